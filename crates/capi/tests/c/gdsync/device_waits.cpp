/* The waits of gdsync/device.cuh, in a thread of a processor, with a clock of this program. */
#include <time.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* Each reading adds this to the clock, and the reading of that number sets it back by a second first. */
static uint64_t clock_ns = 10000000000u, step_ns;
static int readings, back_at;
/* The word that a wait waits for, and the reading that stores `met`. */
static uint32_t word, met;
static int met_at;

static int own_clock(struct timespec *now)
{
	readings++;
	if (readings == back_at)
		clock_ns -= 1000000000u;
	if (readings == met_at)
		__atomic_store_n(&word, met, __ATOMIC_RELEASE);
	clock_ns += step_ns;
	now->tv_sec = (time_t)(clock_ns / 1000000000u);
	now->tv_nsec = (long)(clock_ns % 1000000000u);
	return 0;
}
#define clock_gettime(clock, now) own_clock(now)

#include <doorbell/queue.h>
#include <doorbell/signal.h>
#include <gdsync.h>

/* As nvcc would see it, without what is for a GPU alone. */
#define DOORBELL_DEVICE_CUH
#define __CUDACC__
#define __device__
#define __host__
#include <gdsync/device.cuh>

#define EXPECT(condition)                                                                                    \
	do {                                                                                                 \
		if (!(condition)) {                                                                          \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                      \
			exit(1);                                                                             \
		}                                                                                            \
	} while (0)

/* Waits until the word, 0 at first, meets the condition with the value 6. */
static int waits(gdsync::wait_cond_t condition, int back, int stored_at, uint32_t stored)
{
	gdsync::isem32_t sem;
	sem.ptr = &word;
	sem.value = 6;
	word = condition == GDS_WAIT_COND_NOR ? UINT32_MAX : 0;
	readings = 0;
	back_at = back;
	met_at = stored_at;
	met = stored;
	return gdsync::device::wait(sem, condition);
}

int main()
{
	static const struct {
		gdsync::wait_cond_t condition;
		uint32_t met;
	} all[] = {{GDS_WAIT_COND_EQ, 6}, {GDS_WAIT_COND_GEQ, 7}, {GDS_WAIT_COND_AND, 2}, {GDS_WAIT_COND_NOR, 0}};
	for (const auto &one : all) {
		step_ns = 1000;
		EXPECT(waits(one.condition, 0, 1000, one.met) == 0);
		/* NVIDIA does not guarantee that the clock never steps back. Nothing has passed then. */
		EXPECT(waits(one.condition, 20, 1000, one.met) == 0);
		/* The time limit is one. */
		step_ns = 1000000;
		EXPECT(waits(one.condition, 0, 100000000, one.met) == gdsync::ERROR_TIMEOUT);
		EXPECT(readings > 1900 && readings < 20000);
	}
	EXPECT(waits((gdsync::wait_cond_t)9, 0, 0, 0) == gdsync::ERROR_INVALID);
	puts("done");
	return 0;
}
