/*
 * Kernel queues: work requests that kernels make, in the send queue of an endpoint, by threads of a GPU or of a CPU.
 * C11, C++17 and CUDA.
 *
 * Any number of threads, of any number of blocks and kernels, can use one queue at once. A thread reserves slots,
 * writes a work request into each one, and submits them. Then it polls, or waits for completion. No thread waits for
 * another one: if a thread submits while another one rings the NIC, the other one rings for both. Calls that wait have
 * a time limit. They return:
 *
 *     DOORBELL_OK (0)    success
 *     DOORBELL_EFULL     no free slots within the time limit
 *     DOORBELL_ETIMEOUT  not complete within the time limit
 *     DOORBELL_EWORK     the endpoint has failed: a completion with an error, a dead peer, an abort. No more slots are
 *                        reserved; what was reserved before may still be sent. doorbell_endpoint_failure on the host
 *                        has the reason
 *     DOORBELL_ERANGE    more slots than the queue has, too many inline bytes, or a message that is too long
 *     DOORBELL_EBUSY     other threads took the free slots first, for one second longer than the time limit
 *
 * The control path of the endpoint determines which component rings; the calls are the same. On the direct path the
 * kernel itself rings, by the doorbell record and the UAR. On the proxy path a thread of the host finds the submitted
 * slots in its memory, rings the NIC, and counts completions.
 *
 * Time limits are in nanoseconds, and at most DOORBELL_KERNEL_TIMEOUT_MAX_NS. Calls without a limit check once. But a
 * thread that rings also rings for others that submit meanwhile, at most one more round for each of their submissions.
 *
 * Slot numbers are 32-bit running counts that wrap; the NIC uses their low 16 bits. A slot is one WQEBB, and each work
 * request of this header takes one slot. Nothing is ever cleared: the mark of a submitted slot contains its count, so
 * marks of earlier laps are not mistaken.
 *
 * detail/queue_doorbell.h has the memory order.
 */
#ifndef DOORBELL_QUEUE_H
#define DOORBELL_QUEUE_H

#include "../doorbell.h"
#include "detail/wqe.h"

/* Most bytes of a put or get: `max_msg_sz` of a ConnectX port. The library gives kernels no queue of a port that has less. */
#define DOORBELL_MESSAGE_BYTES_MAX 0x40000000u

/* Inline bytes that fit in a slot, after the three segments of a write. */
#define DOORBELL_INLINE_BYTES 28u

/*
 * A queue as kernels see it; pass it by value. doorbell_kernel_queue_view() fills it. It is valid as long as the
 * doorbell_kernel_queue. Addresses are those of the GPU for which the queue was made.
 */
struct doorbell_queue {
	uint64_t state;       /* struct dbl_queue_state */
	uint64_t control;     /* struct dbl_queue_control */
	uint64_t marks;       /* a uint32_t per slot: one more than the count it was submitted with */
	uint64_t doorbells;   /* if the host rings, a uint64_t per slot: the doorbell that rings it */
	uint64_t ring;        /* the work requests */
	uint64_t record;      /* the send half of the doorbell record; 0 if the host rings and counts completions */
	uint64_t uar[2];      /* the doorbell registers, used alternately */
	uint64_t completions; /* the completion queue */
	uint64_t cq_record;   /* the consumer index of the completion queue */
	uint32_t slot_mask;
	uint32_t cqe_mask;
	uint32_t capacity; /* most slots in flight */
	uint32_t qpn;
};

DBL_STATIC_ASSERT(sizeof(struct doorbell_queue) == 96, "a queue is 96 bytes");
DBL_STATIC_ASSERT(offsetof(struct doorbell_queue, slot_mask) == 80, "slot_mask");

#include "detail/queue_doorbell.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Collects completions unless another thread is doing so. Does not wait. Returns 0, or the code of the queue's
 * failure.
 */
DBL_DEVICE int doorbell_poll(const struct doorbell_queue *queue)
{
	return dbl_queue_progress(queue);
}

/*
 * Reserves `count` consecutive slots and writes the first slot number to `*first`. Waits up to `timeout_ns`
 * nanoseconds for free slots; 0 checks once. Each reserved slot must be written and submitted soon, in any order.
 * Slots cannot be returned: later slots are not sent before them. Returns 0, DOORBELL_EFULL, DOORBELL_EWORK,
 * DOORBELL_ERANGE or DOORBELL_EBUSY.
 */
