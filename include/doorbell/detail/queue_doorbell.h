/*
 * Inside doorbell/queue.h: the state that the threads of a device queue share, the ring of work requests, the doorbell,
 * and the completion queue. Programs include doorbell/queue.h.
 *
 * Memory order, each store with its other side:
 * - The data to send and the work request are ordinary stores. The thread that holds `ringing` has a release fence of
 *   system scope between them and the doorbell record. It covers everything that the thread of doorbell_device_submit() has
 *   synchronised with (__syncwarp, __syncthreads), because a release is cumulative. A thread that finds `ringing` taken
 *   has a release fence before the mark of each slot; the thread that rings loads the mark and has an acquire fence.
 *   That fence is of GPU scope, because only threads of this GPU ring. On the proxy path it is of system scope: a
 *   thread of the host loads the mark with acquire and rings (src/endpoint/shared/proxy_doorbells.rs).
 * - The thread that rings stores the doorbell record, has a release fence of system scope, and stores the UAR. A NIC
 *   that has seen the doorbell finds the record and the work request. A NIC may use the record before it sees the
 *   doorbell, so one fence for both stores would not be enough.
 * - `ringing` is only changed by read-modify-write operations, which have one order, so no sequentially consistent
 *   fence is needed: a thread that finds it taken adds one to it, and the thread that rings can only release it if
 *   nothing was added since its last look at the marks. The addition releases the marks, the look acquires them.
 * - `reserved` is relaxed. A thread may write a slot because of `completed`, which it loads with acquire. It is a
 *   compare-and-swap and not an addition, because slots cannot be returned: an addition would take slots before it is
 *   known that they are free, and a call whose time limit passes could not give them back.
 * - The NIC writes data, then the completion. A thread that polls loads the completion, has an acquire fence of system
 *   scope, and stores the count with release. A thread that waits loads the count relaxed until it is reached, and then
 *   with acquire; ordinary loads then see the data of a get. The compiler assumes that memory read through
 *   `const T *__restrict__` or __ldg() does not change while the kernel runs, so such loads may miss data that arrives
 *   meanwhile. In GPU memory this order holds as far as the GPU orders writes of others
 *   (CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING).
 * - A thread that has read completions stores the consumer index after an acquire fence, so after its loads. The NIC
 *   loads it before it reuses the entries, so its writes come after the loads. The host also uses the index to look for
 *   errors that nobody polls for (src/endpoint/queue/ownership.rs).
 * - The host stores `status` of the control block, and on the proxy path `completed`, with release; kernels load them
 *   with acquire, of system scope. A thread that learns of a failure stores the state's `status` with release, so that
 *   others see everything that the host had seen.
 * - Everything in struct dbl_queue_state is of GPU scope, because only threads of that GPU access it. With an exclusive
 *   view its words are loaded and stored without any order: the threads that have the queue one after another synchronise
 *   with one another. The stores to the record and the UAR have the same fences. No lock is taken.
 */
#ifndef DOORBELL_QUEUE_H
/* It includes this file behind the queue's structure. */
#include "../queue.h"
#elif !defined(DOORBELL_DETAIL_QUEUE_H)
#define DOORBELL_DETAIL_QUEUE_H

#include "access.h"
#include "wqe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the threads share, in memory of their GPU. Each group of writers has its own cache lines. */
struct dbl_queue_state {
	uint32_t reserved; /* end of the reserved slots */
	uint32_t line0[31];
	uint32_t ringing; /* 0, or 1 while a thread rings, plus 1 for each submission that it has to look for */
	uint32_t rung;    /* end of the slots that the NIC was told of */
	uint32_t line1[30];
	uint32_t completed; /* end of the slots that are complete */
	int32_t status;     /* 0, or the code of the failure */
	uint32_t error;     /* a completion with an error: syndrome, vendor syndrome << 8, low 16 bits of the slot <<
			       16 */
	uint32_t line2[29];
	uint32_t polling;  /* 1 while a thread polls */
	uint32_t cq_index; /* count of the next completion */
	uint32_t line3[30];
};

