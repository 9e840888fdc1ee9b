/*
 * The calls of queue.h and signal.h for a whole warp or block. For nvcc, sm_75 or newer.
 *
 * One rule: the threads make ONE operation together. doorbell_device_put_warp() is one put for all its lanes, and
 * doorbell_device_put_block() one put for all threads of the block. Arguments are the same in all threads, `upto`
 * and `bytes` excepted (the bytes of the first thread are sent), and all threads get the same result and the same `*upto`, which is written if the result is DOORBELL_OK. What
 * any of the threads stored before is ordered before the operation. What a wait has seen is visible to all of them.
 *
 * Warp calls: `lanes` is a mask of lanes of one warp, as in CUDA's _sync functions; all these lanes make the call with
 * the same mask. 0xffffffff means all lanes, __activemask() the active ones. Block calls: all threads of the block
 * make the call.
 *
 * Calls that end in _lanes make one operation for each lane of a warp, with one reservation and one doorbell for all.
 */
#ifndef DOORBELL_COLLECTIVE_CUH
#define DOORBELL_COLLECTIVE_CUH

#include "queue.h"
#include "signal.h"

#ifndef DBL_HAS_BLOCKS
#error "collective.cuh is for nvcc"
#endif

/* The rank of the calling thread among the lanes of the mask, from 0. */
DBL_DEVICE uint32_t dbl_rank(uint32_t lanes)
{
	return __popc(lanes & dbl_lanes_before());
}

/* The first lane of the mask makes the operation, which gets the place of `*upto`. */
template <typename Operation> DBL_DEVICE int dbl_by_warp(uint32_t lanes, uint32_t *upto, Operation operation)
{
	const int leader = __ffs((int)lanes) - 1;
	uint32_t end = 0;
	int code = DOORBELL_OK;

	/* All lanes have arrived: their stores come before the operation, and none of them waits for it elsewhere. */
	__syncwarp(lanes);
	if (dbl_rank(lanes) == 0)
		code = operation(&end);
	/* Makes what the leader has seen visible, because a shuffle orders no memory. */
	__syncwarp(lanes);
	code = __shfl_sync(lanes, code, leader);
	end = __shfl_sync(lanes, end, leader);
	if (upto && code == DOORBELL_OK)
		*upto = end;
	return code;
}

/* The same by the first thread of the block. */
template <typename Operation> DBL_DEVICE int dbl_by_block(uint32_t *upto, Operation operation)
{
	__shared__ int code;
	__shared__ uint32_t end;

	__syncthreads();
	if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0)
		code = operation(&end);
	__syncthreads();
	if (upto && code == DOORBELL_OK)
		*upto = end;
	/* The first barrier of the next call comes after these loads. */
	return code;
}

/* ------------------------------------------------------------------------------------------------ one operation of a warp */

DBL_DEVICE int doorbell_device_put_warp(const struct doorbell_queue_view *queue, uint32_t lanes, struct doorbell_local local,
					struct doorbell_remote remote, uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_by_warp(lanes, upto, [&](uint32_t *end) { return doorbell_device_put(queue, local, remote, timeout_ns, end); });
}

DBL_DEVICE int doorbell_device_put_imm_warp(const struct doorbell_queue_view *queue, uint32_t lanes,
					    struct doorbell_local local, struct doorbell_remote remote, uint32_t imm,
					    uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_by_warp(lanes, upto, [&](uint32_t *end) { return doorbell_device_put_imm(queue, local, remote, imm, timeout_ns, end); });
}

DBL_DEVICE int doorbell_device_put_inline_warp(const struct doorbell_queue_view *queue, uint32_t lanes, const void *bytes, uint32_t len_bytes,
					       struct doorbell_remote remote, uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_by_warp(lanes, upto,
			   [&](uint32_t *end) { return doorbell_device_put_inline(queue, bytes, len_bytes, remote, timeout_ns, end); });
}

DBL_DEVICE int doorbell_device_get_warp(const struct doorbell_queue_view *queue, uint32_t lanes, struct doorbell_local local,
					struct doorbell_remote remote, uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_by_warp(lanes, upto, [&](uint32_t *end) { return doorbell_device_get(queue, local, remote, timeout_ns, end); });
}

DBL_DEVICE int doorbell_device_fetch_add_warp(const struct doorbell_queue_view *queue, uint32_t lanes,
					      struct doorbell_local result, struct doorbell_remote remote, uint64_t add,
					      uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_by_warp(lanes, upto, [&](uint32_t *end) { return doorbell_device_fetch_add(queue, result, remote, add, timeout_ns, end); });
}

DBL_DEVICE int doorbell_device_signal_warp(const struct doorbell_queue_view *queue, uint32_t lanes,
					   struct doorbell_remote remote, uint32_t signal_op, uint64_t value,
					   uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_by_warp(lanes, upto, [&](uint32_t *end) { return doorbell_device_signal(queue, remote, signal_op, value, timeout_ns, end); });
}

