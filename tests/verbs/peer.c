/*
 * The other end of a `doorbell` endpoint, with nothing but libibverbs: both ways, every byte checked. tests/verbs_peer.rs tells it what
 * to do, in lines on stdin, and reads what it did on stdout. Addresses are the 48 bytes of doorbell's `Address`, in hexadecimal, and where
 * the memory is:
 *
 *   (prints)  address HEX AT RKEY
 *   connect HEX AT RKEY      prints: connected
 *   check                    what the endpoint wrote, sent and counted has arrived; prints: checked
 *   go                       does the same to the endpoint; prints: done
 */
#include "pair.h"

#define AREA 65536u
#define LENGTH 20011u
#define IMM 0x01020304u
/* Areas of the memory, the same on both sides: for what the peer reads, what it writes, what it sends, its counters, and our results. */
enum area { SOURCE, WRITTEN, RECEIVED, COUNTERS, RESULTS, AREAS };

static struct device device;
static struct ibv_mr *memory;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct address peer;

static uint8_t *area(enum area number)
{
	return (uint8_t *)memory->addr + (size_t)number * AREA;
}

/* Byte `at` of what this program (1) or the endpoint (0) has. */
static uint8_t pattern(int ours, uint32_t at)
{
	return (uint8_t)(at * 13 + (at >> 8) + (ours ? 0x5a : 0));
}

static void expect(const char *what, const uint8_t *found, int ours)
{
	for (uint32_t at = 0; at < LENGTH; at++) {
		if (found[at] != pattern(ours, at)) {
			fprintf(stderr, "%s: byte %u is 0x%02x, expected 0x%02x\n", what, at, found[at], pattern(ours, at));
			exit(1);
		}
	}
}

/* Of the layout of addresses that this program writes and reads. */
#define VERSION 2

static uint32_t checksum(const uint8_t *bytes, size_t length)
{
	uint32_t hash = 0x811c9dc5;
	for (; length; length--)
		hash = (hash ^ *bytes++) * 0x01000193;
	return hash;
}

static void print_address(void)
{
	uint8_t bytes[48] = "DBEL";
	const uint32_t qpn = qp->qp_num, psn = qpn & 0xffff;
	uint32_t sum;
	bytes[4] = VERSION;
	bytes[6] = 2; /* a verbs device */
	bytes[7] = 10; /* MTU 1024 */
	memcpy(bytes + 8, &device.gid, 16);
	memcpy(bytes + 24, &device.port.lid, 2);
	bytes[26] = device.port.link_layer;
	bytes[27] = 4; /* reads that it serves, as pair.h has it */
	memcpy(bytes + 32, &qpn, 4);
	memcpy(bytes + 36, &psn, 4);
	sum = checksum(bytes, 44);
	memcpy(bytes + 44, &sum, 4);
	printf("address ");
	for (int i = 0; i < 48; i++)
		printf("%02x", bytes[i]);
	printf(" %" PRIx64 " %x\n", (uint64_t)(uintptr_t)memory->addr, memory->rkey);
}

static void read_address(void)
{
	uint8_t bytes[48];
	uint32_t sum;
	for (int i = 0; i < 48; i++) {
		unsigned value;
		CHECK(scanf(" %2x", &value) == 1);
		bytes[i] = (uint8_t)value;
	}
	CHECK(scanf("%" SCNx64 " %x", &peer.at, &peer.rkey) == 2);
	memcpy(&sum, bytes + 44, 4);
	CHECK(memcmp(bytes, "DBEL", 4) == 0 && bytes[4] == VERSION && bytes[5] == 0 && bytes[6] == 2);
	CHECK(bytes[27] > 0 && sum == checksum(bytes, 44));
	memcpy(&peer.gid, bytes + 8, 16);
	peer.lid = bytes[24] | (uint32_t)bytes[25] << 8;
	memcpy(&peer.qpn, bytes + 32, 4);
	memcpy(&peer.psn, bytes + 36, 4);
}