/* In host memory. src/endpoint/device_queue_state.rs is the other side. */
struct dbl_queue_control {
	/* Written by the host. */
	int32_t status;     /* 0, or the code of the endpoint's failure */
	uint32_t completed; /* like dbl_queue_state.completed, if the host counts completions */
	uint32_t line0[14];
	/* Written by kernels: replay.h. */
	int32_t replay_code; /* 0, or the code of an operation that was not executed */
	uint32_t reserved;
	uint64_t replay_timeout_ns; /* its time limit */
	uint32_t line1[12];
};

DBL_STATIC_ASSERT(offsetof(struct dbl_queue_state, ringing) == 128, "ringing");
DBL_STATIC_ASSERT(offsetof(struct dbl_queue_state, completed) == 256, "completed");
DBL_STATIC_ASSERT(offsetof(struct dbl_queue_state, polling) == 384, "polling");
DBL_STATIC_ASSERT(sizeof(struct dbl_queue_state) == 512, "a state is 512 bytes");
DBL_STATIC_ASSERT(offsetof(struct dbl_queue_control, replay_code) == 64, "replay_code");
DBL_STATIC_ASSERT(sizeof(struct dbl_queue_control) == 128, "a control block is a line");

/* Bytes of a work request of a put or get in one call that takes several. Tests, which have less memory, use fewer. */
#ifndef DBL_PIECE_BYTES
#define DBL_PIECE_BYTES DOORBELL_MESSAGE_BYTES_MAX
#endif

/* Called in each turn of a wait, on a CPU. */
#ifndef DBL_TURN
#define DBL_TURN() ((void)0)
#endif

/* For tests: called when the slots from `from` up to `upto` can be written again. */
#ifndef DBL_SLOTS_FREED
#define DBL_SLOTS_FREED(queue, from, upto) ((void)0)
#endif

/* For tests: called after ringing the NIC, before the lock is released. */
#ifndef DBL_RANG
#define DBL_RANG(queue) ((void)0)
#endif

/* For scripts/sass: called where a thread leaves the fast path. */
#ifndef DBL_SLOW
#define DBL_SLOW() ((void)0)
#endif

/* Tells the compiler which case the fast path is, so that the other one is not in its way. */
#if defined(__CUDACC__) || defined(__GNUC__)
#define DBL_LIKELY(condition) __builtin_expect(!!(condition), 1)
#else
#define DBL_LIKELY(condition) (condition)
#endif

/* Marks that a thread loads at once. Model checkers, which try all orders of all loads, use fewer. */
#ifndef DBL_MARKS_AT_ONCE
#define DBL_MARKS_AT_ONCE 8
#endif

/* How long a thread tries to reserve slots if others always take them first. */
#define DBL_CONTENTION_NS 1000000000u

DBL_DEVICE struct dbl_queue_state *dbl_queue_state(const struct doorbell_queue_view *queue)
{
	return (struct dbl_queue_state *)(uintptr_t)queue->state;
}

DBL_DEVICE uint32_t *dbl_queue_mark(const struct doorbell_queue_view *queue, uint32_t slot)
{
	return (uint32_t *)(uintptr_t)queue->marks + (slot & queue->slot_mask);
}

/* Slots before `upto` are complete. The caller holds `polling`. */
DBL_DEVICE void dbl_queue_complete(const struct doorbell_queue_view *queue, uint32_t upto)
{
	DBL_SLOTS_FREED(queue, dbl_queue_state(queue)->completed, upto);
	if (queue->mode == DBL_QUEUE_EXCLUSIVE)
		dbl_store_dword_own(&dbl_queue_state(queue)->completed, upto);
	else
		dbl_store_dword_release_gpu(&dbl_queue_state(queue)->completed, upto);
}

DBL_DEVICE const struct dbl_queue_control *dbl_queue_control(const struct doorbell_queue_view *queue)
{
	return (const struct dbl_queue_control *)(uintptr_t)queue->control;
}

/* The code of the queue's failure, or 0. Acquire only if there is one. */
DBL_DEVICE int dbl_queue_status(const struct doorbell_queue_view *queue)
{
	const struct dbl_queue_state *state = dbl_queue_state(queue);

	if (DBL_LIKELY(dbl_load_dword_relaxed(&state->status) == 0))
		return 0;
	DBL_SLOW();
	return (int32_t)dbl_load_dword_gpu(&state->status);
}

