/*
 * The two loops of GPUDirect RDMA, side by side, in CUDA C: loop.c with kernels of a GPU, and messages in its memory.
 *
 *   scripts/install-c --features cuda PREFIX
 *   nvcc -O2 -std=c++17 -IPREFIX/include examples/loop.cu -LPREFIX/lib -ldoorbell -Xlinker -rpath=PREFIX/lib -o loop
 *   ./loop [SIZE_BYTES [STEPS [DEVICE]]]
 *
 * Each step computes a message and sends it to a second endpoint of this process.
 *   sync    the application launches the kernel, waits for the stream, posts the send, and polls for its completion.
 *   async   it queues kernel, send and waits on the stream, batches of steps ahead, and sleeps until a batch is done.
 * A second kernel looks at every byte that arrives. The last line begins with PASS or FAIL; without a GPU it is WAIVED, and the status 77.
 */
#include <doorbell.h>

#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

static constexpr uint64_t steps_of_batch = 20, batches_in_flight = 4;
static constexpr int64_t timeout_ms = 30000;

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

__device__ static uint8_t expected(uint64_t step, uint64_t at)
{
	return (uint8_t)((step + 1) * 0x9e3779b97f4a7c15u >> 56) ^ (uint8_t)(at * 31);
}

/* Leaves the message of its step. */
__global__ void compute(uint8_t *message, uint64_t size, uint64_t step)
{
	const uint64_t first = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x, stride = (uint64_t)gridDim.x * blockDim.x;
	for (uint64_t at = first; at < size; at += stride)
		message[at] = expected(step, at);
}

/* Looks at what has arrived, and wipes it. */
__global__ void check(uint8_t *message, uint64_t size, uint64_t step, unsigned long long *wrong_bytes)
{
	const uint64_t first = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x, stride = (uint64_t)gridDim.x * blockDim.x;
	for (uint64_t at = first; at < size; at += stride) {
		if (message[at] != expected(step, at))
			atomicAdd(wrong_bytes, 1ull);
		message[at] = (uint8_t)~message[at];
	}
}

struct loop {
	cudaStream_t cuda;
	doorbell_stream *stream;
	doorbell_endpoint *sender;
	doorbell_endpoint *receiver;
	doorbell_slice source;
	doorbell_slice target;
	uint8_t *message;
	uint8_t *arrived;
	uint64_t size;
	unsigned blocks;
	unsigned long long *wrong_bytes;
};

static void run_sync(const loop &l, uint64_t steps)
{
	for (uint64_t i = 0; i < steps; i++) {
		const doorbell_work send = doorbell_work_send(&l.source, 1);
		doorbell_completion completion;
		TRY(doorbell_post_recv(l.receiver, i, &l.target, 1, nullptr));
		compute<<<l.blocks, 256, 0, l.cuda>>>(l.message, l.size, i);
		CUDA(cudaStreamSynchronize(l.cuda));
		TRY(doorbell_post_send(l.sender, &send, nullptr));
		TRY(doorbell_wait_cq(l.sender, DOORBELL_QUEUE_SEND, timeout_ms, &completion));
		TRY(doorbell_wait_cq(l.receiver, DOORBELL_QUEUE_RECV, timeout_ms, &completion));
		check<<<l.blocks, 256, 0, l.cuda>>>(l.arrived, l.size, i, l.wrong_bytes);
	}
	CUDA(cudaStreamSynchronize(l.cuda));
}

static void run_async(const loop &l, uint64_t steps)
{
	cudaEvent_t done[batches_in_flight];
	for (cudaEvent_t &event : done)
		CUDA(cudaEventCreateWithFlags(&event, cudaEventBlockingSync | cudaEventDisableTiming));
	for (uint64_t first = 0, batch = 0; first < steps; first += steps_of_batch, batch++) {
		const cudaEvent_t slot = done[batch % batches_in_flight];
		/* Of an earlier batch; returns at once when there was none. */
		CUDA(cudaEventSynchronize(slot));
		for (uint64_t i = first; i < steps && i < first + steps_of_batch; i++) {
			const doorbell_work send = doorbell_work_send(&l.source, 1);
			TRY(doorbell_post_recv(l.receiver, i, &l.target, 1, nullptr));
			compute<<<l.blocks, 256, 0, l.cuda>>>(l.message, l.size, i);
			TRY(doorbell_stream_queue_send(l.stream, l.sender, &send, nullptr));
			TRY(doorbell_stream_wait_cq(l.stream, l.sender, DOORBELL_QUEUE_SEND, DOORBELL_DEFAULT_TIMEOUT, nullptr));
			TRY(doorbell_stream_wait_cq(l.stream, l.receiver, DOORBELL_QUEUE_RECV, DOORBELL_DEFAULT_TIMEOUT, nullptr));
			check<<<l.blocks, 256, 0, l.cuda>>>(l.arrived, l.size, i, l.wrong_bytes);
		}
		CUDA(cudaEventRecord(slot, l.cuda));
	}
	/* With a bound of its own, and it reports what failed on the stream, if something did. */
	TRY(doorbell_stream_synchronize(l.stream, timeout_ms));
	for (cudaEvent_t &event : done)
		CUDA(cudaEventDestroy(event));
}

