/*
 * The two loops of GPUDirect RDMA, side by side, over the C interface.
 *
 *   cargo build --release
 *   cc -O2 -I include examples/loop.c target/release/libdoorbell.a -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc -o loop
 *   ./loop [SIZE_BYTES [STEPS [KERNEL_US [DEVICE]]]]
 *
 * Each step computes a message and sends it to a second endpoint of this process.
 *   sync    the application launches the kernel, waits for the stream, posts the send, and polls for its completion.
 *   async   it queues kernel, send and waits on the stream, batches of steps ahead, and sleeps until a batch is done.
 * A second kernel checks every byte that arrives.
 */
#define _POSIX_C_SOURCE 200809L

#include <doorbell.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum {
	STEPS_OF_BATCH = 20,
	BATCHES_IN_FLIGHT = 4,
	TIMEOUT_MS = 30000
};

/* Ends the program if a call fails, with the library's own words. */
#define TRY(call) try_((call), #call)

static int try_(int code, const char *call)
{
	if (code < 0) {
		fprintf(stderr, "%s: %s: %s\n", call, doorbell_error_name(code), doorbell_last_error());
		exit(1);
	}
	return code;
}

struct loop {
	doorbell_stream *stream;
	doorbell_endpoint *sender;
	doorbell_endpoint *receiver;
	doorbell_slice source;
	doorbell_slice target;
	uint64_t kernel_ns;
};

/* What the kernels of one step need. It stays until the stream is done with them. */
struct step {
	const struct loop *loop;
	uint64_t number;
	uint64_t wrong_bytes;
};