/*
 * Returns the last word of a completion if the NIC has written it, according to its owner bit; otherwise a word with
 * opcode 0xf (mlx5dv.h: MLX5_CQE_INVALID). Relaxed.
 */
DBL_DEVICE uint32_t dbl_queue_completion(const struct doorbell_queue_view *queue, uint32_t index)
{
	const uint8_t *cqe = (const uint8_t *)(uintptr_t)queue->completions + (size_t)(index & queue->cqe_mask) * 64;
	const uint32_t word = dbl_load_dword_relaxed(cqe + 60);
	const uint32_t lap_is_odd = (index & (queue->cqe_mask + 1)) != 0;

	return (word >> 24 & 1) == lap_is_odd ? word : 0xf0000000u;
}

/* Whether it is an error of the requester or of the responder (mlx5dv.h: MLX5_CQE_REQ_ERR, MLX5_CQE_RESP_ERR). */
DBL_DEVICE int dbl_completion_is_error(uint32_t word)
{
	return word >> 28 == 13 || word >> 28 == 14;
}

/*
 * The number of slots from `completed` on that a completion covers; its own slot is the last one (mlx5dv.h:
 * wqe_counter).
 */
DBL_DEVICE uint32_t dbl_completion_slots(uint32_t word, uint32_t completed)
{
	return (((dbl_be32(word) >> 16) - completed) & 0xffff) + 1;
}

/*
 * Polls the completion queue, and looks at the host's status. The caller holds `polling`: one thread at a time loads from
 * the host's memory. Loads of many threads at once would wait for one another, and the fences of the thread that rings
 * for them. Returns whether it has stored anything.
 */
DBL_DEVICE int dbl_queue_poll_own(const struct doorbell_queue_view *queue)
{
	struct dbl_queue_state *state = dbl_queue_state(queue);
	const int32_t host_status = (int32_t)DBL_LOAD_FENCED(&dbl_queue_control(queue)->status);
	const uint32_t begin = dbl_load_dword_relaxed(&state->cq_index);
	uint32_t index = begin, completed = dbl_load_dword_relaxed(&state->completed), ahead, slots, words[8];
	uint32_t rung = 0, failed = 0;
	int32_t status = 0;

	while (status == 0) {
		/* Loads several at once, because each load of host memory has a long latency. The NIC writes them in
		   order; the loads may be in any order. */
#ifdef __CUDACC__
#pragma unroll
#endif
		for (ahead = 0; ahead < 8; ahead++)
			words[ahead] = dbl_queue_completion(queue, index + ahead);
		if (words[0] >> 28 == 0xf)
			break;
		/* What the NIC wrote before them. */
		dbl_fence_acquire();
		/* Loaded after the completions: everything that they complete was rung before. */
		rung = DBL_LOAD_FENCED(&state->rung);
		/* Unrolled as well: an array that is indexed at run time would lie in local memory. */
#ifdef __CUDACC__
#pragma unroll
#endif
		for (ahead = 0; ahead < 8; ahead++) {
			if (words[ahead] >> 28 == 0xf)
				break;
			slots = dbl_completion_slots(words[ahead], completed);
			if (slots > rung - completed || dbl_completion_is_error(words[ahead])) {
				/* The completion is not consumed, so that the host finds it. */
				status = DOORBELL_EWORK;
				failed = words[ahead];
				break;
			}
			completed += slots;
		}
		index += ahead;
		if (ahead < 8)
			break;
	}
	if (index != begin) {
		/* Behind the acquire fence: the completions are read before the NIC is told that it may write others
		   there. */
		DBL_STORE_FENCED((void *)(uintptr_t)queue->cq_record, dbl_be32(index & 0xffffff));
		dbl_store_dword(&state->cq_index, index);
		dbl_queue_complete(queue, completed);
	}
	if (status != 0) {
		slots = dbl_completion_slots(failed, completed);
		/* Otherwise it is a completion of no request that was rung. */
		if (slots <= rung - completed) {
			const uint8_t *cqe =
				(const uint8_t *)(uintptr_t)queue->completions + (size_t)(index & queue->cqe_mask) * 64;
			/* mlx5dv.h, struct mlx5_err_cqe: vendor_err_synd is at 54, syndrome at 55. */
			const uint32_t syndromes = dbl_load_dword_relaxed(cqe + 52);
			dbl_store_dword(&state->error, syndromes >> 24 | (syndromes >> 8 & 0xff00) |
							       (completed + slots - 1) << 16);
		}
	} else if (host_status != 0) {
		/* A thread that loads this status must also see the completions that the host had seen. */
		dbl_fence_acquire();
		status = host_status;
	}
	if (status != 0)
		dbl_store_dword_release_gpu(&state->status, (uint32_t)status);
	return index != begin || status != 0;
}

