/*
 * Triggers: prepared operations that a kernel of the application executes. C11, C++17 and CUDA; without CUDA the
 * functions run on the CPU, for tests.
 *
 * The host takes a `struct doorbell_trigger` from a trigger stream (doorbell_stream_take_trigger, TriggerStream::take)
 * and passes it to its kernel by value:
 *
 *     __global__ void step(const __grid_constant__ doorbell_trigger trigger, int *status, ...)
 *     {
 *             ... compute the data to send ...
 *             int code = doorbell_device_trigger_block(&trigger, 1000000000);
 *             if (threadIdx.x == 0 && code != DOORBELL_OK)
 *                     *status = code;
 *     }
 *
 * With __grid_constant__ the trigger is read from the parameter memory; without it, each thread that takes its address
 * copies it.
 *
 * Results
 *     DOORBELL_OK        All operations were executed, and all waits completed without an error.
 *     DOORBELL_EWORK     A completion had an error, the host ended a wait (timeout, abort, dead peer), a message was
 *                        longer than the memory of its receive, or the host has found a failure since the trigger was
 *                        taken and the trigger has a wait. Or the stream had already stopped; then nothing is executed.
 *     DOORBELL_ETIMEOUT  Either earlier triggers were not executed within the time: nothing has happened, and the call
 *                        may be repeated. Or a wait of this trigger took too long: what follows the wait is not
 *                        executed, nor is any later trigger of the stream. To find out which, repeat the call: in the
 *                        second case it returns DOORBELL_ESTATE.
 *     DOORBELL_ESTATE    The trigger was already executed, is being executed, or the stream has discarded it.
 *     DOORBELL_EINVAL    The trigger is invalid.
 *
 * Order
 *     The triggers of a stream are executed once each, in the order in which they were taken, by any kernels on the
 *     stream's device. A trigger waits until its predecessor was executed.
 *
 * Timeouts
 *     `timeout_ns` limits all waits of a call together, and is at most DOORBELL_DEVICE_TIMEOUT_MAX_NS. The host may end
 *     waits earlier, as on other streams. The GPU's clock has steps of up to a microsecond.
 *
 * Memory order. For each store of this file, what it pairs with:
 *     earlier stores of the calling thread, or of the threads of its warp or block: ordered before all stores of a
 *         program by the release fence of system scope at the beginning of each program. The barrier before it makes the other
 *         threads' stores visible; fences are cumulative. Pairs with the loads of the NIC, and of the thread that acts
 *         for it (acquire of the doorbell, then loads).
 *     stores of a program (doorbell record, UAR, trigger word, words of memory): relaxed, system scope, in the order
 *         given by the program's fences; each pairs with the acquire load of its consumer
 *     polls of a program: relaxed, and an acquire fence when the condition holds, system scope; pair with DMA writes of
 *         NICs in PCIe order, and with release stores of the host
 *     dbl_control.done: relaxed after a fence; pairs with the acquire load of the host, which then reports the progress
 *     dbl_control.stopped, .stop: in this order with a fence between; pair with the host's acquire loads in the
 *         opposite order
 *     turn: acquire and release of GPU scope, because only threads of that GPU use it; pairs with the next trigger
 * This applies to ordinary loads. The compiler assumes that memory read through `const T *__restrict__` or __ldg()
 * does not change while the kernel runs, so such loads may miss data that arrives meanwhile. Writes of a NIC to GPU
 * memory are visible to a kernel after a wait if the GPU orders them
 * (CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING of at least 100). On other GPUs they are visible to a later
 * kernel of the stream.
 */
#ifndef DOORBELL_TRIGGER_H
#define DOORBELL_TRIGGER_H

#include "../doorbell.h"
#include "detail/trigger.h"
#include "signal.h"

