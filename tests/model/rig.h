/* What a model is written with: the names of GenMC (doc/manual.md there), and a clock that stands still: bounds are 0, or for ever. */
#ifndef DOORBELL_MODEL_RIG_H
#define DOORBELL_MODEL_RIG_H

#include <assert.h>
#include <pthread.h>
#include <stdint.h>
#include <time.h>

void __VERIFIER_assume(_Bool);

#define REQUIRE(condition) assert(condition)
/* Executions in which it does not hold are none: a thread that waits, and has not yet seen what it waits for. */
#define ASSUME(condition) __VERIFIER_assume(condition)
/*
 * Who would look again is not followed: the execution in which it looks later shows the same. So of a failure and a thread that holds the polling for
 * longer than others try, of which doorbell_wait() speaks, the models say nothing.
 */
#define DBL_TURN() ASSUME(0)
#define SPAWN(thread, function) pthread_create(&(thread), 0, function, 0)
#define JOIN(thread) pthread_join(thread, 0)

static inline int model_clock(struct timespec *now)
{
	now->tv_sec = 0;
	now->tv_nsec = 0;
	return 0;
}
#define clock_gettime(clock, now) model_clock(now)

/* Word by word, as kernels copy: the checker tells accesses of different widths to the same place apart. */
static inline void model_copy(void *to, const void *from, size_t len_bytes)
{
	size_t at;

	if (len_bytes % 8 == 0)
		for (at = 0; at < len_bytes / 8; at++)
			((uint64_t *)to)[at] = ((const uint64_t *)from)[at];
	else
		for (at = 0; at < len_bytes / 4; at++)
			((uint32_t *)to)[at] = ((const uint32_t *)from)[at];
}
#define memcpy(to, from, len_bytes) model_copy(to, from, len_bytes)

#endif
