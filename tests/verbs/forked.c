/*
 * `forked served|left`: what a forked child can do with a context of its parent. Behind the door whose device serves processes from
 * outside it is as with a kernel's: the child makes objects of its own, in its own memory, and neither its end nor its parent's
 * is the end of the other's objects. Where the device is in the parent's process it is left there: the child's calls fail with EIO.
 */
#include "pair.h"
#include <sys/wait.h>

struct pair {
	struct ibv_cq *cq;
	struct ibv_qp *a, *b;
	struct ibv_mr *memory;
};

static struct pair make(struct device *device)
{
	struct pair pair = { .cq = ibv_create_cq(device->context, 16, NULL, NULL, 0) };
	CHECK(pair.cq);
	pair.a = new_qp(device, IBV_QPT_RC, pair.cq, 8);
	pair.b = new_qp(device, IBV_QPT_RC, pair.cq, 8);
	pair.memory = register_memory(device, 8192, EVERY_ACCESS);
	struct address at_a = address_of(device, pair.a), at_b = address_of(device, pair.b);
	to_init(pair.a);
	to_init(pair.b);
	join(device, pair.a, &at_b, PATIENT);
	join(device, pair.b, &at_a, PATIENT);
	return pair;
}

/* One write from the first half of the memory to the second, of bytes that were not there before. */
static void transfer(struct pair *pair, int value)
{
	char *memory = pair->memory->addr;
	struct ibv_sge piece = { .addr = (uintptr_t)memory, .length = 4096, .lkey = pair->memory->lkey };
	struct ibv_send_wr send = { .sg_list = &piece, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED }, *bad;
	memset(memory, value, 4096);
	send.wr.rdma.remote_addr = piece.addr + 4096;
	send.wr.rdma.rkey = pair->memory->rkey;
	CALL(ibv_post_send(pair->a, &send, &bad));
	CHECK(next_completion(pair->cq).status == IBV_WC_SUCCESS);
	for (int i = 0; i < 4096; i++)
		CHECK(memory[4096 + i] == (char)value);
}

/* What a child does; it leaves without giving anything back. */
static void in_child(struct device device, int served, int value)
{
	struct ibv_pd *pd = ibv_alloc_pd(device.context);
	if (!served) {
		CHECK(!pd && errno == EIO);
		struct device own = open_device();
		struct pair pair = make(&own);
		transfer(&pair, value);
		return;
	}
	CHECK(pd);
	/* In a domain of its own, and in the parent's. */
	struct device mine = device;
	mine.pd = pd;
	struct pair pair = make(&mine), with_parent = make(&device);
	transfer(&pair, value);
	transfer(&with_parent, value + 1);
	CALL(ibv_dereg_mr(pair.memory));
}

int main(int argc, char **argv)
{
	int served = argc > 1 && !strcmp(argv[1], "served"), status;
	struct device device = open_device();
	struct pair pair = make(&device);
	transfer(&pair, 1);
	for (int i = 0; i < 4; i++) {
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			in_child(device, served, 10 * i);
			_exit(0);
		}
		if (i % 2)
			transfer(&pair, 50 + i);
		CHECK(waitpid(child, &status, 0) == child && status == 0);
		transfer(&pair, 100 + i);
	}
	/* As a daemon: the process that opened the device exits first. */
	pid_t parent = getpid(), child = fork();
	CHECK(child >= 0);
	if (child > 0)
		_exit(0);
	while (getppid() == parent)
		usleep(1000);
	usleep(20000);
	in_child(device, served, 200);
	puts("a child of its parent");
	return 0;
}
