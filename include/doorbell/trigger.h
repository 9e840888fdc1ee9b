/*
 * Triggers: prepared operations that a kernel of the application executes itself. C11, C++17 and CUDA; outside of CUDA the functions are of
 * the CPU, for tests.
 *
 * The host takes a `struct doorbell_trigger` (doorbell_stream_take_trigger, KernelStream::take) of what it has queued on a kernel stream and
 * passes it by value to its kernel:
 *
 *     __global__ void step(const __grid_constant__ doorbell_trigger trigger, int *status, ...)
 *     {
 *             ... what is to be sent is computed ...
 *             int code = doorbell_trigger_block(&trigger, 1000000000);
 *             if (threadIdx.x == 0 && code != DOORBELL_OK)
 *                     *status = code;
 *     }
 *
 * (__grid_constant__, so that it is read where the driver has put it; without it each thread that takes its address copies it.)
 *
 * Results
 *     DOORBELL_OK        all of it was executed, and every wait in it was met without an error
 *     DOORBELL_EWORK     a completion in error, a wait that the host has ended (deadline, abort, a dead peer), a failure that the host has
 *                        found since the trigger was taken, if there is a wait in it; or the stream had stopped before: nothing is executed
 *     DOORBELL_ETIMEOUT  within the time the triggers before it were not executed: nothing has happened, and it may be tried again; or a wait
 *                        in it was not met: what comes after that wait is not executed, nor is any later trigger of the stream
 *     DOORBELL_ESTATE    it was executed before, is being executed, or the stream has given it up
 * Which of the two a timeout was, says the second attempt: DOORBELL_ESTATE if there is nothing to be tried.
 *
 * Order
 *     Triggers of one stream are executed in the order in which they were taken, each once, by any kernels of the stream's device. A trigger
 *     whose predecessor has not been executed waits for it.
 *
 * Bounds
 *     `timeout_ns` is for all waits of a call, and at most DOORBELL_KERNEL_TIMEOUT_MAX_NS. Within it the host ends waits as it does for streams.
 *     The GPU's clock steps by up to a microsecond.
 *
 * Memory order. Each store of this file, with what it pairs with:
 *     what the calling thread stored before, of a warp or block all threads of it: is ordered before every store of a program by the
 *         fence of system scope that each program begins with. Of the other threads it knows by the barrier before it; a fence is cumulative.
 *         It pairs with the loads of the NIC, and of the thread that stands in for it (acquire of the doorbell, then loads).
 *     stores of a program (doorbell record, UAR, trigger word, words of memory): relaxed, system scope, in the order that the fences of the
 *         program give; each pairs with the acquire load of its consumer
 *     polls of a program: acquire, system scope; pair with the DMA writes of NICs in PCIe order, and with release stores of the host
 *     dbl_control.done: relaxed behind a fence; pairs with the acquire load of the host, which then tells owners
 *     dbl_control.stopped, .stop: in that order, a fence between; pair with the host's acquire loads in the other order
 *     turn: acquire and release of the scope of the GPU, for other threads of which it is; pairs with the next trigger's
 *     doorbell_kernel_write_value32: release, system scope; pairs with doorbell_kernel_wait_value32, doorbell_wait_value32 of the host, and
 *         the waits for values of streams of either kind
 *     doorbell_kernel_wait_value32: acquire, system scope; pairs with doorbell_kernel_write_value32, doorbell_stream_write_value32 and release
 *         stores of the host
 * That holds for ordinary loads. What a kernel reads through `const T *__restrict__` or __ldg() the compiler takes for constant while the kernel
 * runs: not what arrives meanwhile.
 * What a NIC writes to the memory of a GPU is visible to kernels behind a wait where the device's writes are ordered
 * (CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING of at least 100, as of all data centre GPUs since Volta); where they are not, a later
 * kernel of a stream sees it.
 */
#ifndef DOORBELL_TRIGGER_H
#define DOORBELL_TRIGGER_H

