/*
 * Raises each completion status that a requester or a responder can have, with nothing but libibverbs calls, and compares what both sides
 * report. Both queue pairs are in this process and talk through the device. Prints a line a case; ends with 1 if one was wrong.
 * `statuses garbled`, `statuses send STATUS` and `statuses recv STATUS` expect what the device was told to do wrong.
 */
#include "pair.h"

#define BYTES 65536u
#define NONE ((enum ibv_wc_status)-1)

static struct device device;
static struct ibv_mr *ours, *theirs, *for_reading;
static struct ibv_cq *our_cq, *their_cq;
static struct ibv_qp *our_qp, *their_qp;
static int wrong;

static void begin(enum ibv_qp_type type, struct patience patience)
{
	struct address a, b;
	our_cq = new_cq(&device, 64);
	their_cq = new_cq(&device, 64);
	our_qp = new_qp(&device, type, our_cq, 16);
	their_qp = new_qp(&device, type, their_cq, 16);
	a = address_of(&device, our_qp);
	b = address_of(&device, their_qp);
	to_init(our_qp);
	to_init(their_qp);
	join(&device, our_qp, &b, patience);
	join(&device, their_qp, &a, patience);
}

static void end(void)
{
	CALL(ibv_destroy_qp(our_qp));
	CALL(ibv_destroy_qp(their_qp));
	CALL(ibv_destroy_cq(our_cq));
	CALL(ibv_destroy_cq(their_cq));
}

static struct ibv_sge piece(const struct ibv_mr *region, uint32_t bytes)
{
	return (struct ibv_sge){ .addr = (uintptr_t)region->addr, .length = bytes, .lkey = region->lkey };
}

/* The responder's queue pair loses a right. */
static void deny(int right)
{
	struct ibv_qp_attr change = {
		.qp_access_flags = (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC) & ~(unsigned)right,
	};
	CALL(ibv_modify_qp(their_qp, &change, IBV_QP_ACCESS_FLAGS));
}

static void receive(struct ibv_sge into)
{
	struct ibv_recv_wr request = { .wr_id = 0x1ec, .sg_list = &into, .num_sge = 1 }, *bad;
	CALL(ibv_post_recv(their_qp, &request, &bad));
}

static struct ibv_send_wr request(enum ibv_wr_opcode opcode, struct ibv_sge *from)
{
	struct ibv_send_wr request = { .wr_id = 0x5e4d, .sg_list = from, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED };
	if (opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		request.wr.atomic.remote_addr = (uintptr_t)theirs->addr;
		request.wr.atomic.rkey = theirs->rkey;
	} else {
		request.wr.rdma.remote_addr = (uintptr_t)theirs->addr;
		request.wr.rdma.rkey = theirs->rkey;
	}
	return request;
}

static void post(struct ibv_send_wr request)
{
	struct ibv_send_wr *bad;
	CALL(ibv_post_send(our_qp, &request, &bad));
}

static void expect_one(const char *what, const char *side, struct ibv_cq *cq, enum ibv_wc_status expected, uint64_t wr_id, uint32_t qpn)
{
	struct ibv_wc completion;
	if (expected == NONE) {
		/* What would come has come: the other side's completion was later. */
		if (ibv_poll_cq(cq, 1, &completion) != 0) {
			printf("%s: %s: %s, expected nothing\n", what, side, ibv_wc_status_str(completion.status));
			wrong = 1;
		}
		return;
	}
	completion = next_completion(cq);
	printf("%s: %s: %s (vendor 0x%x)\n", what, side, ibv_wc_status_str(completion.status), completion.vendor_err);
	if (completion.status != expected || completion.wr_id != wr_id || completion.qp_num != qpn) {
		printf("  EXPECTED %s, wr_id 0x%" PRIx64 " (0x%" PRIx64 "), qp 0x%x (0x%x)\n", ibv_wc_status_str(expected), wr_id,
		       completion.wr_id, qpn, completion.qp_num);
		wrong = 1;
	}
}

