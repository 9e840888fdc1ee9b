/* What ibv_poll_cq says of work requests that are polled late, fail, or could not be posted. */
#define _POSIX_C_SOURCE 200809L

#include "rig.h"

#include <pthread.h>

/* A stream waits for the receives; the program polls them when the queue is full of later ones. */
static void polled_late(struct side *a, struct side *b, enum ibv_wr_opcode opcode)
{
	CUstream stream = new_stream();
	struct ibv_sge from = at(a, 0, 0);
	gds_send_wr wr, *bad = NULL;
	struct ibv_wc wc;
	int i;
	for (i = 0; i < DEPTH; i++)
		post_recv(b, (uint64_t)i, 1024, 64);
	for (i = 0; i < DEPTH; i++) {
		from.length = 10 + (uint32_t)i;
		wr = request_to(100, opcode, &from, b, 1024);
		wr.imm_data = htonl(1000 + (uint32_t)i);
		WORKS(gds_post_send(a->qp, &wr, &bad));
		expect_wc(a->qp->send_cq.cq, 100, opcode == IBV_WR_SEND_WITH_IMM ? IBV_WC_SEND : IBV_WC_RDMA_WRITE, 0);
		WORKS(gds_stream_wait_cq(stream, &b->qp->recv_cq, 0));
	}
	sync_stream(stream);
	for (i = 0; i < DEPTH; i++)
		post_recv(b, 50 + (uint64_t)i, 1024, 64);
	for (i = 0; i < DEPTH; i++) {
		wc = poll_one(b->qp->recv_cq.cq);
		EXPECT(wc.status == IBV_WC_SUCCESS && wc.wr_id == (uint64_t)i && wc.byte_len == 10 + (uint32_t)i);
		EXPECT(wc.wc_flags == IBV_WC_WITH_IMM && wc.imm_data == htonl(1000 + (uint32_t)i));
		EXPECT(wc.opcode == (opcode == IBV_WR_SEND_WITH_IMM ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM));
	}
	EXPECT(has_none(b->qp->recv_cq.cq));
	/* The later ones, by the processor. */
	from.length = 7;
	for (i = 0; i < DEPTH; i++) {
		wr = request_to(100, opcode, &from, b, 1024);
		WORKS(gds_post_send(a->qp, &wr, &bad));
		expect_wc(a->qp->send_cq.cq, 100, opcode == IBV_WR_SEND_WITH_IMM ? IBV_WC_SEND : IBV_WC_RDMA_WRITE, 0);
		expect_wc(b->qp->recv_cq.cq, 50 + (uint64_t)i, opcode == IBV_WR_SEND_WITH_IMM ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM, 7);
	}
	end_stream(stream);
}

/* The linker has calls of doorbell_poll_cq come here (--wrap). So many of the next ones find the endpoint in use. */
static int busy_polls;
#ifdef __cplusplus
extern "C" {
#endif
int __real_doorbell_poll_cq(doorbell_endpoint *endpoint, uint32_t queue_kind, doorbell_completion *completion);
int __wrap_doorbell_poll_cq(doorbell_endpoint *endpoint, uint32_t queue_kind, doorbell_completion *completion);
int __wrap_doorbell_poll_cq(doorbell_endpoint *endpoint, uint32_t queue_kind, doorbell_completion *completion)
{
	if (busy_polls == 0)
		return __real_doorbell_poll_cq(endpoint, queue_kind, completion);
	busy_polls--;
	return DOORBELL_EBUSY;
}
#ifdef __cplusplus
}
#endif

/* While another thread uses the endpoint, nothing is reported, and later each work request gets its own completion. */
static void polled_while_busy(struct side *a, struct side *b)
{
	struct ibv_sge from = at(a, 0, 0);
	gds_send_wr wr, *bad = NULL;
	struct ibv_wc wc;
	uint32_t i;
	for (i = 0; i < 3; i++)
		post_recv(b, i, 1024, 64);
	for (i = 0; i < 3; i++) {
		from.length = 10 + i;
		wr = request_to(100, IBV_WR_SEND_WITH_IMM, &from, b, 1024);
		wr.imm_data = htonl(1000 + i);
		WORKS(gds_post_send(a->qp, &wr, &bad));
		expect_wc(a->qp->send_cq.cq, 100, IBV_WC_SEND, 0);
	}
	for (i = 0; i < 3; i++) {
		busy_polls = 1;
		EXPECT(gds_poll_cq(&b->qp->recv_cq, 1, &wc) == 0 && busy_polls == 0);
		wc = poll_one(b->qp->recv_cq.cq);
		EXPECT(wc.status == IBV_WC_SUCCESS && wc.wr_id == i && wc.byte_len == 10 + i && wc.imm_data == htonl(1000 + i));
	}
	EXPECT(has_none(b->qp->recv_cq.cq));
}

static void reset_both(struct side *a, struct side *b)
{
	WORKS(gds_qp_reset(a->qp));
	WORKS(gds_qp_reset(b->qp));
	connect_sides(a, b);
}