DBL_DEVICE int doorbell_reserve(const struct doorbell_queue *queue, uint32_t count, uint64_t timeout_ns, uint32_t *first)
{
	struct dbl_queue_state *state = dbl_queue_state(queue);
	uint32_t status, reserved, completed;

	if (count == 0 || count > queue->capacity)
		return DOORBELL_ERANGE;
	/* One round trip to memory for the three, so in any order: if `reserved` is older than `completed` there seems
	   to be no room, or another thread has changed it. */
	status = dbl_load_dword_relaxed(&state->status);
	reserved = dbl_load_dword_relaxed(&state->reserved);
	completed = dbl_load_dword_gpu(&state->completed);
	if (DBL_LIKELY(status == 0 && reserved + count - completed <= queue->capacity) &&
	    DBL_LIKELY(dbl_claim_dword(&state->reserved, reserved, reserved + count) == reserved)) {
		*first = reserved;
		return DOORBELL_OK;
	}
	DBL_SLOW();
	return dbl_queue_reserve_later(queue, count, timeout_ns, first);
}

/*
 * Writes a put into a reserved slot: the NIC writes `len_bytes` bytes from `local_addr` (local key `lkey`) to the
 * peer's `remote_addr` (remote key `rkey`). Returns 0, or DOORBELL_ERANGE if `len_bytes` exceeds
 * DOORBELL_MESSAGE_BYTES_MAX; the slot must then be written again.
 *
 * `flags` is 0 or a combination of DOORBELL_WORK_UNSIGNALED, _SOLICITED, _FENCE and _ORDERED. An unsignaled slot
 * is complete, and free again, when a later signaled slot is complete. The last slot of a submission must be signaled if a thread
 * waits for it. Among any `capacity` consecutive slots at least one must be signaled, otherwise the queue stays full.
 */
DBL_DEVICE int doorbell_write_put(const struct doorbell_queue *queue, uint32_t slot, uint32_t flags,
				  uint64_t local_addr, uint32_t lkey, uint32_t len_bytes, uint64_t remote_addr,
				  uint32_t rkey)
{
	if (len_bytes > DOORBELL_MESSAGE_BYTES_MAX)
		return DOORBELL_ERANGE;
	dbl_queue_write_slice(queue, slot, DBL_OPCODE_RDMA_WRITE, flags, 0, local_addr, lkey, len_bytes, remote_addr, rkey);
	return DOORBELL_OK;
}

/*
 * Writes a put with immediate data: it uses one of the peer's receives, whose completion has `imm`, in host byte
 * order. Returns like doorbell_write_put.
 */
DBL_DEVICE int doorbell_write_put_imm(const struct doorbell_queue *queue, uint32_t slot, uint32_t flags,
				      uint64_t local_addr, uint32_t lkey, uint32_t len_bytes, uint64_t remote_addr,
				      uint32_t rkey, uint32_t imm)
{
	if (len_bytes > DOORBELL_MESSAGE_BYTES_MAX)
		return DOORBELL_ERANGE;
	dbl_queue_write_slice(queue, slot, DBL_OPCODE_RDMA_WRITE_IMM, flags, imm, local_addr, lkey, len_bytes, remote_addr,
			      rkey);
	return DOORBELL_OK;
}

/*
 * Writes a get into a reserved slot: the NIC reads `len_bytes` bytes from the peer's `remote_addr` to `local_addr`.
 * Returns like doorbell_write_put.
 */
DBL_DEVICE int doorbell_write_get(const struct doorbell_queue *queue, uint32_t slot, uint32_t flags,
				  uint64_t local_addr, uint32_t lkey, uint32_t len_bytes, uint64_t remote_addr,
				  uint32_t rkey)
{
	if (len_bytes > DOORBELL_MESSAGE_BYTES_MAX)
		return DOORBELL_ERANGE;
	dbl_queue_write_slice(queue, slot, DBL_OPCODE_RDMA_READ, flags, 0, local_addr, lkey, len_bytes, remote_addr, rkey);
	return DOORBELL_OK;
}

/*
 * Writes a fetch-and-add into a reserved slot: adds `add` to the 8 bytes at the peer's `remote_addr`, a multiple of 8,
 * and writes the old value to `result_addr`. Values are in host byte order.
 */
