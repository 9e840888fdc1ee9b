/* What goes wrong with gdsync.h: refusals that change nothing, completions in error, peers that are gone, waits that do not end. */
#define _POSIX_C_SOURCE 200809L

#include "rig.h"

#ifdef GDSYNC_WITH_LIBIBVERBS
#include "foreign.h"
#endif

static void queue_pairs(struct side *side)
{
	gds_qp_init_attr_t attr;
	struct ibv_pd *pd;
	struct ibv_context *context;
	char name[80];
	attributes(&attr);
	REFUSED(EINVAL, gds_create_qp(NULL, side->context, &attr, 0, 0));
	REFUSED(EINVAL, gds_create_qp(side->pd, NULL, &attr, 0, 0));
	REFUSED(EINVAL, gds_create_qp(side->pd, side->context, NULL, 0, 0));
	REFUSED(EOPNOTSUPP, gds_create_qp(side->pd, side->context, &attr, 0, GDS_CREATE_QP_WQ_ON_GPU));
	REFUSED(EOPNOTSUPP, gds_create_qp(side->pd, side->context, &attr, 0, GDS_CREATE_QP_TX_CQ_ON_GPU));
	REFUSED(EOPNOTSUPP, gds_create_qp(side->pd, side->context, &attr, 0, GDS_CREATE_QP_RX_CQ_ON_GPU));
	REFUSED(EOPNOTSUPP, gds_create_qp(side->pd, side->context, &attr, 0, GDS_CREATE_QP_WQ_DBREC_ON_GPU));
	attr.qp_type = IBV_QPT_UC;
	REFUSED(EOPNOTSUPP, gds_create_qp(side->pd, side->context, &attr, 0, 0));
	attr.qp_type = IBV_QPT_UD;
	REFUSED(EOPNOTSUPP, gds_create_qp(side->pd, side->context, &attr, 0, 0));
	attributes(&attr);
	attr.srq = (struct ibv_srq *)(void *)&attr;
	REFUSED(EOPNOTSUPP, gds_create_qp(side->pd, side->context, &attr, 0, 0));
	attributes(&attr);
	attr.cap.max_send_wr = 1u << 30;
	REFUSED(EINVAL, gds_create_qp(side->pd, side->context, &attr, 0, 0));
	GIVES(EINVAL, gds_destroy_qp(NULL));
	EXPECT(gds_qp_endpoint(NULL) == NULL);
	GIVES(EINVAL, gds_qp_connect(NULL, NULL));
	GIVES(EINVAL, gds_qp_connect(side->qp, NULL));
	GIVES(EINVAL, gds_qp_address(NULL, NULL));
	GIVES(EINVAL, gds_qp_reset(NULL));

	/* Devices and protection domains. */
	REFUSED(EINVAL, gds_open_device(NULL));
	memset(name, 'x', sizeof(name));
	name[79] = 0;
	REFUSED(EINVAL, gds_open_device(name));
	context = gds_open_device("no such device");
	EXPECT(context);
	errno = 0;
	EXPECT(gds_alloc_pd(context) == NULL && errno != 0);
	WORKS(gds_close_device(context));
	GIVES(EINVAL, gds_close_device(NULL));
	GIVES(EBUSY, gds_close_device(side->context));
	GIVES(EBUSY, gds_dealloc_pd(side->pd));
	GIVES(EINVAL, gds_dealloc_pd(NULL));
	REFUSED(EINVAL, gds_alloc_pd(NULL));
	pd = gds_alloc_pd(side->context);
	EXPECT(pd);
	WORKS(gds_dealloc_pd(pd));
}

