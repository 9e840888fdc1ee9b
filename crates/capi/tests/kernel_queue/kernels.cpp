/* Kernels for the calls of warps and blocks, as a program in CUDA C++ would have them: a block of them, of which BLOCK is the number. */
#include "kernels.h"

static inline uint32_t thread_of_block()
{
	return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

static doorbell_local here_at(const job *job, uint64_t offset, uint64_t len_bytes)
{
	return doorbell_device_local_at(job->local, offset, len_bytes);
}

static doorbell_remote there_at(const job *job, uint64_t offset, uint64_t len_bytes)
{
	return doorbell_device_remote_at(job->remote, offset, len_bytes);
}

/* Each lane's operation at its own place; of up to three groups of a warp at once. With `groups` 1 of one group alone, and round by round. */
__global__ void puts(const job *job)
{
	const uint32_t thread = thread_of_block(), warp = thread / LANES, lane = thread % LANES;

	for (uint32_t round = 0; round < job->rounds; round++) {
		const uint32_t group = group_of(round, lane), operation = operation_of(job, blockIdx.x, thread, round);
		uint32_t upto = 0, slot;
		int code;

		if (job->groups == 1)
			__syncwarp();
		if (group >= job->groups)
			continue;
		const uint32_t lanes = mask_of(job, warp, round, group), count = __popc(lanes), rank = dbl_rank(lanes);
		if (!adds(round)) {
			job->source[operation] = word_of(operation);
			code = doorbell_device_put_lanes(&job->queue, lanes, here_at(job, 8 * operation, 8), there_at(job, 8 * operation, 8), BOUND,
							 &upto);
		} else {
			code = doorbell_device_reserve_lanes(&job->queue, lanes, BOUND, &slot);
			EXPECT(code == DOORBELL_OK);
			EXPECT(doorbell_device_write_fetch_add(&job->queue, slot, rank + 1 < count ? (uint32_t)DOORBELL_WORK_UNSIGNALED : 0u,
							       here_at(job, 8 * (job->operations + operation), 8),
							       there_at(job, 8 * job->operations, 8), 1) == DOORBELL_OK);
			upto = slot - rank + count;
			code = doorbell_device_submit_lanes(&job->queue, lanes, slot);
		}
		EXPECT(code == DOORBELL_OK);
		job->outcomes[operation].code = code;
		job->outcomes[operation].upto = upto;
		/* Some wait for theirs, and find it. */
		if ((round * 31 + thread * 7) % 61 == 0) {
			EXPECT(doorbell_device_wait(&job->queue, upto, BOUND) == DOORBELL_OK);
			EXPECT(adds(round) || job->target[operation] == word_of(operation));
		}
	}
}

/* One put of 8 bytes by each lane of `mask`, with a bound of its own. */
__global__ void one_put(const job *job)
{
	outcome *outcome = &job->outcomes[thread_of_block()];

	if (job->mask >> dbl_lane() & 1)
		outcome->code = doorbell_device_put_lanes(&job->queue, job->mask, here_at(job, 0, 8), there_at(job, 0, 8), job->timeout_ns,
							  &outcome->upto);
}

/* One put of 8 bytes by all lanes of `mask` together. */
__global__ void one_put_together(const job *job)
{
	outcome *outcome = &job->outcomes[thread_of_block()];

	if (job->mask >> dbl_lane() & 1)
		outcome->code = doorbell_device_put_warp(&job->queue, job->mask, here_at(job, 0, 8), there_at(job, 0, 8), job->timeout_ns,
							 &outcome->upto);
}

/* The block's put with a signal, and its wait for all that was posted before: the two codes of each thread. */
__global__ void one_signal(const job *job)
{
	outcome *outcome = &job->outcomes[thread_of_block()];
	const uint32_t posted = dbl_load_dword(&dbl_queue_state(&job->queue)->reserved);
	uint32_t upto = 77;

	outcome->code = doorbell_device_put_signal_block(&job->queue, here_at(job, 0, 8), there_at(job, 0, 8), there_at(job, 8, 8),
							 DOORBELL_SIGNAL_SET, 1, job->timeout_ns, &upto);
	EXPECT((upto == 77) == (outcome->code != DOORBELL_OK));
	outcome->upto = (uint32_t)doorbell_device_wait_block(&job->queue, posted, job->timeout_ns);
	/* All were posted, and by no other thread. */
	EXPECT(doorbell_device_quiet_block(&job->queue, job->timeout_ns) == (int)outcome->upto);
	EXPECT(doorbell_device_flush_block(&job->queue, job->timeout_ns) == (int)outcome->upto);
}

/* What was put before fails once the lanes of `mask` have their slots, and before they submit them. */
__global__ void failure_between(const job *job)
{
	uint32_t upto = 0, slot;

	if ((job->mask >> dbl_lane() & 1) == 0)
		return;
	/* Not as its first lane does, which submits for all: another finds it. */
	const bool finds = dbl_rank(job->mask) == 1;
	if (finds)
		EXPECT(doorbell_device_put(&job->queue, here_at(job, 0, 8), there_at(job, 0, 8), BOUND, &upto) == DOORBELL_OK);
	EXPECT(doorbell_device_reserve_lanes(&job->queue, job->mask, BOUND, &slot) == DOORBELL_OK);
	doorbell_device_write_nop(&job->queue, slot, 0);
	if (finds)
		EXPECT(doorbell_device_wait(&job->queue, upto, BOUND) == DOORBELL_EWORK);
	job->outcomes[thread_of_block()].code = doorbell_device_submit_lanes(&job->queue, job->mask, slot);
}

/* The put of one lane of `mask` is longer than any NIC sends. */
__global__ void one_too_long(const job *job)
{
	doorbell_local local = here_at(job, 0, 8);
	doorbell_remote remote = there_at(job, 0, 8);

	if (dbl_rank(job->mask) == 1)
		local.len_bytes = remote.len_bytes = DOORBELL_MESSAGE_BYTES_MAX + 1;
	if (job->mask >> dbl_lane() & 1)
		job->outcomes[thread_of_block()].code =
			doorbell_device_put_lanes(&job->queue, job->mask, local, remote, job->timeout_ns, nullptr);
}

/* The last lane of the first warp comes when the second warp's put has arrived; the others are there long before. */
__global__ void late_lane(const job *job)
{
	const doorbell_local local = here_at(job, 0, 8);
	const doorbell_remote remote = there_at(job, 0, 8);
	const uint32_t thread = thread_of_block();
	uint32_t *flag = reinterpret_cast<uint32_t *>(job->data), upto;

	if (thread < LANES) {
		if (thread == LANES - 1)
			EXPECT(doorbell_device_wait_value32(flag, DOORBELL_WAIT_GEQ, 1, BOUND, nullptr) == DOORBELL_OK);
		EXPECT(doorbell_device_put_lanes(&job->queue, 0xffffffff, local, remote, BOUND, &upto) == DOORBELL_OK);
		EXPECT(doorbell_device_wait(&job->queue, upto, BOUND) == DOORBELL_OK);
	} else if (thread == LANES) {
		usleep(50000);
		EXPECT(doorbell_device_put(&job->queue, local, remote, BOUND, &upto) == DOORBELL_OK);
		/* Which is less than the other lanes wait. */
		EXPECT(doorbell_device_wait(&job->queue, upto, BOUND / 2) == DOORBELL_OK);
		doorbell_device_write_value32(flag, 1);
	}
}

/*
 * What all threads of the block have written goes out with a signal, and is brought back. Of the local memory each block has a part to send
 * from, and one where it comes back; of the remote one each round of each block has a part, and a word for its signal.
 */
__global__ void put_signal_and_get(const job *job)
{
	const uint32_t thread = thread_of_block(), other = (thread + 1) % job->threads, bytes = 8 * job->threads;
	const uint64_t from = 2 * bytes * blockIdx.x;
	uint64_t *source = job->source + 2 * job->threads * blockIdx.x;

	for (uint32_t round = 0; round < job->rounds; round++) {
		const uint32_t part = blockIdx.x * job->rounds + round;
		const doorbell_remote to = there_at(job, (uint64_t)bytes * part, bytes);
		/* Further than any lane gets. */
		uint32_t upto = 1u << 30, read = 0;

		source[thread] = word_of(part * job->threads + thread);
		EXPECT(doorbell_device_put_signal_block(&job->queue, here_at(job, from, bytes), to, there_at(job, 8 * (job->operations + part), 8),
							DOORBELL_SIGNAL_SET, word_of(part), BOUND, &upto) == DOORBELL_OK);
		EXPECT(doorbell_device_wait_block(&job->queue, upto, BOUND) == DOORBELL_OK);
		/* One after the other, with codes that differ: no completion has got that far. */
		EXPECT(doorbell_device_wait_block(&job->queue, upto + (1u << 30), 0) == DOORBELL_ETIMEOUT);
		EXPECT(doorbell_device_wait_block(&job->queue, upto, BOUND) == DOORBELL_OK);
		EXPECT(doorbell_device_get_block(&job->queue, here_at(job, from + bytes, bytes), to, BOUND, &read) == DOORBELL_OK);
		EXPECT(doorbell_device_wait_block(&job->queue, read, BOUND) == DOORBELL_OK);
		EXPECT(source[job->threads + other] == word_of(part * job->threads + other));
	}
}

/*
 * Each operation by a warp, or by a block: it is made once, and carries what all its threads have stored before. Team t has a part of
 * both memories, of 8 bytes a thread and four words; all teams add to the counter at the beginning of the remote memory.
 */
template <bool BY_WARP> static void scopes_of(const job *job)
{
	const uint32_t thread = thread_of_block(), size = BY_WARP ? lanes_of(job, thread / LANES) : job->threads;
	const uint32_t lanes = BY_WARP ? (uint32_t)((1ull << size) - 1) : 0, member = BY_WARP ? thread % LANES : thread;
	const uint32_t teams = BY_WARP ? (job->threads + LANES - 1) / LANES : 1, team = blockIdx.x * teams + (BY_WARP ? thread / LANES : 0);
	const uint32_t other = (member + 1) % size, stride = 8 * job->threads + 64, bytes = 8 * size;
	const uint64_t part = 64 + (uint64_t)stride * team, words = part + 8 * job->threads;
	uint64_t *source = job->source + part / 8, *target = job->target + part / 8, *flags = job->target + words / 8;
	const doorbell_local from = here_at(job, part, bytes), result = here_at(job, words, 8);
	const doorbell_remote to = there_at(job, part, bytes), counter = there_at(job, 0, 8);
	const auto meet = [&]() {
		if (BY_WARP)
			__syncwarp(lanes);
		else
			__syncthreads();
	};
/* The call of either scope. */
#define TOGETHER(name, ...) \
	(BY_WARP ? doorbell_device_##name##_warp(WITH_QUEUE_##name lanes, __VA_ARGS__) : doorbell_device_##name##_block(WITH_QUEUE_##name __VA_ARGS__))
#define WITH_QUEUE_put &job->queue,
#define WITH_QUEUE_put_imm &job->queue,
#define WITH_QUEUE_put_inline &job->queue,
#define WITH_QUEUE_get &job->queue,
#define WITH_QUEUE_fetch_add &job->queue,
#define WITH_QUEUE_signal &job->queue,
#define WITH_QUEUE_put_signal &job->queue,
#define WITH_QUEUE_wait &job->queue,
#define WITH_QUEUE_quiet &job->queue,
#define WITH_QUEUE_flush &job->queue,
#define WITH_QUEUE_wait_value32
#define WITH_QUEUE_signal_wait_until

	for (uint32_t round = 0; round < job->rounds; round++) {
		const uint64_t tag = word_of(round * 64 + team);
		uint32_t upto = 0;

		source[member] = tag + member;
		EXPECT(TOGETHER(put, from, to, BOUND, &upto) == DOORBELL_OK);
		EXPECT(TOGETHER(wait, upto, BOUND) == DOORBELL_OK);
		EXPECT(target[other] == tag + other);
		meet();
		source[member] = ~tag + member;
		EXPECT(TOGETHER(put_signal, from, to, there_at(job, words, 8), DOORBELL_SIGNAL_ADD, 1, BOUND, &upto) == DOORBELL_OK);
		EXPECT(TOGETHER(signal_wait_until, &flags[0], DOORBELL_CMP_EQ, round + 1, BOUND, nullptr) == DOORBELL_OK);
		EXPECT(target[other] == ~tag + other);
		EXPECT(TOGETHER(quiet, BOUND) == DOORBELL_OK);
		EXPECT(TOGETHER(signal, there_at(job, words + 8, 8), DOORBELL_SIGNAL_SET, round + 1, BOUND, nullptr) == DOORBELL_OK);
		EXPECT(TOGETHER(wait_value32, reinterpret_cast<uint32_t *>(&flags[1]), DOORBELL_WAIT_GEQ, round + 1, BOUND, nullptr) == DOORBELL_OK);
		EXPECT(TOGETHER(signal_wait_until, &flags[1], DOORBELL_CMP_GT, round + 1, 0, nullptr) == DOORBELL_ETIMEOUT);
		source[member] = 0;
		EXPECT(TOGETHER(get, from, to, BOUND, &upto) == DOORBELL_OK);
		EXPECT(TOGETHER(flush, BOUND) == DOORBELL_OK);
		EXPECT(source[other] == ~tag + other);
		meet();
		source[member] = tag - member;
		EXPECT(TOGETHER(put_imm, from, to, round * 64 + team, BOUND, &upto) == DOORBELL_OK);
		EXPECT(TOGETHER(fetch_add, result, counter, 1, BOUND, &upto) == DOORBELL_OK);
		EXPECT(TOGETHER(wait, upto, BOUND) == DOORBELL_OK);
		EXPECT(target[other] == tag - other);
		EXPECT(job->source[words / 8] < job->operations);
		/* The first thread's bytes. */
		const uint64_t mine = tag + 7 * member;
		EXPECT(TOGETHER(put_inline, &mine, 8, there_at(job, words + 16, 8), BOUND, &upto) == DOORBELL_OK);
		EXPECT(TOGETHER(wait, upto, BOUND) == DOORBELL_OK);
		EXPECT(flags[2] == tag);
		/* A refusal is everyone's. */
		EXPECT(TOGETHER(signal, there_at(job, words + 4, 8), DOORBELL_SIGNAL_SET, 1, BOUND, &upto) == DOORBELL_EALIGNMENT);
		meet();
	}
}

__global__ void scopes(const job *job)
{
	if (job->by_warps)
		scopes_of<true>(job);
	else
		scopes_of<false>(job);
}

/* ------------------------------------------------------------------------------------------------------------ triggers */

static int execute_one(const job *job, const doorbell_trigger *trigger, uint64_t timeout_ns)
{
	return job->by_warps ? doorbell_device_trigger_warp(trigger, 0xffffffff, timeout_ns) : doorbell_device_trigger_block(trigger, timeout_ns);
}

/* One trigger, by all of them; the code of each thread. */
__global__ void execute(const job *job)
{
	job->outcomes[thread_of_block()].code = execute_one(job, job->triggers, job->timeout_ns);
}

/*
 * In each round all threads write, and a trigger says so; the next one waits for an answer to each, and what the host has written in place of it
 * is there for all of them.
 */
__global__ void ping(const job *job)
{
	const uint32_t thread = thread_of_block(), other = (thread + 1) % job->threads;

	for (uint32_t round = 0; round < job->rounds; round++) {
		const doorbell_trigger *triggers = &job->triggers[2 * round];

		job->data[thread] = word_of(round * job->threads + thread);
		EXPECT(execute_one(job, &triggers[0], BOUND) == DOORBELL_OK);
		EXPECT(execute_one(job, &triggers[1], BOUND) == DOORBELL_OK);
		EXPECT(job->replies[other] == ~word_of(round * job->threads + other));
		if (round % 4 == 3) {
			EXPECT(execute_one(job, &triggers[0], BOUND) == DOORBELL_ESTATE);
			EXPECT(execute_one(job, &triggers[1], BOUND) == DOORBELL_ESTATE);
		}
	}
}

/* The warps, or the blocks, take turns; each finds what the one before it has written. */
__global__ void relay(const job *job)
{
	const uint32_t size = job->by_warps ? LANES : job->threads, teams = 2 * job->threads / size;
	const uint32_t number = blockIdx.x * job->threads + thread_of_block(), team = number / size, member = number % size;
	const uint32_t other = (member + 1) % size;

	for (uint32_t round = 0; round < job->rounds; round++) {
		const uint32_t turn = round * teams + team;

		job->data[turn * size + member] = word_of(turn * size + member);
		EXPECT(execute_one(job, &job->triggers[turn], BOUND) == DOORBELL_OK);
		if (turn > 0)
			EXPECT(job->data[(turn - 1) * size + other] == word_of((turn - 1) * size + other));
	}
}

/* ------------------------------------------------------------------------------------------- that blocks.h is what it says */

/* A data race: the shuffle has come back, and orders nothing. */
__global__ void shuffle_alone(const job *job)
{
	const uint32_t lane = dbl_lane(), other = (lane + 1) % LANES;

	job->data[lane] = lane;
	EXPECT(__shfl_sync(0xffffffff, lane * 3, (int)other) == other * 3);
	EXPECT(job->data[other] == other);
}

/* None, behind the barrier; also of the half of a warp, whose other half does not come. */
__global__ void warp_barrier(const job *job)
{
	const uint32_t lane = dbl_lane(), other = (lane + 1) % 16;

	if (lane >= 16)
		return;
	for (uint32_t round = 0; round < job->rounds; round++) {
		job->data[lane] = round;
		__syncwarp(0xffff);
		EXPECT(job->data[other] == round);
		__syncwarp(0xffff);
	}
}

__global__ void block_barrier(const job *job)
{
	const uint32_t thread = thread_of_block(), other = (thread + 40) % job->threads;

	for (uint32_t round = 0; round < job->rounds; round++) {
		job->data[thread] = round;
		__syncthreads();
		EXPECT(job->data[other] == round);
		__syncthreads();
	}
}

__global__ void own_shared(const job *job)
{
	__shared__ uint32_t number, count;

	for (uint32_t round = 0; round < job->rounds; round++) {
		if (thread_of_block() == 0) {
			number = blockIdx.x;
			count = 0;
		}
		__syncthreads();
		__atomic_fetch_add(&count, 1, __ATOMIC_RELAXED);
		EXPECT(number == blockIdx.x);
		__syncthreads();
		EXPECT(count == job->threads);
		__syncthreads();
	}
}

#define CALL(kernel) [](const void *argument) { kernel(static_cast<const job *>(argument)); }
#define BLOCK_NAME_OF(number) block_##number
#define BLOCK_NAME(number) BLOCK_NAME_OF(number)

/* As in enum kernel. */
const kernel_of_block BLOCK_NAME(BLOCK)[KERNELS] = {
	CALL(puts),	     CALL(one_put), CALL(one_signal), CALL(failure_between), CALL(late_lane),	 CALL(one_too_long),  CALL(put_signal_and_get),
	CALL(one_put_together), CALL(scopes), CALL(execute),	     CALL(ping),    CALL(relay),      CALL(shuffle_alone),   CALL(warp_barrier), CALL(block_barrier), CALL(own_shared),
};
