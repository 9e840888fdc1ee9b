/*
 * `flood KILLS`: a child floods this process with sends, writes and reads and is killed with -9 in the middle, KILLS times. This process
 * must see its own requests to the dead peer fail, and another pair of its own, on the same device, must not notice.
 */
#include "pair.h"
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define BYTES 16384u
#define DEPTH 32u
/* A number for receives; requests have 0. */
#define RECEIVE 1u

/* 134 ms eight times over: a busy machine is not a dead peer. */
static const struct patience PATIENCE = { .timeout = 15, .retries = 7, .rnr_retries = 7, .rnr_timer = 1 };

static void post(struct ibv_qp *qp, struct ibv_mr *memory, enum ibv_wr_opcode opcode, uint64_t at, uint32_t rkey, uint32_t bytes)
{
	struct ibv_sge piece = { .addr = (uintptr_t)memory->addr, .length = bytes, .lkey = memory->lkey };
	struct ibv_send_wr request = { .sg_list = &piece, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED }, *bad;
	request.wr.rdma.remote_addr = at;
	request.wr.rdma.rkey = rkey;
	CALL(ibv_post_send(qp, &request, &bad));
}

static void receive(struct ibv_qp *qp, struct ibv_mr *memory)
{
	struct ibv_sge piece = { .addr = (uintptr_t)memory->addr, .length = BYTES, .lkey = memory->lkey };
	struct ibv_recv_wr request = { .wr_id = RECEIVE, .sg_list = &piece, .num_sge = 1 }, *bad;
	CALL(ibv_post_recv(qp, &request, &bad));
}

static void tell(int fd, const struct address *mine, struct address *yours)
{
	CHECK(write(fd, mine, sizeof(*mine)) == sizeof(*mine));
	CHECK(recv(fd, yours, sizeof(*yours), MSG_WAITALL) == sizeof(*yours));
}

/* Until it is killed. */
static void flooder(int fd)
{
	static const enum ibv_wr_opcode opcodes[] = { IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ };
	struct device device = open_device();
	struct ibv_mr *memory = register_memory(&device, BYTES, EVERY_ACCESS);
	struct ibv_cq *cq = new_cq(&device, 2 * DEPTH);
	struct ibv_qp *qp = new_qp(&device, IBV_QPT_RC, cq, DEPTH);
	struct address mine = address_of(&device, qp), peer;
	struct ibv_wc completion;
	uint32_t posted = 0, done = 0;
	char joined;

	mine.at = (uintptr_t)memory->addr;
	mine.rkey = memory->rkey;
	to_init(qp);
	tell(fd, &mine, &peer);
	join(&device, qp, &peer, PATIENCE);
	/* A process that has not connected yet receives nothing, however long that takes. */
	CHECK(recv(fd, &joined, 1, MSG_WAITALL) == 1);
	for (;;) {
		while (posted - done < DEPTH)
			post(qp, memory, opcodes[posted++ % 3], peer.at, peer.rkey, BYTES);
		completion = next_completion(cq);
		if (completion.status != IBV_WC_SUCCESS) {
			fprintf(stderr, "flooder: %s (vendor 0x%x)\n", ibv_wc_status_str(completion.status), completion.vendor_err);
			exit(1);
		}
		done++;
	}
}

/* A pair in this process; what goes from one to the other arrives. */
struct bystander {
	struct ibv_cq *cq;
	struct ibv_qp *a, *b;
	struct ibv_mr *from, *to;
};

static struct bystander stand_by(struct device *device)
{
	struct bystander it;
	struct address a, b;
	it.cq = new_cq(device, 16);
	it.a = new_qp(device, IBV_QPT_RC, it.cq, 4);
	it.b = new_qp(device, IBV_QPT_RC, it.cq, 4);
	it.from = register_memory(device, BYTES, EVERY_ACCESS);
	it.to = register_memory(device, BYTES, EVERY_ACCESS);
	a = address_of(device, it.a);
	b = address_of(device, it.b);
	to_init(it.a);
	to_init(it.b);
	join(device, it.a, &b, PATIENT);
	join(device, it.b, &a, PATIENT);
	return it;
}

