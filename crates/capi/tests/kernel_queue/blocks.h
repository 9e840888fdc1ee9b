/*
 * Warps and blocks of threads of a processor: what CUDA C++ has for them, as far as doorbell/collective.cuh and doorbell/trigger.h use it. A
 * thread of a GPU is a thread of the system. No more than CUDA promises is given:
 *
 *     __syncwarp, __syncthreads   order memory among those that take part
 *     __shfl_sync                 brings a value, and orders no memory: all of it is relaxed, so that ThreadSanitizer sees a race behind it
 *     __shared__                  one object for a block: each block is a translation unit of its own (`-DBLOCK=n`), and it is `static` there
 *     a mask                      the lanes that are not in it take no part; groups of a warp with masks of their own meet at the same time
 *
 * Threads come late as they like: now and then one lingers before it comes to a meeting, or after. What CUDA leaves undefined ends the program,
 * which says what it was: lanes that are not in their own mask, a shuffle from a lane that is not, threads that never come.
 *
 * What is not here: lanes that run together (every access of a lane is by itself, and lanes are as far apart as the system lets them be), exited
 * threads that CUDA no longer waits for, and what the memory of a GPU does.
 */
#ifndef BLOCKS_H
#define BLOCKS_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define __global__ static
#define __device__
#define __grid_constant__
#define __shared__ static

/* Longer than any of them waits on purpose. */
#define BLOCKS_LIMIT_S 50

constexpr uint32_t BLOCKS_MOST = 3, WARPS_MOST = 4, MASKS_MOST = 256, LANES = 32;

struct blocks_index {
	unsigned x, y, z;
};

/* Where `count` threads wait for each other, again and again. */
struct blocks_meeting {
	uint32_t arrived; /* never reset: its value gives the round */
	uint32_t rounds;  /* that are over */
};

/* The lanes that have a mask in common. */
struct blocks_group {
	uint32_t mask; /* 0: of none yet */
	struct blocks_meeting barrier, shuffle;
	uint64_t words[2][LANES];   /* what each brings to a shuffle: its round << 32 | value */
	uint32_t shuffles[LANES]; /* each lane's own */
};

struct blocks_block {
	uint32_t thread_count;
	struct blocks_meeting barrier;
	struct blocks_group groups[WARPS_MOST][MASKS_MOST];
};

struct blocks_thread {
	pthread_t thread;
	struct blocks_block *block;
	struct blocks_index index, block_index, shape;
	uint32_t number; /* in its block */
	uint32_t seed;
	void (*kernel)(const void *argument);
	const void *argument;
};

/* CUDA's names. */
inline thread_local blocks_index threadIdx, blockIdx, blockDim;
inline thread_local blocks_thread *blocks_self;

[[noreturn]] static inline void blocks_fail(const char *what, uint32_t mask)
{
	fprintf(stderr, "block %u, thread %u, mask %#x: %s\n", blockIdx.x, blocks_self->number, mask, what);
	_exit(2);
}

/* By chance, a while or none. */
static inline void blocks_linger()
{
	blocks_self->seed = blocks_self->seed * 1664525 + 1013904223;
	const uint32_t chance = blocks_self->seed >> 22;
	if (chance < 4)
		usleep(100);
	else if (chance < 64)
		sched_yield();
}

/* No call of the C library, of which ThreadSanitizer might think that it orders something. */
static inline void blocks_sleep(uint32_t *word, uint32_t seen, const char *what, uint32_t mask)
{
	const timespec limit = {BLOCKS_LIMIT_S, 0};
	if (syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, &limit, nullptr, 0) == -1 && errno == ETIMEDOUT)
		blocks_fail(what, mask);
}

