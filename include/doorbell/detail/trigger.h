/*
 * Inside doorbell/trigger.h: how triggers of a stream take turns. Programs include doorbell/trigger.h.
 */
#ifndef DOORBELL_DETAIL_TRIGGER_H
#define DOORBELL_DETAIL_TRIGGER_H

#include "../../doorbell.h"
#include "execute.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * The word by which triggers take turns, in memory of the stream's device, where atomics work: twice the number of the
 * next trigger, plus one while it is being executed. The top bit is set when execution has stopped and only counts are
 * executed.
 */
#define DBL_TURN_STOPPED ((uint64_t)1 << 63)

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
	/* `expected` receives the value that was found. */
	__atomic_compare_exchange_n(turn, &expected, desired, 0, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE);
	return expected;
}

DBL_DEVICE void dbl_turn_pass(uint64_t *turn, uint64_t value)
{
	__atomic_store_n(turn, value, __ATOMIC_RELEASE);
}

#endif

/*
 * Takes the turn of trigger `number`. Returns DOORBELL_OK and writes the old turn to `taken`, or returns a code and
 * changes nothing.
 */
DBL_EXECUTOR int dbl_turn_take(uint64_t *turn, uint64_t number, struct dbl_run *run, uint64_t *taken)
{
	const uint64_t mine = number << 1;
	uint64_t expected = mine, seen, place;
	uint32_t attempt;

	for (attempt = 0;; attempt++) {
		/* Tries the exchange without a load before it, because usually the turn is right: one memory round
		   trip before the doorbell. */
		seen = dbl_turn_exchange(turn, expected, expected + 1);
		if (seen == expected) {
			*taken = seen;
			return DOORBELL_OK;
		}
		place = seen & ~DBL_TURN_STOPPED;
		if (place > mine)
			return DOORBELL_ESTATE;
		/* The value when it is this trigger's turn. */
		expected = mine | (seen & DBL_TURN_STOPPED);
		if (place == mine)
			continue;
		if (dbl_run_is_late(run, dbl_now_ns()))
			return DOORBELL_ETIMEOUT;
		if (DBL_PAUSE(attempt))
			return DOORBELL_EASYNC;
	}
}

#ifdef __cplusplus
}
#endif

#endif
