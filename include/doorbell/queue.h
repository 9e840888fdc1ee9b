/*
 * Device queues: work requests that kernels make, in the send queue of an endpoint, by threads of a GPU or of a CPU.
 * C11, C++17 and CUDA.
 *
 * Any number of threads, of any number of blocks and kernels, can use one queue at once. In one call a thread puts, gets,
 * adds or signals. In steps it reserves slots, writes a work request into each one, and submits them. Then it polls, or
 * waits for completion. No thread waits for another one: if a thread submits while another one rings the NIC, the other
 * one rings for both. Calls that wait have a time limit. They return:
 *
 *     DOORBELL_OK (0)     success
 *     DOORBELL_EFULL      no free slots within the time limit
 *     DOORBELL_ETIMEOUT   not complete within the time limit
 *     DOORBELL_EWORK      the endpoint has failed: a completion with an error, a dead peer, an abort. No more slots are
 *                         reserved; what was reserved before may still be sent. doorbell_endpoint_failure on the host
 *                         has the reason
 *     DOORBELL_ERANGE     more slots than the queue has, more bytes than the remote memory has or than fit in one work
 *                         request, memory of fewer than 8 bytes for an addition or a signal
 *     DOORBELL_EALIGNMENT an addition to, or a signal at, an address that is not a multiple of 8
 *     DOORBELL_EBUSY      other threads took the free slots first, for one second longer than the time limit
 *     DOORBELL_ESTATE     an addition on a device without atomics; slots of an exclusive queue that were submitted in
 *                         another order than they were reserved
 *
 * Names. The calls of kernels begin with doorbell_device_. Those that end in _warp or _block are in collective.cuh: the
 * threads of a warp or of a block make one operation together. Without such an ending one thread makes the operation.
 *
 * Memory. A `struct doorbell_local` (doorbell_device_queue_local) names memory of this side, a `struct doorbell_remote`
 * (doorbell_region_remote) memory of the peer. A put or get moves `local.len_bytes` bytes, from or to the beginning of
 * `remote`, which may be longer. doorbell_device_local_at() and doorbell_device_remote_at() name a part.
 *
 * The control path of the endpoint determines which component rings; the calls are the same. On the direct path the
 * kernel itself rings, by the doorbell record and the UAR. On the proxy path a thread of the host finds the submitted
 * slots in its memory, rings the NIC, and counts completions.
 *
 * Time limits are in nanoseconds, and at most DOORBELL_DEVICE_TIMEOUT_MAX_NS. Calls without a limit check once. But a
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

/*
 * Most bytes of one work request: `max_msg_sz` of a ConnectX port. The library gives kernels no queue of a port that has
 * less. Puts and gets of more bytes, in one call, are several work requests.
 */
#define DOORBELL_MESSAGE_BYTES_MAX 0x40000000u

/* Inline bytes that fit in a slot, after the three segments of a write. */
#define DOORBELL_INLINE_BYTES 28u

/* What a signal does to the peer's 64-bit word. */
enum doorbell_signal_op {
	DOORBELL_SIGNAL_SET = 0, /* stores the value */
	DOORBELL_SIGNAL_ADD = 1	 /* adds the value, atomically towards other additions of the peer's device */
};

/* How many threads use a view at once: doorbell_device_exclusive(). */
enum dbl_queue_mode { DBL_QUEUE_SHARED = 0, DBL_QUEUE_EXCLUSIVE = 1 };

/*
 * A queue as kernels see it; pass it by value. doorbell_device_queue_view() fills it. It is valid as long as the
 * doorbell_device_queue. Addresses are those of the GPU for which the queue was made.
 */
struct doorbell_queue_view {
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
	uint64_t sink;       /* the NIC writes there what signals of DOORBELL_SIGNAL_ADD found; 0 on a device without atomics */
	uint32_t sink_lkey;
	uint32_t mode;       /* enum dbl_queue_mode */
};

DBL_STATIC_ASSERT(sizeof(struct doorbell_queue_view) == 112, "a queue is 112 bytes");
DBL_STATIC_ASSERT(offsetof(struct doorbell_queue_view, slot_mask) == 80, "slot_mask");
DBL_STATIC_ASSERT(offsetof(struct doorbell_queue_view, sink) == 96, "sink");