/* Comes back when all have come. A release and an acquire if it orders memory, else neither. */
template <bool ORDERS> static inline void blocks_meet(blocks_meeting *meeting, uint32_t count, const char *what, uint32_t mask)
{
	constexpr int arrive = ORDERS ? __ATOMIC_ACQ_REL : __ATOMIC_RELAXED;
	constexpr int leave = ORDERS ? __ATOMIC_RELEASE : __ATOMIC_RELAXED;
	constexpr int look = ORDERS ? __ATOMIC_ACQUIRE : __ATOMIC_RELAXED;

	blocks_linger();
	const uint32_t ticket = __atomic_fetch_add(&meeting->arrived, 1, arrive), round = ticket / count;
	if (ticket % count == count - 1) {
		__atomic_store_n(&meeting->rounds, round + 1, leave);
		syscall(SYS_futex, &meeting->rounds, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
	} else {
		uint32_t rounds;
		while ((int32_t)((rounds = __atomic_load_n(&meeting->rounds, look)) - round) <= 0)
			blocks_sleep(&meeting->rounds, rounds, what, mask);
	}
	blocks_linger();
}

static inline uint32_t dbl_lane()
{
	return blocks_self->number % LANES;
}

static inline uint32_t dbl_lanes_before()
{
	return (1u << dbl_lane()) - 1;
}

static inline int __popc(unsigned bits)
{
	return __builtin_popcount(bits);
}

static inline int __ffs(int bits)
{
	return __builtin_ffs(bits);
}

/* Of the calling thread's warp. Which is whose is settled without order, too. */
static inline blocks_group *blocks_group_of(uint32_t mask)
{
	if ((mask >> dbl_lane() & 1) == 0)
		blocks_fail("this lane is not in its mask", mask);
	const uint32_t warp_lanes = blocks_self->block->thread_count - blocks_self->number / LANES * LANES;
	if (warp_lanes < LANES && mask >> warp_lanes != 0)
		blocks_fail("the mask has lanes that the warp has not", mask);
	for (uint32_t at = 0; at < MASKS_MOST; at++) {
		blocks_group *group = &blocks_self->block->groups[blocks_self->number / LANES][(mask * 2654435769u + at) % MASKS_MOST];
		uint32_t found = 0;
		if (__atomic_compare_exchange_n(&group->mask, &found, mask, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED) || found == mask)
			return group;
	}
	blocks_fail("the test has too many masks", mask);
}

static inline void __syncwarp(unsigned mask = 0xffffffff)
{
	blocks_meet<true>(&blocks_group_of(mask)->barrier, __popc(mask), "__syncwarp waits for ever", mask);
}

static inline void __syncthreads()
{
	blocks_meet<true>(&blocks_self->block->barrier, blocks_self->block->thread_count, "__syncthreads waits for ever", 0);
}

template <typename T> static inline T __shfl_sync(unsigned mask, T value, int from)
{
	static_assert(sizeof(T) == 4, "of words");
	blocks_group *group = blocks_group_of(mask);
	const uint32_t lane = dbl_lane(), round = ++group->shuffles[lane];
	uint64_t *words = group->words[round % 2], word;
	uint32_t bits;

	if ((mask >> (from & 31) & 1) == 0)
		blocks_fail("__shfl_sync from a lane that takes no part", mask);
	memcpy(&bits, &value, sizeof(bits));
	/* A lane that stores here again, two rounds later, has met all lanes in between, which have read this value by then. */
	__atomic_store_n(&words[lane], (uint64_t)round << 32 | bits, __ATOMIC_RELAXED);
	blocks_meet<false>(&group->shuffle, __popc(mask), "__shfl_sync waits for ever", mask);
	/* The meeting has ordered nothing. */
	do
		word = __atomic_load_n(&words[from & 31], __ATOMIC_RELAXED);
	while (word >> 32 != round);
	bits = (uint32_t)word;
	memcpy(&value, &bits, sizeof(bits));
	return value;
}

/* By shuffles: of a few lanes, and seldom. */
static inline int __any_sync(unsigned mask, int predicate)
{
	int any = 0;

	for (uint32_t lane = 0; lane < LANES; lane++)
		if (mask >> lane & 1)
			any |= __shfl_sync(mask, (int)(predicate != 0), (int)lane);
	return any;
}

static inline void *blocks_run(void *argument)
{
	blocks_self = (blocks_thread *)argument;
	threadIdx = blocks_self->index;
	blockIdx = blocks_self->block_index;
	blockDim = blocks_self->shape;
	blocks_self->kernel(blocks_self->argument);
	return nullptr;
}

/* Each of the kernels is a block, with threads as `shape` says; comes back when all are done. */
static inline void blocks_launch(void (*const *kernels)(const void *), uint32_t block_count, blocks_index shape, const void *argument)
{
	static uint32_t seed;
	const uint32_t threads = shape.x * shape.y * shape.z;
	auto *blocks = (blocks_block *)calloc(block_count, sizeof(blocks_block));
	auto *all = (blocks_thread *)calloc(block_count * threads, sizeof(blocks_thread));

	if (threads > WARPS_MOST * LANES || block_count > BLOCKS_MOST || !blocks || !all)
		abort();
	for (uint32_t at = 0; at < block_count * threads; at++) {
		const uint32_t number = at % threads;
		blocks[at / threads].thread_count = threads;
		all[at].block = &blocks[at / threads];
		all[at].number = number;
		all[at].index = {number % shape.x, number / shape.x % shape.y, number / shape.x / shape.y};
		all[at].block_index = {at / threads, 0, 0};
		all[at].shape = shape;
		all[at].seed = ++seed * 2654435761u;
		all[at].kernel = kernels[at / threads];
		all[at].argument = argument;
	}
	for (uint32_t at = 0; at < block_count * threads; at++)
		if (pthread_create(&all[at].thread, nullptr, blocks_run, &all[at]) != 0)
			abort();
	for (uint32_t at = 0; at < block_count * threads; at++)
		if (pthread_join(all[at].thread, nullptr) != 0)
			abort();
	free(all);
	free(blocks);
}

#endif