static void keys_and_slices(struct side *a, struct side *b)
{
	struct ibv_sge from = at(a, 0, 64), parts[17];
	gds_send_wr wr = request_to(1, IBV_WR_RDMA_WRITE, &from, b, 0), next, *bad = NULL;
	struct ibv_recv_wr recv, *bad_recv = NULL;
	gds_send_request_t request;
	struct ibv_mr *mr;
	void *page;
	int i;

	/* A key that is none, another's, one that was let go, and its place used again. */
	from.lkey = 0;
	GIVES(EINVAL, gds_post_send(a->qp, &wr, &bad));
	EXPECT(bad == &wr);
	from.lkey = a->mr->lkey + 100;
	GIVES(EINVAL, gds_post_send(a->qp, &wr, &bad));
	from.lkey = 0xffffffffu;
	GIVES(EINVAL, gds_post_send(a->qp, &wr, &bad));
	from.lkey = b->mr->lkey;
	GIVES(EFAULT, gds_post_send(a->qp, &wr, &bad));
	from.addr = (uint64_t)(uintptr_t)b->buffer;
	GIVES(EINVAL, gds_post_send(a->qp, &wr, &bad));
	EXPECT(strstr(doorbell_last_error(), "domain"));
	EXPECT(posix_memalign(&page, 4096, 4096) == 0);
	mr = gds_reg_mr(a->pd, page, 4096, IBV_ACCESS_LOCAL_WRITE);
	EXPECT(mr);
	from.addr = (uint64_t)(uintptr_t)page;
	from.lkey = mr->lkey;
	WORKS(gds_post_send(a->qp, &wr, &bad));
	expect_wc(a->qp->send_cq.cq, 1, IBV_WC_RDMA_WRITE, 0);
	WORKS(gds_dereg_mr(mr));
	GIVES(EINVAL, gds_post_send(a->qp, &wr, &bad));
	mr = gds_reg_mr(a->pd, page, 4096, IBV_ACCESS_LOCAL_WRITE);
	EXPECT(mr && mr->lkey != from.lkey);
	GIVES(EINVAL, gds_post_send(a->qp, &wr, &bad));
	WORKS(gds_dereg_mr(mr));
	free(page);

	/* Bytes outside of the memory; more slices than there may be. */
	from = at(a, BYTES - 63, 64);
	GIVES(EFAULT, gds_post_send(a->qp, &wr, &bad));
	from = at(a, 0, 64);
	from.addr -= 1;
	GIVES(EFAULT, gds_post_send(a->qp, &wr, &bad));
	from = at(a, 0, 64);
	for (i = 0; i < 17; i++)
		parts[i] = at(a, 0, 1);
	wr.sg_list = parts;
	for (i = 5; i <= 17; i += 12) {
		wr.num_sge = i;
		GIVES(EINVAL, gds_post_send(a->qp, &wr, &bad));
	}
	wr.sg_list = NULL;
	wr.num_sge = 1;
	GIVES(EINVAL, gds_post_send(a->qp, &wr, &bad));
	wr.send_flags |= IBV_SEND_INLINE;
	GIVES(EINVAL, gds_post_send(a->qp, &wr, &bad));
	from.length = 65;
	wr.sg_list = &from;
	GIVES(EINVAL, gds_post_send(a->qp, &wr, &bad));
	from.length = 4000;
	GIVES(ENOMEM, gds_post_send(a->qp, &wr, &bad));
	memset(&recv, 0, sizeof(recv));
	recv.sg_list = &from;
	recv.num_sge = 1;
	from = at(a, BYTES - 63, 64);
	GIVES(EFAULT, gds_post_recv(a->qp, &recv, &bad_recv));
	EXPECT(bad_recv == &recv);
	from = at(a, 0, 64);

	/* Opcodes and flags that are not kept; nothing at all. */
	wr = request_to(1, (enum ibv_wr_opcode)99, &from, b, 0);
	GIVES(EOPNOTSUPP, gds_post_send(a->qp, &wr, &bad));
	wr = request_to(1, IBV_WR_RDMA_WRITE, &from, b, 0);
	wr.send_flags |= 1u << 20;
	GIVES(EOPNOTSUPP, gds_post_send(a->qp, &wr, &bad));
	GIVES(EINVAL, gds_post_send(a->qp, NULL, &bad));
	GIVES(EINVAL, gds_post_recv(a->qp, NULL, &bad_recv));
	GIVES(EINVAL, gds_prepare_send(NULL, &wr, &bad, &request));

	/* Of a chain that is posted, those before the bad one go; of one that is prepared, none. */
	wr = request_to(1, IBV_WR_RDMA_WRITE, &from, b, 0);
	next = wr;
	wr.next = &next;
	next.num_sge = -1;
	GIVES(EINVAL, gds_post_send(a->qp, &wr, &bad));
	EXPECT(bad == &next);
	expect_wc(a->qp->send_cq.cq, 1, IBV_WC_RDMA_WRITE, 0);
	GIVES(EINVAL, gds_prepare_send(a->qp, &wr, &bad, &request));
	EXPECT(bad == &next && request.count == 0);
	EXPECT(has_none(a->qp->send_cq.cq));

	/* Registering what makes no sense. */
	REFUSED(EINVAL, gds_reg_mr(NULL, a->buffer, 64, 0));
	REFUSED(EINVAL, gds_reg_mr(a->pd, NULL, 64, 0));
	REFUSED(EINVAL, gds_reg_mr(a->pd, a->buffer, 64, 1 << 5));
	REFUSED(EINVAL, gds_reg_mr(a->pd, a->buffer, 0, 0));
	GIVES(EINVAL, gds_dereg_mr(NULL));
}

