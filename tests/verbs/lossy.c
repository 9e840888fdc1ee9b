/*
 * Traffic in which every byte and every order can be checked, both ways at once, between two processes:
 * `lossy listen|connect|both SOCKET ROUNDS`, where `both` forks. They exchange addresses over a Unix socket or, if SOCKET is ADDRESS:PORT, by
 * TCP, and then each does ROUNDS times, SLOTS of them in flight: a write, a read of what was written, a fetch-and-add, a compare-and-swap, a send, a write with
 * immediate. A wire that loses, doubles or reorders packets must not show in anything but the time.
 */
#include "pair.h"
#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

/* Exit status when the connection ran out of retries, of which verbs allows no more than seven in a row. */
#define GAVE_UP 3
#define SLOTS 8u
/* Of an area. Twice as many as are in flight: a round's sign from the peer says what it has looked at SLOTS rounds before. */
#define RING (2 * SLOTS)
#define SLOT_BYTES 65536u
/* Areas of the memory that both sides register, of RING slots each. */
enum area { SOURCE, WRITTEN, READ_BACK, RECEIVED, COUNTERS, RESULTS, AREAS };
enum operation { WRITE, READ, ADD, SWAP, SEND, WRITE_IMM, OPERATIONS };

static struct device device;
static struct ibv_mr *memory;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct address peer;
static int listens;
static uint32_t rounds, received, immediates;

static uint8_t *slot(enum area area, uint32_t number)
{
	return (uint8_t *)memory->addr + ((size_t)area * RING + number % RING) * SLOT_BYTES;
}

static uint64_t remote(enum area area, uint32_t number)
{
	return peer.at + (uint64_t)(slot(area, number) - (uint8_t *)memory->addr);
}

static uint64_t scramble(uint64_t z)
{
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
	return z ^ (z >> 31);
}

/* Up to 20 packets; some of nothing at all. */
static uint32_t length_of(uint32_t round, int of_listener)
{
	uint64_t random = scramble(round * 2u + (unsigned)of_listener + 77);
	return random % 7 == 0 ? 0 : random % 5 == 0 ? (uint32_t)(random >> 20) % 20000 : (uint32_t)(random >> 20) % 3000;
}

static uint8_t pattern(uint32_t round, int of_listener, uint32_t at)
{
	return (uint8_t)(scramble(((uint64_t)round << 33) + ((uint64_t)of_listener << 32) + at / 8) >> at % 8 * 8);
}

static void fill(uint8_t *to, uint32_t round, int of_listener)
{
	uint32_t length = length_of(round, of_listener);
	for (uint32_t at = 0; at < length; at++)
		to[at] = pattern(round, of_listener, at);
}

static void compare(const char *what, const uint8_t *found, uint32_t round, int of_listener)
{
	uint32_t length = length_of(round, of_listener);
	for (uint32_t at = 0; at < length; at++) {
		if (found[at] != pattern(round, of_listener, at)) {
			fprintf(stderr, "%s, round %u: byte %u of %u is 0x%02x, expected 0x%02x\n", what, round, at, length, found[at],
				pattern(round, of_listener, at));
			exit(1);
		}
	}
}

static void receive(uint32_t number)
{
	struct ibv_sge into = { .addr = (uintptr_t)slot(RECEIVED, number), .length = SLOT_BYTES, .lkey = memory->lkey };
	struct ibv_recv_wr request = { .wr_id = number, .sg_list = &into, .num_sge = 1 }, *bad;
	CALL(ibv_post_recv(qp, &request, &bad));
}