/* Both sides' first completions, and that what is posted afterwards is flushed where the queue pair is broken. */
static void expect(const char *what, enum ibv_wc_status requester, enum ibv_wc_status responder)
{
	struct ibv_sge from = piece(ours, 8);
	expect_one(what, "requester", our_cq, requester, 0x5e4d, our_qp->qp_num);
	expect_one(what, "responder", their_cq, responder, 0x1ec, their_qp->qp_num);
	if (requester != IBV_WC_SUCCESS && our_qp->qp_type == IBV_QPT_RC) {
		if (state_of(our_qp) != IBV_QPS_ERR) {
			printf("  EXPECTED the requester's queue pair in error, it is in %d\n", state_of(our_qp));
			wrong = 1;
		}
		post(request(IBV_WR_SEND, &from));
		expect_one(what, "flushed", our_cq, IBV_WC_WR_FLUSH_ERR, 0x5e4d, our_qp->qp_num);
	}
	end();
}

static const struct patience HASTY = { .timeout = 8, .retries = 1, .rnr_retries = 1, .rnr_timer = 1 };

static void lengths_and_keys(void)
{
	struct ibv_sge from = piece(ours, 1000), into = piece(theirs, 1000), wrong_key;
	struct ibv_send_wr send;

	begin(IBV_QPT_RC, PATIENT);
	receive(into);
	post(request(IBV_WR_SEND, &from));
	expect("a send that fits", IBV_WC_SUCCESS, IBV_WC_SUCCESS);

	begin(IBV_QPT_RC, PATIENT);
	into.length = 999;
	receive(into);
	post(request(IBV_WR_SEND, &from));
	expect("a send longer than the receive", IBV_WC_REM_INV_REQ_ERR, IBV_WC_LOC_LEN_ERR);

	begin(IBV_QPT_RC, PATIENT);
	wrong_key = from;
	wrong_key.lkey ^= 0x5500;
	post(request(IBV_WR_SEND, &wrong_key));
	expect("a send from a key that is none", IBV_WC_LOC_PROT_ERR, NONE);

	begin(IBV_QPT_RC, PATIENT);
	into = piece(theirs, 1000);
	into.lkey ^= 0x5500;
	receive(into);
	post(request(IBV_WR_SEND, &from));
	expect("a receive into a key that is none", IBV_WC_REM_OP_ERR, IBV_WC_LOC_PROT_ERR);

	begin(IBV_QPT_RC, PATIENT);
	receive(piece(for_reading, 1000));
	post(request(IBV_WR_SEND, &from));
	expect("a receive into memory that may not be written", IBV_WC_REM_OP_ERR, IBV_WC_LOC_PROT_ERR);

	begin(IBV_QPT_RC, PATIENT);
	from = piece(for_reading, 1000);
	post(request(IBV_WR_RDMA_READ, &from));
	expect("a read into memory that may not be written", IBV_WC_LOC_PROT_ERR, NONE);

	from = piece(ours, 1000);
	begin(IBV_QPT_RC, PATIENT);
	send = request(IBV_WR_RDMA_WRITE, &from);
	send.wr.rdma.rkey ^= 0x5500;
	post(send);
	expect("a write to a key that is none", IBV_WC_REM_ACCESS_ERR, NONE);

	begin(IBV_QPT_RC, PATIENT);
	receive(piece(theirs, 1000));
	send = request(IBV_WR_RDMA_WRITE_WITH_IMM, &from);
	send.wr.rdma.rkey ^= 0x5500;
	post(send);
	expect("a write with immediate to a key that is none", IBV_WC_REM_ACCESS_ERR, IBV_WC_LOC_ACCESS_ERR);

	begin(IBV_QPT_RC, PATIENT);
	receive(piece(theirs, 1000));
	send = request(IBV_WR_SEND_WITH_INV, &from);
	send.invalidate_rkey = theirs->rkey ^ 0x5500;
	post(send);
	expect("a send that makes a key invalid that is none", IBV_WC_REM_ACCESS_ERR, IBV_WC_LOC_ACCESS_ERR);

	begin(IBV_QPT_RC, PATIENT);
	send = request(IBV_WR_RDMA_WRITE, &from);
	send.wr.rdma.rkey = for_reading->rkey;
	send.wr.rdma.remote_addr = (uintptr_t)for_reading->addr;
	post(send);
	expect("a write where only reads are allowed", IBV_WC_REM_ACCESS_ERR, NONE);

	begin(IBV_QPT_RC, PATIENT);
	send = request(IBV_WR_RDMA_WRITE, &from);
	send.wr.rdma.remote_addr += BYTES - 999;
	post(send);
	expect("a write one byte too far", IBV_WC_REM_ACCESS_ERR, NONE);

	begin(IBV_QPT_RC, PATIENT);
	send = request(IBV_WR_RDMA_READ, &from);
	send.wr.rdma.remote_addr -= 1;
	post(send);
	expect("a read one byte too early", IBV_WC_REM_ACCESS_ERR, NONE);

	from.length = 8;
	begin(IBV_QPT_RC, PATIENT);
	send = request(IBV_WR_ATOMIC_FETCH_AND_ADD, &from);
	send.wr.atomic.remote_addr += 4;
	post(send);
	expect("an atomic that is not aligned", IBV_WC_REM_INV_REQ_ERR, NONE);

	begin(IBV_QPT_RC, PATIENT);
	send = request(IBV_WR_ATOMIC_CMP_AND_SWP, &from);
	send.wr.atomic.rkey = for_reading->rkey;
	send.wr.atomic.remote_addr = (uintptr_t)for_reading->addr;
	post(send);
	expect("an atomic where none is allowed", IBV_WC_REM_ACCESS_ERR, NONE);

	/* What a key does not allow is an access error; what the queue pair does not allow, its receive queue does not support. */
	begin(IBV_QPT_RC, PATIENT);
	deny(IBV_ACCESS_REMOTE_WRITE);
	post(request(IBV_WR_RDMA_WRITE, &from));
	expect("a write that the queue pair does not allow", IBV_WC_REM_INV_REQ_ERR, NONE);

	begin(IBV_QPT_RC, PATIENT);
	deny(IBV_ACCESS_REMOTE_WRITE);
	send = request(IBV_WR_RDMA_WRITE, &from);
	send.num_sge = 0;
	post(send);
	expect("a write of no bytes that the queue pair does not allow", IBV_WC_REM_INV_REQ_ERR, NONE);

	begin(IBV_QPT_RC, PATIENT);
	deny(IBV_ACCESS_REMOTE_READ);
	post(request(IBV_WR_RDMA_READ, &from));
	expect("a read that the queue pair does not allow", IBV_WC_REM_INV_REQ_ERR, NONE);

	begin(IBV_QPT_RC, PATIENT);
	deny(IBV_ACCESS_REMOTE_ATOMIC);
	post(request(IBV_WR_ATOMIC_FETCH_AND_ADD, &from));
	expect("an atomic that the queue pair does not allow", IBV_WC_REM_INV_REQ_ERR, NONE);
}