static void full_queue(struct side *a, struct side *b)
{
	CUstream stream = new_stream();
	struct ibv_sge from = at(a, 0, 64);
	gds_send_wr wr = request_to(1, IBV_WR_RDMA_WRITE, &from, b, 0), chain[2], *bad = NULL;
	struct ibv_recv_wr recv, *bad_recv = NULL;
	static gds_send_request_t requests[DEPTH + 1];
	int i, count, error = 0;
	for (count = 0; count <= DEPTH && !error; count += !error)
		error = gds_prepare_send(a->qp, &wr, &bad, &requests[count]);
	GIVES(ENOMEM, error);
	EXPECT(bad == &wr && count == DEPTH);
	chain[0] = chain[1] = wr;
	chain[0].next = &chain[1];
	WORKS(gds_rollback_send(a->qp, &requests[--count]));
	/* One has room, two have not, and then neither is there. */
	GIVES(ENOMEM, gds_prepare_send(a->qp, chain, &bad, &requests[count]));
	EXPECT(bad == &chain[1]);
	WORKS(gds_prepare_send(a->qp, &wr, &bad, &requests[count++]));
	GIVES(ENOMEM, gds_stream_queue_send(stream, a->qp, &wr, &bad));

	/* Out of order, taken back out of order, and beside what is prepared. */
	GIVES(EINVAL, gds_stream_post_send(stream, &requests[1]));
	GIVES(EBUSY, gds_rollback_send(a->qp, &requests[0]));
	WORKS(gds_stream_post_send_all(stream, count, requests));
	GIVES(EINVAL, gds_stream_post_send(stream, &requests[0]));
	GIVES(EINVAL, gds_rollback_send(a->qp, &requests[0]));
	sync_stream(stream);
	for (i = 0; i < DEPTH; i++)
		expect_wc(a->qp->send_cq.cq, 1, IBV_WC_RDMA_WRITE, 0);
	WORKS(gds_prepare_send(a->qp, &wr, &bad, &requests[0]));
	GIVES(EBUSY, gds_post_send(a->qp, &wr, &bad));
	WORKS(gds_stream_post_send(stream, &requests[0]));
	sync_stream(stream);
	WORKS(gds_post_send(a->qp, &wr, &bad));
	for (i = 0; i < 2; i++)
		expect_wc(a->qp->send_cq.cq, 1, IBV_WC_RDMA_WRITE, 0);

	/* Receives. */
	from = at(b, 0, 64);
	memset(&recv, 0, sizeof(recv));
	recv.sg_list = &from;
	recv.num_sge = 1;
	for (i = 0; i < DEPTH; i++)
		WORKS(ibv_post_recv(b->qp->qp, &recv, &bad_recv));
	GIVES(ENOMEM, gds_post_recv(b->qp, &recv, &bad_recv));
	end_stream(stream);
}

