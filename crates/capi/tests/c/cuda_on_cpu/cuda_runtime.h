/*
 * The examples in CUDA C, on a processor: as much of the runtime as they use, over host streams. A kernel is called block by block with one
 * thread in each, in the stream's thread. What a GPU decides is not seen here: many threads, its memory, its order of accesses.
 *
 * tests/examples.rs writes LAUNCH(kernel, blocks, threads, stream, ...) where they have the brackets of CUDA.
 */
#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H

#include <doorbell.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>

#ifndef WITHOUT_TRIGGERS
#include <dlfcn.h>
#endif

#define __global__ static
#define __device__
#define __host__
#define __grid_constant__
/* Blocks of one thread come one after the other. */
#define __shared__ static thread_local

struct cuda_on_cpu_index {
	unsigned x, y, z;
};
static thread_local cuda_on_cpu_index blockIdx, threadIdx, gridDim, blockDim;

static inline void __syncthreads()
{
}

static inline void __threadfence()
{
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
}

template <typename T, typename U> static inline T atomicAdd(T *at, U more)
{
	return __atomic_fetch_add(at, (T)more, __ATOMIC_SEQ_CST);
}

template <typename T, typename U, typename V> static inline T atomicCAS(T *at, U expected, V desired)
{
	T seen = (T)expected;
	__atomic_compare_exchange_n(at, &seen, (T)desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
	return seen;
}

/* ------------------------------------------------------------------------------------------------------- runtime */

typedef int cudaError_t;
enum { cudaSuccess = 0, cudaErrorUnknown = 999 };
enum { cudaStreamNonBlocking = 1, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };

struct CUstream_st {
	doorbell_stream *host;
	bool is_lent; /* the handle is destroyed elsewhere */
};
typedef CUstream_st *cudaStream_t;
typedef doorbell_event *cudaEvent_t;

static inline const char *cudaGetErrorString(cudaError_t)
{
	return doorbell_last_error();
}

static inline cudaError_t cuda_on_cpu(int code)
{
	return code < 0 ? cudaErrorUnknown : cudaSuccess;
}

/* With triggers the context of the stand-in becomes current, as the runtime would have it. */
static inline cudaError_t cudaGetDeviceCount(int *count)
{
	*count = 1;
#ifndef WITHOUT_TRIGGERS
	void *const driver = dlopen("libcuda.so.1", RTLD_NOW), *context = nullptr;
	const auto init = (int (*)(unsigned))dlsym(driver, "cuInit");
	const auto retain = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
	const auto set = (int (*)(void *))dlsym(driver, "cuCtxSetCurrent");
	if (init(0) != 0 || retain(&context, 0) != 0 || set(context) != 0)
		return cudaErrorUnknown;
#endif
	return cudaSuccess;
}

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };

/* No limit of queued calls: a block that waits blocks only its stream. */
static inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr, int)
{
	*value = 1 << 20;
	return cudaSuccess;
}

template <typename Kernel> static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Kernel *, int, size_t)
{
	*blocks = 1;
	return cudaSuccess;
}

static inline cudaError_t cudaGetLastError()
{
	return cudaSuccess;
}

/* No stream of the tests has work then. */
static inline cudaError_t cudaDeviceSynchronize()
{
	return cudaSuccess;
}

static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
	*stream = new CUstream_st{nullptr, false};
	return cuda_on_cpu(doorbell_stream_create_host("cuda on cpu", 0, &(*stream)->host));
}

static inline cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
	/* Ended before its CUDA stream, as it may be. */
	return cuda_on_cpu(doorbell_stream_synchronize(stream->host, 60000));
}

static inline cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
	if (!stream->is_lent)
		doorbell_stream_destroy(stream->host);
	delete stream;
	return cudaSuccess;
}

static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
	return cuda_on_cpu(doorbell_event_create(DOORBELL_EVENT_NO_TIMING, event));
}

static inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
	return cuda_on_cpu(doorbell_stream_record(stream->host, event));
}

static inline cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
	return cuda_on_cpu(doorbell_event_synchronize(event, 60000));
}

static inline cudaError_t cudaEventDestroy(cudaEvent_t event)
{
	return cuda_on_cpu(doorbell_event_destroy(event));
}

template <typename T> static inline cudaError_t cudaMalloc(T **memory, size_t bytes)
{
	void *made = nullptr;
	if (posix_memalign(&made, 4096, (bytes + 4095) / 4096 * 4096) != 0)
		return cudaErrorUnknown;
	/* The contents of new GPU memory are undefined. */
	memset(made, 0xa5, bytes);
	*memory = (T *)made;
	return cudaSuccess;
}

static inline cudaError_t cudaFree(void *memory)
{
	free(memory);
	return cudaSuccess;
}

static inline cudaError_t cudaMemset(void *memory, int value, size_t bytes)
{
	memset(memory, value, bytes);
	return cudaSuccess;
}

static inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind)
{
	memcpy(to, from, bytes);
	return cudaSuccess;
}

static inline void cuda_on_cpu_call(void *argument)
{
	std::function<void()> *kernel = static_cast<std::function<void()> *>(argument);
	(*kernel)();
	delete kernel;
}

struct cudaFuncAttributes {
	int maxThreadsPerBlock;
};

template <typename... Parameters> static inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, void (*)(Parameters...))
{
	attributes->maxThreadsPerBlock = 1;
	return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
static inline void LAUNCH(void (*kernel)(Parameters...), unsigned blocks, unsigned, cudaStream_t stream, Arguments... arguments)
{
	/* By value, as the driver copies them at the launch. */
	auto *call = new std::function<void()>([=]() {
		gridDim = {blocks, 1, 1};
		blockDim = {1, 1, 1};
		threadIdx = {0, 0, 0};
		for (unsigned block = 0; block < blocks; block++) {
			blockIdx = {block, 0, 0};
			kernel(arguments...);
		}
	});
	if (doorbell_stream_launch(stream->host, cuda_on_cpu_call, call) < 0)
		abort();
}

/* --------------------------------------------------------------------------------------------- doorbell, without CUDA */

static inline int cuda_on_cpu_stream(cudaStream_t stream, doorbell_stream **handle)
{
	stream->is_lent = true;
	*handle = stream->host;
	return 0;
}

#define doorbell_stream_create_cuda(cuda, config, handle) cuda_on_cpu_stream(cuda, handle)
#define doorbell_region_register_device(domain, address, len_bytes, access, region)                                                        \
	doorbell_region_register(domain, (void *)(uintptr_t)(address), len_bytes, access, region)
#define DOORBELL_KERNELS_CUDA DOORBELL_KERNELS_HOST

#endif
