/*
 * A program of libibverbs and libgdsync, as libmp is one: its own protection domain and memory, ibv_reg_mr, and the steps of
 * ibv_modify_qp with numbers that it has exchanged itself.
 */
#define _GNU_SOURCE

#include "rig.h"

#include <sys/mman.h>

struct end {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct gds_qp *qp;
	struct ibv_port_attr port;
	union ibv_gid gid;
	uint8_t *buffer;
};

/* The errno of the next registration by libibverbs, which is not made; 0: it is made. */
static int refusal;

/* Before libibverbs' own call, to which it goes. */
struct ibv_mr *(ibv_reg_mr)(struct ibv_pd *pd, void *start, size_t len_bytes, int access)
{
	struct ibv_mr *(*own)(struct ibv_pd *, void *, size_t, int);
	if (refusal) {
		errno = refusal;
		refusal = 0;
		return NULL;
	}
	find(RTLD_NEXT, "ibv_reg_mr", &own);
	return own(pd, start, len_bytes, access);
}

/* The program is linked to fixed addresses, so this is at a low address, and what mmap gives is at a high one. */
static uint8_t low[BYTES] __attribute__((aligned(4096)));

enum { RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

static void init_end(struct end *end)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	memset(&attr, 0, sizeof(attr));
	attr.qp_state = IBV_QPS_INIT;
	attr.port_num = 1;
	attr.qp_access_flags = RIGHTS;
	WORKS(ibv_modify_qp(end->qp->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	/* Not from INIT. */
	attr.qp_state = IBV_QPS_RTS;
	GIVES(EINVAL, ibv_modify_qp(end->qp->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	WORKS(ibv_query_qp(end->qp->qp, &attr, IBV_QP_STATE, &init));
	EXPECT(attr.qp_state == IBV_QPS_INIT && attr.port_num == 1);
}

static void make_end(struct end *end, void *buffer)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	gds_qp_init_attr_t init;
	EXPECT(list && list[0]);
	end->context = ibv_open_device(list[0]);
	ibv_free_device_list(list);
	EXPECT(end->context);
	end->pd = ibv_alloc_pd(end->context);
	EXPECT(end->pd);
	end->buffer = (uint8_t *)buffer;
	memset(end->buffer, 0, BYTES);
	/* The name in brackets is libibverbs' own call, which a source without the header makes. */
	end->mr = (ibv_reg_mr)(end->pd, end->buffer, BYTES, RIGHTS);
	WORKS(ibv_query_port(end->context, 1, &end->port));
	WORKS(ibv_query_gid(end->context, 1, 0, &end->gid));
	attributes(&init);
	end->qp = gds_create_qp(end->pd, end->context, &init, 0, GDS_CREATE_QP_DEFAULT);
	EXPECT(end->mr && end->qp && end->qp->qp->pd == end->pd);
	init_end(end);
}

static void connect_end(struct end *end, const struct end *peer)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	memset(&attr, 0, sizeof(attr));
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = end->port.active_mtu;
	attr.dest_qp_num = peer->qp->qp->qp_num;
	attr.rq_psn = 17;
	attr.max_dest_rd_atomic = 1;
	attr.min_rnr_timer = 12;
	attr.ah_attr.dlid = peer->port.lid;
	attr.ah_attr.port_num = 1;
	if (end->port.link_layer == IBV_LINK_LAYER_ETHERNET) {
		attr.ah_attr.is_global = 1;
		attr.ah_attr.grh.dgid = peer->gid;
		attr.ah_attr.grh.hop_limit = 1;
	}
	WORKS(ibv_modify_qp(end->qp->qp, &attr,
			    IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
				    IBV_QP_MIN_RNR_TIMER));
	memset(&attr, 0, sizeof(attr));
	attr.qp_state = IBV_QPS_RTS;
	attr.sq_psn = 17;
	attr.timeout = 14;
	attr.retry_cnt = attr.rnr_retry = 7;
	attr.max_rd_atomic = 1;
	WORKS(ibv_modify_qp(end->qp->qp, &attr,
			    IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC));
	WORKS(ibv_query_qp(end->qp->qp, &attr, IBV_QP_STATE, &init));
	EXPECT(attr.qp_state == IBV_QPS_RTS && attr.dest_qp_num == peer->qp->qp->qp_num && attr.rq_psn == 17);
}

/* A queue pair that is reset has nothing of its connection, and can be connected again. */
static void reset_end(struct end *end)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	memset(&attr, 0, sizeof(attr));
	attr.qp_state = IBV_QPS_RESET;
	WORKS(ibv_modify_qp(end->qp->qp, &attr, IBV_QP_STATE));
	memset(&attr, 0x55, sizeof(attr));
	WORKS(ibv_query_qp(end->qp->qp, &attr, IBV_QP_STATE, &init));
	EXPECT(attr.qp_state == IBV_QPS_RESET && attr.dest_qp_num == 0 && attr.rq_psn == 0 && attr.path_mtu == 0 && attr.ah_attr.dlid == 0);
	init_end(end);
}

static void end_end(struct end *end)
{
	WORKS(gds_destroy_qp(end->qp));
	WORKS(ibv_dereg_mr(end->mr));
	/* Nothing of the program's protection domain is in use any more. */
	WORKS(ibv_dealloc_pd(end->pd));
	WORKS(ibv_close_device(end->context));
}

static void transfer(struct end *a, struct end *b)
{
	CUstream stream = new_stream();
	struct ibv_sge from, to;
	struct ibv_recv_wr recv, *bad_recv = NULL;
	struct ibv_mr *parts[40];
	gds_send_wr wr, *bad = NULL;
	int i;
	memset(a->buffer, 0x77, 256);
	to.addr = (uint64_t)(uintptr_t)(b->buffer + 1024);
	to.length = 256;
	to.lkey = b->mr->lkey;
	memset(&recv, 0, sizeof(recv));
	recv.wr_id = 1;
	recv.sg_list = &to;
	recv.num_sge = 1;
	WORKS(ibv_post_recv(b->qp->qp, &recv, &bad_recv));
	from.addr = (uint64_t)(uintptr_t)a->buffer;
	from.length = 256;
	from.lkey = a->mr->lkey;
	wr = request(2, IBV_WR_SEND, &from);
	WORKS(gds_stream_queue_send(stream, a->qp, &wr, &bad));
	WORKS(gds_stream_wait_cq(stream, &a->qp->send_cq, 0));
	sync_stream(stream);
	expect_wc(a->qp->send_cq.cq, 2, IBV_WC_SEND, 0);
	expect_wc(b->qp->recv_cq.cq, 1, IBV_WC_RECV, 256);
	EXPECT(b->buffer[1024] == 0x77 && b->buffer[1279] == 0x77);
	/* Many keys, and one again that was not used for long. */
	for (i = 0; i < 40; i++) {
		parts[i] = ibv_reg_mr(a->pd, a->buffer, 4096, IBV_ACCESS_LOCAL_WRITE);
		EXPECT(parts[i] && !gds_owns_mr(parts[i]));
		a->buffer[0] = (uint8_t)i;
		from.length = 1;
		from.lkey = parts[i]->lkey;
		wr = request(3, IBV_WR_RDMA_WRITE, &from);
		wr.wr.rdma.remote_addr = (uint64_t)(uintptr_t)(b->buffer + i);
		wr.wr.rdma.rkey = b->mr->rkey;
		WORKS(gds_post_send(a->qp, &wr, &bad));
		expect_wc(a->qp->send_cq.cq, 3, IBV_WC_RDMA_WRITE, 0);
	}
	for (i = 0; i < 40; i++) {
		EXPECT(b->buffer[i] == i);
		WORKS(ibv_dereg_mr(parts[i]));
	}
	end_stream(stream);
}

/* No second attempt is made for memory of the host. */
static void refused_memory(struct end *end)
{
	const int codes[] = {ENOMEM, EINVAL, EPERM};
	size_t i;
	for (i = 0; i < sizeof(codes) / sizeof(codes[0]); i++) {
		refusal = codes[i];
		REFUSED(codes[i], ibv_reg_mr(end->pd, end->buffer, 4096, IBV_ACCESS_LOCAL_WRITE));
		EXPECT(refusal == 0);
	}
}

/*
 * Work requests of two slices in different windows of DOORBELL_GDS_WINDOW, with one key and with two. The queue pair's table has one place
 * for some of these pairs.
 */
static void pairs_of_keys(struct end *a, struct end *b)
{
	enum { KEYS = 64 };
	uint8_t *const border = (uint8_t *)((uintptr_t)64 << 39);
	void *const memory = mmap(border - 4096, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	struct ibv_mr *keys[KEYS];
	struct ibv_sge parts[2];
	struct ibv_recv_wr recv, *bad_recv = NULL;
	gds_send_wr wr, *bad = NULL;
	int i, j;
	EXPECT(memory == border - 4096);
	for (i = 0; i < KEYS; i++)
		EXPECT((keys[i] = ibv_reg_mr(a->pd, memory, 8192, IBV_ACCESS_LOCAL_WRITE)) != NULL);
	border[-1] = 1;
	border[0] = 2;
	memset(parts, 0, sizeof(parts));
	parts[0].addr = (uint64_t)(uintptr_t)border - 1;
	parts[1].addr = (uint64_t)(uintptr_t)border;
	parts[0].length = parts[1].length = 1;
	wr = request(3, IBV_WR_RDMA_WRITE, parts);
	wr.num_sge = 2;
	wr.wr.rdma.remote_addr = (uint64_t)(uintptr_t)b->buffer;
	wr.wr.rdma.rkey = b->mr->rkey;
	for (i = 0; i < KEYS; i++) {
		for (j = 0; j < KEYS; j++) {
			memset(b->buffer, 0, 2);
			parts[0].lkey = keys[i]->lkey;
			parts[1].lkey = keys[j]->lkey;
			WORKS(gds_post_send(a->qp, &wr, &bad));
			expect_wc(a->qp->send_cq.cq, 3, IBV_WC_RDMA_WRITE, 0);
			EXPECT(b->buffer[0] == 1 && b->buffer[1] == 2);
		}
	}
	/* A receive, too. */
	border[-1] = border[0] = 0;
	parts[1].lkey = parts[0].lkey;
	memset(&recv, 0, sizeof(recv));
	recv.sg_list = parts;
	recv.num_sge = 2;
	WORKS(ibv_post_recv(a->qp->qp, &recv, &bad_recv));
	b->buffer[0] = 3;
	b->buffer[1] = 4;
	parts[0].addr = (uint64_t)(uintptr_t)b->buffer;
	parts[0].length = 2;
	parts[0].lkey = b->mr->lkey;
	wr = request(4, IBV_WR_SEND, parts);
	WORKS(gds_post_send(b->qp, &wr, &bad));
	expect_wc(b->qp->send_cq.cq, 4, IBV_WC_SEND, 0);
	expect_wc(a->qp->recv_cq.cq, 0, IBV_WC_RECV, 2);
	EXPECT(border[-1] == 3 && border[0] == 4);
	for (i = 0; i < KEYS; i++)
		WORKS(ibv_dereg_mr(keys[i]));
	EXPECT(munmap(memory, 8192) == 0);
}

/* The device refuses a key that is none, with a completion. */
static void invalid_key(struct end *a, const struct end *b)
{
	struct ibv_sge from;
	struct ibv_wc wc;
	gds_send_wr wr, *bad = NULL;
	from.addr = (uint64_t)(uintptr_t)a->buffer;
	from.length = 16;
	from.lkey = a->mr->lkey ^ 0x55aa00;
	wr = request(9, IBV_WR_RDMA_WRITE, &from);
	wr.wr.rdma.remote_addr = (uint64_t)(uintptr_t)b->buffer;
	wr.wr.rdma.rkey = b->mr->rkey;
	WORKS(gds_post_send(a->qp, &wr, &bad));
	wc = poll_one(a->qp->send_cq.cq);
	EXPECT(wc.wr_id == 9 && wc.status == IBV_WC_LOC_PROT_ERR);
}

/* A UD queue pair in the state RTS. */
static struct gds_qp *datagram_qp(const struct end *end, uint32_t qkey)
{
	gds_qp_init_attr_t init;
	struct ibv_qp_attr attr;
	struct gds_qp *qp;
	attributes(&init);
	init.qp_type = IBV_QPT_UD;
	qp = gds_create_qp(end->pd, end->context, &init, 0, GDS_CREATE_QP_DEFAULT);
	EXPECT(qp && qp->qp->qp_type == IBV_QPT_UD);
	memset(&attr, 0, sizeof(attr));
	attr.qp_state = IBV_QPS_INIT;
	attr.port_num = 1;
	attr.qkey = qkey;
	WORKS(ibv_modify_qp(qp->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	attr.qp_state = IBV_QPS_RTR;
	WORKS(ibv_modify_qp(qp->qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	attr.sq_psn = 3;
	WORKS(ibv_modify_qp(qp->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	WORKS(ibv_query_qp(qp->qp, &attr, IBV_QP_STATE, &init));
	EXPECT(attr.qp_state == IBV_QPS_RTS && attr.qkey == qkey && init.qp_type == IBV_QPT_UD);
	return qp;
}

/* Datagrams to an address handle of the program: at once, on a stream, and prepared. */
static void datagrams(struct end *a, struct end *b)
{
	enum { QKEY = 0x11111111, GRH = 40 };
	struct gds_qp *from = datagram_qp(a, QKEY), *to = datagram_qp(b, QKEY);
	CUstream stream = new_stream();
	struct ibv_ah_attr ah_attr;
	struct ibv_ah *ah;
	struct ibv_sge source, place;
	struct ibv_recv_wr recv, *bad_recv = NULL;
	gds_send_wr wr, *bad = NULL;
	gds_send_request_t prepared;
	struct ibv_wc wc;
	int round;
	memset(&ah_attr, 0, sizeof(ah_attr));
	ah_attr.dlid = b->port.lid;
	ah_attr.port_num = 1;
	if (b->port.link_layer == IBV_LINK_LAYER_ETHERNET) {
		ah_attr.is_global = 1;
		ah_attr.grh.dgid = b->gid;
		ah_attr.grh.hop_limit = 1;
	}
	ah = ibv_create_ah(a->pd, &ah_attr);
	EXPECT(ah);
	source.addr = (uint64_t)(uintptr_t)a->buffer;
	source.length = 100;
	source.lkey = a->mr->lkey;
	place.addr = (uint64_t)(uintptr_t)(b->buffer + 1024);
	place.length = GRH + 100;
	place.lkey = b->mr->lkey;
	memset(&recv, 0, sizeof(recv));
	recv.sg_list = &place;
	recv.num_sge = 1;
	/* What UD has not, and a send without an address handle. */
	wr = request(1, IBV_WR_RDMA_WRITE, &source);
	GIVES(EINVAL, gds_post_send(from, &wr, &bad));
	wr = request(1, IBV_WR_SEND, &source);
	memset(&wr.wr, 0, sizeof(wr.wr));
	GIVES(EINVAL, gds_post_send(from, &wr, &bad));
	for (round = 0; round < 60; round++) {
		memset(a->buffer, round + 1, 100);
		memset(b->buffer + 1024, 0, GRH + 100);
		recv.wr_id = (uint64_t)round;
		WORKS(ibv_post_recv(to->qp, &recv, &bad_recv));
		wr = request((uint64_t)round, IBV_WR_SEND_WITH_IMM, &source);
		wr.imm_data = 0x1234;
		wr.wr.ud.ah = ah;
		wr.wr.ud.remote_qpn = to->qp->qp_num;
		wr.wr.ud.remote_qkey = QKEY;
		if (round % 3 == 0) {
			WORKS(gds_post_send(from, &wr, &bad));
		} else if (round % 3 == 1) {
			WORKS(gds_stream_queue_send(stream, from, &wr, &bad));
			WORKS(gds_stream_wait_cq(stream, &from->send_cq, 0));
			sync_stream(stream);
		} else {
			WORKS(gds_prepare_send(from, &wr, &bad, &prepared));
			WORKS(gds_stream_post_send(stream, &prepared));
			sync_stream(stream);
		}
		expect_wc(from->send_cq.cq, (uint64_t)round, IBV_WC_SEND, 0);
		wc = poll_one(to->recv_cq.cq);
		EXPECT(wc.status == IBV_WC_SUCCESS && wc.wr_id == (uint64_t)round && wc.byte_len == GRH + 100);
		EXPECT(wc.opcode == IBV_WC_RECV && wc.src_qp == from->qp->qp_num && wc.imm_data == 0x1234);
		EXPECT(!(wc.wc_flags & IBV_WC_GRH) == (b->port.link_layer != IBV_LINK_LAYER_ETHERNET));
		EXPECT(b->buffer[1024 + GRH] == round + 1 && b->buffer[1024 + GRH + 99] == round + 1);
	}
	end_stream(stream);
	WORKS(gds_destroy_qp(from));
	WORKS(gds_destroy_qp(to));
	WORKS(ibv_destroy_ah(ah));
}

int main(void)
{
	struct end a, b;
	void *high;
	EXPECT((uintptr_t)low < (uintptr_t)1 << 39);
	EXPECT(posix_memalign(&high, 4096, BYTES) == 0);
	make_end(&a, low);
	make_end(&b, high);
	connect_end(&a, &b);
	connect_end(&b, &a);
	transfer(&a, &b);
	transfer(&b, &a);
	pairs_of_keys(&a, &b);
	datagrams(&a, &b);
	reset_end(&a);
	reset_end(&b);
	connect_end(&a, &b);
	connect_end(&b, &a);
	transfer(&a, &b);
	refused_memory(&a);
	invalid_key(&a, &b);
	end_end(&a);
	end_end(&b);
	free(high);
	puts("done");
	return 0;
}