static void requests_and_descriptors(struct side *a, struct side *b)
{
	CUstream stream = new_stream();
	struct ibv_sge from = at(a, 0, 64);
	gds_send_wr wr = request_to(1, IBV_WR_RDMA_WRITE, &from, b, 0), *bad = NULL;
	gds_send_request_t send;
	gds_wait_request_t wait, none;
	gds_descriptor_t descs[3];
	gds_mem_desc_t mapped;
	doorbell_stream *handle;
	static uint32_t page[2048] __attribute__((aligned(4096)));
	CUdeviceptr device;
	int i;

	/* Waits for nothing, twice, by another queue's name. */
	GIVES(EINVAL, gds_prepare_wait_cq(&a->qp->send_cq, &wait, 0));
	GIVES(EINVAL, gds_prepare_wait_cq(&a->qp->send_cq, &wait, 1));
	GIVES(EINVAL, gds_prepare_wait_cq(NULL, &wait, 0));
	GIVES(EINVAL, gds_stream_wait_cq(stream, &a->qp->send_cq, 0));
	GIVES(EINVAL, gds_stream_wait_cq(stream, &a->qp->send_cq, 1));
	WORKS(gds_prepare_send(a->qp, &wr, &bad, &send));
	WORKS(gds_prepare_wait_cq(&a->qp->send_cq, &wait, 0));
	GIVES(EBUSY, gds_rollback_send(a->qp, &send));
	GIVES(EINVAL, gds_rollback_send(b->qp, &send));
	GIVES(EINVAL, gds_abort_wait_cq(&a->qp->recv_cq, &wait));
	GIVES(EINVAL, gds_post_wait_cq(&a->qp->send_cq, &wait, 1));
	GIVES(EINVAL, gds_append_wait_cq(&wait, NULL, 1));

	/* A store behind the wait to memory that is not registered: nothing is given. */
	memset(&none, 0, sizeof(none));
	GIVES(EINVAL, gds_append_wait_cq(&none, page, 1));
	WORKS(gds_append_wait_cq(&wait, page, 1));
	memset(descs, 0, sizeof(descs));
	descs[0].tag = GDS_TAG_SEND;
	descs[0].send = &send;
	descs[1].tag = GDS_TAG_WAIT;
	descs[1].wait = &wait;
	GIVES(EFAULT, gds_stream_post_descriptors(stream, 2, descs, 0));
	GIVES(EFAULT, gds_post_descriptors(2, descs, 0));
	WORKS(gds_register_mem(page, sizeof(page), GDS_MEMORY_HOST, &device));

	/* One that makes no sense, and none is given. */
	GIVES(EINVAL, gds_stream_post_descriptors(stream, 2, descs, 1));
	GIVES(EINVAL, gds_post_descriptors(2, descs, 1));
	GIVES(EINVAL, gds_stream_post_descriptors(stream, 1, NULL, 0));
	descs[2].tag = (gds_tag_t)17;
	GIVES(EINVAL, gds_stream_post_descriptors(stream, 3, descs, 0));
	descs[2].tag = GDS_TAG_SEND;
	GIVES(EINVAL, gds_stream_post_descriptors(stream, 3, descs, 0));
	descs[2].tag = GDS_TAG_WAIT;
	descs[2].wait = &none;
	GIVES(EINVAL, gds_stream_post_descriptors(stream, 3, descs, 0));
	descs[2].tag = GDS_TAG_WRITE_VALUE32;
	WORKS(gds_prepare_write_value32(&descs[2].write32, page + 2048, 1, GDS_MEMORY_HOST));
	GIVES(EFAULT, gds_stream_post_descriptors(stream, 3, descs, 0));
	WORKS(gds_prepare_write_value32(&descs[2].write32, (uint32_t *)(void *)((uint8_t *)page + 2), 1, GDS_MEMORY_HOST));
	GIVES(EINVAL, gds_stream_post_descriptors(stream, 3, descs, 0));
	descs[2].tag = GDS_TAG_WRITE_MEMORY;
	for (i = 0; i < 3; i++) {
		const size_t counts[3] = {3, GDS_WRITE_MEMORY_MAX_BYTES + 4, 8};
		WORKS(gds_prepare_write_memory(&descs[2].writemem, (uint8_t *)(page + 2047), (const uint8_t *)page, counts[i],
					       GDS_MEMORY_HOST));
		GIVES(i < 2 ? EINVAL : EFAULT, gds_stream_post_descriptors(stream, 3, descs, 0));
	}
	/* Stores are of words. */
	WORKS(gds_prepare_write_memory(&descs[2].writemem, (uint8_t *)page + 2, (const uint8_t *)page, 8, GDS_MEMORY_HOST));
	GIVES(EINVAL, gds_stream_post_descriptors(stream, 3, descs, 0));
	EXPECT(send.count == 1 && wait.prepared && has_none(a->qp->send_cq.cq));
	WORKS(gds_stream_post_descriptors(stream, 2, descs, 0));
	sync_stream(stream);
	EXPECT(page[0] == 1);
	expect_wc(a->qp->send_cq.cq, 1, IBV_WC_RDMA_WRITE, 0);
	GIVES(EINVAL, gds_stream_post_wait_cq(stream, &wait));
	GIVES(EINVAL, gds_abort_wait_cq(&a->qp->send_cq, &wait));
	GIVES(EINVAL, gds_stream_post_wait_cq_all(stream, 0, &wait));
	GIVES(EINVAL, gds_post_pokes(stream, -1, &send, NULL, 0));

	/* No more stores behind a wait than there is room for. */
	wr.wr_id = 2;
	WORKS(gds_stream_queue_send(stream, a->qp, &wr, &bad));
	WORKS(gds_prepare_wait_cq(&a->qp->send_cq, &wait, 0));
	for (i = 0; i < GDS_WAIT_INFO_MAX_OPS - 2; i++)
		WORKS(gds_append_wait_cq(&wait, page + i, 100 + (uint32_t)i));
	GIVES(ENOMEM, gds_append_wait_cq(&wait, page, 1));
	WORKS(gds_stream_post_wait_cq(stream, &wait));
	sync_stream(stream);
	for (i = 0; i < GDS_WAIT_INFO_MAX_OPS - 2; i++)
		EXPECT(page[i] == 100 + (uint32_t)i);
	expect_wc(a->qp->send_cq.cq, 2, IBV_WC_RDMA_WRITE, 0);

	/* Flags, conditions and kinds of memory. */
	GIVES(EINVAL, gds_prepare_wait_value32(&descs[2].wait32, page, 0, (gds_wait_cond_flag_t)4, GDS_MEMORY_HOST));
	GIVES(EINVAL, gds_prepare_wait_value32(&descs[2].wait32, page, 0, GDS_WAIT_COND_GEQ, 0));
	GIVES(EINVAL, gds_prepare_wait_value32(&descs[2].wait32, page, 0, GDS_WAIT_COND_GEQ, GDS_MEMORY_HOST | GDS_WRITE_PRE_BARRIER));
	GIVES(EINVAL, gds_prepare_wait_value32(NULL, page, 0, GDS_WAIT_COND_GEQ, GDS_MEMORY_HOST));
	GIVES(EOPNOTSUPP, gds_prepare_wait_value32(&descs[2].wait32, page, 0, GDS_WAIT_COND_GEQ, GDS_MEMORY_IO));
	GIVES(EOPNOTSUPP, gds_prepare_write_value32(&descs[2].write32, page, 0, GDS_MEMORY_IO));
	GIVES(EOPNOTSUPP, gds_prepare_write_memory(&descs[2].writemem, (uint8_t *)page, NULL, 4, GDS_MEMORY_IO));
	GIVES(EINVAL, gds_prepare_write_value32(&descs[2].write32, page, 0, 3));
	GIVES(EINVAL, gds_prepare_write_value32(NULL, page, 0, GDS_MEMORY_HOST));
	GIVES(EINVAL, gds_prepare_write_memory(&descs[2].writemem, (uint8_t *)page, NULL, 4, GDS_MEMORY_HOST | 1 << 9));
	GIVES(EINVAL, gds_prepare_write_memory(NULL, (uint8_t *)page, NULL, 4, GDS_MEMORY_HOST));
	GIVES(EINVAL, gds_stream_post_inline_copy(stream, page, NULL, 4, GDS_MEMORY_HOST));

	/* Memory. */
	GIVES(EINVAL, gds_register_mem(page + 1024, sizeof(page), GDS_MEMORY_HOST, &device));
	GIVES(EINVAL, gds_register_mem(NULL, 4096, GDS_MEMORY_HOST, &device));
	GIVES(EINVAL, gds_register_mem(page, 0, GDS_MEMORY_HOST, &device));
	GIVES(EINVAL, gds_register_mem(page, SIZE_MAX, GDS_MEMORY_HOST, &device));
	GIVES(EINVAL, gds_register_mem(page, 4096, (gds_memory_type_t)3, &device));
	GIVES(EOPNOTSUPP, gds_register_mem(page, 4096, GDS_MEMORY_IO, &device));
	GIVES(EINVAL, gds_unregister_mem(page, sizeof(page) + 1));
	GIVES(EINVAL, gds_unregister_mem(NULL, 1));
	GIVES(EINVAL, gds_unregister_mem(page, 0));
	WORKS(gds_unregister_mem(page, sizeof(page)));
	memset(&mapped, 0, sizeof(mapped));
	WORKS(gds_alloc_mapped_memory(&mapped, 0, GDS_MEMORY_HOST));
	EXPECT(!mapped.h_ptr);
	GIVES(EINVAL, gds_free_mapped_memory(&mapped));
	GIVES(EINVAL, gds_alloc_mapped_memory(NULL, 8, GDS_MEMORY_HOST));
	GIVES(EINVAL, gds_alloc_mapped_memory(&mapped, 8, 0));
	GIVES(EOPNOTSUPP, gds_alloc_mapped_memory(&mapped, 8, GDS_MEMORY_GPU));
	mapped.h_ptr = page;
	mapped.alloc_size = 8;
	GIVES(EINVAL, gds_free_mapped_memory(&mapped));

	/* Streams that do not exist. */
	GIVES(EINVAL, gds_release_stream((CUstream)(void *)page));
	GIVES(EINVAL, gds_create_host_stream(NULL));
	GIVES(EINVAL, gds_stream_handle(stream, NULL));
	if (!by_cuda()) {
		i = gds_stream_handle((CUstream)(void *)page, &handle);
		EXPECT(i == EOPNOTSUPP || i == EINVAL || i == EIO);
		EXPECT(gds_stream_queue_send((CUstream)(void *)page, a->qp, &wr, &bad) == i && bad == &wr);
		EXPECT(has_none(a->qp->send_cq.cq));
	}
	end_stream(stream);
	stream = new_stream();
	wr.wr_id = 3;
	WORKS(gds_stream_queue_send(stream, a->qp, &wr, &bad));
	sync_stream(stream);
	expect_wc(a->qp->send_cq.cq, 3, IBV_WC_RDMA_WRITE, 0);
	end_stream(stream);
}