DBL_DEVICE void doorbell_write_add(const struct doorbell_queue *queue, uint32_t slot, uint32_t flags,
				   uint64_t result_addr, uint32_t lkey, uint64_t remote_addr, uint32_t rkey,
				   uint64_t add)
{
	dbl_queue_write(queue, slot, DBL_OPCODE_ATOMIC_FA, 4, flags, 0, dbl_be64(remote_addr), dbl_be32(rkey), dbl_be64(add), 0,
			dbl_be32x2(8, lkey), dbl_be64(result_addr));
}

/*
 * Writes a put of up to DOORBELL_INLINE_BYTES bytes, which are copied now. Returns 0, or DOORBELL_ERANGE for more
 * bytes; the slot must then be written again.
 */
DBL_DEVICE int doorbell_write_inline(const struct doorbell_queue *queue, uint32_t slot, uint32_t flags, const void *bytes,
				     uint32_t len_bytes, uint64_t remote_addr, uint32_t rkey)
{
	const uint8_t *from = (const uint8_t *)bytes;
	/* The header of the segment and 28 bytes. */
	uint64_t word4 = dbl_be32(DBL_INLINE_SEGMENT | len_bytes), word5 = 0, word6 = 0, word7 = 0;
	uint32_t at, ds;

	if (len_bytes > DOORBELL_INLINE_BYTES)
		return DOORBELL_ERANGE;
	/* Unrolled, so that each byte has its place at compile time. */
#ifdef __CUDACC__
#pragma unroll
#endif
	for (at = 0; at < DOORBELL_INLINE_BYTES; at++) {
		const uint64_t byte = at < len_bytes ? from[at] : 0;
		const uint32_t place = at + 4, shift = place % 8 * 8;

		if (place < 8)
			word4 |= byte << shift;
		else if (place < 16)
			word5 |= byte << shift;
		else if (place < 24)
			word6 |= byte << shift;
		else
			word7 |= byte << shift;
	}
	/* No bytes have no segment. */
	ds = len_bytes == 0 ? 2 : 2 + (len_bytes + 4 + 15) / 16;
	dbl_queue_write(queue, slot, DBL_OPCODE_RDMA_WRITE, ds, flags, 0, dbl_be64(remote_addr), dbl_be32(rkey),
			len_bytes == 0 ? 0 : word4, word5, word6, word7);
	return DOORBELL_OK;
}

/*
 * Writes a signal into a reserved slot: stores the 8 bytes of `value` at the peer's `remote_addr`. Earlier puts on the
 * same queue are visible when the peer sees the value, as far as the peer's memory keeps the NIC's write order: the
 * slot is DOORBELL_WORK_ORDERED. The peer must load the value with acquire. A fetch-and-add
 * (doorbell_write_add) is ordered as well, and the NIC does not wait for the puts.
 */
DBL_DEVICE void doorbell_write_signal(const struct doorbell_queue *queue, uint32_t slot, uint32_t flags,
				      uint64_t remote_addr, uint32_t rkey, uint64_t value)
{
	dbl_queue_write(queue, slot, DBL_OPCODE_RDMA_WRITE, 3, flags | DOORBELL_WORK_ORDERED, 0, dbl_be64(remote_addr),
			dbl_be32(rkey), value << 32 | dbl_be32(DBL_INLINE_SEGMENT | (uint32_t)sizeof(value)), value >> 32, 0, 0);
}

/* Writes a no-operation into a reserved slot that is not needed. */
DBL_DEVICE void doorbell_write_nop(const struct doorbell_queue *queue, uint32_t slot, uint32_t flags)
{
	dbl_queue_write(queue, slot, DBL_OPCODE_NOP, 1, flags, 0, 0, 0, 0, 0, 0, 0);
}

/*
 * Submits `count` written slots from `first` on. They are sent when all earlier slots are submitted too. Does not
 * wait. Returns 0, or the code of the queue's failure.
 */