DBL_DEVICE int doorbell_device_put_signal_warp(const struct doorbell_queue_view *queue, uint32_t lanes,
					       struct doorbell_local local, struct doorbell_remote remote,
					       struct doorbell_remote signal, uint32_t signal_op, uint64_t value,
					       uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_by_warp(lanes, upto, [&](uint32_t *end) { return doorbell_device_put_signal(queue, local, remote, signal, signal_op, value, timeout_ns, end); });
}

DBL_DEVICE int doorbell_device_wait_warp(const struct doorbell_queue_view *queue, uint32_t lanes, uint32_t upto,
					 uint64_t timeout_ns)
{
	return dbl_by_warp(lanes, nullptr, [&](uint32_t *) { return doorbell_device_wait(queue, upto, timeout_ns); });
}

DBL_DEVICE int doorbell_device_quiet_warp(const struct doorbell_queue_view *queue, uint32_t lanes, uint64_t timeout_ns)
{
	return dbl_by_warp(lanes, nullptr, [&](uint32_t *) { return doorbell_device_quiet(queue, timeout_ns); });
}

DBL_DEVICE int doorbell_device_flush_warp(const struct doorbell_queue_view *queue, uint32_t lanes, uint64_t timeout_ns)
{
	return dbl_by_warp(lanes, nullptr, [&](uint32_t *) { return doorbell_device_flush(queue, timeout_ns); });
}

DBL_DEVICE int doorbell_device_wait_value32_warp(uint32_t lanes, const uint32_t *word, uint32_t wait_condition, uint32_t value,
						 uint64_t timeout_ns, const int32_t *status_word)
{
	return dbl_by_warp(lanes, nullptr, [&](uint32_t *) { return doorbell_device_wait_value32(word, wait_condition, value, timeout_ns, status_word); });
}

DBL_DEVICE int doorbell_device_signal_wait_until_warp(uint32_t lanes, const uint64_t *word, uint32_t cmp, uint64_t cmp_value,
						      uint64_t timeout_ns, const int32_t *status_word)
{
	return dbl_by_warp(lanes, nullptr, [&](uint32_t *) { return doorbell_device_signal_wait_until(word, cmp, cmp_value, timeout_ns, status_word); });
}

/* ------------------------------------------------------------------------------------------------ one operation of a block */

DBL_DEVICE int doorbell_device_put_block(const struct doorbell_queue_view *queue, struct doorbell_local local,
					 struct doorbell_remote remote, uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_by_block(upto, [&](uint32_t *end) { return doorbell_device_put(queue, local, remote, timeout_ns, end); });
}

DBL_DEVICE int doorbell_device_put_imm_block(const struct doorbell_queue_view *queue, struct doorbell_local local,
					     struct doorbell_remote remote, uint32_t imm, uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_by_block(upto, [&](uint32_t *end) { return doorbell_device_put_imm(queue, local, remote, imm, timeout_ns, end); });
}

DBL_DEVICE int doorbell_device_put_inline_block(const struct doorbell_queue_view *queue, const void *bytes, uint32_t len_bytes,
					       struct doorbell_remote remote, uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_by_block(upto,
			   [&](uint32_t *end) { return doorbell_device_put_inline(queue, bytes, len_bytes, remote, timeout_ns, end); });
}

DBL_DEVICE int doorbell_device_get_block(const struct doorbell_queue_view *queue, struct doorbell_local local,
					 struct doorbell_remote remote, uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_by_block(upto, [&](uint32_t *end) { return doorbell_device_get(queue, local, remote, timeout_ns, end); });
}

DBL_DEVICE int doorbell_device_fetch_add_block(const struct doorbell_queue_view *queue, struct doorbell_local result,
					       struct doorbell_remote remote, uint64_t add, uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_by_block(upto, [&](uint32_t *end) { return doorbell_device_fetch_add(queue, result, remote, add, timeout_ns, end); });
}

DBL_DEVICE int doorbell_device_signal_block(const struct doorbell_queue_view *queue, struct doorbell_remote remote,
					    uint32_t signal_op, uint64_t value, uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_by_block(upto, [&](uint32_t *end) { return doorbell_device_signal(queue, remote, signal_op, value, timeout_ns, end); });
}

DBL_DEVICE int doorbell_device_put_signal_block(const struct doorbell_queue_view *queue, struct doorbell_local local,
						struct doorbell_remote remote, struct doorbell_remote signal,
						uint32_t signal_op, uint64_t value, uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_by_block(upto, [&](uint32_t *end) { return doorbell_device_put_signal(queue, local, remote, signal, signal_op, value, timeout_ns, end); });
}

