/*
 * The kernels of the feature `cuda`. build.rs compiles them, where there is nvcc, and src/cuda/module.rs holds what comes of it. Each has
 * one thread. None may loop without a bound: a kernel that does not end takes its context with it.
 */
#include <doorbell/execute.h>

/* Takes that long: work, as far as who measures is concerned. */
extern "C" __global__ void doorbell_spin(uint64_t ns)
{
	const uint64_t start = dbl_now_ns();
	while (dbl_now_ns() - start < ns)
		;
}

template <uint32_t WORDS> struct batch {
	uint64_t control;
	uint64_t word_count;
	uint64_t words[WORDS];
};

/* Read where the driver has put them, which is not this thread's stack. */
extern "C" __global__ void doorbell_execute_short(const __grid_constant__ batch<DBL_BATCH_SHORT_WORDS> batch)
{
	dbl_execute(batch.words, (uint32_t)batch.word_count, (struct dbl_control *)batch.control);
}

extern "C" __global__ void doorbell_execute_long(const __grid_constant__ batch<DBL_BATCH_LONG_WORDS> batch)
{
	dbl_execute(batch.words, (uint32_t)batch.word_count, (struct dbl_control *)batch.control);
}