#include "detail/queue_doorbell.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --------------------------------------------------------------------------------------------------------- memory */

/*
 * `len_bytes` bytes of `local` from the byte `offset_bytes` on. If they are not within `local`, the calls that get the
 * result return DOORBELL_ERANGE.
 */
static inline DBL_HD struct doorbell_local doorbell_device_local_at(struct doorbell_local local, uint64_t offset_bytes, uint64_t len_bytes)
{
	const int fits = offset_bytes <= local.len_bytes && len_bytes <= local.len_bytes - offset_bytes;

	local.addr += offset_bytes;
	/* More than any peer has. */
	local.len_bytes = fits ? len_bytes : UINT64_MAX;
	return local;
}

/* The same of the peer's memory. The host may call both. */
static inline DBL_HD struct doorbell_remote doorbell_device_remote_at(struct doorbell_remote remote, uint64_t offset_bytes, uint64_t len_bytes)
{
	const int fits = offset_bytes <= remote.len_bytes && len_bytes <= remote.len_bytes - offset_bytes;

	remote.addr += offset_bytes;
	/* No room for a byte. */
	remote.len_bytes = fits ? len_bytes : 0;
	return remote;
}

/* ------------------------------------------------------------------------------------------- reservation and doorbell */

/*
 * Returns a view of the queue that is cheaper: its calls use no atomic operations and no lock. The caller promises that
 * no two threads use the queue at once, with this view or another one. The queue may go from one thread to another with
 * a barrier, or release and acquire, between; and from one kernel to the next. Slots must be submitted in the order in
 * which they were reserved; otherwise doorbell_device_submit() returns DOORBELL_ESTATE, on the direct path. Views of both
 * kinds may be used after one another when all reserved slots are submitted.
 */
DBL_DEVICE struct doorbell_queue_view doorbell_device_exclusive(const struct doorbell_queue_view *queue)
{
	struct doorbell_queue_view view = *queue;

	view.mode = DBL_QUEUE_EXCLUSIVE;
	return view;
}

/*
 * Collects completions unless another thread is doing so. Does not wait. Returns 0, or the code of the queue's
 * failure.
 */
DBL_DEVICE int doorbell_device_poll(const struct doorbell_queue_view *queue)
{
	return dbl_queue_progress(queue);
}

/*
 * Reserves `count` consecutive slots and writes the first slot number to `*first`. Waits up to `timeout_ns`
 * nanoseconds for free slots; 0 checks once. Each reserved slot must be written and submitted soon, in any order.
 * Slots cannot be returned: later slots are not sent before them. Returns 0, DOORBELL_EFULL, DOORBELL_EWORK,
 * DOORBELL_ERANGE or DOORBELL_EBUSY.
 */
DBL_DEVICE int doorbell_device_reserve(const struct doorbell_queue_view *queue, uint32_t count, uint64_t timeout_ns, uint32_t *first)
{
	struct dbl_queue_state *state = dbl_queue_state(queue);
	uint32_t status, reserved, completed;

	if (count == 0 || count > queue->capacity)
		return DOORBELL_ERANGE;
	/* One round trip to memory for the three, so in any order: if `reserved` is older than `completed` there seems
	   to be no room, or another thread has changed it. */
	status = dbl_load_dword_relaxed(&state->status);
	reserved = dbl_load_dword_relaxed(&state->reserved);
	completed = dbl_queue_completed(queue);
	if (DBL_LIKELY(status == 0 && reserved + count - completed <= queue->capacity) &&
	    DBL_LIKELY(dbl_queue_claim(queue, reserved, reserved + count) == reserved)) {
		*first = reserved;
		return DOORBELL_OK;
	}
	DBL_SLOW();
	return dbl_queue_reserve_later(queue, count, timeout_ns, first);
}

/*
 * Submits `count` written slots from `first` on. They are sent when all earlier slots are submitted too. Does not
 * wait. Returns 0, or the code of the queue's failure. The last slot of a submission should be signaled; otherwise
 * doorbell_device_wait() and doorbell_device_quiet() see it complete only when a later signaled slot is complete.
 */
