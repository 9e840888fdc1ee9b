/*
 * Work requests of a whole warp or block: one reservation and one doorbell for all of them. For nvcc, sm_75 or newer.
 *
 * Warp calls: `lanes` is a mask of lanes of one warp, as in CUDA's _sync functions; all these lanes make the call with
 * the same mask. 0xffffffff means all lanes, __activemask() the active ones. Block calls: all threads of the block
 * make the call. Arguments are the same in all threads, except those that are described as each thread's own. All
 * threads get the same result. What any of them stored before is ordered before the doorbell.
 */
#ifndef DOORBELL_COLLECTIVE_CUH
#define DOORBELL_COLLECTIVE_CUH

#include "queue.h"

#ifndef DBL_HAS_BLOCKS
#error "collective.cuh is for nvcc"
#endif

/* The rank of the calling thread among the lanes of the mask, from 0. */
DBL_DEVICE uint32_t dbl_rank(uint32_t lanes)
{
	return __popc(lanes & dbl_lanes_before());
}

/*
 * Reserves one slot for each lane, in lane order; `*slot` is the lane's own. Returns the codes of doorbell_reserve();
 * DOORBELL_ERANGE if there are more lanes than slots in the queue.
 */
DBL_DEVICE int doorbell_reserve_warp(const struct doorbell_queue *queue, uint32_t lanes, uint64_t timeout_ns, uint32_t *slot)
{
	const int leader = __ffs((int)lanes) - 1;
	const uint32_t rank = dbl_rank(lanes);
	uint32_t first = 0;
	int code = DOORBELL_OK;

	/* All lanes must have arrived: slots that are reserved for a late lane would block every thread, and for
	   ever if that lane waits for one of them. */
	__syncwarp(lanes);
	if (rank == 0)
		code = doorbell_reserve(queue, __popc(lanes), timeout_ns, &first);
	/* Makes what the leader has seen visible, because a shuffle orders no memory: the slots must be written
	   after their completions were read. */
	__syncwarp(lanes);
	code = __shfl_sync(lanes, code, leader);
	*slot = __shfl_sync(lanes, first, leader) + rank;
	return code;
}

/*
 * Submits the slots that these lanes have reserved together, with one doorbell. Returns the codes of
 * doorbell_submit().
 */
DBL_DEVICE int doorbell_submit_warp(const struct doorbell_queue *queue, uint32_t lanes, uint32_t slot)
{
	int code = DOORBELL_OK;

	/* The other lanes' work requests and data come before the fence at the beginning of the submission. */
	__syncwarp(lanes);
	if (dbl_rank(lanes) == 0)
		code = doorbell_submit(queue, slot, __popc(lanes));
	return __shfl_sync(lanes, code, __ffs((int)lanes) - 1);
}

/*
 * Makes one put for each lane; addresses, keys and `len_bytes` are each lane's own. Only the last put is signaled.
 * `*upto`, if `upto` is not NULL, is the same for all lanes, for doorbell_wait(). Returns the codes of doorbell_put().
 */
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

/*
 * Makes one put followed by a signal, for the whole block. `*upto` is written if the result is DOORBELL_OK and `upto`
 * is not NULL. Returns the codes of doorbell_put_signal().
 */
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
	/* The first barrier of the next call comes after these loads. */
	return code;
}

/*
 * Waits like doorbell_wait(), in one thread for the whole block. Data that have arrived are visible to all threads of
 * the block.
 */
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
