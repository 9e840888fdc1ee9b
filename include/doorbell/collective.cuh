/*
 * Work requests of kernels, made by a warp or a block at once: one reservation and one doorbell for all of them. For nvcc, sm_75 or newer.
 *
 * Who calls: `lanes` is a mask of lanes of one warp as of CUDA's own _sync functions, all of which call with the same mask; 0xffffffff for all,
 * __activemask() for those that are there. Calls of a block are made by all its threads, with the same arguments but for those that are each
 * thread's own. All get the same code. What any of them stored before is ordered before the doorbell.
 */
#ifndef DOORBELL_COLLECTIVE_CUH
#define DOORBELL_COLLECTIVE_CUH

#include "queue.h"

#ifndef DBL_HAS_BLOCKS
#error "collective.cuh is for nvcc"
#endif

/* The lane of the calling thread among those of the mask, from 0; and how many there are. */
DBL_DEVICE uint32_t dbl_rank(uint32_t lanes)
{
	return __popc(lanes & dbl_lanes_before());
}

/* Reserves a slot for each lane, in the order of the lanes: doorbell_reserve() of as many. DOORBELL_ERANGE for more lanes than the queue has slots. */
DBL_DEVICE int doorbell_reserve_warp(const struct doorbell_queue *queue, uint32_t lanes, uint64_t timeout_ns, uint32_t *slot)
{
	const int leader = __ffs((int)lanes) - 1;
	const uint32_t rank = dbl_rank(lanes);
	uint32_t first = 0;
	int code = DOORBELL_OK;

	/* All have come: what was reserved for one that is late would hold up everybody, and for ever if it waits for one of those. */
	__syncwarp(lanes);
	if (rank == 0)
		code = doorbell_reserve(queue, __popc(lanes), timeout_ns, &first);
	/* What the leader has seen: a shuffle orders no memory, and the slots are to be written behind their completions. */
	__syncwarp(lanes);
	code = __shfl_sync(lanes, code, leader);
	*slot = __shfl_sync(lanes, first, leader) + rank;
	return code;
}

/* Submits the slots that these lanes have reserved together, with one doorbell: doorbell_submit(). */
DBL_DEVICE int doorbell_submit_warp(const struct doorbell_queue *queue, uint32_t lanes, uint32_t slot)
{
	int code = DOORBELL_OK;

	/* The work requests of the others, and their data, before the fence that the submission begins with. */
	__syncwarp(lanes);
	if (dbl_rank(lanes) == 0)
		code = doorbell_submit(queue, slot, __popc(lanes));
	return __shfl_sync(lanes, code, __ffs((int)lanes) - 1);
}

/* doorbell_put() of each lane's own. The last alone is signaled; `upto`, the same for all, is for doorbell_wait(). */
DBL_DEVICE int doorbell_put_warp(const struct doorbell_queue *queue, uint32_t lanes, uint64_t local_addr, uint32_t lkey,
				 uint32_t len_bytes, uint64_t remote_addr, uint32_t rkey, uint64_t timeout_ns, uint32_t *upto)
{
	const uint32_t count = __popc(lanes), rank = dbl_rank(lanes);
	uint32_t slot;
	int code;

	if (__any_sync(lanes, len_bytes > DOORBELL_MESSAGE_BYTES_MAX))
		return DOORBELL_ERANGE;
	code = doorbell_reserve_warp(queue, lanes, timeout_ns, &slot);
	if (code != DOORBELL_OK)
		return code;
	(void)doorbell_write_put(queue, slot, rank + 1 < count ? (uint32_t)DOORBELL_WORK_UNSIGNALED : 0u, local_addr, lkey, len_bytes,
			   remote_addr, rkey);
	if (upto)
		*upto = slot - rank + count;
	return doorbell_submit_warp(queue, lanes, slot);
}

/* One doorbell_put_signal() of what the block has produced. `*upto` is written if the code is DOORBELL_OK. */
DBL_DEVICE int doorbell_put_signal_block(const struct doorbell_queue *queue, uint64_t local_addr, uint32_t lkey,
					 uint32_t len_bytes, uint64_t remote_addr, uint32_t rkey, uint64_t signal_addr,
					 uint32_t signal_rkey, uint64_t value, uint64_t timeout_ns, uint32_t *upto)
{
	__shared__ int code;
	__shared__ uint32_t end;

	__syncthreads();
	if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0)
		code = doorbell_put_signal(queue, local_addr, lkey, len_bytes, remote_addr, rkey, signal_addr, signal_rkey, value,
					   timeout_ns, &end);
	__syncthreads();
	if (upto && code == DOORBELL_OK)
		*upto = end;
	/* The next call's first barrier is behind these loads. */
	return code;
}

/* doorbell_wait(), by one thread for the block: what has arrived is there for all of it. */
DBL_DEVICE int doorbell_wait_block(const struct doorbell_queue *queue, uint32_t upto, uint64_t timeout_ns)
{
	__shared__ int code;

	__syncthreads();
	if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0)
		code = doorbell_wait(queue, upto, timeout_ns);
	__syncthreads();
	return code;
}

#endif