DBL_DEVICE int doorbell_device_submit(const struct doorbell_queue_view *queue, uint32_t first, uint32_t count)
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
	if (queue->mode == DBL_QUEUE_EXCLUSIVE)
		return dbl_queue_submit_own(queue, first, upto);
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
 * by doorbell_device_submit(first, count), `upto` is first + count. Returns 0, DOORBELL_ETIMEOUT, or DOORBELL_EWORK if the
 * queue failed before the slots were complete. In one case DOORBELL_EWORK is early: the queue failed after `upto` and
 * the thread that polls is not running. A later call then returns 0.
 */
DBL_DEVICE int doorbell_device_wait(const struct doorbell_queue_view *queue, uint32_t upto, uint64_t timeout_ns)
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
		status = doorbell_device_poll(queue);
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
 * Waits up to `timeout_ns` nanoseconds until everything is complete that this thread has submitted to the queue, and that
 * others had submitted before they synchronised with this thread: the peer's device has acknowledged it, the data of
 * gets and the results of additions are there, and the memory of puts may be used again. 0 checks once. The count that
 * it waits for is that of all slots that are reserved by now, so it also waits for what other threads have begun. This
 * thread has no slots that are reserved and not submitted. Returns the codes of doorbell_device_wait().
 */
DBL_DEVICE int doorbell_device_quiet(const struct doorbell_queue_view *queue, uint64_t timeout_ns)
{
	/* Relaxed: a thread sees its own reservations, and those that it has synchronised with. */
	return doorbell_device_wait(queue, dbl_load_dword_relaxed(&dbl_queue_state(queue)->reserved), timeout_ns);
}

/*
 * Waits until everything that doorbell_device_quiet() names is complete on this side: the memory of puts may be used
 * again, the data of gets is there. On a reliable connection a work request is complete on this side when the peer's
 * device has acknowledged it, so this waits for the same completions. Code that needs no more than this says so.
 */
DBL_DEVICE int doorbell_device_flush(const struct doorbell_queue_view *queue, uint64_t timeout_ns)
{
	return doorbell_device_quiet(queue, timeout_ns);
}

/*
 * Returns the error of the completion that failed the queue: syndrome (mlx5dv.h: MLX5_CQE_SYNDROME_*) | vendor
 * syndrome << 8 | low 16 bits of the slot << 16. Returns 0 if there was none, for example after an abort, and if the
 * host counts completions.
 */
DBL_DEVICE uint32_t doorbell_device_error(const struct doorbell_queue_view *queue)
{
	return dbl_load_dword_gpu(&dbl_queue_state(queue)->error);
}

/*
 * Returns the status word of the endpoint: 0, or the code of its failure. A kernel that waits for a word that the peer
 * stores passes it to doorbell_device_signal_wait_until(), which then ends when this endpoint fails.
 */
DBL_DEVICE const int32_t *doorbell_device_status_word(const struct doorbell_queue_view *queue)
{
	return &dbl_queue_control(queue)->status;
}

/* ---------------------------------------------------------------------------------------------- writing work requests */

/*
 * The following calls write a work request into a reserved slot. `flags` is 0 or a combination of
 * DOORBELL_WORK_UNSIGNALED, _SOLICITED, _FENCE and _ORDERED. An unsignaled slot is complete, and free again, when a later
 * signaled slot is complete. Among any `capacity` consecutive slots at least one must be signaled, otherwise the queue
 * stays full. They return 0 or a code of an argument that is refused; the slot must then be written again.
 *
 * A put: the NIC writes the bytes of `local` to the beginning of `remote`. DOORBELL_ERANGE if `remote` is shorter, or for
 * more than DOORBELL_MESSAGE_BYTES_MAX bytes.
 */
DBL_DEVICE int doorbell_device_write_put(const struct doorbell_queue_view *queue, uint32_t slot, uint32_t flags, struct doorbell_local local,
					 struct doorbell_remote remote)
{
	if (dbl_too_long(local, remote) || local.len_bytes > DOORBELL_MESSAGE_BYTES_MAX)
		return DOORBELL_ERANGE;
	dbl_queue_write_slice(queue, slot, DBL_OPCODE_RDMA_WRITE, flags, 0, local.addr, local.lkey, (uint32_t)local.len_bytes, remote.addr,
			      remote.rkey);
	return DOORBELL_OK;
}

