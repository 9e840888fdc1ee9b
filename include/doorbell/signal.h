/*
 * Words in memory that kernels store and wait for: signals of peers, and words of 32 bits that streams use as well. C11,
 * C++17 and CUDA; without CUDA the functions run on the CPU.
 *
 * A word is in device memory, or in host memory that is mapped to the GPU: doorbell_region_device_pointer() returns the
 * address for a region. It is aligned to its size.
 *
 * Waits have a time limit in nanoseconds, at most DOORBELL_DEVICE_TIMEOUT_MAX_NS. They return:
 *
 *     DOORBELL_OK        the condition is met
 *     DOORBELL_ETIMEOUT  it was not met within the time limit
 *     DOORBELL_EINVAL    the condition is unknown
 *     the status word    if one is given, it is not 0, and the condition is not met. Status words are those of streams
 *                        (doorbell_stream_status_word), which have DOORBELL_EWORK or DOORBELL_EASYNC, and those of queues
 *                        (doorbell_device_status_word() of queue.h)
 *
 * Memory order. For each access of this file, what it pairs with:
 *     writes: release, system scope; pair with the waits of this file, doorbell_wait_value32 on the host, and waits for
 *         values on streams of all kinds
 *     waits: relaxed, and an acquire fence when they return, system scope; pair with the writes of this file, with
 *         doorbell_stream_write_value32, with release stores of the host, and with signals of NICs, whose earlier data is then
 *         visible in PCIe order
 * As in trigger.h, this applies to ordinary loads and not to memory that is read through `const T *__restrict__`.
 */
#ifndef DOORBELL_SIGNAL_H
#define DOORBELL_SIGNAL_H

#include "../doorbell.h"
#include "detail/execute.h"

/* How a 64-bit word is compared with a value: both are unsigned. */
enum doorbell_cmp {
	DOORBELL_CMP_EQ = 0, /* equal */
	DOORBELL_CMP_NE = 1, /* not equal */
	DOORBELL_CMP_GT = 2, /* the word is greater */
	DOORBELL_CMP_GE = 3, /* greater or equal */
	DOORBELL_CMP_LT = 4, /* less */
	DOORBELL_CMP_LE = 5  /* less or equal */
};

#ifdef __cplusplus
extern "C" {
#endif

DBL_EXECUTOR int dbl_cmp_holds(uint64_t word, uint32_t cmp, uint64_t value)
{
	switch (cmp) {
	case DOORBELL_CMP_EQ:
		return word == value;
	case DOORBELL_CMP_NE:
		return word != value;
	case DOORBELL_CMP_GT:
		return word > value;
	case DOORBELL_CMP_GE:
		return word >= value;
	case DOORBELL_CMP_LT:
		return word < value;
	default:
		return word <= value;
	}
}

/*
 * One turn of a wait whose condition is not met. Returns whether the wait ends, with `*code`. The status word and the clock
 * are looked at in each sixteenth turn, so that the loads of the awaited word are not delayed.
 */
DBL_EXECUTOR int dbl_wait_ends(uint32_t turn, uint64_t start_ns, uint64_t bound_ns, const int32_t *status_word, int *code)
{
	if (turn % 16 == 15) {
		*code = status_word ? (int)DBL_LOAD_FENCED(status_word) : 0;
		if (*code != 0) {
			dbl_fence_acquire();
			return 1;
		}
		*code = DOORBELL_ETIMEOUT;
		if (dbl_has_passed(dbl_now_ns(), start_ns, bound_ns))
			return 1;
	}
	*code = DOORBELL_EASYNC;
	return DBL_PAUSE(turn);
}

/*
 * Stores a 32-bit word with release, after everything that this thread has stored. Call it after a barrier to include
 * other threads' stores. A kernel uses this call to release a stream or another kernel that waits for the value.
 */
DBL_EXECUTOR void doorbell_device_write_value32(uint32_t *word, uint32_t value)
{
	dbl_store_dword_release(word, value);
}

/* The same with a 64-bit word: signals this process as doorbell_device_signal() signals the peer. */
DBL_EXECUTOR void doorbell_device_write_value64(uint64_t *word, uint64_t value)
{
	dbl_store_qword_release(word, value);
}

/*
 * Waits until a 32-bit word meets a condition of streams (DOORBELL_WAIT_GEQ, DOORBELL_WAIT_AND or DOORBELL_WAIT_NOR;
 * DOORBELL_WAIT_EQ returns DOORBELL_EINVAL), for at most `timeout_ns` nanoseconds. What was stored before the word is
 * visible afterwards. `status_word` may be NULL.
 */
DBL_EXECUTOR int doorbell_device_wait_value32(const uint32_t *word, uint32_t wait_condition, uint32_t value, uint64_t timeout_ns,
					      const int32_t *status_word)
{
	const uint64_t start_ns = dbl_now_ns(), bound_ns = dbl_bounded(timeout_ns);
	const uint8_t kind = (uint8_t)(DBL_POLL_GEQ + wait_condition);
	uint32_t turn;
	int code;

	if (wait_condition > DOORBELL_WAIT_NOR)
		return DOORBELL_EINVAL;
	for (turn = 0;; turn++) {
		if (dbl_poll_satisfied(kind, DBL_LOAD_FENCED(word), value)) {
			dbl_fence_acquire();
			return DOORBELL_OK;
		}
		if (dbl_wait_ends(turn, start_ns, bound_ns, status_word, &code))
			return code;
	}
}

/*
 * Waits until the 64-bit word of a signal compares to `cmp_value` as `cmp` (DOORBELL_CMP_*) says, for at most `timeout_ns`
 * nanoseconds. What the peer had put before the signal is visible afterwards. `status_word` may be NULL.
 */
DBL_EXECUTOR int doorbell_device_signal_wait_until(const uint64_t *word, uint32_t cmp, uint64_t cmp_value, uint64_t timeout_ns,
						   const int32_t *status_word)
{
	const uint64_t start_ns = dbl_now_ns(), bound_ns = dbl_bounded(timeout_ns);
	uint32_t turn;
	int code;

	if (cmp > DOORBELL_CMP_LE)
		return DOORBELL_EINVAL;
	for (turn = 0;; turn++) {
		if (dbl_cmp_holds(DBL_LOAD_QWORD_FENCED(word), cmp, cmp_value)) {
			dbl_fence_acquire();
			return DOORBELL_OK;
		}
		if (dbl_wait_ends(turn, start_ns, bound_ns, status_word, &code))
			return code;
	}
}

/* Returns the 64-bit word of a signal, loaded with acquire: what the peer had put before this value is visible. */
DBL_EXECUTOR uint64_t doorbell_device_signal_fetch(const uint64_t *word)
{
	return dbl_load_qword(word);
}

/*
 * Returns 1 if nothing has failed on the stream with this status word (doorbell_stream_status_word), else 0. A kernel, also
 * one in a graph, that is queued behind a wait calls it to learn whether the wait ended with success: the word is written
 * before a failed wait ends.
 */
DBL_EXECUTOR int doorbell_device_ok(const int32_t *status_word)
{
	return dbl_load_dword(status_word) == 0;
}

#ifdef __cplusplus
}
#endif

#endif