static uint64_t now_ns(clockid_t clock)
{
	struct timespec now;
	clock_gettime(clock, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint8_t *memory(const doorbell_slice *slice)
{
	return (uint8_t *)doorbell_region_pointer(slice->region) + slice->offset;
}

static uint8_t expected(uint64_t step, uint64_t at)
{
	return (uint8_t)((step + 1) * 0x9e3779b97f4a7c15u >> 56) ^ (uint8_t)(at * 31);
}

/* A kernel that takes its time, and leaves the message of its step. */
static void compute(void *argument)
{
	const struct step *step = argument;
	const uint64_t end_ns = now_ns(CLOCK_MONOTONIC) + step->loop->kernel_ns;
	uint8_t *bytes = memory(&step->loop->source);
	for (uint64_t at = 0; at < step->loop->source.len_bytes; at++)
		bytes[at] = expected(step->number, at);
	while (now_ns(CLOCK_MONOTONIC) < end_ns)
		;
}

/* A kernel that looks at what has arrived, and wipes it. */
static void check(void *argument)
{
	struct step *step = argument;
	uint8_t *bytes = memory(&step->loop->target);
	for (uint64_t at = 0; at < step->loop->target.len_bytes; at++) {
		step->wrong_bytes += bytes[at] != expected(step->number, at);
		bytes[at] = (uint8_t)~bytes[at];
	}
}

static void run_sync(const struct loop *loop, struct step *steps, uint64_t count)
{
	doorbell_completion completion;
	for (uint64_t i = 0; i < count; i++) {
		const doorbell_work send = doorbell_work_send(&loop->source, 1);
		TRY(doorbell_post_recv(loop->receiver, i, &loop->target, 1, NULL));
		TRY(doorbell_stream_launch(loop->stream, compute, &steps[i]));
		TRY(doorbell_stream_synchronize(loop->stream, TIMEOUT_MS));
		TRY(doorbell_post_send(loop->sender, &send, NULL));
		TRY(doorbell_wait_cq(loop->sender, DOORBELL_QUEUE_SEND, TIMEOUT_MS, &completion));
		TRY(doorbell_wait_cq(loop->receiver, DOORBELL_QUEUE_RECV, TIMEOUT_MS, &completion));
		TRY(doorbell_stream_launch(loop->stream, check, &steps[i]));
	}
	TRY(doorbell_stream_synchronize(loop->stream, TIMEOUT_MS));
}

static void queue_step(const struct loop *loop, struct step *step)
{
	doorbell_work send = doorbell_work_send(&loop->source, 1);
	send.wr_id = step->number;
	TRY(doorbell_post_recv(loop->receiver, step->number, &loop->target, 1, NULL));
	TRY(doorbell_stream_launch(loop->stream, compute, step));
	TRY(doorbell_stream_queue_send(loop->stream, loop->sender, &send, NULL));
	TRY(doorbell_stream_wait_cq(loop->stream, loop->sender, DOORBELL_QUEUE_SEND, DOORBELL_DEFAULT_TIMEOUT, NULL));
	TRY(doorbell_stream_wait_cq(loop->stream, loop->receiver, DOORBELL_QUEUE_RECV, DOORBELL_DEFAULT_TIMEOUT, NULL));
	TRY(doorbell_stream_launch(loop->stream, check, step));
}

static void run_async(const struct loop *loop, struct step *steps, uint64_t count)
{
	doorbell_event *done[BATCHES_IN_FLIGHT];
	for (int i = 0; i < BATCHES_IN_FLIGHT; i++)
		TRY(doorbell_event_create(DOORBELL_EVENT_BLOCKING | DOORBELL_EVENT_NO_TIMING, &done[i]));
	for (uint64_t first = 0, batch = 0; first < count; first += STEPS_OF_BATCH, batch++) {
		doorbell_event *slot = done[batch % BATCHES_IN_FLIGHT];
		/* Of an earlier batch; returns at once when there was none. */
		TRY(doorbell_event_synchronize(slot, TIMEOUT_MS));
		for (uint64_t i = first; i < count && i < first + STEPS_OF_BATCH; i++)
			queue_step(loop, &steps[i]);
		TRY(doorbell_stream_record(loop->stream, slot));
	}
	for (int i = 0; i < BATCHES_IN_FLIGHT; i++) {
		TRY(doorbell_event_synchronize(done[i], TIMEOUT_MS));
		TRY(doorbell_event_destroy(done[i]));
	}
	/* Reports what failed on the stream, if something did. */
	TRY(doorbell_stream_synchronize(loop->stream, TIMEOUT_MS));
}

static uint64_t measure(const char *name, void (*run)(const struct loop *, struct step *, uint64_t),
			const struct loop *loop, uint64_t count)
{
	uint64_t wall_ns, cpu_ns, wrong_bytes = 0;
	struct step *steps = calloc(count, sizeof *steps);
	if (!steps) {
		fprintf(stderr, "no memory for %llu steps\n", (unsigned long long)count);
		exit(1);
	}
	for (uint64_t i = 0; i < count; i++) {
		steps[i].loop = loop;
		steps[i].number = i;
	}
	wall_ns = now_ns(CLOCK_MONOTONIC);
	cpu_ns = now_ns(CLOCK_THREAD_CPUTIME_ID);
	run(loop, steps, count);
	cpu_ns = now_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_ns;
	wall_ns = now_ns(CLOCK_MONOTONIC) - wall_ns;
	for (uint64_t i = 0; i < count; i++)
		wrong_bytes += steps[i].wrong_bytes;
	free(steps);
	printf("%-6s %8llu %12.2f %20.2f %12llu\n", name, (unsigned long long)count,
	       (double)wall_ns / 1000.0 / (double)count, (double)cpu_ns / 1000.0 / (double)count,
	       (unsigned long long)wrong_bytes);
	return wrong_bytes;
}

static uint64_t number(int argc, char **argv, int at, uint64_t otherwise)
{
	char *end;
	unsigned long long value;
	if (at >= argc)
		return otherwise;
	value = strtoull(argv[at], &end, 10);
	if (*argv[at] < '0' || *argv[at] > '9' || *end) {
		fprintf(stderr, "usage: loop [SIZE_BYTES [STEPS [KERNEL_US [DEVICE]]]]\n");
		exit(2);
	}
	return value;
}

int main(int argc, char **argv)
{
	const uint64_t size_bytes = number(argc, argv, 1, 64), count = number(argc, argv, 2, 2000);
	const uint64_t kernel_us = number(argc, argv, 3, 10);
	const char *device_name = argc > 4 ? argv[4] : "softcx";
	struct loop loop = {0};
	doorbell_device *device;
	doorbell_domain *domain;
	doorbell_region *region;
	doorbell_address address;
	uint64_t wrong_bytes = 0;
	char path[512];

	if (size_bytes == 0 || size_bytes > 1 << 30 || count == 0) {
		fprintf(stderr, "a size of 1 to 1073741824 bytes, and at least one step\n");
		return 2;
	}
	TRY(doorbell_device_open(device_name, &device));
	TRY(doorbell_domain_create(device, &domain));
	TRY(doorbell_region_alloc(domain, 2 * size_bytes, DOORBELL_ACCESS_ALL, &region));
	TRY(doorbell_endpoint_create(domain, NULL, &loop.sender));
	TRY(doorbell_endpoint_create(domain, NULL, &loop.receiver));
	TRY(doorbell_endpoint_address(loop.receiver, &address));
	TRY(doorbell_endpoint_connect(loop.sender, &address));
	TRY(doorbell_endpoint_address(loop.sender, &address));
	TRY(doorbell_endpoint_connect(loop.receiver, &address));
	TRY(doorbell_stream_create_host("loop", 0, &loop.stream));
	loop.source = (doorbell_slice){region, 0, size_bytes};
	loop.target = (doorbell_slice){region, size_bytes, size_bytes};
	loop.kernel_ns = kernel_us * 1000;

	TRY(doorbell_endpoint_path(loop.sender, NULL, path, sizeof path));
	printf("doorbell %s, %s, host stream, %s\n", doorbell_version_text(), device_name, path);
	printf("%llu bytes a message, kernels of %llu us\n", (unsigned long long)size_bytes,
	       (unsigned long long)kernel_us);
	printf("%-6s %8s %12s %20s %12s\n", "loop", "steps", "us/step", "application us/step", "wrong bytes");
	wrong_bytes += measure("sync", run_sync, &loop, count);
	wrong_bytes += measure("async", run_async, &loop, count);

	TRY(doorbell_stream_destroy(loop.stream));
	TRY(doorbell_endpoint_destroy(loop.sender));
	TRY(doorbell_endpoint_destroy(loop.receiver));
	TRY(doorbell_region_destroy(region));
	TRY(doorbell_domain_destroy(domain));
	TRY(doorbell_device_close(device));
	if (wrong_bytes) {
		printf("FAILED: %llu bytes did not arrive as they were sent\n", (unsigned long long)wrong_bytes);
		return 1;
	}
	printf("all %llu bytes arrived as they were sent\n", (unsigned long long)(2 * count * size_bytes));
	return 0;
}