/*
 * A put with immediate data: it uses one of the peer's receives, whose completion has `imm`, in host byte order. Returns
 * like doorbell_device_write_put.
 */
DBL_DEVICE int doorbell_device_write_put_imm(const struct doorbell_queue_view *queue, uint32_t slot, uint32_t flags,
					     struct doorbell_local local, struct doorbell_remote remote, uint32_t imm)
{
	if (dbl_too_long(local, remote) || local.len_bytes > DOORBELL_MESSAGE_BYTES_MAX)
		return DOORBELL_ERANGE;
	dbl_queue_write_slice(queue, slot, DBL_OPCODE_RDMA_WRITE_IMM, flags, imm, local.addr, local.lkey, (uint32_t)local.len_bytes,
			      remote.addr, remote.rkey);
	return DOORBELL_OK;
}

/* A get: the NIC reads from the beginning of `remote` to `local`. Returns like doorbell_device_write_put. */
DBL_DEVICE int doorbell_device_write_get(const struct doorbell_queue_view *queue, uint32_t slot, uint32_t flags, struct doorbell_local local,
					 struct doorbell_remote remote)
{
	if (dbl_too_long(local, remote) || local.len_bytes > DOORBELL_MESSAGE_BYTES_MAX)
		return DOORBELL_ERANGE;
	dbl_queue_write_slice(queue, slot, DBL_OPCODE_RDMA_READ, flags, 0, local.addr, local.lkey, (uint32_t)local.len_bytes, remote.addr,
			      remote.rkey);
	return DOORBELL_OK;
}

/*
 * A fetch-and-add: adds `add` to the first 8 bytes of `remote`, whose address is a multiple of 8, and writes the old
 * value to the first 8 bytes of `result`. Values are in host byte order. Returns 0, DOORBELL_ERANGE if one of the two has
 * fewer bytes, DOORBELL_EALIGNMENT, or DOORBELL_ESTATE on a device without atomics.
 */
DBL_DEVICE int doorbell_device_write_fetch_add(const struct doorbell_queue_view *queue, uint32_t slot, uint32_t flags,
					       struct doorbell_local result, struct doorbell_remote remote, uint64_t add)
{
	const int code = dbl_refused_fetch_add(queue, result, remote);

	if (code != DOORBELL_OK)
		return code;
	dbl_queue_write_add(queue, slot, flags, result.addr, result.lkey, remote, add);
	return DOORBELL_OK;
}

/*
 * A put of up to DOORBELL_INLINE_BYTES bytes, which are copied now. Returns 0, or DOORBELL_ERANGE for more bytes, or if
 * `remote` is shorter.
 */
DBL_DEVICE int doorbell_device_write_inline(const struct doorbell_queue_view *queue, uint32_t slot, uint32_t flags, const void *bytes,
					    uint32_t len_bytes, struct doorbell_remote remote)
{
	const uint8_t *from = (const uint8_t *)bytes;
	/* The header of the segment and 28 bytes. */
	uint64_t word4 = dbl_be32(DBL_INLINE_SEGMENT | len_bytes), word5 = 0, word6 = 0, word7 = 0;
	uint32_t at, ds;

	if (len_bytes > DOORBELL_INLINE_BYTES || len_bytes > remote.len_bytes)
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
	dbl_queue_write(queue, slot, DBL_OPCODE_RDMA_WRITE, ds, flags, 0, dbl_be64(remote.addr), dbl_be32(remote.rkey),
			len_bytes == 0 ? 0 : word4, word5, word6, word7);
	return DOORBELL_OK;
}