/* What the calling thread posts would overtake what a stream has, and has not come to. */
static void beside_a_stream(struct side *a, struct side *b)
{
	static uint32_t page[1024] __attribute__((aligned(4096)));
	CUstream stream = new_stream();
	struct ibv_sge from = at(a, 0, 64), to = at(a, 128, 64);
	gds_send_wr wr = request_to(1, IBV_WR_RDMA_WRITE, &from, b, 0), *bad = NULL;
	struct ibv_recv_wr recv, *bad_recv = NULL;
	memset(&recv, 0, sizeof(recv));
	recv.sg_list = &to;
	recv.num_sge = 1;
	if (!is_sync()) {
		WORKS(gds_register_mem(page, sizeof(page), GDS_MEMORY_HOST, NULL));
		WORKS(gds_stream_post_poll_dword(stream, page, 1, GDS_WAIT_COND_GEQ, GDS_MEMORY_HOST));
		WORKS(gds_stream_queue_send(stream, a->qp, &wr, &bad));
		wr.wr_id = 2;
		GIVES(EBUSY, gds_post_send(a->qp, &wr, &bad));
		EXPECT(bad == &wr);
		GIVES(EBUSY, ibv_post_send(a->qp->qp, (struct ibv_send_wr *)(void *)&wr, (struct ibv_send_wr **)(void *)&bad));
		EXPECT(has_none(a->qp->send_cq.cq));
		/* Of the other queue nothing is overtaken. */
		WORKS(gds_post_recv(a->qp, &recv, &bad_recv));
		store(page, 1);
		sync_stream(stream);
		expect_wc(a->qp->send_cq.cq, 1, IBV_WC_RDMA_WRITE, 0);
		WORKS(gds_unregister_mem(page, sizeof(page)));
		WORKS(gds_post_send(a->qp, &wr, &bad));
		expect_wc(a->qp->send_cq.cq, 2, IBV_WC_RDMA_WRITE, 0);
	}
	end_stream(stream);
}

