/* A program of API 3.0: CQs are pointers, work requests are those of upstream verbs, gds_poll_cq. */
#define _POSIX_C_SOURCE 200809L
#define GDSYNC_API 3

#include <gdsync.h>

#include <sched.h>

#define EXPECT(condition)                                                                                    \
	do {                                                                                                 \
		if (!(condition)) {                                                                          \
			fprintf(stderr, "%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition,       \
				doorbell_last_error());                                                      \
			exit(1);                                                                             \
		}                                                                                            \
	} while (0)

enum { BYTES = 4096, DEPTH = 8 };

struct side {
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	gds_qp_t *qp;
	uint8_t *buffer;
};

static void make_side(struct side *side, struct ibv_context *context)
{
	gds_qp_init_attr_t attr;
	void *buffer;
	side->pd = gds_alloc_pd(context);
	EXPECT(side->pd && posix_memalign(&buffer, 4096, BYTES) == 0);
	side->buffer = (uint8_t *)buffer;
	memset(side->buffer, 0, BYTES);
	side->mr = gds_reg_mr(side->pd, side->buffer, BYTES, IBV_ACCESS_LOCAL_WRITE);
	memset(&attr, 0, sizeof(attr));
	attr.cap.max_send_wr = attr.cap.max_recv_wr = DEPTH;
	/* As devices have it, and more than a queue of this library. */
	attr.cap.max_send_sge = 30;
	attr.qp_type = IBV_QPT_RC;
	side->qp = gds_create_qp(side->pd, context, &attr, 0, GDS_CREATE_QP_DEFAULT);
	EXPECT(side->mr && side->qp && side->qp->ibqp->qp_num > 0 && attr.cap.max_send_sge == DOORBELL_SLICES_MAX);
	EXPECT(side->qp->send_cq->ibcq == attr.send_cq && side->qp->recv_cq->ibcq == attr.recv_cq && side->qp->send_cq != side->qp->recv_cq);
	EXPECT(side->qp->send_cq->ctype == GDS_CQ_TYPE_SQ && side->qp->recv_cq->ctype == GDS_CQ_TYPE_RQ);
	EXPECT(side->qp->dtype == GDS_DRIVER_TYPE_MLX5 && gds_qp_of(side->qp->ibqp) == side->qp);
}

static void end_side(struct side *side)
{
	errno = 0;
	gds_destroy_cq(side->qp->send_cq);
	EXPECT(errno == EBUSY);
	gds_destroy_qp(side->qp);
	EXPECT(gds_dereg_mr(side->mr) == 0 && gds_dealloc_pd(side->pd) == 0);
	free(side->buffer);
}

static struct ibv_wc poll_one(gds_cq_t *cq)
{
	struct ibv_wc wc;
	int count;
	while ((count = gds_poll_cq(cq, 1, &wc)) == 0)
		sched_yield();
	EXPECT(count == 1 && wc.status == IBV_WC_SUCCESS);
	return wc;
}

int main(void)
{
	struct ibv_context *context = gds_open_device("softcx");
	struct side a, b;
	doorbell_address of_a, of_b;
	struct ibv_recv_wr recv, *bad_recv = NULL;
	gds_send_wr send, *bad = NULL;
	struct ibv_sge from, to;
	gds_send_request_t prepared;
	gds_wait_request_t wait;
	CUstream stream;
	int version = 0;
	EXPECT(context && gds_query_param(GDS_PARAM_VERSION, &version) == 0);
	EXPECT(GDS_API_VERSION_COMPATIBLE(version) && GDS_API_MAJOR_VERSION == 3 && gds_query_param(GDS_NUM_PARAMS, &version) == EINVAL);
	make_side(&a, context);
	make_side(&b, context);
	EXPECT(gds_qp_address(a.qp, &of_a) == 0 && gds_qp_address(b.qp, &of_b) == 0);
	EXPECT(gds_qp_connect(a.qp, &of_b) == 0 && gds_qp_connect(b.qp, &of_a) == 0);
	EXPECT(gds_create_host_stream(&stream) == 0);
	memset(a.buffer, 0x5a, 64);
	memset(&send, 0, sizeof(send));
	memset(&recv, 0, sizeof(recv));
	from.addr = (uint64_t)(uintptr_t)a.buffer;
	to.addr = (uint64_t)(uintptr_t)b.buffer;
	from.length = to.length = 64;
	from.lkey = a.mr->lkey;
	to.lkey = b.mr->lkey;
	recv.wr_id = 1;
	recv.sg_list = &to;
	recv.num_sge = 1;
	EXPECT(gds_post_recv(b.qp, &recv, &bad_recv) == 0 && gds_post_recv(b.qp, &recv, &bad_recv) == 0);
	send.wr_id = 2;
	send.sg_list = &from;
	send.num_sge = 1;
	send.opcode = IBV_WR_SEND;
	send.send_flags = IBV_SEND_SIGNALED;
	EXPECT(gds_stream_queue_send(stream, a.qp, &send, &bad) == 0);
	EXPECT(gds_stream_wait_cq(stream, a.qp->send_cq, 0) == 0 && gds_stream_wait_cq(stream, b.qp->recv_cq, 0) == 0);
	EXPECT(a.qp->send_cq->curr_offset == 1 && b.qp->recv_cq->curr_offset == 1);
	EXPECT(poll_one(b.qp->recv_cq).byte_len == 64 && poll_one(a.qp->send_cq).wr_id == 2 && b.buffer[63] == 0x5a);
	send.wr_id = 3;
	EXPECT(gds_prepare_send(a.qp, &send, &bad, &prepared) == 0 && gds_prepare_wait_cq(a.qp->send_cq, &wait, 0) == 0);
	EXPECT(gds_stream_post_send(stream, &prepared) == 0 && gds_stream_post_wait_cq(stream, &wait) == 0);
	EXPECT(poll_one(a.qp->send_cq).wr_id == 3 && poll_one(b.qp->recv_cq).opcode == IBV_WC_RECV);
	EXPECT(gds_poll_cq(NULL, 1, NULL) < 0 && gds_poll_cq(a.qp->send_cq, 0, NULL) < 0);
	EXPECT(gds_release_stream(stream) == 0);
	end_side(&a);
	end_side(&b);
	EXPECT(gds_close_device(context) == 0);
	puts("done");
	return 0;
}