/* The same where the host counts completions. */
DBL_DEVICE int dbl_queue_poll_host(const struct doorbell_queue_view *queue)
{
	struct dbl_queue_state *state = dbl_queue_state(queue);
	const struct dbl_queue_control *control = dbl_queue_control(queue);
	/* These loads may be in any order: a thread that waits and finds the status polls again. */
	const int32_t status = (int32_t)DBL_LOAD_FENCED(&control->status);
	const uint32_t completed = DBL_LOAD_FENCED(&control->completed);
	const int has_completed = completed != dbl_load_dword_relaxed(&state->completed);

	if (!has_completed && status == 0)
		return 0;
	/* What the host saw before it counted. */
	dbl_fence_acquire();
	if (has_completed)
		dbl_queue_complete(queue, completed);
	if (status != 0)
		dbl_store_dword_release_gpu(&state->status, (uint32_t)status);
	return 1;
}

/* Collects completions unless another thread is doing so. Returns whether this thread did. */
DBL_DEVICE int dbl_queue_poll(const struct doorbell_queue_view *queue)
{
	struct dbl_queue_state *state = dbl_queue_state(queue);
	const int is_exclusive = queue->mode == DBL_QUEUE_EXCLUSIVE;
	int has_stored = 0;

	if (!is_exclusive && (dbl_load_dword_relaxed(&state->polling) != 0 || !dbl_take_dword(&state->polling, 0, 1)))
		return 0;
	if (queue->record != 0) {
		has_stored = dbl_queue_poll_own(queue);
	} else {
		has_stored = dbl_queue_poll_host(queue);
	}
	if (is_exclusive)
		return 1;
	/* Most polls find nothing, and have nothing to release. As a read-modify-write operation the release of the
	   thread before goes on to the thread that comes next. */
	if (has_stored)
		dbl_store_dword_release_gpu(&state->polling, 0);
	else
		(void)dbl_swap_dword(&state->polling, 0);
	return 1;
}

/* doorbell_device_poll(). */
DBL_DEVICE int dbl_queue_progress(const struct doorbell_queue_view *queue)
{
	const int status = dbl_queue_status(queue);

	if (status != 0 || !dbl_queue_poll(queue))
		return status;
	return dbl_queue_status(queue);
}

/* The end of the slots that are complete. Acquire; in an exclusive view the calling thread has polled itself. */
DBL_DEVICE uint32_t dbl_queue_completed(const struct doorbell_queue_view *queue)
{
	struct dbl_queue_state *state = dbl_queue_state(queue);

	return queue->mode == DBL_QUEUE_EXCLUSIVE ? dbl_load_dword_own(&state->completed) : dbl_load_dword_gpu(&state->completed);
}

/* Reserves the slots from `from` up to `to` if the end of the reserved slots is `from`. Returns what that was. Relaxed. */
DBL_DEVICE uint32_t dbl_queue_claim(const struct doorbell_queue_view *queue, uint32_t from, uint32_t to)
{
	struct dbl_queue_state *state = dbl_queue_state(queue);

	if (queue->mode == DBL_QUEUE_EXCLUSIVE) {
		dbl_store_dword_own(&state->reserved, to);
		return from;
	}
	return dbl_claim_dword(&state->reserved, from, to);
}