/* Words of GPU memory are the driver's, on its streams; not those of a stream of this library. */
static void words_of_a_gpu(struct side *a)
{
	int (*alloc)(CUdeviceptr *pointer, size_t len_bytes);
	int (*release)(CUdeviceptr pointer);
	int (*read)(void *to, CUdeviceptr from, size_t len_bytes);
	int (*write)(CUdeviceptr to, const void *from, size_t len_bytes);
	CUstream stream;
	CUdeviceptr memory = 0, device = 0;
	static uint32_t page[1024] __attribute__((aligned(4096)));
	const uint32_t bytes[2] = {1, 2};
	gds_descriptor_t desc;
	uint32_t seen[4], *word;
	struct ibv_mr *mr;
	void *library;
	int i;
	if (!by_cuda() || strncmp(device_name(), "softcx", 6) != 0)
		return;
	stream = new_stream();
	library = dlopen("libcuda.so.1", RTLD_NOW);
	EXPECT(library);
	find(library, "cuMemAlloc_v2", &alloc);
	find(library, "cuMemFree_v2", &release);
	find(library, "cuMemcpyDtoH_v2", &read);
	find(library, "cuMemcpyHtoD_v2", &write);
	WORKS(alloc(&memory, 65536));
	word = (uint32_t *)(uintptr_t)memory;
	WORKS(gds_register_mem(page, sizeof(page), GDS_MEMORY_HOST, NULL));
	for (i = 0; i < 3; i++) {
		const uint32_t zeros[4] = {0, 0, 0, 0}, turn = 1 + (uint32_t)i;
		/* Not registered; registered for words; and for slices. */
		mr = NULL;
		if (i == 1)
			WORKS(gds_register_mem(word, 4096, GDS_MEMORY_GPU, &device));
		if (i == 2)
			EXPECT((mr = gds_reg_mr(a->pd, word, 4096, IBV_ACCESS_LOCAL_WRITE)) != NULL);
		WORKS(write(memory, zeros, sizeof(zeros)));
		/* A store that the CPU waits for is behind waits and stores of the GPU's words. */
		WORKS(gds_stream_post_poll_dword(stream, word, turn, GDS_WAIT_COND_EQ, GDS_MEMORY_GPU));
		WORKS(gds_stream_post_poke_dword(stream, word + 1, 7, GDS_MEMORY_GPU));
		WORKS(gds_stream_post_poll_dword(stream, word + 1, 7, GDS_WAIT_COND_GEQ, GDS_MEMORY_GPU));
		WORKS(gds_stream_post_inline_copy(stream, word + 2, (void *)(uintptr_t)bytes, sizeof(bytes), GDS_MEMORY_GPU));
		WORKS(gds_stream_post_poke_dword(stream, page, turn, GDS_MEMORY_HOST));
		EXPECT(is_idle(stream) == 0 && load(page) == (uint32_t)i);
		WORKS(write(memory, &turn, 4));
		sync_stream(stream);
		EXPECT(load(page) == turn);
		WORKS(read(seen, memory, sizeof(seen)));
		EXPECT(seen[0] == turn && seen[1] == 7 && seen[2] == 1 && seen[3] == 2);
		desc.tag = GDS_TAG_WRITE_VALUE32;
		WORKS(gds_prepare_write_value32(&desc.write32, word, 1, GDS_MEMORY_GPU));
		GIVES(EINVAL, gds_post_descriptors(1, &desc, 0));
		if (i == 1)
			WORKS(gds_unregister_mem(word, 4096));
		if (i == 2)
			WORKS(gds_dereg_mr(mr));
	}
	EXPECT(device == memory);
	WORKS(gds_unregister_mem(page, sizeof(page)));
	WORKS(release(memory));
	end_stream(stream);
}