/*
 * A signal: changes the 64-bit word at the beginning of `remote`, whose address is a multiple of 8, as `signal_op`
 * (DOORBELL_SIGNAL_*) says. Earlier puts on the same queue are visible when the peer sees the change, as far as the peer's
 * memory keeps the NIC's write order. The peer waits by doorbell_device_signal_wait_until(), or loads with acquire.
 * DOORBELL_SIGNAL_SET is DOORBELL_WORK_ORDERED: the NIC sends it when the puts are answered. DOORBELL_SIGNAL_ADD is
 * a fetch-and-add, which is ordered without that wait; what it found is dropped. Returns 0, DOORBELL_ERANGE for fewer than 8
 * bytes or an unknown `signal_op`, DOORBELL_EALIGNMENT, or DOORBELL_ESTATE for an addition on a device without atomics.
 */
DBL_DEVICE int doorbell_device_write_signal(const struct doorbell_queue_view *queue, uint32_t slot, uint32_t flags,
					    struct doorbell_remote remote, uint32_t signal_op, uint64_t value)
{
	const int code = dbl_refused_signal(queue, remote, signal_op);

	if (code != DOORBELL_OK)
		return code;
	dbl_queue_write_signal(queue, slot, flags, remote, signal_op, value);
	return DOORBELL_OK;
}

/* A no-operation, for a slot that is not needed. */
DBL_DEVICE void doorbell_device_write_nop(const struct doorbell_queue_view *queue, uint32_t slot, uint32_t flags)
{
	dbl_queue_write(queue, slot, DBL_OPCODE_NOP, 1, flags, 0, 0, 0, 0, 0, 0, 0);
}

/* -------------------------------------------------------------------------------------------------------- in one call */

/* Puts, and gets, of any length; with a signal behind it if `has_signal`. */
DBL_DEVICE int dbl_queue_transfer(const struct doorbell_queue_view *queue, uint32_t opcode, struct doorbell_local local,
				  struct doorbell_remote remote, uint32_t imm, int has_signal, struct doorbell_remote signal,
				  uint32_t signal_op, uint64_t value, uint64_t timeout_ns, uint32_t *upto)
{
	const uint32_t count = has_signal ? 2 : 1;
	uint32_t slot;
	int code, is_last;

	if (dbl_too_long(local, remote))
		return DOORBELL_ERANGE;
	if (has_signal) {
		code = dbl_refused_signal(queue, signal, signal_op);
		if (code != DOORBELL_OK)
			return code;
	}
	for (;;) {
		is_last = local.len_bytes <= DBL_PIECE_BYTES;
		code = doorbell_device_reserve(queue, count, timeout_ns, &slot);
		if (code != DOORBELL_OK)
			return code;
		dbl_queue_write_slice(queue, slot, is_last || opcode != DBL_OPCODE_RDMA_WRITE_IMM ? opcode : (uint32_t)DBL_OPCODE_RDMA_WRITE,
				      has_signal ? (uint32_t)DOORBELL_WORK_UNSIGNALED : 0u, is_last ? imm : 0, local.addr, local.lkey,
				      is_last ? (uint32_t)local.len_bytes : DBL_PIECE_BYTES, remote.addr, remote.rkey);
		/* As many slots each time: the compiler knows the number. */
		if (has_signal && is_last)
			dbl_queue_write_signal(queue, slot + 1, 0, signal, signal_op, value);
		else if (has_signal)
			doorbell_device_write_nop(queue, slot + 1, 0);
		if (upto)
			*upto = slot + count;
		code = doorbell_device_submit(queue, slot, count);
		if (DBL_LIKELY(is_last))
			return code;
		DBL_SLOW();
		if (code != DOORBELL_OK)
			return code;
		local.addr += DBL_PIECE_BYTES;
		local.len_bytes -= DBL_PIECE_BYTES;
		remote.addr += DBL_PIECE_BYTES;
	}
}

/*
 * The following calls reserve a slot within `timeout_ns` nanoseconds, write it, signaled, and submit it. `*upto`, if
 * `upto` is not NULL, receives the value for doorbell_device_wait(). They return 0 or the codes of
 * doorbell_device_reserve(), doorbell_device_write_*() and doorbell_device_submit().
 *
 * Puts and gets of more than DOORBELL_MESSAGE_BYTES_MAX bytes are several work requests, each in a slot and with a time
 * limit of its own. If such a call fails, some of them may be sent. `*upto` covers all.
 *
 * A put: see doorbell_device_write_put().
 */