/* Reserves slots if there was no room, a failure, or another thread that was faster, at the first look. */
DBL_DEVICE int dbl_queue_reserve_later(const struct doorbell_queue_view *queue, uint32_t count, uint64_t timeout_ns,
				       uint32_t *first)
{
	struct dbl_queue_state *state = dbl_queue_state(queue);
	const uint64_t bound_ns = dbl_bounded(timeout_ns);
	uint64_t full_ns = 0, outrun_ns = 0, now_ns;
	uint32_t turn, completed, reserved, found, outrun;
	int32_t status;
	int late, is_outrun, is_full = 0;

	for (turn = 0, outrun = 0;;) {
		is_outrun = 0;
		status = dbl_queue_status(queue);
		if (status != 0)
			return status;
		/* Loaded in this order: an older `completed` makes the free space look smaller, never larger. */
		completed = dbl_queue_completed(queue);
		reserved = dbl_load_dword_relaxed(&state->reserved);
		while (reserved + count - completed <= queue->capacity) {
			/* What another thread has left is the next attempt's value: a load of it would take as long as an
			   attempt. */
			found = dbl_queue_claim(queue, reserved, reserved + count);
			if (found == reserved) {
				*first = reserved;
				return DOORBELL_OK;
			}
			reserved = found;
			is_outrun = 1;
			if (++outrun % 1024 != 0)
				continue;
			now_ns = dbl_now_ns();
			if (outrun == 1024)
				outrun_ns = now_ns;
			else if (dbl_has_passed(now_ns, outrun_ns, DBL_CONTENTION_NS + bound_ns))
				return DOORBELL_EBUSY;
			status = dbl_queue_status(queue);
			if (status != 0)
				return status;
		}
		/* Others have taken what was free by then. More may be free now. */
		if (is_outrun)
			continue;
		if (turn != 0) {
			/* There was no room even after a poll. */
			now_ns = dbl_now_ns();
			if (!is_full)
				full_ns = now_ns;
			is_full = 1;
			late = bound_ns == 0 || dbl_has_passed(now_ns, full_ns, bound_ns);
			if (late)
				return DOORBELL_EFULL;
			DBL_TURN();
		}
		turn++;
		outrun = 0;
		status = dbl_queue_progress(queue);
		if (status != 0)
			return status;
	}
}

/* Converts DOORBELL_WORK_* to bits of a control segment. */
DBL_DEVICE uint8_t dbl_queue_flags(uint32_t flags)
{
	return (uint8_t)((flags & DOORBELL_WORK_UNSIGNALED ? 0 : DBL_WR_SIGNALED) |
			 (flags & DOORBELL_WORK_SOLICITED ? DBL_WR_SOLICITED : 0) |
			 (flags & DOORBELL_WORK_ORDERED ? DBL_WR_ORDERED :
			  flags & DOORBELL_WORK_FENCE	? DBL_WR_FENCE :
							  0));
}

/*
 * Writes a work request of `ds` segments into a slot: the control segment, then words 2 to 7 of the WQE. The words are
 * values and no array: a kernel would keep an array whose length it does not know at compile time in local memory.
 * Formats: dbl_wqe_build() of wqe.h.
 */
DBL_DEVICE void dbl_queue_write(const struct doorbell_queue_view *queue, uint32_t slot, uint32_t opcode, uint32_t ds, uint32_t flags,
				uint32_t imm, uint64_t word2, uint64_t word3, uint64_t word4, uint64_t word5, uint64_t word6,
				uint64_t word7)
{
	uint64_t wqe[DBL_WQEBB_BYTES / 8];

	dbl_wqe_control(wqe, opcode, slot, queue->qpn, ds, dbl_queue_flags(flags), imm);
	wqe[2] = word2;
	wqe[3] = word3;
	wqe[4] = word4;
	wqe[5] = word5;
	wqe[6] = word6;
	wqe[7] = word7;
	dbl_wqe_copy((uint8_t *)(uintptr_t)queue->ring, queue->slot_mask, slot, wqe, 1);
	if (queue->record == 0)
		((uint64_t *)(uintptr_t)queue->doorbells)[slot & queue->slot_mask] = wqe[0];
}