DBL_DEVICE int doorbell_submit(const struct doorbell_queue *queue, uint32_t first, uint32_t count)
{
	struct dbl_queue_state *state = dbl_queue_state(queue);
	const uint32_t upto = first + count;

	int is_own = 0;

	if (queue->record == 0) {
		/* Earlier stores, work requests included, before the marks, for the thread of the host that rings. */
		dbl_fence_release();
		dbl_queue_mark_all(queue, first, upto);
		return dbl_queue_status(queue);
	}
	if (DBL_LIKELY(dbl_take_dword(&state->ringing, 0, 1))) {
		/* Without a fence: only threads that hold `ringing` after this one load these marks. */
		dbl_queue_mark_all(queue, first, upto);
		is_own = 1;
	} else {
		DBL_SLOW();
		/* Earlier stores, work requests included, before the marks, for the thread that rings. */
		dbl_fence_release_gpu();
		dbl_queue_mark_all(queue, first, upto);
		/* It looks again. Or it has just finished, and this thread rings. */
		if (dbl_add_dword(&state->ringing, 1) != 0)
			return dbl_queue_status(queue);
	}
	dbl_queue_ring(queue, first, upto, is_own);
	return dbl_queue_status(queue);
}

/*
 * Waits up to `timeout_ns` nanoseconds until all slots before `upto` are complete; 0 checks once. For slots submitted
 * by doorbell_submit(first, count), `upto` is first + count. Returns 0, DOORBELL_ETIMEOUT, or DOORBELL_EWORK if the
 * queue failed before the slots were complete. In one case DOORBELL_EWORK is early: the queue failed after `upto` and
 * the thread that polls is not running. A later call then returns 0.
 */
DBL_DEVICE int doorbell_wait(const struct doorbell_queue *queue, uint32_t upto, uint64_t timeout_ns)
{
	struct dbl_queue_state *state = dbl_queue_state(queue);
	const uint64_t bound_ns = dbl_bounded(timeout_ns);
	uint64_t since_ns = 0, now_ns;
	uint32_t turn, last;
	int32_t status = 0;
	int late, has_waited = 0;

	for (turn = 0;; turn++) {
		if (dbl_load_dword_relaxed(&state->completed) - upto < 0x80000000u) {
			/* Acquire: what the completions have brought. */
			(void)dbl_load_dword_gpu(&state->completed);
			return DOORBELL_OK;
		}
		DBL_SLOW();
		if (status != 0) {
			/* Checked after the failure, because slots that were complete before it are complete. The
			   thread that polls, if another one, is soon done. */
			for (last = 0; last < 1024 && !dbl_queue_poll(queue); last++)
				DBL_TURN();
			return dbl_load_dword_gpu(&state->completed) - upto < 0x80000000u ? DOORBELL_OK : status;
		}
		status = doorbell_poll(queue);
		if (turn == 0)
			continue;
		now_ns = dbl_now_ns();
		/* Not by `turn`, which wraps within an hour. */
		if (!has_waited)
			since_ns = now_ns;
		has_waited = 1;
		late = bound_ns == 0 || dbl_has_passed(now_ns, since_ns, bound_ns);
		if (late && status == 0)
			return DOORBELL_ETIMEOUT;
		DBL_TURN();
	}
}

/*
 * Returns the error of the completion that failed the queue: syndrome (mlx5dv.h: MLX5_CQE_SYNDROME_*) | vendor
 * syndrome << 8 | low 16 bits of the slot << 16. Returns 0 if there was none, for example after an abort, and if the
 * host counts completions.
 */
DBL_DEVICE uint32_t doorbell_queue_error(const struct doorbell_queue *queue)
{
	return dbl_load_dword_gpu(&dbl_queue_state(queue)->error);
}

/*
 * The following calls reserve a slot within `timeout_ns` nanoseconds, write it, signaled, and submit it. `*upto`, if
 * `upto` is not NULL, receives the value for doorbell_wait(). They return 0 or the codes of doorbell_reserve(),
 * doorbell_write_*() and doorbell_submit(). This call makes a put.
 */
DBL_DEVICE int doorbell_put(const struct doorbell_queue *queue, uint64_t local_addr, uint32_t lkey, uint32_t len_bytes,
			    uint64_t remote_addr, uint32_t rkey, uint64_t timeout_ns, uint32_t *upto)
{
	uint32_t slot;
	int code;

	if (len_bytes > DOORBELL_MESSAGE_BYTES_MAX)
		return DOORBELL_ERANGE;
	code = doorbell_reserve(queue, 1, timeout_ns, &slot);
	if (code != DOORBELL_OK)
		return code;
	(void)doorbell_write_put(queue, slot, 0, local_addr, lkey, len_bytes, remote_addr, rkey);
	if (upto)
		*upto = slot + 1;
	return doorbell_submit(queue, slot, 1);
}

