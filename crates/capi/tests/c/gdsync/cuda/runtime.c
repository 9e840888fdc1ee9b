/*
 * As much of the CUDA runtime as libgdsync's and libmp's programs use, over the driver: for the stand-in, over which
 * CUDA's own runtime does not run. Built into a libcudart.so by scripts/gdsync-programs.
 */
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread cudaError_t last = cudaSuccess;

static cudaError_t told(CUresult result)
{
	/* The runtime's errors have the driver's numbers, as far as they mean the same. */
	last = (cudaError_t)result;
	return last;
}

/* The primary context of the first GPU, as the runtime makes it current in each thread that calls it. */
static CUresult enter(void)
{
	static CUcontext context;
	CUcontext current = NULL;
	CUresult result = cuInit(0);
	if (result == CUDA_SUCCESS)
		result = cuCtxGetCurrent(&current);
	if (result != CUDA_SUCCESS || current)
		return result;
	if (!context)
		result = cuDevicePrimaryCtxRetain(&context, 0);
	return result == CUDA_SUCCESS ? cuCtxSetCurrent(context) : result;
}

#define ENTER()                                                                                              \
	do {                                                                                                 \
		CUresult entered_ = enter();                                                                 \
		if (entered_ != CUDA_SUCCESS)                                                                \
			return told(entered_);                                                               \
	} while (0)

cudaError_t cudaGetLastError(void)
{
	cudaError_t error = last;
	last = cudaSuccess;
	return error;
}

const char *cudaGetErrorString(cudaError_t error)
{
	const char *text = NULL;
	cuGetErrorString((CUresult)error, &text);
	return text ? text : "unknown error";
}

cudaError_t cudaGetDeviceCount(int *count)
{
	ENTER();
	return told(cuDeviceGetCount(count));
}

cudaError_t cudaGetDevice(int *device)
{
	*device = 0;
	ENTER();
	return told(CUDA_SUCCESS);
}

cudaError_t cudaSetDevice(int device)
{
	ENTER();
	return told(device == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE);
}

#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *prop, int device);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device);

cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *prop, int device)
{
	ENTER();
	memset(prop, 0, sizeof(*prop));
	cuDeviceGetAttribute(&prop->multiProcessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
	return told(cuDeviceGetName(prop->name, (int)sizeof(prop->name), device));
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
	return cudaGetDeviceProperties_v2(prop, device);
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
	ENTER();
	return told(cuDeviceCanAccessPeer(can, device, peer));
}

cudaError_t cudaDeviceSynchronize(void)
{
	ENTER();
	return told(cuCtxSynchronize());
}

/* Pinned memory of the host: no device behind the doors reaches the stand-in's GPU memory. */
cudaError_t cudaMalloc(void **pointer, size_t size)
{
	ENTER();
	return told(cuMemAllocHost(pointer, size));
}

cudaError_t cudaFree(void *pointer)
{
	ENTER();
	return told(pointer ? cuMemFreeHost(pointer) : CUDA_SUCCESS);
}

cudaError_t cudaMallocHost(void **pointer, size_t size)
{
	ENTER();
	return told(cuMemAllocHost(pointer, size));
}

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags)
{
	ENTER();
	return told(cuMemHostAlloc(pointer, size, flags));
}

cudaError_t cudaFreeHost(void *pointer)
{
	ENTER();
	return told(cuMemFreeHost(pointer));
}

cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags)
{
	ENTER();
	return told(cuMemHostRegister(pointer, size, flags));
}

cudaError_t cudaMemset(void *pointer, int value, size_t count)
{
	ENTER();
	return told(cuMemsetD8((CUdeviceptr)pointer, (unsigned char)value, count));
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t count, cudaStream_t stream)
{
	ENTER();
	return told(cuMemsetD8Async((CUdeviceptr)pointer, (unsigned char)value, count, stream));
}

/* Unified addressing knows where both ends are; memory that the driver does not know is the host's. */
static int is_known(const void *pointer)
{
	unsigned type;
	return cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)pointer) == CUDA_SUCCESS;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t count, enum cudaMemcpyKind kind, cudaStream_t stream)
{
	(void)kind;
	ENTER();
	if (is_known(to) && is_known(from))
		return told(cuMemcpyAsync((CUdeviceptr)to, (CUdeviceptr)from, count, stream));
	if (is_known(to))
		return told(cuMemcpyHtoDAsync((CUdeviceptr)to, from, count, stream));
	return told(cuMemcpyDtoHAsync(to, (CUdeviceptr)from, count, stream));
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t count, enum cudaMemcpyKind kind)
{
	(void)kind;
	ENTER();
	if (is_known(to) && is_known(from))
		return told(cuMemcpy((CUdeviceptr)to, (CUdeviceptr)from, count));
	if (is_known(to))
		return told(cuMemcpyHtoD((CUdeviceptr)to, from, count));
	return told(cuMemcpyDtoH(to, (CUdeviceptr)from, count));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
	ENTER();
	return told(cuStreamCreate(stream, flags));
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
	return cudaStreamCreateWithFlags(stream, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
	ENTER();
	return told(cuStreamDestroy(stream));
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
	ENTER();
	return told(cuStreamSynchronize(stream));
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
	ENTER();
	return told(cuStreamQuery(stream));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
	ENTER();
	return told(cuEventCreate(event, flags));
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
	return cudaEventCreateWithFlags(event, 0);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
	ENTER();
	return told(cuEventRecord(event, stream));
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
	ENTER();
	return told(cuEventQuery(event));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
	ENTER();
	return told(cuEventSynchronize(event));
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
	ENTER();
	return told(cuEventElapsedTime(ms, start, end));
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
	ENTER();
	return told(cuEventDestroy(event));
}

/* Calls of the driver that the stand-in does not have: the memory of a process is its own. */
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer)
{
	(void)handle;
	(void)pointer;
	return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags)
{
	(void)pointer;
	(void)handle;
	(void)flags;
	return CUDA_ERROR_NOT_SUPPORTED;
}

struct callback {
	CUstreamCallback function;
	CUstream stream;
	void *data;
};

static void call(void *argument)
{
	struct callback callback = *(struct callback *)argument;
	free(argument);
	callback.function(callback.stream, CUDA_SUCCESS, callback.data);
}

CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback function, void *data, unsigned flags)
{
	struct callback *callback = (struct callback *)malloc(sizeof(*callback));
	(void)flags;
	if (!callback)
		return CUDA_ERROR_OUT_OF_MEMORY;
	callback->function = function;
	callback->stream = stream;
	callback->data = data;
	return cuLaunchHostFunc(stream, call, callback);
}