/* A round's six requests, as one list. */
static void post(uint32_t round)
{
	struct ibv_send_wr list[OPERATIONS], *bad;
	struct ibv_sge pieces[OPERATIONS];
	const uint32_t length = length_of(round, listens);

	fill(slot(SOURCE, round), round, listens);
	memset(list, 0, sizeof(list));
	for (int i = 0; i < OPERATIONS; i++) {
		pieces[i] = (struct ibv_sge){ .addr = (uintptr_t)slot(SOURCE, round), .length = length, .lkey = memory->lkey };
		list[i].wr_id = (uint64_t)round * OPERATIONS + (unsigned)i;
		list[i].sg_list = &pieces[i];
		list[i].num_sge = 1;
		list[i].send_flags = IBV_SEND_SIGNALED;
		list[i].next = i + 1 < OPERATIONS ? &list[i + 1] : NULL;
		list[i].wr.rdma.remote_addr = remote(WRITTEN, round);
		list[i].wr.rdma.rkey = peer.rkey;
	}
	list[WRITE].opcode = IBV_WR_RDMA_WRITE;
	list[READ].opcode = IBV_WR_RDMA_READ;
	pieces[READ].addr = (uintptr_t)slot(READ_BACK, round);
	for (int i = ADD; i <= SWAP; i++) {
		pieces[i].addr = (uintptr_t)(slot(RESULTS, round) + 8 * (i - ADD));
		pieces[i].length = 8;
		list[i].wr.atomic.remote_addr = remote(COUNTERS, 0) + 8u * (unsigned)(i - ADD);
		list[i].wr.atomic.rkey = peer.rkey;
	}
	list[ADD].opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
	list[ADD].wr.atomic.compare_add = 3;
	list[SWAP].opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
	list[SWAP].wr.atomic.compare_add = round;
	list[SWAP].wr.atomic.swap = round + 1;
	list[SEND].opcode = IBV_WR_SEND;
	list[WRITE_IMM].opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
	list[WRITE_IMM].imm_data = htobe32(round);
	pieces[WRITE_IMM].length = length / 2;
	CALL(ibv_post_send(qp, list, &bad));
}

/* Returns the round that is done with, or -1. */
static int64_t sent(const struct ibv_wc *completion)
{
	static uint64_t next;
	const uint32_t round = (uint32_t)(completion->wr_id / OPERATIONS);
	uint64_t results[2];

	CHECK(completion->wr_id == next++);
	switch (completion->wr_id % OPERATIONS) {
	case READ:
		compare("read", slot(READ_BACK, round), round, listens);
		return -1;
	case SWAP:
		memcpy(results, slot(RESULTS, round), sizeof(results));
		if (results[0] != 3ull * round || results[1] != round) {
			fprintf(stderr, "atomics of round %u gave %" PRIu64 " and %" PRIu64 "\n", round, results[0], results[1]);
			exit(1);
		}
		return -1;
	case WRITE_IMM:
		return round;
	default:
		return -1;
	}
}

static void arrived(const struct ibv_wc *completion)
{
	CHECK(completion->wr_id == received + immediates);
	if (completion->opcode == IBV_WC_RECV) {
		CHECK(completion->byte_len == length_of(received, !listens) && !(completion->wc_flags & IBV_WC_WITH_IMM));
		compare("send", slot(RECEIVED, (uint32_t)completion->wr_id), received, !listens);
		received++;
	} else {
		CHECK(completion->opcode == IBV_WC_RECV_RDMA_WITH_IMM && completion->wc_flags & IBV_WC_WITH_IMM);
		CHECK(be32toh(completion->imm_data) == immediates && completion->byte_len == length_of(immediates, !listens) / 2);
		compare("write", slot(WRITTEN, immediates), immediates, !listens);
		immediates++;
	}
	receive((uint32_t)completion->wr_id + SLOTS);
}

static int meet(const char *path)
{
	struct sockaddr_un file = { .sun_family = AF_UNIX };
	struct sockaddr_in host = { .sin_family = AF_INET };
	const char *port = strchr(path, ':');
	struct sockaddr *name = port ? (struct sockaddr *)&host : (struct sockaddr *)&file;
	const socklen_t bytes = port ? sizeof(host) : sizeof(file);
	int fd;

	CHECK(strlen(path) < sizeof(file.sun_path));
	strcpy(file.sun_path, path);
	if (port) {
		file.sun_path[port - path] = 0;
		CHECK(inet_pton(AF_INET, file.sun_path, &host.sin_addr) == 1);
		host.sin_port = htons((uint16_t)atoi(port + 1));
	}
	if (listens) {
		int listener = socket(name->sa_family, SOCK_STREAM, 0), on = 1;
		CHECK(listener >= 0 && setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0);
		CHECK(bind(listener, name, bytes) == 0 && listen(listener, 1) == 0);
		CHECK((fd = accept(listener, NULL, NULL)) >= 0);
		close(listener);
	} else {
		const time_t begun = time(NULL);
		for (;;) {
			/* A socket whose connect failed is not used again. */
			CHECK((fd = socket(name->sa_family, SOCK_STREAM, 0)) >= 0);
			if (connect(fd, name, bytes) == 0)
				break;
			CHECK((errno == ENOENT || errno == ECONNREFUSED || errno == EHOSTUNREACH || errno == ETIMEDOUT) &&
			      time(NULL) - begun < LIMIT_S);
			close(fd);
			usleep(2000);
		}
	}
	return fd;
}

