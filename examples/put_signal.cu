/*
 * Puts with signals that kernels make, two ways, between two endpoints of this process.
 *
 *   scripts/install-c --features cuda PREFIX
 *   nvcc -O2 -std=c++17 -IPREFIX/include examples/put_signal.cu -LPREFIX/lib -ldoorbell -Xlinker -rpath=PREFIX/lib -o put_signal
 *   ./put_signal [BLOCKS [ROUNDS [SIZE_BYTES [DEVICE]]]]
 *
 *   built      each block fills its part of a buffer, builds a put and a signal in the endpoint's own queue, and rings the
 *              device. The signals of all blocks add to one counter. The host has no part in it.
 *   triggered  the host has prepared the put and the signal; the last block that has filled its part rings.
 * (WITHOUT_TRIGGERS, defined, leaves the second one out: for tests on a processor.)
 * On the peer's side a kernel waits for the signals and looks at every byte. The last line begins with PASS or FAIL; without a GPU it is
 * WAIVED, and the status 77.
 */
#include <doorbell/device.cuh>

#include <cuda_runtime.h>

#include <cstdint>
#include <algorithm>
#include <cstdio>
#include <cstdlib>

static constexpr int64_t timeout_ms = 30000;
static constexpr uint64_t timeout_ns = 20000000000u;

#define TRY(call) try_((call), #call)
#define CUDA(call) cuda_((call), #call)

static int try_(int code, const char *call)
{
	if (code < 0) {
		fprintf(stderr, "%s: %s: %s\n", call, doorbell_error_name(code), doorbell_last_error());
		printf("FAIL: %s\n", call);
		exit(1);
	}
	return code;
}

static void cuda_(cudaError_t code, const char *call)
{
	if (code != cudaSuccess) {
		printf("FAIL: %s: %s\n", call, cudaGetErrorString(code));
		exit(1);
	}
}

/* What kernels know of both sides. */
struct sides {
	doorbell_local source;
	doorbell_remote target;
	doorbell_remote signal;
	uint8_t *source_bytes;
	uint8_t *target_bytes;
	uint64_t *signal_word;
	uint64_t size; /* of a block's part */
};

/* What they leave for the host. */
struct outcome {
	unsigned long long wrong_bytes;
	unsigned filled; /* blocks of this round that have */
	int code;        /* the first that is not DOORBELL_OK */
};

__device__ static uint8_t expected(uint32_t round, uint64_t at)
{
	return (uint8_t)((round + 1) * 37 + at * 7 + (at >> 8));
}

__device__ static void report(outcome *out, int code)
{
	if (code != DOORBELL_OK)
		atomicCAS(&out->code, DOORBELL_OK, code);
}

__device__ static void fill(const sides &s, uint32_t round)
{
	for (uint64_t at = threadIdx.x; at < s.size; at += blockDim.x)
		s.source_bytes[blockIdx.x * s.size + at] = expected(round, blockIdx.x * s.size + at);
}

/* Each block makes and rings what it sends. */
__global__ void put_built(const __grid_constant__ struct doorbell_queue_view queue, const sides s, uint32_t round, outcome *out)
{
	const uint64_t begin = blockIdx.x * s.size;
	fill(s, round);
	/* One put of the whole block. What all its threads have stored goes before the doorbell. */
	int code = doorbell_device_put_signal_block(&queue, doorbell_device_local_at(s.source, begin, s.size),
						    doorbell_device_remote_at(s.target, begin, s.size), s.signal, DOORBELL_SIGNAL_ADD, 1,
						    timeout_ns, nullptr);
	if (code == DOORBELL_OK)
		code = doorbell_device_quiet_block(&queue, timeout_ns);
	if (threadIdx.x == 0)
		report(out, code);
}

#ifndef WITHOUT_TRIGGERS
/* The last block rings what the host has prepared for all of them. */
__global__ void put_triggered(const __grid_constant__ doorbell_trigger trigger, const sides s, uint32_t round, outcome *out)
{
	fill(s, round);
	__syncthreads();
	if (threadIdx.x == 0) {
		/* This block's bytes before its count; with the fence, all that were counted before the last one's doorbell. */
		__threadfence();
		if (atomicAdd(&out->filled, 1) == gridDim.x - 1) {
			__threadfence();
			out->filled = 0;
			report(out, doorbell_device_trigger(&trigger, timeout_ns));
		}
	}
}
#endif

/* The peer's side: the signal's word has the value, then the bytes before it are there. */
__global__ void check(const sides s, uint32_t round, uint64_t value, outcome *out)
{
	const int code = doorbell_device_signal_wait_until_block(s.signal_word, DOORBELL_CMP_GE, value, timeout_ns, nullptr);
	if (code != DOORBELL_OK) {
		report(out, code);
		return;
	}
	for (uint64_t at = threadIdx.x; at < s.size; at += blockDim.x)
		if (s.target_bytes[blockIdx.x * s.size + at] != expected(round, blockIdx.x * s.size + at))
			atomicAdd(&out->wrong_bytes, 1ull);
}