/* A request with one slice of local memory. A slice of length 0 has no segment, as in dbl_wqe_build(). */
DBL_DEVICE void dbl_queue_write_slice(const struct doorbell_queue_view *queue, uint32_t slot, uint32_t opcode, uint32_t flags,
				      uint32_t imm, uint64_t local_addr, uint32_t lkey, uint32_t len_bytes, uint64_t remote_addr,
				      uint32_t rkey)
{
	const int is_empty = len_bytes == 0;

	dbl_queue_write(queue, slot, opcode, is_empty ? 2 : 3, flags, imm, dbl_be64(remote_addr), dbl_be32(rkey),
			is_empty ? 0 : dbl_be32x2(len_bytes, lkey), is_empty ? 0 : dbl_be64(local_addr), 0, 0);
}

/* Whether the bytes of a put or get do not fit in the peer's memory. */
DBL_DEVICE int dbl_too_long(struct doorbell_local local, struct doorbell_remote remote)
{
	return local.len_bytes > remote.len_bytes;
}

/* DOORBELL_OK, or why there is no addition to `remote`. */
DBL_DEVICE int dbl_refused_add(const struct doorbell_queue_view *queue, struct doorbell_remote remote)
{
	if (remote.len_bytes < 8)
		return DOORBELL_ERANGE;
	if (remote.addr % 8 != 0)
		return DOORBELL_EALIGNMENT;
	return queue->sink == 0 ? DOORBELL_ESTATE : DOORBELL_OK;
}

DBL_DEVICE int dbl_refused_fetch_add(const struct doorbell_queue_view *queue, struct doorbell_local result, struct doorbell_remote remote)
{
	/* UINT64_MAX: doorbell_device_local_at(). */
	return result.len_bytes < 8 || result.len_bytes == UINT64_MAX ? DOORBELL_ERANGE : dbl_refused_add(queue, remote);
}

DBL_DEVICE int dbl_refused_signal(const struct doorbell_queue_view *queue, struct doorbell_remote remote, uint32_t signal_op)
{
	if (signal_op == DOORBELL_SIGNAL_ADD)
		return dbl_refused_add(queue, remote);
	if (signal_op != DOORBELL_SIGNAL_SET || remote.len_bytes < 8)
		return DOORBELL_ERANGE;
	return remote.addr % 8 != 0 ? DOORBELL_EALIGNMENT : DOORBELL_OK;
}

/* A fetch-and-add: see doorbell_device_write_fetch_add(). */
DBL_DEVICE void dbl_queue_write_add(const struct doorbell_queue_view *queue, uint32_t slot, uint32_t flags, uint64_t result_addr,
				    uint32_t lkey, struct doorbell_remote remote, uint64_t add)
{
	dbl_queue_write(queue, slot, DBL_OPCODE_ATOMIC_FA, 4, flags, 0, dbl_be64(remote.addr), dbl_be32(remote.rkey), dbl_be64(add), 0,
			dbl_be32x2(8, lkey), dbl_be64(result_addr));
}

/* A signal: see doorbell_device_write_signal(). */
DBL_DEVICE void dbl_queue_write_signal(const struct doorbell_queue_view *queue, uint32_t slot, uint32_t flags, struct doorbell_remote remote,
				       uint32_t signal_op, uint64_t value)
{
	if (signal_op == DOORBELL_SIGNAL_ADD)
		dbl_queue_write_add(queue, slot, flags, queue->sink, queue->sink_lkey, remote, value);
	else
		dbl_queue_write(queue, slot, DBL_OPCODE_RDMA_WRITE, 3, flags | DOORBELL_WORK_ORDERED, 0, dbl_be64(remote.addr),
				dbl_be32(remote.rkey), value << 32 | dbl_be32(DBL_INLINE_SEGMENT | (uint32_t)sizeof(value)), value >> 32,
				0, 0);
}

/* Returns the end of the consecutive submitted slots from `begin` on. Relaxed. The caller holds `ringing`. */
DBL_DEVICE uint32_t dbl_queue_submitted(const struct doorbell_queue_view *queue, uint32_t begin)
{
	uint32_t end = begin, ahead, marks[DBL_MARKS_AT_ONCE];

	do {
		/* Loads several at once, because each load has a long latency, which would otherwise limit the
		   queue's rate. */
#ifdef __CUDACC__
#pragma unroll
#endif
		for (ahead = 0; ahead < DBL_MARKS_AT_ONCE; ahead++)
			marks[ahead] = DBL_LOAD_FENCED(dbl_queue_mark(queue, end + ahead));
#ifdef __CUDACC__
#pragma unroll
#endif
		for (ahead = 0; ahead < DBL_MARKS_AT_ONCE; ahead++) {
			if (marks[ahead] != end + 1)
				return end;
			end++;
		}
	} while (end - begin < queue->capacity);
	return end;
}