#include "../doorbell.h"
#include "detail/execute.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * The word by which triggers take turns, in memory of the stream's device, which has atomic operations there: twice the number of the trigger
 * that is next, one more while it is executed; and a bit from the moment when nothing but counts is executed.
 */
#define DBL_TURN_STOPPED ((uint64_t)1 << 63)

DBL_STATIC_ASSERT(sizeof(struct doorbell_trigger) == 512, "a trigger is 512 bytes");
DBL_STATIC_ASSERT(offsetof(struct doorbell_trigger, turn) == 8, "turn");
DBL_STATIC_ASSERT(offsetof(struct doorbell_trigger, number) == 16, "number");
DBL_STATIC_ASSERT(offsetof(struct doorbell_trigger, word_count) == 24, "word_count");
DBL_STATIC_ASSERT(offsetof(struct doorbell_trigger, failures) == 28, "failures");
DBL_STATIC_ASSERT(offsetof(struct doorbell_trigger, words) == 32, "words");

#ifdef __CUDACC__

DBL_DEVICE uint64_t dbl_turn_exchange(uint64_t *turn, uint64_t expected, uint64_t desired)
{
	uint64_t seen;
	asm volatile("atom.acquire.gpu.global.cas.b64 %0, [%1], %2, %3;"
		     : "=l"(seen)
		     : "l"(turn), "l"(expected), "l"(desired)
		     : "memory");
	return seen;
}

DBL_DEVICE void dbl_turn_pass(uint64_t *turn, uint64_t value)
{
	asm volatile("st.release.gpu.global.u64 [%0], %1;" : : "l"(turn), "l"(value) : "memory");
}

#else

DBL_DEVICE uint64_t dbl_turn_exchange(uint64_t *turn, uint64_t expected, uint64_t desired)
{
	/* What was there is left in `expected`. */
	__atomic_compare_exchange_n(turn, &expected, desired, 0, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE);
	return expected;
}

DBL_DEVICE void dbl_turn_pass(uint64_t *turn, uint64_t value)
{
	__atomic_store_n(turn, value, __ATOMIC_RELEASE);
}

#endif

/* Takes the turn of that trigger: DOORBELL_OK, and what the turn was goes to `taken`; or a code, and nothing has happened. */
DBL_EXECUTOR int dbl_turn_take(uint64_t *turn, uint64_t number, struct dbl_run *run, uint64_t *taken)
{
	const uint64_t mine = number << 1;
	uint64_t expected = mine, seen, place;
	uint32_t attempt;

	for (attempt = 0;; attempt++) {
		/* At once, since the turn is mine if the order is kept: one way to memory and back before the doorbell. */
		seen = dbl_turn_exchange(turn, expected, expected + 1);
		if (seen == expected) {
			*taken = seen;
			return DOORBELL_OK;
		}
		place = seen & ~DBL_TURN_STOPPED;
		if (place > mine)
			return DOORBELL_ESTATE;
		/* As it will be when it is mine. */
		expected = mine | (seen & DBL_TURN_STOPPED);
		if (place == mine)
			continue;
		if (dbl_run_is_late(run, dbl_now_ns()))
			return DOORBELL_ETIMEOUT;
		if (DBL_PAUSE(attempt))
			return DOORBELL_EASYNC;
	}
}