#ifdef __cplusplus
extern "C" {
#endif

DBL_STATIC_ASSERT(sizeof(struct doorbell_trigger) == 512, "a trigger is 512 bytes");
DBL_STATIC_ASSERT(offsetof(struct doorbell_trigger, turn) == 8, "turn");
DBL_STATIC_ASSERT(offsetof(struct doorbell_trigger, number) == 16, "number");
DBL_STATIC_ASSERT(offsetof(struct doorbell_trigger, word_count) == 24, "word_count");
DBL_STATIC_ASSERT(offsetof(struct doorbell_trigger, failures) == 28, "failures");
DBL_STATIC_ASSERT(offsetof(struct doorbell_trigger, words) == 32, "words");

/*
 * Executes a trigger in this thread. `timeout_ns` is in nanoseconds. Exactly one thread calls it. Returns one of the
 * results above.
 */
DBL_EXECUTOR int doorbell_device_trigger(const struct doorbell_trigger *trigger, uint64_t timeout_ns)
{
	struct dbl_control *control;
	struct dbl_run run;
	uint64_t *turn, taken;
	enum dbl_end end;
	int code;

	/* An empty trigger. */
	if (trigger->word_count == 0)
		return DOORBELL_OK;
	control = (struct dbl_control *)DBL_MAP_ADDRESS(trigger->control, sizeof(*control));
	turn = (uint64_t *)DBL_MAP_ADDRESS(trigger->turn, sizeof(*turn));
	if (!control || !turn || trigger->word_count > DOORBELL_TRIGGER_WORDS)
		return DOORBELL_EINVAL;
	run.control = control;
	run.start_ns = 0;
	run.timeout_ns = dbl_bounded(timeout_ns);
	run.waited = run.failed = 0;
	code = dbl_turn_take(turn, trigger->number, &run, &taken);
	if (code != DOORBELL_OK)
		return code;
	/* The stop state comes from the turn, because the control block is in host memory, which is slow to read. */
	run.stopped = taken & DBL_TURN_STOPPED ? DBL_STOP_ABANDONED : 0;
	end = dbl_execute_bounded(trigger->words, trigger->word_count, &run);
	if (end == DBL_END_UNREACHABLE)
		return DOORBELL_EINVAL;
	if (end != DBL_END_DONE)
		return DOORBELL_EASYNC;
	taken += 2;
	if (run.stopped)
		taken |= DBL_TURN_STOPPED;
	dbl_turn_pass(turn, taken);
	if (run.stopped == DBL_STOP_TIMED_OUT)
		return DOORBELL_ETIMEOUT;
	/* This load is last: the host counts a failure before it releases a wait. */
	if (run.stopped || run.failed || (run.waited && dbl_load_dword(&control->failures) != trigger->failures))
		return DOORBELL_EWORK;
	return DOORBELL_OK;
}

#ifdef __cplusplus
}
#endif

#ifdef DBL_HAS_BLOCKS

/*
 * Executes a trigger for lanes of a warp. `lanes` is their mask, as in collective.cuh. They all call it with the same
 * arguments and get the same result. What they stored before is ordered before the doorbell, and what the waits have seen
 * is visible to all of them.
 */
DBL_EXECUTOR int doorbell_device_trigger_warp(const struct doorbell_trigger *trigger, uint32_t lanes, uint64_t timeout_ns)
{
	const uint32_t leader = (uint32_t)__ffs((int)lanes) - 1;
	int code = DOORBELL_OK;

	__syncwarp(lanes);
	if (dbl_lane() == leader)
		code = doorbell_device_trigger(trigger, timeout_ns);
	/* Makes what the leader has seen visible: a shuffle does not order memory. */
	__syncwarp(lanes);
	return __shfl_sync(lanes, code, (int)leader);
}

/*
 * Executes a trigger for a block. All threads of the block call it with the same arguments and get the same result;
 * memory is ordered as for doorbell_device_trigger_warp.
 */
DBL_EXECUTOR int doorbell_device_trigger_block(const struct doorbell_trigger *trigger, uint64_t timeout_ns)
{
	__shared__ int code;

	__syncthreads();
	if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0)
		code = doorbell_device_trigger(trigger, timeout_ns);
	__syncthreads();
	/* The first barrier of the next call comes after this load. */
	return code;
}

#endif

#endif
