/*
 * Posts what tests/libmlx5.rs asks for with the ibv_post_send of the libmlx5 that is installed, on the device mlx5_0, and prints what
 * that wrote into the send ring. The queue pair is in the error state: every request is flushed, so that keys and addresses may be
 * anything, and the ring goes round for ever. A request a line on stdin, words in hexadecimal, as tests/mlx5dv_oracle.c takes them:
 *
 *   open SEGMENTS INLINE          prints: QPN WQEBBS
 *   ud SEGMENTS INLINE            the same with a UD queue pair, whose RADDR, RKEY and SWAP are the number of an address handle, queue key and
 *                                 queue pair
 *   ah LID SL CLASS FLOW HOPS GLOBAL GID     a further address handle of a UD queue pair; prints its address vector
 *   post N                        the next N requests go in one call, as a list
 *   wqe OPCODE FLAGS IMM RADDR RKEY SWAP COMPARE QPN INDEX list N (LEN LKEY ADDR)*     flags: 1 signaled, 2 solicited, 4 fence
 *   wqe ...                                                inline N BYTES
 */
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define REQUESTS 64u
#define LIST_MAX 16u
#define SEGMENTS_MAX 64u
#define INLINE_MAX 1024u
#define HANDLES_MAX 64u

#define CHECK(condition)                                                                                                       \
	do {                                                                                                                   \
		if (!(condition)) {                                                                                            \
			fprintf(stderr, "line %d: %s: %m\n", __LINE__, #condition);                                            \
			exit(1);                                                                                               \
		}                                                                                                              \
	} while (0)

static struct ibv_qp *qp;
static struct ibv_cq *cq;
static struct ibv_pd *domain;
static struct ibv_ah *handles[HANDLES_MAX];
static uint32_t handle_count;
static struct mlx5dv_qp ring;
/* Running WQEBB count, and requests that are not flushed yet. */
static uint32_t producer, outstanding;

static uint64_t word(void)
{
	uint64_t value;
	CHECK(scanf("%" SCNx64, &value) == 1);
	return value;
}

static void open_device(enum ibv_qp_type type)
{
	struct ibv_qp_init_attr attributes = { .qp_type = type };
	struct ibv_qp_attr change = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct mlx5dv_obj object = { .qp = { .out = &ring } };
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context;
	struct ibv_port_attr port;
	union ibv_gid gid;

	CHECK(list && list[0] && (context = ibv_open_device(list[0])));
	CHECK((domain = ibv_alloc_pd(context)));
	CHECK((cq = ibv_create_cq(context, 4 * REQUESTS, NULL, NULL, 0)));
	attributes.send_cq = attributes.recv_cq = cq;
	attributes.cap.max_send_wr = REQUESTS;
	attributes.cap.max_recv_wr = attributes.cap.max_recv_sge = 1;
	attributes.cap.max_send_sge = (uint32_t)word();
	attributes.cap.max_inline_data = (uint32_t)word();
	CHECK((qp = ibv_create_qp(domain, &attributes)));
	CHECK(!ibv_modify_qp(qp, &change,
			     IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				     (type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)));
	/* libmlx5 takes no sends before the queue pair is ready for them once. Its peer is itself. */
	CHECK(!ibv_query_port(context, 1, &port) && !ibv_query_gid(context, 1, 0, &gid));
	change.qp_state = IBV_QPS_RTR;
	change.path_mtu = IBV_MTU_1024;
	change.dest_qp_num = qp->qp_num;
	change.ah_attr.dlid = port.lid;
	change.ah_attr.port_num = 1;
	change.ah_attr.is_global = port.link_layer == IBV_LINK_LAYER_ETHERNET;
	change.ah_attr.grh.dgid = gid;
	CHECK(!ibv_modify_qp(qp, &change,
			     type == IBV_QPT_UD ? IBV_QP_STATE : IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	change.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(qp, &change,
			     type == IBV_QPT_UD ? IBV_QP_STATE | IBV_QP_SQ_PSN : IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
				     IBV_QP_MAX_QP_RD_ATOMIC));
	change.qp_state = IBV_QPS_ERR;
	CHECK(!ibv_modify_qp(qp, &change, IBV_QP_STATE));
	object.qp.in = qp;
	CHECK(!mlx5dv_init_obj(&object, MLX5DV_OBJ_QP));
	CHECK(ring.sq.stride == MLX5_SEND_WQE_BB);
	printf("%x %x\n", qp->qp_num, ring.sq.wqe_cnt);
}

static void new_handle(void)
{
	struct ibv_ah_attr attributes = { .port_num = 1 };
	struct mlx5dv_ah vector;
	struct mlx5dv_obj object = { .ah = { .out = &vector } };
	CHECK(handle_count < HANDLES_MAX);
	attributes.dlid = (uint16_t)word();
	attributes.sl = (uint8_t)word();
	attributes.grh.traffic_class = (uint8_t)word();
	attributes.grh.flow_label = (uint32_t)word();
	attributes.grh.hop_limit = (uint8_t)word();
	attributes.is_global = (uint8_t)word();
	for (int i = 0; i < 16; i++) {
		unsigned value;
		CHECK(scanf(" %2x", &value) == 1);
		attributes.grh.dgid.raw[i] = (uint8_t)value;
	}
	CHECK((object.ah.in = handles[handle_count++] = ibv_create_ah(domain, &attributes)));
	CHECK(!mlx5dv_init_obj(&object, MLX5DV_OBJ_AH));
	for (size_t at = 0; at < sizeof(struct mlx5_wqe_av); at++)
		printf("%02x", ((const uint8_t *)vector.av)[at]);
	putchar('\n');
}

/* Takes completions until at most `left` requests are in the queue. */
static void drain(uint32_t left)
{
	const time_t begun = time(NULL);
	while (outstanding > left) {
		struct ibv_wc completions[16];
		int found = ibv_poll_cq(cq, 16, completions);
		CHECK(found >= 0);
		for (int i = 0; i < found; i++)
			CHECK(completions[i].status == IBV_WC_WR_FLUSH_ERR);
		CHECK((uint32_t)found <= outstanding);
		outstanding -= (uint32_t)found;
		CHECK(time(NULL) - begun < 30);
	}
}

static void read_request(struct ibv_send_wr *request, struct ibv_sge *pieces, uint8_t *data)
{
	static const enum ibv_wr_opcode opcodes[] = {
		[MLX5_OPCODE_RDMA_WRITE] = IBV_WR_RDMA_WRITE,	   [MLX5_OPCODE_RDMA_WRITE_IMM] = IBV_WR_RDMA_WRITE_WITH_IMM,
		[MLX5_OPCODE_SEND] = IBV_WR_SEND,		   [MLX5_OPCODE_SEND_IMM] = IBV_WR_SEND_WITH_IMM,
		[MLX5_OPCODE_RDMA_READ] = IBV_WR_RDMA_READ,	   [MLX5_OPCODE_ATOMIC_CS] = IBV_WR_ATOMIC_CMP_AND_SWP,
		[MLX5_OPCODE_ATOMIC_FA] = IBV_WR_ATOMIC_FETCH_AND_ADD, [MLX5_OPCODE_SEND_INVAL] = IBV_WR_SEND_WITH_INV,
	};
	const uint64_t opcode = word(), flags = word();
	const uint32_t imm = (uint32_t)word();
	const uint64_t raddr = word();
	const uint32_t rkey = (uint32_t)word();
	const uint64_t swap = word(), compare = word();
	char form[8];

	word(); /* libmlx5 knows the queue pair */
	word(); /* and the index */
	CHECK(opcode >= MLX5_OPCODE_SEND_INVAL && opcode <= MLX5_OPCODE_ATOMIC_FA);
	memset(request, 0, sizeof(*request));
	request->opcode = opcodes[opcode];
	request->send_flags = (flags & 1 ? IBV_SEND_SIGNALED : 0u) | (flags & 2 ? IBV_SEND_SOLICITED : 0u) |
			      (flags & 4 ? IBV_SEND_FENCE : 0u);
	if (opcode == MLX5_OPCODE_SEND_INVAL)
		request->invalidate_rkey = imm;
	else
		request->imm_data = htobe32(imm);
	request->sg_list = pieces;
	if (handle_count) {
		CHECK(raddr < handle_count);
		request->wr.ud.ah = handles[raddr];
		request->wr.ud.remote_qkey = rkey;
		request->wr.ud.remote_qpn = (uint32_t)swap;
	} else if (opcode == MLX5_OPCODE_ATOMIC_CS || opcode == MLX5_OPCODE_ATOMIC_FA) {
		request->wr.atomic.remote_addr = raddr;
		request->wr.atomic.rkey = rkey;
		request->wr.atomic.swap = swap;
		request->wr.atomic.compare_add = opcode == MLX5_OPCODE_ATOMIC_CS ? compare : swap;
	} else {
		request->wr.rdma.remote_addr = raddr;
		request->wr.rdma.rkey = rkey;
	}
	CHECK(scanf("%7s", form) == 1);
	if (strcmp(form, "inline") == 0) {
		const uint32_t length = (uint32_t)word(), first = length / 3;
		CHECK(length <= INLINE_MAX);
		for (uint32_t i = 0; i < length; i++) {
			unsigned value;
			CHECK(scanf(" %2x", &value) == 1);
			data[i] = (uint8_t)value;
		}
		/* Gathered from two places. */
		request->send_flags |= IBV_SEND_INLINE;
		pieces[0] = (struct ibv_sge){ .addr = (uintptr_t)data, .length = first };
		pieces[1] = (struct ibv_sge){ .addr = (uintptr_t)(data + first), .length = length - first };
		request->num_sge = 2;
	} else {
		request->num_sge = (int)word();
		CHECK((uint32_t)request->num_sge <= SEGMENTS_MAX);
		for (int i = 0; i < request->num_sge; i++) {
			pieces[i].length = (uint32_t)word();
			pieces[i].lkey = (uint32_t)word();
			pieces[i].addr = word();
		}
	}
}

static void post(void)
{
	static struct ibv_send_wr requests[LIST_MAX];
	static struct ibv_sge pieces[LIST_MAX][SEGMENTS_MAX];
	static uint8_t data[LIST_MAX][INLINE_MAX];
	const uint32_t count = (uint32_t)word();
	struct ibv_send_wr *bad = NULL;
	char what[8];

	CHECK(count >= 1 && count <= LIST_MAX);
	for (uint32_t i = 0; i < count; i++) {
		CHECK(scanf("%7s", what) == 1 && strcmp(what, "wqe") == 0);
		read_request(&requests[i], pieces[i], data[i]);
		requests[i].next = i + 1 < count ? &requests[i + 1] : NULL;
	}
	if (outstanding + count > REQUESTS)
		drain(0);
	errno = ibv_post_send(qp, requests, &bad);
	CHECK(errno == 0);
	outstanding += count;
	for (uint32_t i = 0; i < count; i++) {
		const uint8_t *base = ring.sq.buf;
		const uint32_t length = ring.sq.wqe_cnt * ring.sq.stride, start = producer * ring.sq.stride % length;
		const uint32_t segments = base[start + 7] & 0x3f;
		for (uint32_t at = 0; at < segments * 16; at++)
			printf("%02x", base[(start + at) % length]);
		putchar('\n');
		producer += (segments + 3) / 4;
	}
}

int main(void)
{
	char what[8];
	while (scanf("%7s", what) == 1) {
		if (strcmp(what, "open") == 0)
			open_device(IBV_QPT_RC);
		else if (strcmp(what, "ud") == 0)
			open_device(IBV_QPT_UD);
		else if (strcmp(what, "ah") == 0)
			new_handle();
		else if (strcmp(what, "post") == 0)
			post();
		else
			return 2;
	}
	drain(0);
	return 0;
}