DBL_DEVICE int doorbell_device_wait_block(const struct doorbell_queue_view *queue, uint32_t upto, uint64_t timeout_ns)
{
	return dbl_by_block(nullptr, [&](uint32_t *) { return doorbell_device_wait(queue, upto, timeout_ns); });
}

DBL_DEVICE int doorbell_device_quiet_block(const struct doorbell_queue_view *queue, uint64_t timeout_ns)
{
	return dbl_by_block(nullptr, [&](uint32_t *) { return doorbell_device_quiet(queue, timeout_ns); });
}

DBL_DEVICE int doorbell_device_flush_block(const struct doorbell_queue_view *queue, uint64_t timeout_ns)
{
	return dbl_by_block(nullptr, [&](uint32_t *) { return doorbell_device_flush(queue, timeout_ns); });
}

DBL_DEVICE int doorbell_device_wait_value32_block(const uint32_t *word, uint32_t wait_condition, uint32_t value,
						  uint64_t timeout_ns, const int32_t *status_word)
{
	return dbl_by_block(nullptr, [&](uint32_t *) { return doorbell_device_wait_value32(word, wait_condition, value, timeout_ns, status_word); });
}

DBL_DEVICE int doorbell_device_signal_wait_until_block(const uint64_t *word, uint32_t cmp, uint64_t cmp_value,
						       uint64_t timeout_ns, const int32_t *status_word)
{
	return dbl_by_block(nullptr, [&](uint32_t *) { return doorbell_device_signal_wait_until(word, cmp, cmp_value, timeout_ns, status_word); });
}

/* ---------------------------------------------------------------------------------------------- one operation of each lane */

/*
 * Reserves one slot for each lane, in lane order; `*slot` is the lane's own. Returns the codes of
 * doorbell_device_reserve(); DOORBELL_ERANGE if there are more lanes than slots in the queue.
 */
DBL_DEVICE int doorbell_device_reserve_lanes(const struct doorbell_queue_view *queue, uint32_t lanes, uint64_t timeout_ns, uint32_t *slot)
{
	const int leader = __ffs((int)lanes) - 1;
	const uint32_t rank = dbl_rank(lanes);
	uint32_t first = 0;
	int code = DOORBELL_OK;

	/* All lanes must have arrived: slots that are reserved for a late lane would block every thread, and for
	   ever if that lane waits for one of them. */
	__syncwarp(lanes);
	if (rank == 0)
		code = doorbell_device_reserve(queue, __popc(lanes), timeout_ns, &first);
	/* Makes what the leader has seen visible, because a shuffle orders no memory: the slots must be written
	   after their completions were read. */
	__syncwarp(lanes);
	code = __shfl_sync(lanes, code, leader);
	*slot = __shfl_sync(lanes, first, leader) + rank;
	return code;
}

/*
 * Submits the slots that these lanes have reserved together, with one doorbell. Returns the codes of
 * doorbell_device_submit().
 */
DBL_DEVICE int doorbell_device_submit_lanes(const struct doorbell_queue_view *queue, uint32_t lanes, uint32_t slot)
{
	int code = DOORBELL_OK;

	/* The other lanes' work requests and data come before the fence at the beginning of the submission. */
	__syncwarp(lanes);
	if (dbl_rank(lanes) == 0)
		code = doorbell_device_submit(queue, slot, __popc(lanes));
	return __shfl_sync(lanes, code, __ffs((int)lanes) - 1);
}

/*
 * Makes one put for each lane; `local` and `remote` are each lane's own, of at most DOORBELL_MESSAGE_BYTES_MAX bytes. Only
 * the last put is signaled. `*upto`, if `upto` is not NULL, is the same for all lanes, for doorbell_device_wait(). Returns
 * the codes of doorbell_device_put(): DOORBELL_ERANGE, in all lanes, if a put of one lane does not fit.
 */
DBL_DEVICE int doorbell_device_put_lanes(const struct doorbell_queue_view *queue, uint32_t lanes, struct doorbell_local local,
					 struct doorbell_remote remote, uint64_t timeout_ns, uint32_t *upto)
{
	const uint32_t count = __popc(lanes), rank = dbl_rank(lanes);
	uint32_t slot;
	int code;

	if (__any_sync(lanes, dbl_too_long(local, remote) || local.len_bytes > DOORBELL_MESSAGE_BYTES_MAX))
		return DOORBELL_ERANGE;
	code = doorbell_device_reserve_lanes(queue, lanes, timeout_ns, &slot);
	if (code != DOORBELL_OK)
		return code;
	dbl_queue_write_slice(queue, slot, DBL_OPCODE_RDMA_WRITE, rank + 1 < count ? (uint32_t)DOORBELL_WORK_UNSIGNALED : 0u, 0, local.addr,
			      local.lkey, (uint32_t)local.len_bytes, remote.addr, remote.rkey);
	if (upto)
		*upto = slot - rank + count;
	return doorbell_device_submit_lanes(queue, lanes, slot);
}

#endif