static void patience(void)
{
	struct ibv_sge from = piece(ours, 100);

	begin(IBV_QPT_RC, HASTY);
	post(request(IBV_WR_SEND, &from));
	expect("a send that no receive waits for", IBV_WC_RNR_RETRY_EXC_ERR, NONE);

	begin(IBV_QPT_RC, HASTY);
	to_error(their_qp);
	post(request(IBV_WR_SEND, &from));
	expect("a send to a queue pair in error", IBV_WC_RETRY_EXC_ERR, NONE);

	begin(IBV_QPT_RC, PATIENT);
	post(request(IBV_WR_SEND, &from));
	usleep(20000);
	receive(piece(theirs, 100));
	expect("a receive that comes late", IBV_WC_SUCCESS, IBV_WC_SUCCESS);

	begin(IBV_QPT_RC, PATIENT);
	to_error(our_qp);
	post(request(IBV_WR_SEND, &from));
	expect("a send on a queue pair in error", IBV_WC_WR_FLUSH_ERR, NONE);

	begin(IBV_QPT_RC, PATIENT);
	receive(piece(theirs, 100));
	to_error(their_qp);
	expect_one("a receive on a queue pair in error", "responder", their_cq, IBV_WC_WR_FLUSH_ERR, 0x1ec, their_qp->qp_num);
	end();
}