/* Executes a trigger, from this thread alone. One thread calls it. */
DBL_EXECUTOR int doorbell_trigger_thread(const struct doorbell_trigger *trigger, uint64_t timeout_ns)
{
	struct dbl_control *control;
	struct dbl_run run;
	uint64_t *turn, taken;
	enum dbl_end end;
	int code;

	/* One that there was nothing for. */
	if (trigger->word_count == 0)
		return DOORBELL_OK;
	control = (struct dbl_control *)DBL_REACH(trigger->control, sizeof(*control));
	turn = (uint64_t *)DBL_REACH(trigger->turn, sizeof(*turn));
	if (!control || !turn || trigger->word_count > DOORBELL_TRIGGER_WORDS)
		return DOORBELL_EINVAL;
	run.control = control;
	run.start_ns = 0;
	run.timeout_ns = dbl_bounded(timeout_ns);
	run.waited = run.failed = 0;
	code = dbl_turn_take(turn, trigger->number, &run, &taken);
	if (code != DOORBELL_OK)
		return code;
	/* Not asked of the control block, which is in the host's memory. */
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
	/* The last: what the host has found it has counted before it let a wait go. */
	if (run.stopped || run.failed || (run.waited && dbl_load_dword(&control->failures) != trigger->failures))
		return DOORBELL_EWORK;
	return DOORBELL_OK;
}

/*
 * Stores a word of device memory, or of host memory that is mapped to the GPU (doorbell_region_device_pointer gives the address of a region's),
 * after everything that this thread has stored; call it behind a barrier for what others have. It is
 * how a kernel lets a stream go on that waits for the value, or another kernel.
 */
DBL_EXECUTOR void doorbell_kernel_write_value32(uint32_t *word, uint32_t value)
{
	dbl_store_dword_release(word, value);
}

/*
 * Waits until a word meets a condition, DOORBELL_WAIT_*: DOORBELL_OK. DOORBELL_ETIMEOUT when it took longer; DOORBELL_EINVAL for another
 * condition. If `status_word` is not null, and not 0 while the word does not meet the condition: what it is; the status words of streams
 * (doorbell_stream_status_word) have such codes. What was stored before the word is visible afterwards.
 */
DBL_EXECUTOR int doorbell_kernel_wait_value32(const uint32_t *word, uint32_t wait_condition, uint32_t value, uint64_t timeout_ns,
					      const int32_t *status_word)
{
	const uint64_t start_ns = dbl_now_ns(), bound_ns = dbl_bounded(timeout_ns);
	const uint8_t kind = (uint8_t)(DBL_POLL_GEQ + wait_condition);
	uint32_t turn;
	int status;

	if (wait_condition > DOORBELL_WAIT_NOR)
		return DOORBELL_EINVAL;
	for (turn = 0;; turn++) {
		if (dbl_poll_satisfied(kind, dbl_load_dword(word), value))
			return DOORBELL_OK;
		if (turn % 16 == 15) {
			status = status_word ? (int)dbl_load_dword(status_word) : 0;
			if (status != 0)
				return status;
			if (dbl_has_passed(dbl_now_ns(), start_ns, bound_ns))
				return DOORBELL_ETIMEOUT;
		}
		if (DBL_PAUSE(turn))
			return DOORBELL_EASYNC;
	}
}

#ifdef __cplusplus
}
#endif

#ifdef DBL_HAS_BLOCKS

/*
 * Executes a trigger, for a warp: all 32 threads call it with the same arguments, and all get the code. What any of them stored before is
 * ordered before the doorbell, and what the waits have seen is visible to all.
 */
DBL_EXECUTOR int doorbell_trigger_warp(const struct doorbell_trigger *trigger, uint64_t timeout_ns)
{
	int code = DOORBELL_OK;

	__syncwarp();
	if (dbl_lane() == 0)
		code = doorbell_trigger_thread(trigger, timeout_ns);
	/* For what the thread has seen: a shuffle orders no memory. */
	__syncwarp();
	return __shfl_sync(0xffffffffu, code, 0);
}

/* The same for a block: all its threads call it. */
DBL_EXECUTOR int doorbell_trigger_block(const struct doorbell_trigger *trigger, uint64_t timeout_ns)
{
	__shared__ int code;

	__syncthreads();
	if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0)
		code = doorbell_trigger_thread(trigger, timeout_ns);
	__syncthreads();
	/* The next call's first barrier is behind this load. */
	return code;
}

#endif

#endif
