/*
 * Puts with signals that kernels make, on a host without a GPU: here the kernels are threads of this process. Each builds its work requests
 * in the endpoint's own queue and rings the device itself, beside all the others. The host has no part in it.
 *
 *   cargo build --release
 *   cc -O2 -I include examples/put_signal.c target/release/libdoorbell.a -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc -o put_signal
 *   ./put_signal [KERNELS [ROUNDS [SIZE_BYTES [DEVICE]]]]
 *
 * A kernel fills its part of a buffer, puts it to the peer, and a signal behind it with the same doorbell. The peer waits for each signal,
 * looks at every byte before it lets the kernel go on, and ends with PASS or FAIL. put_signal.cu is the same with kernels of a GPU.
 */
#define _POSIX_C_SOURCE 200809L

#include <doorbell/queue.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KERNELS_MAX = 64, TIMEOUT_MS = 30000 };

static const uint64_t timeout_ns = 30000000000u;

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

/* What a kernel is launched with. */
struct kernel {
	struct doorbell_queue_view queue;
	doorbell_local source; /* its part */
	doorbell_remote target;
	doorbell_remote signal;
	uint32_t rounds;
	uint32_t number;
	uint32_t *seen; /* the round that the peer has looked at; UINT32_MAX when it looks no more */
	int code;
	pthread_t thread;
};

static uint8_t expected(uint32_t kernel, uint32_t round, uint64_t at)
{
	return (uint8_t)((round + 1) * 37 + kernel * 11 + at * 7);
}

static void *produce(void *argument)
{
	struct kernel *kernel = argument;
	uint8_t *bytes = (uint8_t *)(uintptr_t)kernel->source.addr;
	for (uint32_t round = 0; round < kernel->rounds && kernel->code == DOORBELL_OK; round++) {
		uint32_t upto;
		for (uint64_t at = 0; at < kernel->source.len_bytes; at++)
			bytes[at] = expected(kernel->number, round, at);
		kernel->code = doorbell_device_put_signal(&kernel->queue, kernel->source, kernel->target, kernel->signal, DOORBELL_SIGNAL_SET,
							  round + 1, timeout_ns, &upto);
		/* The bytes are the device's until then, and the peer's until it has looked. */
		if (kernel->code == DOORBELL_OK)
			kernel->code = doorbell_device_wait(&kernel->queue, upto, timeout_ns);
		while (kernel->code == DOORBELL_OK && __atomic_load_n(kernel->seen, __ATOMIC_ACQUIRE) < round + 1)
			sched_yield();
	}
	return NULL;
}

static long argument(int argc, char **argv, int at, long otherwise, long most)
{
	char *end = NULL;
	const long value = at < argc ? strtol(argv[at], &end, 10) : otherwise;
	if ((end && *end) || value < 1 || value > most) {
		fprintf(stderr, "usage: %s [KERNELS up to %d [ROUNDS [SIZE_BYTES [DEVICE]]]]\n", argv[0], KERNELS_MAX);
		exit(2);
	}
	return value;
}