static void check(void)
{
	struct ibv_wc completion = next_completion(cq);
	uint64_t counters[2];
	CHECK(completion.status == IBV_WC_SUCCESS && completion.opcode == IBV_WC_RECV);
	CHECK(completion.byte_len == LENGTH && completion.wc_flags & IBV_WC_WITH_IMM && be32toh(completion.imm_data) == IMM);
	expect("received", area(RECEIVED), 0);
	expect("written", area(WRITTEN), 0);
	memcpy(counters, area(COUNTERS), sizeof(counters));
	CHECK(counters[0] == 42 && counters[1] == 7);
}

static void go(void)
{
	static const struct {
		enum ibv_wr_opcode opcode;
		enum area local, remote;
		uint32_t local_at, remote_at, length;
	} works[] = {
		{ IBV_WR_RDMA_WRITE, SOURCE, WRITTEN, 0, 0, LENGTH },
		{ IBV_WR_RDMA_READ, RESULTS, SOURCE, 64, 0, LENGTH },
		{ IBV_WR_ATOMIC_FETCH_AND_ADD, RESULTS, COUNTERS, 0, 0, 8 },
		{ IBV_WR_ATOMIC_CMP_AND_SWP, RESULTS, COUNTERS, 8, 8, 8 },
		{ IBV_WR_SEND_WITH_IMM, SOURCE, SOURCE, 0, 0, LENGTH },
	};
	uint64_t results[2];
	for (size_t i = 0; i < sizeof(works) / sizeof(*works); i++) {
		struct ibv_sge piece = { (uintptr_t)(area(works[i].local) + works[i].local_at), works[i].length, memory->lkey };
		struct ibv_send_wr request = { .wr_id = i, .sg_list = &piece, .num_sge = 1, .opcode = works[i].opcode,
					       .send_flags = IBV_SEND_SIGNALED, .imm_data = htobe32(IMM) }, *bad;
		const uint64_t at = peer.at + (uint64_t)works[i].remote * AREA + works[i].remote_at;
		struct ibv_wc completion;
		if (works[i].length == 8) {
			request.wr.atomic.remote_addr = at;
			request.wr.atomic.rkey = peer.rkey;
			request.wr.atomic.compare_add = works[i].remote_at == 0 ? 42 : 0;
			request.wr.atomic.swap = 7;
		} else {
			request.wr.rdma.remote_addr = at;
			request.wr.rdma.rkey = peer.rkey;
		}
		CALL(ibv_post_send(qp, &request, &bad));
		completion = next_completion(cq);
		if (completion.status != IBV_WC_SUCCESS || completion.wr_id != i) {
			fprintf(stderr, "request %zu: %s\n", i, ibv_wc_status_str(completion.status));
			exit(1);
		}
	}
	expect("read", area(RESULTS) + 64, 0);
	memcpy(results, area(RESULTS), sizeof(results));
	CHECK(results[0] == 0 && results[1] == 0);
}

int main(void)
{
	char what[16];
	setvbuf(stdout, NULL, _IOLBF, 0);
	device = open_device();
	memory = register_memory(&device, (size_t)AREAS * AREA, EVERY_ACCESS);
	for (uint32_t at = 0; at < LENGTH; at++)
		area(SOURCE)[at] = pattern(1, at);
	cq = new_cq(&device, 64);
	qp = new_qp(&device, IBV_QPT_RC, cq, 16);
	to_init(qp);
	print_address();
	while (scanf("%15s", what) == 1) {
		if (strcmp(what, "connect") == 0) {
			struct ibv_sge into = { (uintptr_t)area(RECEIVED), AREA, memory->lkey };
			struct ibv_recv_wr receive = { .sg_list = &into, .num_sge = 1 }, *bad;
			read_address();
			join(&device, qp, &peer, PATIENT);
			CALL(ibv_post_recv(qp, &receive, &bad));
			puts("connected");
		} else if (strcmp(what, "check") == 0) {
			check();
			puts("checked");
		} else if (strcmp(what, "go") == 0) {
			go();
			puts("done");
		} else {
			return 2;
		}
	}
	return 0;
}