static long argument(int argc, char **argv, int at, long otherwise, long most)
{
	char *end = nullptr;
	const long value = at < argc ? strtol(argv[at], &end, 10) : otherwise;
	if ((end && *end) || value < 1 || value > most) {
		fprintf(stderr, "usage: %s [BLOCKS [ROUNDS [SIZE_BYTES [DEVICE]]]]\n", argv[0]);
		exit(2);
	}
	return value;
}

/*
 * Of the GPU's multiprocessors, how many so many blocks of a kernel fill. A block that waits does so in its place: with too many of them no place
 * would be left for those that they wait for, which come later.
 */
template <typename... Arguments> static double filled_by(void (*kernel)(Arguments...), uint32_t blocks)
{
	int of_one = 0;
	CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_one, kernel, 128, 0));
	return double(blocks) / of_one;
}

/* Both streams are done, and nothing that they ran has complained. */
static bool is_well(cudaStream_t from, cudaStream_t to, const outcome *out, const char *variant, outcome *found)
{
	CUDA(cudaStreamSynchronize(from));
	CUDA(cudaStreamSynchronize(to));
	CUDA(cudaMemcpy(found, out, sizeof(*found), cudaMemcpyDeviceToHost));
	if (found->code == DOORBELL_OK && found->wrong_bytes == 0)
		return true;
	printf("FAIL: %s: %llu wrong bytes, %s\n", variant, found->wrong_bytes, doorbell_error_name(found->code));
	return false;
}