static void expect_status(struct ibv_cq *cq, uint64_t wr_id, enum ibv_wc_status status)
{
	const struct ibv_wc wc = poll_one(cq);
	if (wc.wr_id != wr_id || wc.status != status)
		fprintf(stderr, "wr_id %llu status %d vendor_err %u\n", (unsigned long long)wc.wr_id, (int)wc.status, wc.vendor_err);
	EXPECT(wc.wr_id == wr_id && wc.status == status);
	EXPECT(status != IBV_WC_WR_FLUSH_ERR || wc.vendor_err == 0);
}

/* All work requests have one wr_id, and the second one fails. Only it has the reason, whether it is signaled or not. */
static void one_wr_id(struct side *a, struct side *b, int is_signaled)
{
	static uint32_t page[1024] __attribute__((aligned(4096)));
	CUstream stream = new_stream();
	struct ibv_sge from = at(a, 0, 64);
	gds_send_wr wr, *bad = NULL;
	int i;
	if (!is_sync()) {
		/* Held up, so that all of it is queued before one fails. */
		store(page, 0);
		WORKS(gds_register_mem(page, sizeof(page), GDS_MEMORY_HOST, NULL));
		post_recv(a, 7, 128, 64);
		WORKS(gds_stream_post_poll_dword(stream, page, 1, GDS_WAIT_COND_GEQ, GDS_MEMORY_HOST));
		for (i = 0; i < 4; i++) {
			wr = request_to(7, IBV_WR_RDMA_WRITE, &from, b, 0);
			if (i == 1)
				wr.wr.rdma.rkey ^= 0x5a5a00;
			if (i == 1 && !is_signaled)
				wr.send_flags = 0;
			WORKS(gds_stream_queue_send(stream, a->qp, &wr, &bad));
		}
		store(page, 1);
		settle(stream);
		expect_wc(a->qp->send_cq.cq, 7, IBV_WC_RDMA_WRITE, 0);
		expect_status(a->qp->send_cq.cq, 7, IBV_WC_REM_ACCESS_ERR);
		expect_status(a->qp->send_cq.cq, 7, IBV_WC_WR_FLUSH_ERR);
		expect_status(a->qp->send_cq.cq, 7, IBV_WC_WR_FLUSH_ERR);
		expect_status(a->qp->recv_cq.cq, 7, IBV_WC_WR_FLUSH_ERR);
		EXPECT(has_none(a->qp->send_cq.cq) && has_none(a->qp->recv_cq.cq));
		WORKS(gds_unregister_mem(page, sizeof(page)));
		reset_both(a, b);
	}
	end_stream(stream);
}

/* Words of `page`: whether the second thread is to end, and how many waits it could prepare. */
static uint32_t page[1024] __attribute__((aligned(4096)));

static void *prepare_waits(void *argument)
{
	struct side *side = (struct side *)argument;
	gds_wait_request_t wait;
	while (!load(page)) {
		if (gds_prepare_wait_cq(&side->qp->send_cq, &wait, 0) != 0)
			continue;
		page[1]++;
		WORKS(gds_abort_wait_cq(&side->qp->send_cq, &wait));
	}
	return NULL;
}

/*
 * A send for a stream that does not exist is taken back. A wait of another thread does not claim its completion meanwhile: it could not be
 * taken back then, and would block the queue.
 */
static void refused_sends(struct side *a, struct side *b)
{
	const int64_t end_ms = now_ms() + 300;
	CUstream stream;
	struct ibv_sge from = at(a, 0, 64);
	gds_send_wr wr = request_to(1, IBV_WR_RDMA_WRITE, &from, b, 0), *bad = NULL;
	pthread_t thread;
	/* A driver may look for the stream at that address. */
	if (by_cuda())
		return;
	store(page, 0);
	EXPECT(pthread_create(&thread, NULL, prepare_waits, a) == 0);
	while (now_ms() < end_ms)
		EXPECT(gds_stream_queue_send((CUstream)(void *)page, a->qp, &wr, &bad) != 0 && bad == &wr);
	store(page, 1);
	EXPECT(pthread_join(thread, NULL) == 0 && page[1] == 0);
	stream = new_stream();
	WORKS(gds_stream_queue_send(stream, a->qp, &wr, &bad));
	sync_stream(stream);
	expect_wc(a->qp->send_cq.cq, 1, IBV_WC_RDMA_WRITE, 0);
	end_stream(stream);
}

int main(void)
{
	struct side a, b;
	WORKS(gds_set_option(GDS_OPTION_WAIT_TIMEOUT_MS, WAIT_TIMEOUT_MS));
	make_pair(&a, &b);
	polled_late(&a, &b, IBV_WR_SEND_WITH_IMM);
	polled_late(&a, &b, IBV_WR_RDMA_WRITE_WITH_IMM);
	polled_while_busy(&a, &b);
	one_wr_id(&a, &b, 1);
	one_wr_id(&a, &b, 0);
	refused_sends(&a, &b);
	end_side(&a);
	end_side(&b);
	puts("done");
	return 0;
}
