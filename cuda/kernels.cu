/*
 * The kernels of the feature `cuda`. build.rs compiles them, where there is nvcc, and src/cuda/module.rs holds what comes of it. Each has
 * one thread, but for the reduction. None may loop without a bound: a kernel that does not end takes its context with it.
 */
#include <doorbell/detail/replay.h>
#include <doorbell/device.cuh>
#include "reduce.h"
#include "step.h"

static __device__ void spin(uint64_t ns)
{
	const uint64_t start_ns = dbl_now_ns();
	const uint64_t bound_ns = dbl_bounded(ns);
	while (!dbl_has_passed(dbl_now_ns(), start_ns, bound_ns))
		;
}

/* Takes that long: work, as far as who measures is concerned. */
extern "C" __global__ void doorbell_spin(uint64_t ns)
{
	spin(ns);
}

/* A kernel of an application, in small: it works that long, and then rings itself. The code of the trigger goes to `code`, if it is not null. */
extern "C" __global__ void doorbell_step(const __grid_constant__ doorbell_trigger trigger, uint64_t work_ns, uint64_t timeout_ns,
					 int32_t *code)
{
	spin(work_ns);
	const int found = doorbell_device_trigger(&trigger, timeout_ns);
	if (code)
		dbl_store_dword(code, (uint32_t)found);
}

/*
 * The same with a work request that the kernel makes: a put, with immediate data if `has_imm` is not 0, and the wait for its completion. The
 * code goes to `code` if it is not 0: who launches many finds the last failure.
 */
extern "C" __global__ void doorbell_put_step(const __grid_constant__ doorbell_queue_view queue, const __grid_constant__ dbl_step step)
{
	spin(step.work_ns);
	const int found = dbl_step_put(&queue, &step);
	if (found != DOORBELL_OK)
		dbl_store_dword((void *)step.code, (uint32_t)found);
}

/* An operation of a graph that its application captures and launches by itself. */
extern "C" __global__ void doorbell_replay(const __grid_constant__ dbl_replay replay)
{
	(void)dbl_replay_execute(&replay);
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

/* Reduces numbers in memory, with as many threads as it is launched with. */
extern "C" __global__ void doorbell_reduce(const __grid_constant__ dbl_reduce reduce)
{
	dbl_reduce_share(&reduce, (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, (uint64_t)gridDim.x * blockDim.x);
}