/* Calls of libibverbs that would access fields which the objects do not have. */
static void objects_of_verbs(struct side *a)
{
	struct ibv_qp *qp = a->qp->qp;
	struct ibv_cq *cq = a->qp->send_cq.cq;
	EXPECT(gds_qp_of(qp) == a->qp && gds_qp_of(NULL) == NULL && gds_owns_cq(cq) && !gds_owns_cq(NULL));
	EXPECT(gds_owns_mr(a->mr) && !gds_owns_mr(NULL));
	GIVES(EOPNOTSUPP, ibv_req_notify_cq(cq, 0));
	struct ibv_qp_init_attr foreign;
	memset(&foreign, 0, sizeof(foreign));
	foreign.send_cq = foreign.recv_cq = cq;
	errno = 0;
	EXPECT(!ibv_create_qp(a->qp->qp->pd, &foreign));
	GIVES(EOPNOTSUPP, errno);
	GIVES(EINVAL, gds_modify_qp(NULL, NULL, 0));
	GIVES(EINVAL, gds_query_qp(a->qp, NULL, 0, NULL));
	errno = 0;
	gds_destroy_cq(&a->qp->send_cq);
	GIVES(EBUSY, errno);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	memset(&attr, 0, sizeof(attr));
	attr.qp_state = IBV_QPS_SQD;
#ifdef GDSYNC_WITH_LIBIBVERBS
	GIVES(EINVAL, ibv_modify_qp(qp, &attr, IBV_QP_STATE));
#else
	EXPECT(ibv_modify_qp(qp, &attr, IBV_QP_STATE) != 0);
#endif
	WORKS(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
	EXPECT(attr.qp_state == IBV_QPS_RTS && init.cap.max_send_wr == DEPTH && init.send_cq == cq && init.qp_type == IBV_QPT_RC);
#ifdef GDSYNC_WITH_LIBIBVERBS
	GIVES(EBUSY, ibv_destroy_cq(cq));
	GIVES(EOPNOTSUPP, ibv_destroy_qp(qp));
	GIVES(EOPNOTSUPP, ibv_resize_cq(cq, 8));
	/* In a source without the header: libibverbs' own functions. */
	GIVES(EOPNOTSUPP, foreign_modify_qp(qp));
	GIVES(EOPNOTSUPP, foreign_query_qp(qp));
	GIVES(EOPNOTSUPP, foreign_destroy_qp(qp));
	GIVES(EOPNOTSUPP, foreign_destroy_cq(cq));
	GIVES(EOPNOTSUPP, foreign_resize_cq(cq));
	GIVES(EOPNOTSUPP, foreign_notify(cq));
#endif
	/* A context and a protection domain of gds_open_device; those of a queue pair and of the program are none. */
	struct ibv_context *context = gds_open_device("softcx"), none;
	struct ibv_pd *pd = gds_alloc_pd(context);
	struct ibv_mr *mr;
	EXPECT(context && pd);
	memset(&none, 0, sizeof(none));
	GIVES(EINVAL, gds_close_device(&none));
	GIVES(EINVAL, gds_close_device(qp->context));
	REFUSED(EINVAL, gds_alloc_pd(&none));
	REFUSED(EINVAL, gds_alloc_pd(qp->context));
	mr = ibv_reg_mr(pd, a->buffer, 4096, IBV_ACCESS_LOCAL_WRITE);
	EXPECT(mr && gds_owns_mr(mr) && mr->pd == pd);
	WORKS(ibv_dereg_mr(mr));
	memset(&foreign, 0, sizeof(foreign));
	REFUSED(EOPNOTSUPP, ibv_create_qp(pd, &foreign));
#ifdef GDSYNC_WITH_LIBIBVERBS
	GIVES(EOPNOTSUPP, foreign_query_port(context));
	GIVES(EOPNOTSUPP, foreign_query_device(context));
	GIVES(0, foreign_objects_of_context(context));
	GIVES(0, foreign_objects_of_context(qp->context));
	GIVES(0, foreign_objects_of_pd(pd, a->buffer));
	GIVES(EOPNOTSUPP, foreign_dealloc_pd(pd));
	/* It has no result that a refusal could give. */
	(void)foreign_close_device(context);
#endif
	WORKS(gds_dealloc_pd(pd));
	WORKS(gds_close_device(context));
}

static void expect_error(struct ibv_cq *cq, uint64_t wr_id, enum ibv_wc_status status)
{
	const struct ibv_wc wc = poll_one(cq);
	if (wc.wr_id != wr_id || wc.status != status)
		fprintf(stderr, "wr_id %llu status %d\n", (unsigned long long)wc.wr_id, (int)wc.status);
	EXPECT(wc.wr_id == wr_id && wc.status == status);
}

/* A completion in error ends the waits of the stream, and is there to be polled, before those that it flushed. */
static void completion_in_error(void)
{
	struct side a, b;
	CUstream stream = new_stream();
	struct ibv_sge from;
	gds_send_wr wr, *bad = NULL;
	int unsignaled;
	make_pair(&a, &b);
	from = at(&a, 0, 64);
	for (unsignaled = 0; unsignaled < 2; unsignaled++) {
		/* Held up, so that all of it is queued before the first one fails. */
		static uint32_t page[1024] __attribute__((aligned(4096)));
		store(page, is_sync() ? 1 : 0);
		WORKS(gds_register_mem(page, sizeof(page), GDS_MEMORY_HOST, NULL));
		WORKS(gds_stream_post_poll_dword(stream, page, 1, GDS_WAIT_COND_GEQ, GDS_MEMORY_HOST));
		wr = request_to(1, IBV_WR_RDMA_WRITE, &from, &b, 0);
		WORKS(gds_stream_queue_send(stream, a.qp, &wr, &bad));
		if (is_sync()) {
			/* The first failure is there before the next request is queued. */
			wr = request_to(2, IBV_WR_RDMA_WRITE, &from, &b, 0);
			wr.wr.rdma.rkey ^= 0x5a5a00;
			wr.send_flags = unsignaled ? 0 : (unsigned)IBV_SEND_SIGNALED;
			WORKS(gds_stream_queue_send(stream, a.qp, &wr, &bad));
		} else {
			wr = request_to(2, IBV_WR_RDMA_WRITE, &from, &b, 0);
			wr.wr.rdma.rkey ^= 0x5a5a00;
			wr.send_flags = unsignaled ? 0 : (unsigned)IBV_SEND_SIGNALED;
			WORKS(gds_stream_queue_send(stream, a.qp, &wr, &bad));
			wr = request_to(3, IBV_WR_RDMA_WRITE, &from, &b, 0);
			WORKS(gds_stream_queue_send(stream, a.qp, &wr, &bad));
			WORKS(gds_stream_wait_cq(stream, &a.qp->send_cq, 0));
			WORKS(gds_stream_wait_cq(stream, &a.qp->send_cq, 0));
			store(page, 1);
		}
		settle(stream);
		expect_wc(a.qp->send_cq.cq, 1, IBV_WC_RDMA_WRITE, 0);
		expect_error(a.qp->send_cq.cq, 2, IBV_WC_REM_ACCESS_ERR);
		if (!is_sync())
			expect_error(a.qp->send_cq.cq, 3, IBV_WC_WR_FLUSH_ERR);
		EXPECT(has_none(a.qp->send_cq.cq));
		GIVES(EIO, gds_stream_queue_send(stream, a.qp, &wr, &bad));
		EXPECT(bad == &wr);
		GIVES(EIO, gds_post_send(a.qp, &wr, &bad));
		settle(stream);
		WORKS(gds_qp_reset(a.qp));
		WORKS(gds_qp_reset(b.qp));
		connect_sides(&a, &b);
		wr = request_to(4, IBV_WR_RDMA_WRITE, &from, &b, 0);
		WORKS(gds_stream_queue_send(stream, a.qp, &wr, &bad));
		sync_stream(stream);
		expect_wc(a.qp->send_cq.cq, 4, IBV_WC_RDMA_WRITE, 0);
		WORKS(gds_unregister_mem(page, sizeof(page)));
	}
	end_side(&a);
	end_side(&b);
	end_stream(stream);
}

/* The peer's queue pair is gone: its answer does not come, and waits of the stream end. */
static void dead_peer(void)
{
	struct side a, b;
	CUstream stream = new_stream();
	struct ibv_sge from;
	struct ibv_wc wc;
	gds_send_wr wr, *bad = NULL;
	gds_descriptor_t descs[2];
	gds_send_request_t send;
	gds_wait_request_t wait;
	make_pair(&a, &b);
	from = at(&a, 0, 64);
	wr = request(5, IBV_WR_SEND, &from);
	post_recv(&a, 6, 128, 64);
	WORKS(gds_destroy_qp(b.qp));
	b.qp = NULL;
	if (is_sync()) {
		/* Carried out where it is queued: the failure of the first may be there before the second. */
		memset(descs, 0, sizeof(descs));
		WORKS(gds_prepare_send(a.qp, &wr, &bad, &send));
		WORKS(gds_prepare_wait_cq(&a.qp->send_cq, &wait, 0));
		descs[0].tag = GDS_TAG_SEND;
		descs[0].send = &send;
		descs[1].tag = GDS_TAG_WAIT;
		descs[1].wait = &wait;
		(void)gds_post_descriptors(2, descs, 0);
	} else {
		WORKS(gds_stream_queue_send(stream, a.qp, &wr, &bad));
		WORKS(gds_stream_wait_cq(stream, &a.qp->send_cq, 0));
		WORKS(gds_stream_wait_cq(stream, &a.qp->recv_cq, 0));
		settle(stream);
	}
	wc = poll_one(a.qp->send_cq.cq);
	EXPECT(wc.wr_id == 5 && wc.status == IBV_WC_RETRY_EXC_ERR);
	if (!is_sync())
		expect_error(a.qp->recv_cq.cq, 6, IBV_WC_WR_FLUSH_ERR);
	end_side(&a);
	end_side(&b);
	end_stream(stream);
}

/* A completion that never comes: the wait is released within WAIT_TIMEOUT_MS. */
static void wait_without_completion(void)
{
	struct side a, b;
	CUstream stream = new_stream();
	int64_t start_ms;
	make_pair(&a, &b);
	post_recv(&a, 6, 128, 64);
	start_ms = now_ms();
	if (is_sync())
		(void)gds_stream_wait_cq(stream, &a.qp->recv_cq, 0);
	else
		WORKS(gds_stream_wait_cq(stream, &a.qp->recv_cq, 0));
	settle(stream);
	EXPECT(now_ms() - start_ms >= WAIT_TIMEOUT_MS - 100 && now_ms() - start_ms < 5 * WAIT_TIMEOUT_MS);
	expect_error(a.qp->recv_cq.cq, 6, IBV_WC_WR_FLUSH_ERR);
	end_side(&a);
	end_side(&b);
	end_stream(stream);
}

/* Memory and queue pairs go while a wait is on a stream: nothing is touched that is gone, and the wait ends. */
static void ends_while_queued(void)
{
	struct side a, b;
	CUstream stream = new_stream();
	if (is_sync())
		return;
	make_pair(&a, &b);
	post_recv(&a, 6, 128, 64);
	WORKS(gds_stream_wait_cq(stream, &a.qp->recv_cq, 0));
	EXPECT(is_idle(stream) == 0);
	WORKS(doorbell_endpoint_abort(gds_qp_endpoint(a.qp)));
	settle(stream);
	expect_error(a.qp->recv_cq.cq, 6, IBV_WC_WR_FLUSH_ERR);
	end_side(&a);
	end_side(&b);
	end_stream(stream);
}

static void settings(void)
{
	GIVES(EINVAL, gds_set_option(GDS_OPTION_WAIT_TIMEOUT_MS, 0));
	GIVES(EINVAL, gds_set_option(GDS_OPTION_REGISTER_ON_USE, 2));
	GIVES(EINVAL, gds_set_option((enum gds_option)77, 0));
	WORKS(gds_set_option(GDS_OPTION_WAIT_TIMEOUT_MS, WAIT_TIMEOUT_MS));
	/* What is not registered is refused. */
	WORKS(gds_set_option(GDS_OPTION_REGISTER_ON_USE, 0));
}

int main(void)
{
	struct side a, b;
	settings();
	make_pair(&a, &b);
	queue_pairs(&a);
	objects_of_verbs(&a);
	keys_and_slices(&a, &b);
	requests_and_descriptors(&a, &b);
	beside_a_stream(&a, &b);
	words_of_a_gpu(&a);
	full_queue(&a, &b);
	end_side(&a);
	end_side(&b);
	completion_in_error();
	dead_peer();
	ends_while_queued();
	wait_without_completion();
	puts("done");
	return 0;
}