static void operations(void)
{
	struct ibv_sge from = piece(ours, 100);
	struct ibv_send_wr bind = { .wr_id = 0x5e4d, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_mw *window;

	begin(IBV_QPT_UC, PATIENT);
	post(request(IBV_WR_RDMA_READ, &from));
	expect("a read on an unreliable connection", IBV_WC_LOC_QP_OP_ERR, NONE);

	CHECK((window = ibv_alloc_mw(device.pd, IBV_MW_TYPE_2)));
	begin(IBV_QPT_RC, PATIENT);
	bind.bind_mw.mw = window;
	bind.bind_mw.rkey = ibv_inc_rkey(window->rkey);
	bind.bind_mw.bind_info.mr = for_reading;
	bind.bind_mw.bind_info.addr = (uintptr_t)for_reading->addr;
	bind.bind_mw.bind_info.length = 4096;
	bind.bind_mw.bind_info.mw_access_flags = IBV_ACCESS_REMOTE_READ;
	post(bind);
	expect("a window over memory that allows none", IBV_WC_MW_BIND_ERR, NONE);
	CALL(ibv_dealloc_mw(window));
}

static void datagram(void)
{
	struct ibv_sge from = piece(ours, BYTES / 2);
	struct address peer;
	struct ibv_ah_attr way;
	struct ibv_ah *handle;
	struct ibv_send_wr send;

	begin(IBV_QPT_UD, PATIENT);
	peer = address_of(&device, their_qp);
	way = way_to(&device, &peer);
	CHECK((handle = ibv_create_ah(device.pd, &way)));
	send = request(IBV_WR_SEND, &from);
	send.wr.ud.ah = handle;
	send.wr.ud.remote_qpn = their_qp->qp_num;
	send.wr.ud.remote_qkey = 0x11111111;
	receive(piece(theirs, 2048));
	post(send);
	expect("a datagram longer than a packet", IBV_WC_LOC_LEN_ERR, NONE);
	CALL(ibv_destroy_ah(handle));
}

int main(int argc, char **argv)
{
	const char *only = argc > 1 ? argv[1] : "all";
	setvbuf(stdout, NULL, _IOLBF, 0);
	device = open_device();
	ours = register_memory(&device, BYTES, EVERY_ACCESS);
	theirs = register_memory(&device, BYTES, EVERY_ACCESS);
	for_reading = register_memory(&device, BYTES, IBV_ACCESS_REMOTE_READ);
	if (strcmp(only, "garbled") == 0) {
		/* The door was told to garble a response. */
		struct ibv_sge into = piece(ours, 100);
		begin(IBV_QPT_RC, PATIENT);
		post(request(IBV_WR_RDMA_READ, &into));
		expect("a response that is wrong", IBV_WC_BAD_RESP_ERR, NONE);
	} else if (argc == 3) {
		/* The door was told to let the first send, or the first receive, fail so. */
		const enum ibv_wc_status status = (enum ibv_wc_status)atoi(argv[2]);
		const int fails_here = strcmp(only, "send") == 0;
		struct ibv_sge from = piece(ours, 100);
		begin(IBV_QPT_RC, PATIENT);
		receive(piece(theirs, 100));
		post(request(IBV_WR_SEND, &from));
		if (fails_here)
			expect_one(ibv_wc_status_str(status), "requester", our_cq, status, 0x5e4d, our_qp->qp_num);
		else
			expect_one(ibv_wc_status_str(status), "responder", their_cq, status, 0x1ec, their_qp->qp_num);
		end();
	} else {
		lengths_and_keys();
		patience();
		operations();
		datagram();
	}
	puts(wrong ? "wrong" : "every status was right");
	return wrong;
}