DBL_DEVICE int doorbell_device_put(const struct doorbell_queue_view *queue, struct doorbell_local local, struct doorbell_remote remote,
				   uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_queue_transfer(queue, DBL_OPCODE_RDMA_WRITE, local, remote, 0, 0, remote, 0, 0, timeout_ns, upto);
}

/* A put with immediate data: see doorbell_device_write_put_imm(). Of several work requests the last one has it. */
DBL_DEVICE int doorbell_device_put_imm(const struct doorbell_queue_view *queue, struct doorbell_local local, struct doorbell_remote remote,
				       uint32_t imm, uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_queue_transfer(queue, DBL_OPCODE_RDMA_WRITE_IMM, local, remote, imm, 0, remote, 0, 0, timeout_ns, upto);
}

/* A get: see doorbell_device_write_get(). */
DBL_DEVICE int doorbell_device_get(const struct doorbell_queue_view *queue, struct doorbell_local local, struct doorbell_remote remote,
				   uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_queue_transfer(queue, DBL_OPCODE_RDMA_READ, local, remote, 0, 0, remote, 0, 0, timeout_ns, upto);
}

/* A put of a few bytes, which are copied now: see doorbell_device_write_inline(). */
DBL_DEVICE int doorbell_device_put_inline(const struct doorbell_queue_view *queue, const void *bytes, uint32_t len_bytes,
					  struct doorbell_remote remote, uint64_t timeout_ns, uint32_t *upto)
{
	uint32_t slot;
	int code;

	if (len_bytes > DOORBELL_INLINE_BYTES || len_bytes > remote.len_bytes)
		return DOORBELL_ERANGE;
	code = doorbell_device_reserve(queue, 1, timeout_ns, &slot);
	if (code != DOORBELL_OK)
		return code;
	(void)doorbell_device_write_inline(queue, slot, 0, bytes, len_bytes, remote);
	if (upto)
		*upto = slot + 1;
	return doorbell_device_submit(queue, slot, 1);
}

/* A fetch-and-add: see doorbell_device_write_fetch_add(). */
DBL_DEVICE int doorbell_device_fetch_add(const struct doorbell_queue_view *queue, struct doorbell_local result,
					 struct doorbell_remote remote, uint64_t add, uint64_t timeout_ns, uint32_t *upto)
{
	uint32_t slot;
	int code = dbl_refused_fetch_add(queue, result, remote);

	if (code != DOORBELL_OK)
		return code;
	code = doorbell_device_reserve(queue, 1, timeout_ns, &slot);
	if (code != DOORBELL_OK)
		return code;
	dbl_queue_write_add(queue, slot, 0, result.addr, result.lkey, remote, add);
	if (upto)
		*upto = slot + 1;
	return doorbell_device_submit(queue, slot, 1);
}

/* A signal: see doorbell_device_write_signal(). */
DBL_DEVICE int doorbell_device_signal(const struct doorbell_queue_view *queue, struct doorbell_remote remote, uint32_t signal_op,
				      uint64_t value, uint64_t timeout_ns, uint32_t *upto)
{
	uint32_t slot;
	int code = dbl_refused_signal(queue, remote, signal_op);

	if (code != DOORBELL_OK)
		return code;
	code = doorbell_device_reserve(queue, 1, timeout_ns, &slot);
	if (code != DOORBELL_OK)
		return code;
	dbl_queue_write_signal(queue, slot, 0, remote, signal_op, value);
	if (upto)
		*upto = slot + 1;
	return doorbell_device_submit(queue, slot, 1);
}

/*
 * A put of `local` to `remote` followed by a signal at `signal`, with one doorbell. Takes two slots; only the signal is
 * signaled.
 */
DBL_DEVICE int doorbell_device_put_signal(const struct doorbell_queue_view *queue, struct doorbell_local local,
					  struct doorbell_remote remote, struct doorbell_remote signal, uint32_t signal_op,
					  uint64_t value, uint64_t timeout_ns, uint32_t *upto)
{
	return dbl_queue_transfer(queue, DBL_OPCODE_RDMA_WRITE, local, remote, 0, 1, signal, signal_op, value, timeout_ns, upto);
}

#ifdef __cplusplus
}
#endif

#endif
