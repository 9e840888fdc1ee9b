/*
 * `cycles N`: opens the device, makes one of each object, uses them once, and closes everything, N times; every tenth time in a child
 * that ends without closing anything. Prints what is left of it in this process (descriptors, mappings, threads), and fails if that is more
 * than after the first cycles.
 */
#include "pair.h"
#include <dirent.h>
#include <sys/wait.h>

static unsigned entries_of(const char *path)
{
	unsigned count = 0;
	DIR *folder = opendir(path);
	CHECK(folder);
	while (readdir(folder))
		count++;
	closedir(folder);
	return count;
}

/* Lines of the memory map. */
static unsigned mappings(void)
{
	unsigned count = 0;
	FILE *map = fopen("/proc/self/maps", "r");
	CHECK(map);
	for (int c; (c = fgetc(map)) != EOF;)
		count += c == '\n';
	fclose(map);
	return count;
}

static void use(int and_close)
{
	struct device device = open_device();
	struct ibv_comp_channel *channel = ibv_create_comp_channel(device.context);
	struct ibv_cq *cq = ibv_create_cq(device.context, 16, NULL, channel, 0), *event_cq;
	struct ibv_srq_init_attr srq_attributes = { .attr = { .max_wr = 16, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(device.pd, &srq_attributes);
	struct ibv_qp *a = new_qp(&device, IBV_QPT_RC, cq, 8), *b = new_qp(&device, IBV_QPT_RC, cq, 8);
	struct ibv_qp *datagrams = new_qp(&device, IBV_QPT_UD, cq, 8);
	struct ibv_mr *memory = register_memory(&device, 8192, EVERY_ACCESS);
	struct address at_a = address_of(&device, a), at_b = address_of(&device, b);
	struct ibv_ah_attr way = way_to(&device, &at_b);
	struct ibv_ah *handle = ibv_create_ah(device.pd, &way);
	struct ibv_mw *window = ibv_alloc_mw(device.pd, IBV_MW_TYPE_1);
	struct ibv_sge piece = { .addr = (uintptr_t)memory->addr, .length = 4096, .lkey = memory->lkey };
	struct ibv_recv_wr receive = { .sg_list = &piece, .num_sge = 1 }, *bad_receive;
	struct ibv_send_wr send = { .sg_list = &piece, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad_send;
	void *context, *buffer = memory->addr;

	CHECK(channel && cq && srq && handle && window);
	to_init(a);
	to_init(b);
	join(&device, a, &at_b, PATIENT);
	join(&device, b, &at_a, PATIENT);
	CALL(ibv_post_recv(b, &receive, &bad_receive));
	CALL(ibv_req_notify_cq(cq, 0));
	piece.addr += 4096;
	CALL(ibv_post_send(a, &send, &bad_send));
	CALL(ibv_get_cq_event(channel, &event_cq, &context));
	ibv_ack_cq_events(event_cq, 1);
	for (int i = 0; i < 2; i++)
		CHECK(next_completion(cq).status == IBV_WC_SUCCESS);
	if (!and_close)
		_exit(0);
	CALL(ibv_dealloc_mw(window));
	CALL(ibv_destroy_ah(handle));
	CALL(ibv_destroy_qp(a));
	CALL(ibv_destroy_qp(b));
	CALL(ibv_destroy_qp(datagrams));
	CALL(ibv_destroy_srq(srq));
	CALL(ibv_dereg_mr(memory));
	CALL(ibv_destroy_cq(cq));
	CALL(ibv_destroy_comp_channel(channel));
	CALL(ibv_dealloc_pd(device.pd));
	CALL(ibv_close_device(device.context));
	free(buffer);
}

int main(int argc, char **argv)
{
	unsigned cycles = argc > 1 ? (unsigned)atoi(argv[1]) : 10, descriptors = 0, maps = 0, threads = 0;
	for (unsigned i = 0; i < cycles; i++) {
		if (i % 10 == 9) {
			int status;
			pid_t child = fork();
			CHECK(child >= 0);
			if (child == 0)
				use(0);
			CHECK(waitpid(child, &status, 0) == child && status == 0);
		} else {
			use(1);
		}
		if (i == 4) {
			descriptors = entries_of("/proc/self/fd");
			maps = mappings();
			threads = entries_of("/proc/self/task");
		}
	}
	/* A device that lives in this process may need a moment to see that it was closed. */
	for (int i = 0; i < 200 && entries_of("/proc/self/fd") > descriptors; i++)
		usleep(10000);
	printf("%u cycles; descriptors %u, at first %u; mappings %u, at first %u; threads %u, at first %u\n", cycles, entries_of("/proc/self/fd"),
	       descriptors, mappings(), maps, entries_of("/proc/self/task"), threads);
	return entries_of("/proc/self/fd") > descriptors || mappings() > maps + 8 || entries_of("/proc/self/task") > threads;
}