/* The doorbell of a slot. Of the first bytes of a work request, the NIC uses only its index and the queue's number. */
DBL_DEVICE uint64_t dbl_queue_doorbell(const struct doorbell_queue_view *queue, uint32_t slot)
{
	return dbl_be32x2((slot & 0xffff) << 8, queue->qpn << 8 | 1);
}

DBL_DEVICE void dbl_queue_mark_all(const struct doorbell_queue_view *queue, uint32_t first, uint32_t upto)
{
	uint32_t slot;

	for (slot = first; slot != upto; slot++)
		DBL_STORE_FENCED(dbl_queue_mark(queue, slot), slot + 1);
}

/* Rings the NIC for the slots before `end`. The caller holds `ringing`, or has the queue for itself. */
DBL_DEVICE void dbl_queue_ring_upto(const struct doorbell_queue_view *queue, uint32_t end)
{
	uint64_t uar;

	/* Before the record, because a NIC may use the record before it sees the doorbell, and a thread that finds a
	   completion must find that it was rung for. */
	DBL_STORE_FENCED(&dbl_queue_state(queue)->rung, end);
	/* The work requests before the record. */
	dbl_fence_release();
	dbl_store_dword((void *)(uintptr_t)queue->record, dbl_be32(end & 0xffff));
	/* The record before the doorbell. */
	dbl_fence_register();
	/* Alternately, without separate state: a burst of stores to one register would wait for its buffer. No index of an
	   array, for which a kernel would copy the queue to local memory. */
	uar = (end & 1) != 0 ? queue->uar[0] : queue->uar[1];
	dbl_store_qword((void *)(uintptr_t)uar, dbl_queue_doorbell(queue, end - 1));
	dbl_flush_registers();
}

/* doorbell_device_submit() of an exclusive view, where kernels ring. */
DBL_DEVICE int dbl_queue_submit_own(const struct doorbell_queue_view *queue, uint32_t first, uint32_t upto)
{
	if (!DBL_LIKELY(dbl_load_dword_own(&dbl_queue_state(queue)->rung) == first)) {
		DBL_SLOW();
		return DOORBELL_ESTATE;
	}
	/* For shared views, which are used later: a mark of this count must not be there already. */
	dbl_queue_mark_all(queue, first, upto);
	dbl_queue_ring_upto(queue, upto);
	DBL_RANG(queue);
	return (int32_t)dbl_load_dword_own(&dbl_queue_state(queue)->status);
}

/*
 * Rings the NIC for all submitted slots up to the first one that is not submitted, and again if slots were submitted
 * meanwhile. The caller holds `ringing`, which is released. The caller has submitted the slots from `first` to `upto`
 * itself if `is_own`.
 */
DBL_DEVICE void dbl_queue_ring(const struct doorbell_queue_view *queue, uint32_t first, uint32_t upto, int is_own)
{
	struct dbl_queue_state *state = dbl_queue_state(queue);
	uint32_t begin, mark, end = upto;

	for (;;) {
		begin = dbl_load_dword_relaxed(&state->rung);
		mark = dbl_load_dword_relaxed(dbl_queue_mark(queue, upto));
		/* Usually these slots are next, and none behind them is submitted. */
		if (!DBL_LIKELY(is_own && begin == first && mark != upto + 1)) {
			DBL_SLOW();
			end = dbl_queue_submitted(queue, begin);
			/* The work requests that the marks announce. */
			dbl_fence_acquire_gpu();
		}
		if (DBL_LIKELY(end != begin))
			dbl_queue_ring_upto(queue, end);
		DBL_RANG(queue);
		/* Fails if a thread has submitted meanwhile and left its slots to this thread. */
		if (DBL_LIKELY(dbl_leave_dword(&state->ringing, 1, 0)))
			return;
		DBL_SLOW();
		(void)dbl_swap_dword_acquire(&state->ringing, 1);
		is_own = 0;
	}
}

#ifdef __cplusplus
}
#endif

#endif