int main(int argc, char **argv)
{
	const uint32_t kernels = (uint32_t)argument(argc, argv, 1, 8, KERNELS_MAX);
	const uint32_t rounds = (uint32_t)argument(argc, argv, 2, 1000, 1000000);
	const uint64_t size = (uint64_t)argument(argc, argv, 3, 256, 1 << 20);
	const char *name = argc > 4 ? argv[4] : "softcx";
	static struct kernel launched[KERNELS_MAX];
	static uint32_t seen[KERNELS_MAX];
	doorbell_device *device;
	doorbell_domain *domain;
	doorbell_endpoint *a, *b;
	doorbell_address address_a, address_b;
	doorbell_region *source, *target, *signals;
	doorbell_device_queue *queue;
	doorbell_remote to, signal;
	struct doorbell_queue_view view;
	uint64_t wrong_bytes = 0, failed = 0;
	char path[256];

	TRY(doorbell_device_open(name, &device));
	TRY(doorbell_domain_create(device, &domain));
	TRY(doorbell_endpoint_create(domain, NULL, &a));
	TRY(doorbell_endpoint_create(domain, NULL, &b));
	TRY(doorbell_endpoint_address(a, &address_a));
	TRY(doorbell_endpoint_address(b, &address_b));
	TRY(doorbell_endpoint_connect(a, &address_b));
	TRY(doorbell_endpoint_connect(b, &address_a));
	TRY(doorbell_region_alloc(domain, kernels * size, DOORBELL_ACCESS_LOCAL_WRITE, &source));
	TRY(doorbell_region_alloc(domain, kernels * size, DOORBELL_ACCESS_ALL, &target));
	TRY(doorbell_region_alloc(domain, kernels * 8, DOORBELL_ACCESS_ALL, &signals));
	TRY(doorbell_region_remote(target, &to));
	TRY(doorbell_region_remote(signals, &signal));
	TRY(doorbell_endpoint_path(a, NULL, path, sizeof(path)));

	TRY(doorbell_device_queue_create(a, DOORBELL_KERNELS_HOST, &queue));
	TRY(doorbell_device_queue_view(queue, &view, sizeof(view)));
	for (uint32_t i = 0; i < kernels; i++) {
		struct kernel *kernel = &launched[i];
		const doorbell_slice part = {source, i * size, size};
		kernel->queue = view;
		TRY(doorbell_device_queue_local(queue, &part, &kernel->source));
		kernel->target = doorbell_device_remote_at(to, i * size, size);
		kernel->signal = doorbell_device_remote_at(signal, i * 8, 8);
		kernel->rounds = rounds;
		kernel->number = i;
		kernel->seen = &seen[i];
		if (pthread_create(&kernel->thread, NULL, produce, kernel) != 0) {
			fprintf(stderr, "no thread is to be had\n");
			return 1;
		}
	}

	for (uint32_t round = 0; round < rounds && !failed; round++) {
		for (uint32_t i = 0; i < kernels && !failed; i++) {
			const uint8_t *bytes = (const uint8_t *)doorbell_region_pointer(target) + i * size;
			const int code = doorbell_wait_value32(signals, i * 8, DOORBELL_WAIT_GEQ, round + 1, TIMEOUT_MS);
			if (code < 0) {
				fprintf(stderr, "signal %u of kernel %u: %s\n", round, i, doorbell_last_error());
				failed++;
				/* Its kernel's code says why; all others come to an end of their own. */
				doorbell_endpoint_abort(a);
			}
			for (uint64_t at = 0; at < size; at++)
				wrong_bytes += bytes[at] != expected(i, round, at);
			__atomic_store_n(&seen[i], round + 1, __ATOMIC_RELEASE);
		}
	}
	for (uint32_t i = 0; i < kernels; i++) {
		if (failed)
			__atomic_store_n(&seen[i], UINT32_MAX, __ATOMIC_RELEASE);
		pthread_join(launched[i].thread, NULL);
		if (launched[i].code != DOORBELL_OK) {
			fprintf(stderr, "kernel %u: %s\n", i, doorbell_error_name(launched[i].code));
			failed++;
		}
	}

	TRY(doorbell_device_queue_destroy(queue));
	doorbell_region_destroy(signals);
	doorbell_region_destroy(target);
	doorbell_region_destroy(source);
	doorbell_endpoint_destroy(b);
	doorbell_endpoint_destroy(a);
	doorbell_domain_destroy(domain);
	doorbell_device_close(device);
	printf("%u kernels, %u rounds, %llu bytes, %s, %s\n", kernels, rounds, (unsigned long long)size, name, path);
	if (wrong_bytes || failed) {
		printf("FAIL: %llu wrong bytes, %llu failures\n", (unsigned long long)wrong_bytes, (unsigned long long)failed);
		return 1;
	}
	printf("PASS: %llu bytes arrived behind %llu signals\n", (unsigned long long)(kernels * size * rounds),
	       (unsigned long long)kernels * rounds);
	return 0;
}
