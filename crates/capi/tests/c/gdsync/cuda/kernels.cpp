/*
 * In place of the kernels of libgdsync's tests (gpu_kernels.cu), which the stand-in for the driver cannot execute: a
 * function of the host for each, in the order of the stream.
 */
#include <cuda.h>

#include <cstddef>

static void nothing(void *)
{
}

static int launch(CUstream stream)
{
	return cuLaunchHostFunc(stream, nothing, nullptr) == CUDA_SUCCESS ? 0 : 1;
}

int gpu_launch_void_kernel_on_stream(CUstream stream)
{
	return launch(stream);
}

int gpu_launch_calc_kernel_on_stream(size_t, CUstream stream)
{
	return launch(stream);
}

extern "C" int gpu_launch_dummy_kernel()
{
	return launch(nullptr);
}

extern "C" int gpu_launch_void_kernel()
{
	return launch(nullptr);
}