static double measure(const char *name, void (*run)(const loop &, uint64_t), const loop &l, uint64_t steps)
{
	const auto start = std::chrono::steady_clock::now();
	run(l, steps);
	const double us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / (double)steps;
	printf("%-6s %8.2f us a step\n", name, us);
	return us;
}

int main(int argc, char **argv)
{
	const long long size = argc > 1 ? atoll(argv[1]) : 4096, steps = argc > 2 ? atoll(argv[2]) : 2000;
	const char *name = argc > 3 ? argv[3] : "softcx";
	int gpus = 0;
	if (size < 1 || size > 1 << 30 || steps < 1) {
		fprintf(stderr, "usage: %s [SIZE_BYTES up to 2^30 [STEPS [DEVICE]]]\n", argv[0]);
		return 2;
	}
	const cudaError_t none = cudaGetDeviceCount(&gpus);
	if (none != cudaSuccess || gpus == 0) {
		printf("WAIVED: no GPU: %s\n", cudaGetErrorString(none));
		return 77;
	}

	loop l = {};
	doorbell_device *device;
	doorbell_domain *domain;
	doorbell_address of_sender, of_receiver;
	doorbell_region *source, *target;
	char path[256];
	l.size = (uint64_t)size;
	l.blocks = (unsigned)(size < 65536 ? (size + 255) / 256 : 256);
	CUDA(cudaStreamCreateWithFlags(&l.cuda, cudaStreamNonBlocking));
	CUDA(cudaMalloc(&l.message, l.size));
	CUDA(cudaMalloc(&l.arrived, l.size));
	CUDA(cudaMalloc(&l.wrong_bytes, sizeof(*l.wrong_bytes)));
	CUDA(cudaMemset(l.wrong_bytes, 0, sizeof(*l.wrong_bytes)));
	/* Before the first kernel of a stream that does not wait for the legacy one. */
	CUDA(cudaDeviceSynchronize());
	TRY(doorbell_device_open(name, &device));
	TRY(doorbell_domain_create(device, &domain));
	TRY(doorbell_region_register_device(domain, (uint64_t)(uintptr_t)l.message, l.size, 0, &source));
	TRY(doorbell_region_register_device(domain, (uint64_t)(uintptr_t)l.arrived, l.size, DOORBELL_ACCESS_LOCAL_WRITE, &target));
	l.source = {source, 0, l.size};
	l.target = {target, 0, l.size};
	TRY(doorbell_endpoint_create(domain, nullptr, &l.sender));
	TRY(doorbell_endpoint_create(domain, nullptr, &l.receiver));
	TRY(doorbell_endpoint_address(l.sender, &of_sender));
	TRY(doorbell_endpoint_address(l.receiver, &of_receiver));
	TRY(doorbell_endpoint_connect(l.sender, &of_receiver));
	TRY(doorbell_endpoint_connect(l.receiver, &of_sender));
	TRY(doorbell_stream_create_cuda(l.cuda, nullptr, &l.stream));

	/* The first of everything is slower: kernels are loaded, memory is mapped. */
	run_sync(l, 10);
	run_async(l, 10);
	TRY(doorbell_endpoint_path(l.sender, nullptr, path, sizeof(path)));
	printf("%lld bytes, %lld steps, %s, CUDA stream, %s\n", size, steps, name, path);
	const double sync_us = measure("sync", run_sync, l, (uint64_t)steps);
	const double async_us = measure("async", run_async, l, (uint64_t)steps);

	unsigned long long wrong_bytes = 0;
	CUDA(cudaMemcpy(&wrong_bytes, l.wrong_bytes, sizeof(wrong_bytes), cudaMemcpyDeviceToHost));
	CUDA(cudaGetLastError());
	doorbell_stream_destroy(l.stream);
	doorbell_endpoint_destroy(l.receiver);
	doorbell_endpoint_destroy(l.sender);
	/* Nothing is in flight: when it is deregistered, only the program uses the memory. */
	TRY(doorbell_region_deregister(target));
	TRY(doorbell_region_deregister(source));
	doorbell_region_destroy(target);
	doorbell_region_destroy(source);
	doorbell_domain_destroy(domain);
	doorbell_device_close(device);
	CUDA(cudaFree(l.wrong_bytes));
	CUDA(cudaFree(l.arrived));
	CUDA(cudaFree(l.message));
	CUDA(cudaStreamDestroy(l.cuda));
	if (wrong_bytes) {
		printf("FAIL: %llu wrong bytes\n", wrong_bytes);
		return 1;
	}
	printf("PASS: all %lld bytes arrived as they were sent; async takes %.2f of sync\n", 2 * size * (steps + 10), async_us / sync_us);
	return 0;
}