static void swap_bytes(int fd, const void *mine, void *yours, size_t bytes)
{
	CHECK(write(fd, mine, bytes) == (ssize_t)bytes);
	CHECK(recv(fd, yours, bytes, MSG_WAITALL) == (ssize_t)bytes);
}

int main(int argc, char **argv)
{
	/* 67 ms eight times over, if LOSSY_TIMEOUT sets no other time, and for ever where a receive is not there yet. */
	const struct patience patience = { .timeout = (uint8_t)number_of("LOSSY_TIMEOUT", 14), .retries = 7, .rnr_retries = 7, .rnr_timer = 1 };
	/* What it sleeps when there is no completion. */
	const useconds_t pause_us = (useconds_t)number_of("LOSSY_PAUSE_US", 0);
	struct address mine;
	uint32_t posted = 0, done = 0;
	time_t begun;
	char ready = 'r';
	pid_t child = 0;
	int fd, status;

	CHECK(argc == 4);
	listens = strcmp(argv[1], "listen") == 0;
	if (strcmp(argv[1], "both") == 0) {
		child = fork();
		CHECK(child >= 0);
		listens = child == 0;
	}
	rounds = (uint32_t)atoi(argv[3]);
	device = open_device();
	memory = register_memory(&device, (size_t)AREAS * RING * SLOT_BYTES, EVERY_ACCESS);
	cq = new_cq(&device, 4 * OPERATIONS * SLOTS);
	qp = new_qp(&device, IBV_QPT_RC, cq, OPERATIONS * SLOTS);
	to_init(qp);
	/* A receive for the send and for the write with immediate of each slot; a late one is retried for. */
	for (uint32_t number = 0; number < SLOTS; number++)
		receive(number);
	mine = address_of(&device, qp);
	mine.rkey = memory->rkey;
	mine.at = (uintptr_t)memory->addr;
	fd = meet(argv[2]);
	swap_bytes(fd, &mine, &peer, sizeof(mine));
	join(&device, qp, &peer, patience);
	swap_bytes(fd, &ready, &ready, 1);

	begun = time(NULL);
	while (done < rounds || received < rounds || immediates < rounds) {
		struct ibv_wc completions[16];
		int found = ibv_poll_cq(cq, 16, completions);
		CHECK(found >= 0 && time(NULL) - begun < LIMIT_S);
		if (found == 0 && pause_us > 0)
			usleep(pause_us);
		if (recv(fd, &ready, 1, MSG_DONTWAIT | MSG_PEEK) == 0) {
			fprintf(stderr, "the peer is gone\n");
			return GAVE_UP;
		}
		for (int i = 0; i < found; i++) {
			if (completions[i].status != IBV_WC_SUCCESS) {
				fprintf(stderr, "%s (vendor 0x%x), wr_id %" PRIu64 "\n", ibv_wc_status_str(completions[i].status),
					completions[i].vendor_err, completions[i].wr_id);
				return completions[i].status == IBV_WC_RETRY_EXC_ERR ? GAVE_UP : 1;
			}
			if (completions[i].opcode & IBV_WC_RECV)
				arrived(&completions[i]);
			else if (sent(&completions[i]) >= 0)
				done++;
		}
		/* A slot of the peer's memory must be looked at before it is written again. */
		while (posted < rounds && posted < done + SLOTS && posted < immediates + SLOTS)
			post(posted++);
	}
	swap_bytes(fd, &ready, &ready, 1);
	if (child)
		CHECK(waitpid(child, &status, 0) == child && status == 0);
	printf("%u rounds, every byte right\n", rounds);
	return 0;
}
