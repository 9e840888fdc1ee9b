/*
 * The kernels of the feature `cuda`. build.rs compiles them, where there is nvcc, and src/cuda/module.rs holds what comes of it. Each has
 * one thread. None may loop without a bound: a kernel that does not end takes its context with it.
 */
#include <stdint.h>

/* Nanoseconds of the clock that all of a GPU have. It steps by up to a microsecond. */
static __device__ uint64_t now_ns(void)
{
	uint64_t now;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
	return now;
}

/* Takes that long: work, as far as who measures is concerned. */
extern "C" __global__ void doorbell_spin(uint64_t ns)
{
	const uint64_t start = now_ns();
	while (now_ns() - start < ns)
		;
}