static void exercise(struct bystander *it)
{
	static uint8_t round;
	memset(it->from->addr, ++round, BYTES);
	memset(it->to->addr, 0, BYTES);
	receive(it->b, it->to);
	post(it->a, it->from, IBV_WR_SEND, 0, 0, BYTES);
	for (int i = 0; i < 2; i++)
		CHECK(next_completion(it->cq).status == IBV_WC_SUCCESS);
	CHECK(memcmp(it->from->addr, it->to->addr, BYTES) == 0);
}

int main(int argc, char **argv)
{
	const int kills = argc > 1 ? atoi(argv[1]) : 1;
	struct bystander bystander;
	struct device device;
	pid_t child;
	int sockets[2];

	for (int kill_number = 0; kill_number < kills; kill_number++) {
		struct address mine, peer;
		struct ibv_mr *memory;
		struct ibv_cq *cq;
		struct ibv_qp *qp;
		struct ibv_wc completion;

		CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
		CHECK((child = fork()) >= 0);
		if (child == 0) {
			/* A context of the parent, if there is one, is not this process's to use. */
			close(sockets[0]);
			flooder(sockets[1]);
		}
		close(sockets[1]);
		if (kill_number == 0) {
			device = open_device();
			bystander = stand_by(&device);
		}
		memory = register_memory(&device, BYTES, EVERY_ACCESS);
		cq = new_cq(&device, 4 * DEPTH);
		qp = new_qp(&device, IBV_QPT_RC, cq, 2 * DEPTH);
		mine = address_of(&device, qp);
		mine.at = (uintptr_t)memory->addr;
		mine.rkey = memory->rkey;
		to_init(qp);
		for (uint32_t i = 0; i < DEPTH; i++)
			receive(qp, memory);
		tell(sockets[0], &mine, &peer);
		join(&device, qp, &peer, PATIENCE);
		CHECK(write(sockets[0], "", 1) == 1);
		for (int arrived = 0; arrived < 100 + 37 * kill_number; arrived++) {
			CHECK(next_completion(cq).status == IBV_WC_SUCCESS);
			receive(qp, memory);
			if (arrived % 16 == 0)
				exercise(&bystander);
		}
		CHECK(kill(child, SIGKILL) == 0);
		post(qp, memory, IBV_WR_RDMA_WRITE, peer.at, peer.rkey, 8);
		exercise(&bystander);
		CHECK(waitpid(child, NULL, 0) == child);
		post(qp, memory, IBV_WR_RDMA_WRITE, peer.at, peer.rkey, 8);
		/*
		 * What the child had sent may still come in. The requests fail because the peer is silent, or because it was caught
		 * with its memory gone before it, which ends the connection too.
		 */
		for (int requests = 2; requests > 0;) {
			completion = next_completion(cq);
			if (completion.wr_id == RECEIVE)
				continue;
			requests--;
			if (requests == 0 ? completion.status == IBV_WC_SUCCESS :
					    completion.status != IBV_WC_SUCCESS && completion.status != IBV_WC_RETRY_EXC_ERR &&
						    completion.status != IBV_WC_REM_OP_ERR && completion.status != IBV_WC_WR_FLUSH_ERR) {
				fprintf(stderr, "kill %d: %s (vendor 0x%x)\n", kill_number, ibv_wc_status_str(completion.status),
					completion.vendor_err);
				return 1;
			}
		}
		exercise(&bystander);
		CALL(ibv_destroy_qp(qp));
		CALL(ibv_destroy_cq(cq));
		CALL(ibv_dereg_mr(memory));
		close(sockets[0]);
	}
	printf("%d killed, the others unharmed\n", kills);
	return 0;
}
