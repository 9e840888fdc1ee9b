/* Kernels for the calls of warps and blocks, as a program in CUDA C++ would have them: a block of them, of which BLOCK is the number. */
#include "kernels.h"

static inline uint32_t thread_of_block()
{
	return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

/* Each lane's operation at its own place; of up to three groups of a warp at once. With `groups` 1 of one group alone, and round by round. */
__global__ void puts(const job *job)
{
	const uint32_t thread = thread_of_block(), warp = thread / LANES, lane = thread % LANES;

	for (uint32_t round = 0; round < job->rounds; round++) {
		const uint32_t group = group_of(round, lane), operation = operation_of(job, blockIdx.x, thread, round);
		const doorbell_remote remote = job->remote;
		const doorbell_sge local = job->local;
		uint32_t upto = 0, slot;
		int code;

		if (job->groups == 1)
			__syncwarp();
		if (group >= job->groups)
			continue;
		const uint32_t lanes = mask_of(job, warp, round, group), count = __popc(lanes), rank = dbl_rank(lanes);
		if (!adds(round)) {
			job->source[operation] = word_of(operation);
			code = doorbell_put_warp(&job->queue, lanes, local.addr + 8 * operation, local.lkey, 8,
						 remote.addr + 8 * operation, remote.rkey, BOUND, &upto);
		} else {
			code = doorbell_reserve_warp(&job->queue, lanes, BOUND, &slot);
			EXPECT(code == DOORBELL_OK);
			doorbell_write_add(&job->queue, slot, rank + 1 < count ? (uint32_t)DOORBELL_WORK_UNSIGNALED : 0u,
					   local.addr + 8 * (job->operations + operation), local.lkey,
					   remote.addr + 8 * job->operations, remote.rkey, 1);
			upto = slot - rank + count;
			code = doorbell_submit_warp(&job->queue, lanes, slot);
		}
		EXPECT(code == DOORBELL_OK);
		job->outcomes[operation].code = code;
		job->outcomes[operation].upto = upto;
		/* Some wait for theirs, and find it. */
		if ((round * 31 + thread * 7) % 61 == 0) {
			EXPECT(doorbell_wait(&job->queue, upto, BOUND) == DOORBELL_OK);
			EXPECT(adds(round) || job->target[operation] == word_of(operation));
		}
	}
}

/* One put of 8 bytes by each lane of `mask`, with a bound of its own. */
__global__ void one_put(const job *job)
{
	outcome *outcome = &job->outcomes[thread_of_block()];

	if (job->mask >> dbl_lane() & 1)
		outcome->code = doorbell_put_warp(&job->queue, job->mask, job->local.addr, job->local.lkey, 8, job->remote.addr,
						  job->remote.rkey, job->timeout_ns, &outcome->upto);
}

/* The block's put with a signal, and its wait for all that was posted before: the two codes of each thread. */
__global__ void one_signal(const job *job)
{
	outcome *outcome = &job->outcomes[thread_of_block()];
	const uint32_t posted = dbl_load_dword(&dbl_queue_state(&job->queue)->reserved);
	uint32_t upto = 77;

	outcome->code = doorbell_put_signal_block(&job->queue, job->local.addr, job->local.lkey, 8, job->remote.addr, job->remote.rkey,
						  job->remote.addr + 8, job->remote.rkey, 1, job->timeout_ns, &upto);
	EXPECT((upto == 77) == (outcome->code != DOORBELL_OK));
	outcome->upto = (uint32_t)doorbell_wait_block(&job->queue, posted, job->timeout_ns);
}

/* What was put before fails once the lanes of `mask` have their slots, and before they submit them. */
__global__ void failure_between(const job *job)
{
	const doorbell_sge local = job->local;
	uint32_t upto = 0, slot;

	if ((job->mask >> dbl_lane() & 1) == 0)
		return;
	/* Not as its first lane does, which submits for all: another finds it. */
	const bool finds = dbl_rank(job->mask) == 1;
	if (finds)
		EXPECT(doorbell_put(&job->queue, local.addr, local.lkey, 8, job->remote.addr, job->remote.rkey, BOUND, &upto) ==
		       DOORBELL_OK);
	EXPECT(doorbell_reserve_warp(&job->queue, job->mask, BOUND, &slot) == DOORBELL_OK);
	doorbell_write_nop(&job->queue, slot, 0);
	if (finds)
		EXPECT(doorbell_wait(&job->queue, upto, BOUND) == DOORBELL_EWORK);
	job->outcomes[thread_of_block()].code = doorbell_submit_warp(&job->queue, job->mask, slot);
}

/* The put of one lane of `mask` is longer than any NIC sends. */
__global__ void one_too_long(const job *job)
{
	const uint32_t len_bytes = dbl_rank(job->mask) == 1 ? DOORBELL_MESSAGE_BYTES_MAX + 1 : 8;

	if (job->mask >> dbl_lane() & 1)
		job->outcomes[thread_of_block()].code =
			doorbell_put_warp(&job->queue, job->mask, job->local.addr, job->local.lkey, len_bytes, job->remote.addr,
					  job->remote.rkey, job->timeout_ns, nullptr);
}

/* The last lane of the first warp comes when the second warp's put has arrived; the others are there long before. */
__global__ void late_lane(const job *job)
{
	const uint32_t thread = thread_of_block();
	uint32_t *flag = reinterpret_cast<uint32_t *>(job->data), upto;

	if (thread < LANES) {
		if (thread == LANES - 1)
			EXPECT(doorbell_kernel_wait_value32(flag, DOORBELL_WAIT_GEQ, 1, BOUND, nullptr) == DOORBELL_OK);
		EXPECT(doorbell_put_warp(&job->queue, 0xffffffff, job->local.addr, job->local.lkey, 8, job->remote.addr, job->remote.rkey,
					 BOUND, &upto) == DOORBELL_OK);
		EXPECT(doorbell_wait(&job->queue, upto, BOUND) == DOORBELL_OK);
	} else if (thread == LANES) {
		usleep(50000);
		EXPECT(doorbell_put(&job->queue, job->local.addr, job->local.lkey, 8, job->remote.addr, job->remote.rkey, BOUND, &upto) ==
		       DOORBELL_OK);
		/* Which is less than the other lanes wait. */
		EXPECT(doorbell_wait(&job->queue, upto, BOUND / 2) == DOORBELL_OK);
		doorbell_kernel_write_value32(flag, 1);
	}
}

/*
 * What all threads of the block have written goes out with a signal, and is brought back. Of the local memory each block has a part to send
 * from, and one where it comes back; of the remote one each round of each block has a part, and a word for its signal.
 */
__global__ void put_signal_and_get(const job *job)
{
	__shared__ uint32_t read;
	const uint32_t thread = thread_of_block(), other = (thread + 1) % job->threads, bytes = 8 * job->threads;
	const uint64_t from = job->local.addr + 2 * bytes * blockIdx.x;
	uint64_t *source = job->source + 2 * job->threads * blockIdx.x;

	for (uint32_t round = 0; round < job->rounds; round++) {
		const uint32_t part = blockIdx.x * job->rounds + round;
		const uint64_t to = job->remote.addr + (uint64_t)bytes * part;
		/* Further than any lane gets. */
		uint32_t upto = 1u << 30;

		source[thread] = word_of(part * job->threads + thread);
		EXPECT(doorbell_put_signal_block(&job->queue, from, job->local.lkey, bytes, to, job->remote.rkey,
						 job->remote.addr + 8 * (job->operations + part), job->remote.rkey,
						 word_of(part), BOUND, &upto) == DOORBELL_OK);
		EXPECT(doorbell_wait_block(&job->queue, upto, BOUND) == DOORBELL_OK);
		/* One after the other, with codes that differ: no completion has got that far. */
		EXPECT(doorbell_wait_block(&job->queue, upto + (1u << 30), 0) == DOORBELL_ETIMEOUT);
		EXPECT(doorbell_wait_block(&job->queue, upto, BOUND) == DOORBELL_OK);
		if (thread == 0)
			EXPECT(doorbell_get(&job->queue, from + bytes, job->local.lkey, bytes, to, job->remote.rkey, BOUND, &read) ==
			       DOORBELL_OK);
		__syncthreads();
		EXPECT(doorbell_wait_block(&job->queue, read, BOUND) == DOORBELL_OK);
		EXPECT(source[job->threads + other] == word_of(part * job->threads + other));
	}
}

/* ------------------------------------------------------------------------------------------------------------ triggers */

static int execute_one(const job *job, const doorbell_trigger *trigger, uint64_t timeout_ns)
{
	return job->by_warps ? doorbell_trigger_warp(trigger, timeout_ns) : doorbell_trigger_block(trigger, timeout_ns);
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
	CALL(execute),	     CALL(ping),    CALL(relay),      CALL(shuffle_alone),   CALL(warp_barrier), CALL(block_barrier), CALL(own_shared),
};