/* A put with immediate data: see doorbell_write_put_imm(). */
DBL_DEVICE int doorbell_put_imm(const struct doorbell_queue *queue, uint64_t local_addr, uint32_t lkey,
				uint32_t len_bytes, uint64_t remote_addr, uint32_t rkey, uint32_t imm,
				uint64_t timeout_ns, uint32_t *upto)
{
	uint32_t slot;
	int code;

	if (len_bytes > DOORBELL_MESSAGE_BYTES_MAX)
		return DOORBELL_ERANGE;
	code = doorbell_reserve(queue, 1, timeout_ns, &slot);
	if (code != DOORBELL_OK)
		return code;
	(void)doorbell_write_put_imm(queue, slot, 0, local_addr, lkey, len_bytes, remote_addr, rkey, imm);
	if (upto)
		*upto = slot + 1;
	return doorbell_submit(queue, slot, 1);
}

/* A get: see doorbell_write_get(). */
DBL_DEVICE int doorbell_get(const struct doorbell_queue *queue, uint64_t local_addr, uint32_t lkey, uint32_t len_bytes,
			    uint64_t remote_addr, uint32_t rkey, uint64_t timeout_ns, uint32_t *upto)
{
	uint32_t slot;
	int code;

	if (len_bytes > DOORBELL_MESSAGE_BYTES_MAX)
		return DOORBELL_ERANGE;
	code = doorbell_reserve(queue, 1, timeout_ns, &slot);
	if (code != DOORBELL_OK)
		return code;
	(void)doorbell_write_get(queue, slot, 0, local_addr, lkey, len_bytes, remote_addr, rkey);
	if (upto)
		*upto = slot + 1;
	return doorbell_submit(queue, slot, 1);
}

/* A fetch-and-add: see doorbell_write_add(). Returns DOORBELL_EALIGNMENT for a remote address that is not a multiple of 8. */
DBL_DEVICE int doorbell_add(const struct doorbell_queue *queue, uint64_t result_addr, uint32_t lkey, uint64_t remote_addr,
			    uint32_t rkey, uint64_t add, uint64_t timeout_ns, uint32_t *upto)
{
	uint32_t slot;
	int code;

	if (remote_addr % 8 != 0)
		return DOORBELL_EALIGNMENT;
	code = doorbell_reserve(queue, 1, timeout_ns, &slot);
	if (code != DOORBELL_OK)
		return code;
	doorbell_write_add(queue, slot, 0, result_addr, lkey, remote_addr, rkey, add);
	if (upto)
		*upto = slot + 1;
	return doorbell_submit(queue, slot, 1);
}

/* A signal: see doorbell_write_signal(). */
DBL_DEVICE int doorbell_signal(const struct doorbell_queue *queue, uint64_t remote_addr, uint32_t rkey, uint64_t value,
			       uint64_t timeout_ns, uint32_t *upto)
{
	uint32_t slot;
	const int code = doorbell_reserve(queue, 1, timeout_ns, &slot);

	if (code != DOORBELL_OK)
		return code;
	doorbell_write_signal(queue, slot, 0, remote_addr, rkey, value);
	if (upto)
		*upto = slot + 1;
	return doorbell_submit(queue, slot, 1);
}

/* A put followed by a signal, with one doorbell. Takes two slots; only the signal is signaled. */
DBL_DEVICE int doorbell_put_signal(const struct doorbell_queue *queue, uint64_t local_addr, uint32_t lkey,
				   uint32_t len_bytes, uint64_t remote_addr, uint32_t rkey, uint64_t signal_addr,
				   uint32_t signal_rkey, uint64_t value, uint64_t timeout_ns, uint32_t *upto)
{
	uint32_t slot;
	int code;

	if (len_bytes > DOORBELL_MESSAGE_BYTES_MAX)
		return DOORBELL_ERANGE;
	code = doorbell_reserve(queue, 2, timeout_ns, &slot);
	if (code != DOORBELL_OK)
		return code;
	(void)doorbell_write_put(queue, slot, DOORBELL_WORK_UNSIGNALED, local_addr, lkey, len_bytes, remote_addr, rkey);
	doorbell_write_signal(queue, slot + 1, 0, signal_addr, signal_rkey, value);
	if (upto)
		*upto = slot + 2;
	return doorbell_submit(queue, slot, 2);
}

#ifdef __cplusplus
}
#endif

#endif
