/* What a model is written with: the names of GenMC (doc/manual.md there), and a clock that stands still: bounds are 0, or for ever. */
#ifndef DOORBELL_MODEL_RIG_H
#define DOORBELL_MODEL_RIG_H

#include <assert.h>
#include <pthread.h>
#include <stdint.h>
#include <time.h>

void __VERIFIER_assume(_Bool);

#define REQUIRE(condition) assert(condition)
/* Executions in which it does not hold are left out: those of a thread that waits, and has not yet seen what it waits for. */
#define ASSUME(condition) __VERIFIER_assume(condition)
/*
 * A thread that would look again is not followed: the execution in which it looks later shows the same. So the models do not cover what
 * doorbell_wait() says of a failure, and of a thread that holds the polling for longer than others try.
 */
#define DBL_TURN() ASSUME(0)

/* Runs a thread of each, up to RUN_MOST, and comes back when all are done. */
#define RUN_MOST 4
static inline void model_run(void *(*const functions[RUN_MOST])(void *))
{
	pthread_t threads[RUN_MOST];
	int at;

	for (at = 0; at < RUN_MOST && functions[at]; at++)
		pthread_create(&threads[at], 0, functions[at], 0);
	for (at = 0; at < RUN_MOST && functions[at]; at++)
		pthread_join(threads[at], 0);
}
#define RUN(...) model_run((void *(*const[RUN_MOST])(void *)){__VA_ARGS__})

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
