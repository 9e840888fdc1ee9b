/* Requests that kernels execute, by their infos. The kernel is the one of that name that the stand-in for the driver has. */
#define _POSIX_C_SOURCE 200809L

#include "rig.h"

struct CUmod_st;
struct CUfunc_st;

struct kernel {
	struct CUmod_st *module;
	struct CUfunc_st *function;
	int (*launch)(struct CUfunc_st *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
		      unsigned block_z, unsigned shared_bytes, CUstream stream, void **parameters, void **extra);
	int (*synchronize)(CUstream stream);
	int (*to_host)(void *to, uint64_t from, size_t len_bytes);
	CUstream stream;
	uint64_t code;
};

static void load_kernel(struct kernel *kernel)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	int (*load)(struct CUmod_st **module, const void *image);
	int (*function)(struct CUfunc_st **function, struct CUmod_st *module, const char *name);
	int (*alloc)(uint64_t *pointer, size_t len_bytes);
	EXPECT(library);
	find(library, "cuModuleLoadData", &load);
	find(library, "cuModuleGetFunction", &function);
	find(library, "cuLaunchKernel", &kernel->launch);
	find(library, "cuStreamSynchronize", &kernel->synchronize);
	find(library, "cuMemcpyDtoH_v2", &kernel->to_host);
	find(library, "cuMemAlloc_v2", &alloc);
	kernel->stream = new_stream();
	WORKS(load(&kernel->module, ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry doorbell_step() { ret; }\n"));
	WORKS(function(&kernel->function, kernel->module, "doorbell_step"));
	WORKS(alloc(&kernel->code, 8));
}

/* What a kernel gets that executes it: doorbell_step(trigger, work_ns, timeout_ns, code). */
static int execute(const struct kernel *kernel, const doorbell_trigger *trigger)
{
	doorbell_trigger copy = *trigger;
	uint64_t work_ns = 1000, timeout_ns = 20000000000u, code = kernel->code;
	void *parameters[4];
	int found = 77;
	parameters[0] = &copy;
	parameters[1] = &work_ns;
	parameters[2] = &timeout_ns;
	parameters[3] = &code;
	WORKS(kernel->launch(kernel->function, 1, 1, 1, 1, 1, 1, 0, kernel->stream, parameters, NULL));
	WORKS(kernel->synchronize(kernel->stream));
	WORKS(kernel->to_host(&found, kernel->code, sizeof(found)));
	return found;
}

static void transfers(const struct kernel *kernel, struct side *a, struct side *b)
{
	const int is_direct = !strstr(device_name(), "path=");
	struct ibv_sge from = at(a, 0, 64);
	gds_send_wr chain[3], *bad = NULL;
	gds_send_request_t sends[2];
	gds_wait_request_t waits[3];
	gds_mlx5_send_info_t send_infos[2];
	gds_mlx5_wait_info_t wait_infos[3];
	int turn, i;
	for (turn = 0; turn < 40; turn++) {
		memset(a->buffer, turn + 1, 64);
		memset(b->buffer, 0, 256);
		post_recv(b, 9, 128, 64);
		/* A chain of two, and one. */
		chain[0] = request_to(1, IBV_WR_RDMA_WRITE, &from, b, 0);
		chain[1] = request_to(2, IBV_WR_RDMA_WRITE, &from, b, 64);
		chain[0].send_flags = 0;
		chain[0].next = &chain[1];
		chain[2] = request(3, IBV_WR_SEND, &from);
		WORKS(gds_prepare_send(a->qp, &chain[0], &bad, &sends[0]));
		WORKS(gds_prepare_send(a->qp, &chain[2], &bad, &sends[1]));
		WORKS(gds_prepare_wait_cq(&a->qp->send_cq, &waits[0], 0));
		WORKS(gds_prepare_wait_cq(&a->qp->send_cq, &waits[1], 0));
		WORKS(gds_prepare_wait_cq(&b->qp->recv_cq, &waits[2], 0));
		WORKS(gds_mlx5_get_send_info(2, sends, send_infos));
		WORKS(gds_mlx5_get_wait_info(3, waits, wait_infos));
		EXPECT(sends[0].count == 0 && sends[1].count == 0 && !waits[0].prepared && !waits[2].prepared);
		GIVES(EINVAL, gds_stream_post_send(kernel->stream, &sends[0]));
		for (i = 0; i < 2; i++) {
			EXPECT(send_infos[i].trigger.word_count > 0 && send_infos[i].dbrec_ptr && send_infos[i].membar_full);
			EXPECT((send_infos[i].db_ptr != NULL) == is_direct);
		}
		EXPECT(send_infos[0].dbrec_ptr == send_infos[1].dbrec_ptr);
		if (is_direct) {
			/* Big-endian, 16 bits: behind the last work request, of which each takes a place. */
			const uint32_t first = ntohl(send_infos[0].dbrec_value), last = ntohl(send_infos[1].dbrec_value);
			EXPECT((uint16_t)(last - first) == 1 && send_infos[0].db_value != send_infos[1].db_value);
		}
		for (i = 0; i < 3; i++)
			EXPECT(wait_infos[i].trigger.word_count > 0 && wait_infos[i].cqe_ptr);
		EXPECT(wait_infos[0].cqe_ptr != wait_infos[1].cqe_ptr || wait_infos[0].cqe_value != wait_infos[1].cqe_value);
		EXPECT(wait_infos[0].flag_ptr && (wait_infos[0].cond == GDS_WAIT_COND_GEQ) == !is_direct);
		EXPECT(b->buffer[0] == 0 && b->buffer[128] == 0 && has_none(a->qp->send_cq.cq));

		GIVES(DOORBELL_OK, execute(kernel, &send_infos[0].trigger));
		GIVES(DOORBELL_OK, execute(kernel, &wait_infos[0].trigger));
		EXPECT(b->buffer[0] == turn + 1 && b->buffer[127] == turn + 1 && b->buffer[128] == 0);
		GIVES(DOORBELL_OK, execute(kernel, &send_infos[1].trigger));
		/* In any order between the queues. */
		GIVES(DOORBELL_OK, execute(kernel, &wait_infos[2].trigger));
		EXPECT(b->buffer[191] == turn + 1);
		GIVES(DOORBELL_OK, execute(kernel, &wait_infos[1].trigger));
		GIVES(DOORBELL_ESTATE, execute(kernel, &wait_infos[1].trigger));
		expect_wc(a->qp->send_cq.cq, 2, IBV_WC_RDMA_WRITE, 0);
		expect_wc(a->qp->send_cq.cq, 3, IBV_WC_SEND, 0);
		expect_wc(b->qp->recv_cq.cq, 9, IBV_WC_RECV, 64);
	}
}

/* A peer that is gone reaches the kernel as a code, and the program as a completion in error. */
static void dead_peer(const struct kernel *kernel)
{
	struct side a, b;
	struct ibv_sge from;
	gds_send_wr wr, *bad = NULL;
	gds_send_request_t send;
	gds_wait_request_t wait;
	gds_mlx5_send_info_t send_info;
	gds_mlx5_wait_info_t wait_info;
	struct ibv_wc wc;
	make_pair(&a, &b);
	from = at(&a, 0, 64);
	wr = request(1, IBV_WR_SEND, &from);
	WORKS(gds_destroy_qp(b.qp));
	b.qp = NULL;
	WORKS(gds_prepare_send(a.qp, &wr, &bad, &send));
	WORKS(gds_prepare_wait_cq(&a.qp->send_cq, &wait, 0));
	WORKS(gds_mlx5_get_send_info(1, &send, &send_info));
	WORKS(gds_mlx5_get_wait_info(1, &wait, &wait_info));
	GIVES(DOORBELL_OK, execute(kernel, &send_info.trigger));
	GIVES(DOORBELL_EWORK, execute(kernel, &wait_info.trigger));
	wc = poll_one(a.qp->send_cq.cq);
	EXPECT(wc.wr_id == 1 && wc.status == IBV_WC_RETRY_EXC_ERR);
	end_side(&a);
	end_side(&b);
}

/* What is refused leaves the request as it was. */
static void refusals(struct side *a, struct side *b, CUstream stream)
{
	struct ibv_sge from = at(a, 0, 8);
	gds_send_wr chain[3], *bad = NULL;
	gds_send_request_t send;
	gds_wait_request_t wait;
	gds_mlx5_send_info_t send_info;
	gds_mlx5_wait_info_t wait_info;
	static uint32_t page[1024] __attribute__((aligned(4096)));
	int i, error;
	WORKS(gds_mlx5_get_send_info(0, NULL, NULL));
	GIVES(EINVAL, gds_mlx5_get_send_info(-1, &send, &send_info));
	GIVES(EINVAL, gds_mlx5_get_send_info(1, NULL, &send_info));
	GIVES(EINVAL, gds_mlx5_get_wait_info(1, &wait, NULL));
	for (i = 0; i < 3; i++) {
		chain[i] = request_to((uint64_t)i, IBV_WR_RDMA_WRITE, &from, b, 0);
		chain[i].next = i < 2 ? &chain[i + 1] : NULL;
	}
	WORKS(gds_register_mem(page, sizeof(page), GDS_MEMORY_HOST, NULL));
	WORKS(gds_prepare_send(a->qp, chain, &bad, &send));
	WORKS(gds_prepare_wait_cq(&a->qp->send_cq, &wait, 0));
	WORKS(gds_append_wait_cq(&wait, page, 3));
	GIVES(ENOMEM, gds_mlx5_get_send_info(1, &send, &send_info));
	GIVES(ENOMEM, gds_mlx5_get_wait_info(1, &wait, &wait_info));
	WORKS(gds_stream_post_send(stream, &send));
	WORKS(gds_stream_post_wait_cq(stream, &wait));
	sync_stream(stream);
	EXPECT(page[0] == 3);
	GIVES(EINVAL, gds_mlx5_get_send_info(1, &send, &send_info));
	GIVES(EINVAL, gds_mlx5_get_wait_info(1, &wait, &wait_info));
	for (i = 0; i < 3; i++)
		expect_wc(a->qp->send_cq.cq, (uint64_t)i, IBV_WC_RDMA_WRITE, 0);
	if (!by_cuda()) {
		/* Without the feature, a driver, or a context. */
		WORKS(gds_prepare_send(a->qp, &chain[2], &bad, &send));
		error = gds_mlx5_get_send_info(1, &send, &send_info);
		EXPECT(error == EOPNOTSUPP || error == EINVAL || error == EIO);
		EXPECT(send.count == 1);
		WORKS(gds_stream_post_send(stream, &send));
		sync_stream(stream);
		expect_wc(a->qp->send_cq.cq, 2, IBV_WC_RDMA_WRITE, 0);
	}
	WORKS(gds_unregister_mem(page, sizeof(page)));
}

int main(void)
{
	struct side a, b;
	struct kernel kernel;
	CUstream stream = new_stream();
	make_pair(&a, &b);
	refusals(&a, &b, stream);
	if (by_cuda() && getenv("DOORBELL_CUDA_STANDIN") && !is_sync()) {
		load_kernel(&kernel);
		transfers(&kernel, &a, &b);
		dead_peer(&kernel);
		end_stream(kernel.stream);
	}
	end_side(&a);
	end_side(&b);
	end_stream(stream);
	puts("done");
	return 0;
}