int main(int argc, char **argv)
{
	const uint32_t blocks = (uint32_t)argument(argc, argv, 1, 64, 4096);
	const uint32_t rounds = (uint32_t)argument(argc, argv, 2, 100, 1000000);
	const uint64_t size = (uint64_t)argument(argc, argv, 3, 1024, 1 << 20);
	const char *name = argc > 4 ? argv[4] : "softcx";
	int gpus = 0;
	const cudaError_t none = cudaGetDeviceCount(&gpus);
	if (none != cudaSuccess || gpus == 0) {
		printf("WAIVED: no GPU: %s\n", cudaGetErrorString(none));
		return 77;
	}

	doorbell_device *device;
	doorbell_domain *domain;
	doorbell_endpoint *a, *b;
	doorbell_address address_a, address_b;
	doorbell_region *source, *target, *signals;
	doorbell_device_queue *queue;
	struct doorbell_queue_view view;
	cudaStream_t from, to;
	outcome *out, found;
	char path[256];
	bool passed = true;
	sides s = {};
	s.size = size;
	int multiprocessors = 0;
	CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
	double filled = filled_by(put_built, blocks);
#ifndef WITHOUT_TRIGGERS
	filled = std::max(filled, filled_by(put_triggered, blocks));
#endif
	if (filled + filled_by(check, blocks) > multiprocessors) {
		printf("%u blocks that put and as many that wait for them have no room on this GPU at once\n", blocks);
		return 2;
	}
	CUDA(cudaStreamCreateWithFlags(&from, cudaStreamNonBlocking));
	CUDA(cudaStreamCreateWithFlags(&to, cudaStreamNonBlocking));
	CUDA(cudaMalloc(&s.source_bytes, blocks * size));
	CUDA(cudaMalloc(&s.target_bytes, blocks * size));
	CUDA(cudaMalloc(&s.signal_word, sizeof(*s.signal_word)));
	CUDA(cudaMalloc(&out, sizeof(*out)));
	CUDA(cudaMemset(s.target_bytes, 0, blocks * size));
	CUDA(cudaMemset(s.signal_word, 0, sizeof(*s.signal_word)));
	CUDA(cudaMemset(out, 0, sizeof(*out)));
	/* Kernels are loaded by their first launch, which may wait for those that run; these wait for one another. */
	cudaFuncAttributes attributes;
	CUDA(cudaFuncGetAttributes(&attributes, put_built));
	CUDA(cudaFuncGetAttributes(&attributes, check));
#ifndef WITHOUT_TRIGGERS
	CUDA(cudaFuncGetAttributes(&attributes, put_triggered));
#endif
	/* Before the first kernel of a stream that does not wait for the legacy one. */
	CUDA(cudaDeviceSynchronize());
	TRY(doorbell_device_open(name, &device));
	TRY(doorbell_domain_create(device, &domain));
	TRY(doorbell_endpoint_create(domain, nullptr, &a));
	TRY(doorbell_endpoint_create(domain, nullptr, &b));
	TRY(doorbell_endpoint_address(a, &address_a));
	TRY(doorbell_endpoint_address(b, &address_b));
	TRY(doorbell_endpoint_connect(a, &address_b));
	TRY(doorbell_endpoint_connect(b, &address_a));
	TRY(doorbell_region_register_device(domain, (uint64_t)(uintptr_t)s.source_bytes, blocks * size, DOORBELL_ACCESS_LOCAL_WRITE, &source));
	TRY(doorbell_region_register_device(domain, (uint64_t)(uintptr_t)s.target_bytes, blocks * size, DOORBELL_ACCESS_ALL, &target));
	TRY(doorbell_region_register_device(domain, (uint64_t)(uintptr_t)s.signal_word, sizeof(*s.signal_word), DOORBELL_ACCESS_ALL, &signals));
	TRY(doorbell_region_remote(target, &s.target));
	TRY(doorbell_region_remote(signals, &s.signal));
	TRY(doorbell_endpoint_path(a, nullptr, path, sizeof(path)));
	printf("%u blocks, %u rounds, %llu bytes each, %s, %s\n", blocks, rounds, (unsigned long long)size, name, path);

#ifndef WITHOUT_TRIGGERS
	/* Triggered: the queue is still the endpoint's own. One signal is for all blocks, and sets the word. */
	doorbell_stream *kernels;
	TRY(doorbell_stream_create_trigger("put_signal", &kernels));
	for (uint32_t round = 0; passed && round < rounds; round++) {
		const doorbell_slice all = {source, 0, blocks * size};
		const uint64_t value = round + 1;
		const doorbell_work put = doorbell_work_write(&all, 1, s.target.addr, s.target.rkey);
		doorbell_work signal = doorbell_work_write_inline(&value, sizeof(value), s.signal.addr, s.signal.rkey);
		signal.flags |= DOORBELL_WORK_ORDERED;
		doorbell_trigger trigger, rest;
		TRY(doorbell_stream_queue_send(kernels, a, &put, nullptr));
		TRY(doorbell_stream_queue_send(kernels, a, &signal, nullptr));
		if (TRY(doorbell_stream_take_trigger(kernels, &trigger)) != 1 || TRY(doorbell_stream_take_trigger(kernels, &rest)) != 0) {
			printf("FAIL: two writes are not one trigger\n");
			return 1;
		}
		put_triggered<<<blocks, 128, 0, from>>>(trigger, s, round, out);
		check<<<blocks, 128, 0, to>>>(s, round, value, out);
		passed = is_well(from, to, out, "triggered", &found);
		/* No other thread polls the completions. */
		for (int i = 0; passed && i < 2; i++) {
			doorbell_completion completion;
			TRY(doorbell_wait_cq(a, DOORBELL_QUEUE_SEND, timeout_ms, &completion));
		}
	}
	TRY(doorbell_stream_destroy(kernels));
	CUDA(cudaMemset(s.signal_word, 0, sizeof(*s.signal_word)));
	CUDA(cudaDeviceSynchronize());
	if (passed)
		printf("triggered: %u rounds\n", rounds);
#else
	printf("triggered: WAIVED\n");
#endif

	/* Built: the queue is the kernels'. */
	if (passed) {
		const doorbell_slice all = {source, 0, blocks * size};
		TRY(doorbell_device_queue_create(a, DOORBELL_KERNELS_CUDA, &queue));
		TRY(doorbell_device_queue_view(queue, &view, sizeof(view)));
		TRY(doorbell_device_queue_local(queue, &all, &s.source));
		for (uint32_t round = 0; passed && round < rounds; round++) {
			put_built<<<blocks, 128, 0, from>>>(view, s, round, out);
			check<<<blocks, 128, 0, to>>>(s, round, (uint64_t)blocks * (round + 1), out);
			passed = is_well(from, to, out, "built", &found);
		}
		TRY(doorbell_device_queue_destroy(queue));
		if (passed)
			printf("built: %u rounds of %u blocks on one queue\n", rounds, blocks);
	}

	CUDA(cudaGetLastError());
	doorbell_endpoint_destroy(b);
	doorbell_endpoint_destroy(a);
	TRY(doorbell_region_deregister(signals));
	TRY(doorbell_region_deregister(target));
	TRY(doorbell_region_deregister(source));
	doorbell_region_destroy(signals);
	doorbell_region_destroy(target);
	doorbell_region_destroy(source);
	doorbell_domain_destroy(domain);
	doorbell_device_close(device);
	CUDA(cudaFree(out));
	CUDA(cudaFree(s.signal_word));
	CUDA(cudaFree(s.target_bytes));
	CUDA(cudaFree(s.source_bytes));
	CUDA(cudaStreamDestroy(to));
	CUDA(cudaStreamDestroy(from));
	if (passed)
		printf("PASS: every byte was there behind its signal\n");
	return passed ? 0 : 1;
}
