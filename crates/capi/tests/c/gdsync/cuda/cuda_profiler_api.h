/* CUDA's header of this name, which libmp's benchmarks include, is in a package of the profiler. */
#ifndef DOORBELL_CUDA_PROFILER_API_H
#define DOORBELL_CUDA_PROFILER_API_H

#include <cuda_runtime_api.h>

static inline cudaError_t cudaProfilerStart(void)
{
	return cudaSuccess;
}

static inline cudaError_t cudaProfilerStop(void)
{
	return cudaSuccess;
}

#endif
