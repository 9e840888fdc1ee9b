/*
 * `stopped owner SOCKET SEED` and `stopped peer SOCKET [supervised]`: two processes write to each other without end. At a random moment the
 * owner stops the peer, with its supervisor if that is its own, posts and polls on, and takes all apart: no call may wait for the peer.
 */
#include "pair.h"
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>

#define BYTES (1u << 20)
#define DEPTH 8u
/* A second would do; more on a loaded machine. Without an end the peer would have to go on. */
#define HELD_UP_S 20

static struct partner {
	struct address address;
	/* Its process, and its supervisor or 0. */
	pid_t pids[2];
} peer;
static const char *volatile now = "set-up";

#define STEP(call)                                                                                                             \
	do {                                                                                                                   \
		now = #call;                                                                                                   \
		alarm(HELD_UP_S);                                                                                              \
		call;                                                                                                          \
	} while (0)

static void signal_peer(int signal)
{
	for (int i = 1; i >= 0; i--)
		if (peer.pids[i])
			kill(peer.pids[i], signal);
}

static void held_up(int signal)
{
	(void)signal;
	CHECK(write(2, now, strlen(now)) > 0 && write(2, " waits for a stopped process\n", 29) == 29);
	signal_peer(SIGKILL);
	_exit(1);
}

/* Until the kernel has it so: a signal is only a request. */
static void await_stop(pid_t pid)
{
	char path[64], state = 0;
	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	for (int i = 0; i < LIMIT_S * 1000 && state != 'T'; i++) {
		FILE *file = fopen(path, "r");
		CHECK(file && fscanf(file, "%*d (%*[^)]) %c", &state) == 1);
		fclose(file);
		usleep(1000);
	}
	CHECK(state == 'T');
}

static int meet(const char *path, int is_owner)
{
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM, 0), accepted;
	CHECK(fd >= 0 && strlen(path) < sizeof(name.sun_path));
	strcpy(name.sun_path, path);
	if (is_owner) {
		CHECK(bind(fd, (struct sockaddr *)&name, sizeof(name)) == 0 && listen(fd, 1) == 0);
		CHECK((accepted = accept(fd, NULL, NULL)) >= 0);
		close(fd);
		return accepted;
	}
	for (int i = 0; connect(fd, (struct sockaddr *)&name, sizeof(name)) != 0; i++) {
		CHECK(i < LIMIT_S * 100);
		usleep(10000);
	}
	return fd;
}

static struct device device;
static struct ibv_mr *memory;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static unsigned in_flight;

/* Keeps the queue full; whether it goes on. */
static int flood(void)
{
	struct ibv_wc completion;
	int found;
	while (in_flight < DEPTH) {
		struct ibv_sge piece = { .addr = (uintptr_t)memory->addr, .length = BYTES, .lkey = memory->lkey };
		struct ibv_send_wr request = { .sg_list = &piece, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED }, *bad;
		request.opcode = in_flight % 4 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
		request.wr.rdma.remote_addr = peer.address.at;
		request.wr.rdma.rkey = peer.address.rkey;
		CALL(ibv_post_send(qp, &request, &bad));
		in_flight++;
	}
	CHECK((found = ibv_poll_cq(cq, 1, &completion)) >= 0);
	in_flight -= (unsigned)found;
	return found == 0 || completion.status == IBV_WC_SUCCESS;
}

int main(int argc, char **argv)
{
	const int is_owner = argc > 2 && !strcmp(argv[1], "owner");
	struct partner mine = { .pids = { getpid(), !is_owner && argc > 3 ? getppid() : 0 } };
	struct timespec begun, end;
	unsigned delay_us;
	int fd;

	CHECK(argc > 2);
	device = open_device();
	memory = register_memory(&device, BYTES, EVERY_ACCESS);
	cq = new_cq(&device, 2 * DEPTH);
	qp = new_qp(&device, IBV_QPT_RC, cq, DEPTH);
	mine.address = address_of(&device, qp);
	mine.address.at = (uintptr_t)memory->addr;
	mine.address.rkey = memory->rkey;
	to_init(qp);
	fd = meet(argv[2], is_owner);
	CHECK(write(fd, &mine, sizeof(mine)) == sizeof(mine) && recv(fd, &peer, sizeof(peer), MSG_WAITALL) == sizeof(peer));
	join(&device, qp, &peer.address, PATIENT);
	CHECK(write(fd, "", 1) == 1 && recv(fd, &end, 1, MSG_WAITALL) == 1);
	if (!is_owner) {
		while (flood())
			;
		pause();
	}
	srand(argc > 3 ? (unsigned)atoi(argv[3]) : 1);
	delay_us = (unsigned)rand() % 50000;
	clock_gettime(CLOCK_MONOTONIC, &begun);
	do {
		flood();
		clock_gettime(CLOCK_MONOTONIC, &end);
	} while ((end.tv_sec - begun.tv_sec) * 1000000 + (end.tv_nsec - begun.tv_nsec) / 1000 < delay_us);
	signal(SIGALRM, held_up);
	signal_peer(SIGSTOP);
	for (int i = 0; i < 2; i++)
		if (peer.pids[i])
			await_stop(peer.pids[i]);
	clock_gettime(CLOCK_MONOTONIC, &begun);
	for (int i = 0; i < 1000; i++)
		STEP(flood());
	STEP(CALL(ibv_dereg_mr(memory)));
	STEP(to_error(qp));
	STEP(CALL(ibv_destroy_qp(qp)));
	STEP(CALL(ibv_destroy_cq(cq)));
	STEP(CALL(ibv_dealloc_pd(device.pd)));
	STEP(CALL(ibv_close_device(device.context)));
	/* And another device, with the stopped one still on the fabric. */
	STEP(device = open_device());
	STEP(CALL(ibv_dealloc_pd(device.pd)));
	STEP(CALL(ibv_close_device(device.context)));
	alarm(0);
	clock_gettime(CLOCK_MONOTONIC, &end);
	printf("not held up: %ld ms\n", (end.tv_sec - begun.tv_sec) * 1000 + (end.tv_nsec - begun.tv_nsec) / 1000000);
	signal_peer(SIGKILL);
	return 0;
}
