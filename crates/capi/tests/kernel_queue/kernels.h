/* What kernels.cpp, which is compiled once for each block, and blocks.cpp have in common. */
#ifndef KERNELS_H
#define KERNELS_H

#include "blocks.h"

#include <doorbell.h>

struct doorbell_queue_view;

/* What the kernels call back: once in each turn of a wait, and the hooks of doorbell/queue.h. */
void turned();
void freed(const struct doorbell_queue_view *queue, uint32_t from, uint32_t upto);
void rang(const struct doorbell_queue_view *queue);

#define DBL_HAS_BLOCKS
#define DBL_TURN() turned()
#define DBL_PAUSE(turn) ((void)(turn), sched_yield(), 0)
#define DBL_SLOTS_FREED(queue, from, upto) freed(queue, from, upto)
#define DBL_RANG(queue) rang(queue)

#include <doorbell/collective.cuh>
#include <doorbell/trigger.h>

#define SECOND 1000000000ull
#define BOUND (40 * SECOND)

#define EXPECT(condition)                                                                                              \
	do {                                                                                                           \
		if (!(condition)) {                                                                                    \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                \
			_exit(1);                                                                                      \
		}                                                                                                      \
	} while (0)

/* What a call gave. */
struct outcome {
	int code;
	uint32_t upto;
};

/* What kernels are given, by address. Which fields, they say. */
struct job {
	struct doorbell_queue_view queue;
	doorbell_local local;
	doorbell_remote remote;
	uint64_t *source, *target; /* where the two are in this process */
	uint32_t threads, rounds, groups, mask;
	uint32_t operations; /* of all blocks together, at most */
	uint64_t timeout_ns;
	struct outcome *outcomes;
	const struct doorbell_trigger *triggers;
	uint64_t *data, *replies;
	bool by_warps;
};

enum kernel {
	PUTS,
	ONE_PUT,
	ONE_SIGNAL,
	FAILURE_BETWEEN,
	LATE_LANE,
	ONE_TOO_LONG,
	PUT_SIGNAL_AND_GET,
	ONE_PUT_TOGETHER,
	SCOPES,
	EXECUTE,
	PING,
	RELAY,
	SHUFFLE_ALONE,
	WARP_BARRIER,
	BLOCK_BARRIER,
	OWN_SHARED,
	KERNELS
};

typedef void (*kernel_of_block)(const void *job);
extern const kernel_of_block block_0[KERNELS], block_1[KERNELS], block_2[KERNELS];

/* A word that is no other's. */
static inline uint64_t word_of(uint32_t number)
{
	return (uint64_t)~number << 32 | number;
}

/* How many of the lanes there are in a warp of a block. */
static inline uint32_t lanes_of(const job *job, uint32_t warp)
{
	return job->threads - warp * LANES < LANES ? job->threads - warp * LANES : LANES;
}

/*
 * The lanes that post together in a round: of those of a warp that are there each is in one of three groups, or in none. First all of them, then
 * each lane alone, then as it comes.
 */
static inline uint32_t group_of(uint32_t round, uint32_t lane)
{
	const uint32_t pattern = round % 24;
	uint32_t mixed;

	if (pattern == 0)
		return 0;
	if (pattern == 1)
		return lane % 8 == 7 ? 3 : lane % 3;
	mixed = (pattern * 2654435761u) ^ (lane * 2246822519u);
	mixed = (mixed ^ mixed >> 15) * 3266489917u;
	return mixed >> 28 & 3;
}

static inline uint32_t mask_of(const job *job, uint32_t warp, uint32_t round, uint32_t group)
{
	uint32_t lane, mask = 0;

	for (lane = 0; lane < lanes_of(job, warp); lane++)
		mask |= (uint32_t)(group_of(round, lane) == group) << lane;
	return mask;
}

/* Of three rounds one adds, by the steps that a put takes in one call. */
static inline bool adds(uint32_t round)
{
	return round % 3 == 2;
}

static inline uint32_t operation_of(const job *job, uint32_t block, uint32_t thread, uint32_t round)
{
	return (block * job->threads + thread) * job->rounds + round;
}

#endif
