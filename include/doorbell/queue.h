/*
 * Work requests that kernels make: the send queue of an endpoint, lent to the threads of a GPU, or of a CPU. C11, C++17 and CUDA.
 *
 * Any number of threads, of any number of blocks and kernels, use one queue at once. A thread reserves slots, writes a work request into each,
 * and submits them; then it polls, or waits for what it needs. None of them ever waits for another: who submits while a thread rings the NIC
 * leaves its doorbell to that one. Every call that waits has a bound, and a code that says what it came to:
 *
 *     0                what the call is for is done
 *     DOORBELL_EFULL   no room within the bound
 *     DOORBELL_ETIMEOUT  not complete within the bound
 *     DOORBELL_EWORK   the endpoint has failed: a completion in error, a dead peer, an abort. Nothing more is reserved; what was
 *                      reserved before may still go out. The host's doorbell_endpoint_failure has the reason
 *     DOORBELL_ERANGE  a count that no queue has room for, inline bytes that no slot has room for, a message that no NIC sends
 *     DOORBELL_EBUSY   others were quicker, for a second longer than the bound
 *
 * Who rings is chosen where the queue is made, and the calls are the same: the kernel itself, by the doorbell record and the UAR, or, on the
 * proxy path, a thread of the host that finds the submitted slots in its memory and tells the NIC, and counts its completions.
 *
 * A bound is in nanoseconds, and at most DOORBELL_KERNEL_TIMEOUT_MAX_NS. Calls without one look once; but a thread that rings does so for those
 * as well who submit meanwhile, a round for each of their submissions at most.
 *
 * Counts are running counts of slots, 32 bits, wrapping; the NIC's have 16. A slot is one WQEBB, and every work request here takes one.
 * Nothing is ever cleared: whether a slot was submitted is told by the count that it was submitted with, so the slot of the lap before is none.
 *
 * Memory order, each store with its other side:
 * - What is to be sent, and the work request, are ordinary stores. doorbell_submit() orders them, and all that its thread has synchronised with
 *   (__syncwarp, __syncthreads), by a fence of system scope before the slot's mark; whoever rings loads the mark with acquire.
 * - Who rings stores the doorbell record, a fence of system scope, the UAR: the NIC, which has seen the doorbell, finds the record and the work
 *   request. On the proxy path a thread of the host does the same (src/endpoint/shared/bell.rs).
 * - The NIC writes data, then the completion. Who polls loads the completion, has a fence behind it, and stores the count with release; who waits loads
 *   the count with acquire: what a get has brought is there, for ordinary loads. What a kernel reads through `const T *__restrict__` or __ldg() the
 *   compiler takes for constant while it runs: not what arrives meanwhile. In memory of the GPU that is so as far as the GPU orders the writes of others
 *   (CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING).
 * - Who has read completions stores the consumer index with release: the NIC, which loads it before it writes there again, comes after the
 *   loads. It is also what the host goes by that looks for errors nobody polls for (src/endpoint/side/loan.rs).
 * - The host stores `status` of the control block, and on the proxy path `completed`, with release; kernels load them with acquire. Who
 *   hears of a failure stores the state's `status` with release: others find there what the host had seen.
 * - The locks (`ringing`, `polling`) are taken with acquire and let go with release, of the GPU's scope: what they guard is its own memory.
 */
#ifndef DOORBELL_QUEUE_H
#define DOORBELL_QUEUE_H

#include "../doorbell.h"
#include "detail/access.h"
#include "detail/wqe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of a put or get at most: the next bit of the length means another kind of segment (mlx5dv.h: MLX5_INLINE_SEG). */
#define DOORBELL_MESSAGE_BYTES_MAX 0x7fffffffu

/* Inline bytes that a slot has room for, behind the three segments of a write. */
#define DOORBELL_INLINE_BYTES 28u

/*
 * A queue as kernels see it: pass it by value. doorbell_kernel_queue_view() fills it; it stays valid as long as the doorbell_kernel_queue.
 * Addresses are those of the GPU that it was made for.
 */
struct doorbell_queue {
	uint64_t state;       /* struct dbl_queue_state */
	uint64_t control;     /* struct dbl_queue_control */
	uint64_t marks;       /* uint32_t for each slot: one more than the count it was submitted with */
	uint64_t doorbells;   /* uint64_t for each slot: what rings it */
	uint64_t ring;        /* the work requests */
	uint64_t record;      /* the send half of the doorbell record; 0 if the host rings, and counts completions */
	uint64_t uar[2];      /* the doorbell registers, which take turns */
	uint64_t completions; /* the completion queue */
	uint64_t cq_record;   /* its consumer index */
	uint32_t slot_mask;
	uint32_t cqe_mask;
	uint32_t capacity; /* slots in flight at most */
	uint32_t qpn;
};

/* What the threads share, in memory of their own GPU; on lines of their own by who writes. */
struct dbl_queue_state {
	uint32_t reserved; /* behind the last slot that is somebody's */
	uint32_t line0[31];
	uint32_t ringing; /* 1 while a thread rings */
	uint32_t rung;    /* behind the last slot that the NIC was told of */
	uint32_t line1[30];
	uint32_t completed; /* behind the last slot that the NIC is done with */
	int32_t status;     /* 0, or why nothing more goes out */
	uint32_t error;     /* of a completion in error: syndrome, vendor syndrome << 8, the slot's 16 bits << 16 */
	uint32_t line2[29];
	uint32_t polling;  /* 1 while a thread polls */
	uint32_t cq_index; /* the next completion */
	uint32_t line3[30];
};

/* What the host says, in its memory. src/endpoint/lent.rs is the other side. */
struct dbl_queue_control {
	int32_t status;     /* 0, or the code of the endpoint's failure */
	uint32_t completed; /* as in the state, where the host counts */
	uint32_t line[30];
};

DBL_STATIC_ASSERT(sizeof(struct doorbell_queue) == 96, "a queue is 96 bytes");
DBL_STATIC_ASSERT(offsetof(struct doorbell_queue, slot_mask) == 80, "slot_mask");
DBL_STATIC_ASSERT(offsetof(struct dbl_queue_state, ringing) == 128, "ringing");
DBL_STATIC_ASSERT(offsetof(struct dbl_queue_state, completed) == 256, "completed");
DBL_STATIC_ASSERT(offsetof(struct dbl_queue_state, polling) == 384, "polling");
DBL_STATIC_ASSERT(sizeof(struct dbl_queue_state) == 512, "a state is 512 bytes");
DBL_STATIC_ASSERT(sizeof(struct dbl_queue_control) == 128, "a control block is a line");

/* Once in each turn of a wait, on a CPU. */
#ifndef DBL_TURN
#define DBL_TURN() ((void)0)
#endif

/* For tests: the slots from `from` up to `upto` may be written again. */
#ifndef DBL_SLOTS_FREED
#define DBL_SLOTS_FREED(queue, from, upto) ((void)0)
#endif

/* For tests: the NIC was rung, and the others are not yet let to it. */
#ifndef DBL_RANG
#define DBL_RANG(queue) ((void)0)
#endif

/* Marks that a thread loads at once. For models, which try all orders of all loads: fewer. */
#ifndef DBL_MARKS_AT_ONCE
#define DBL_MARKS_AT_ONCE 8
#endif

/* Relaxed, with a fence of their own beside them; where ThreadSanitizer is to see the order, which knows no fences, acquire and release. */
#if defined(__CUDACC__) || defined(DBL_FENCES_ORDER)
#define DBL_LOAD_FENCED dbl_load_dword_relaxed
#define DBL_STORE_FENCED dbl_store_dword
#else
#define DBL_LOAD_FENCED dbl_load_dword
#define DBL_STORE_FENCED dbl_store_dword_release
#endif

/* How long a thread tries to reserve slots that others always take before it. */
#define DBL_CONTENTION_NS 1000000000u

DBL_DEVICE struct dbl_queue_state *dbl_queue_state(const struct doorbell_queue *queue)
{
	return (struct dbl_queue_state *)(uintptr_t)queue->state;
}

DBL_DEVICE uint32_t *dbl_queue_mark(const struct doorbell_queue *queue, uint32_t slot)
{
	return (uint32_t *)(uintptr_t)queue->marks + (slot & queue->slot_mask);
}

/* The NIC is done with what comes before `upto`; the caller has `polling`. */
DBL_DEVICE void dbl_queue_complete(const struct doorbell_queue *queue, uint32_t upto)
{
	DBL_SLOTS_FREED(queue, dbl_queue_state(queue)->completed, upto);
	dbl_store_dword_release(&dbl_queue_state(queue)->completed, upto);
}

/* Listens to the host. A load of its memory takes a GPU as long as a thousand instructions, so it is done where there is time. */
DBL_DEVICE int dbl_queue_hear(const struct doorbell_queue *queue)
{
	struct dbl_queue_state *state = dbl_queue_state(queue);
	const struct dbl_queue_control *control = (const struct dbl_queue_control *)(uintptr_t)queue->control;
	int32_t status = (int32_t)dbl_load_dword(&state->status);

	if (status == 0) {
		status = (int32_t)dbl_load_dword(&control->status);
		/* Release: who hears it from this thread is to find the completions that the host had seen as well. */
		if (status != 0)
			dbl_store_dword_release(&state->status, (uint32_t)status);
	}
	return status;
}

/*
 * The last word of a completion if the NIC has written it, as seen by its owner bit; else 0xf of opcode (mlx5dv.h: MLX5_CQE_INVALID). Relaxed.
 */
DBL_DEVICE uint32_t dbl_queue_completion(const struct doorbell_queue *queue, uint32_t index)
{
	const uint8_t *cqe = (const uint8_t *)(uintptr_t)queue->completions + (size_t)(index & queue->cqe_mask) * 64;
	const uint32_t word = dbl_load_dword_relaxed(cqe + 60);
	const uint32_t lap_is_odd = (index & (queue->cqe_mask + 1)) != 0;

	return (word >> 24 & 1) == lap_is_odd ? word : 0xf0000000u;
}

/* The two ends of the request that an error completion tells of (mlx5dv.h: MLX5_CQE_REQ_ERR, MLX5_CQE_RESP_ERR). */
DBL_DEVICE int dbl_completion_is_error(uint32_t word)
{
	return word >> 28 == 13 || word >> 28 == 14;
}

/* The slots that a completion tells of, from `completed` on: its own is the last (mlx5dv.h: wqe_counter). */
DBL_DEVICE uint32_t dbl_completion_slots(uint32_t word, uint32_t completed)
{
	return (((dbl_be32(word) >> 16) - completed) & 0xffff) + 1;
}

/* The caller has `polling`. */
DBL_DEVICE void dbl_queue_poll_own(const struct doorbell_queue *queue)
{
	struct dbl_queue_state *state = dbl_queue_state(queue);
	const uint32_t begin = state->cq_index;
	uint32_t index = begin, completed = state->completed, ahead, slots, words[8];
	uint32_t rung;
	int32_t status = 0;

	while (status == 0) {
		/* Several at once: each is as far away as the memory of the host. They are written in order, and read in any. */
#ifdef __CUDACC__
#pragma unroll
#endif
		for (ahead = 0; ahead < 8; ahead++)
			words[ahead] = dbl_queue_completion(queue, index + ahead);
		if (words[0] >> 28 == 0xf)
			break;
		/* Acquire: what the NIC wrote before them. */
		dbl_fence_system();
		/* After the completions, of what was rung before them. */
		rung = dbl_load_dword(&state->rung);
		for (ahead = 0; ahead < 8 && words[ahead] >> 28 != 0xf && status == 0; ahead++) {
			slots = dbl_completion_slots(words[ahead], completed);
			if (slots > rung - completed) {
				/* Of no request that was rung. */
				status = DOORBELL_EWORK;
			} else if (dbl_completion_is_error(words[ahead])) {
				const uint8_t *cqe = (const uint8_t *)(uintptr_t)queue->completions +
						     (size_t)((index + ahead) & queue->cqe_mask) * 64;
				/* mlx5dv.h, struct mlx5_err_cqe: vendor_err_synd and syndrome at 54 and 55. */
				const uint32_t syndromes = dbl_load_dword(cqe + 52);
				dbl_store_dword(&state->error, syndromes >> 24 | (syndromes >> 8 & 0xff00) |
								       (completed + slots - 1) << 16);
				/* It stays, for the host to find. */
				status = DOORBELL_EWORK;
			} else {
				completed += slots;
			}
		}
		if (status != 0)
			ahead--;
		index += ahead;
		if (ahead < 8)
			break;
	}
	if (index != begin) {
		/* Release: the completions are read before the NIC is told that it may write others there. */
		dbl_store_dword_release((void *)(uintptr_t)queue->cq_record, dbl_be32(index & 0xffffff));
		state->cq_index = index;
		dbl_queue_complete(queue, completed);
	}
	if (status != 0)
		dbl_store_dword_release(&state->status, (uint32_t)status);
}

/* Takes note of what is complete, unless another thread is at it: whether it was this one. */
DBL_DEVICE int dbl_queue_poll(const struct doorbell_queue *queue)
{
	struct dbl_queue_state *state = dbl_queue_state(queue);

	if (dbl_load_dword(&state->polling) != 0 || !dbl_exchange_dword(&state->polling, 0, 1))
		return 0;
	if (queue->record != 0) {
		dbl_queue_poll_own(queue);
	} else {
		const struct dbl_queue_control *control =
			(const struct dbl_queue_control *)(uintptr_t)queue->control;
		const uint32_t completed = dbl_load_dword(&control->completed);

		if (completed != state->completed)
			dbl_queue_complete(queue, completed);
	}
	dbl_store_dword_release(&state->polling, 0);
	return 1;
}

/* Takes note of what is complete, if no other thread is at it. 0, or the failure. */
DBL_DEVICE int doorbell_poll(const struct doorbell_queue *queue)
{
	struct dbl_queue_state *state = dbl_queue_state(queue);
	const int32_t status = (int32_t)dbl_load_dword(&state->status);

	if (status != 0 || !dbl_queue_poll(queue))
		return status;
	return (int32_t)dbl_load_dword(&state->status);
}

/*
 * Reserves `count` slots in a row, from `*first` on. Each must be written and submitted soon, in any order, and none may be given back:
 * what others submit behind it does not go out before. With a bound of 0 it looks once for room.
 * 0, DOORBELL_EFULL, DOORBELL_EWORK, DOORBELL_ERANGE, DOORBELL_EBUSY.
 */
DBL_DEVICE int doorbell_reserve(const struct doorbell_queue *queue, uint32_t count, uint64_t timeout_ns, uint32_t *first)
{
	struct dbl_queue_state *state = dbl_queue_state(queue);
	const uint64_t bound_ns = dbl_bounded(timeout_ns);
	uint64_t full_ns = 0, outrun_ns = 0, now_ns;
	uint32_t turn, completed, reserved, outrun;
	int32_t status;
	int late, is_full = 0;

	if (count == 0 || count > queue->capacity)
		return DOORBELL_ERANGE;
	for (turn = 0, outrun = 0;;) {
		status = (int32_t)dbl_load_dword(&state->status);
		if (status != 0)
			return status;
		/* Loaded in this order: a count of completions that is behind makes the room look smaller, never larger. */
		completed = dbl_load_dword(&state->completed);
		reserved = dbl_load_dword(&state->reserved);
		if (reserved + count - completed <= queue->capacity) {
			if (dbl_exchange_dword(&state->reserved, reserved, reserved + count)) {
				*first = reserved;
				return DOORBELL_OK;
			}
			if (++outrun % 1024 != 0)
				continue;
			now_ns = dbl_now_ns();
			if (outrun == 1024)
				outrun_ns = now_ns;
			else if (dbl_has_passed(now_ns, outrun_ns, DBL_CONTENTION_NS + bound_ns))
				return DOORBELL_EBUSY;
			continue;
		}
		if (turn != 0) {
			/* Once there was no room even after a poll. */
			now_ns = dbl_now_ns();
			if (!is_full)
				full_ns = now_ns;
			is_full = 1;
			late = bound_ns == 0 || dbl_has_passed(now_ns, full_ns, bound_ns);
			/* Who comes again and again hears of a failure as well. */
			if ((late || turn % 16 == 0) && (status = dbl_queue_hear(queue)) != 0)
				return status;
			if (late)
				return DOORBELL_EFULL;
			DBL_TURN();
		}
		turn++;
		outrun = 0;
		status = doorbell_poll(queue);
		if (status != 0)
			return status;
	}
}

/* Writes the work request of a slot. */
DBL_DEVICE void dbl_queue_write(const struct doorbell_queue *queue, uint32_t slot, const struct dbl_wr *wr)
{
	uint64_t wqe[DBL_WQEBB_BYTES / 8];
	const uint32_t ds = dbl_wqe_build(wqe, slot, wr, wr->is_inline);
	uint32_t word;

	for (word = 2 * ds; word < DBL_WQEBB_BYTES / 8; word++)
		wqe[word] = 0;
	dbl_wqe_copy((uint8_t *)(uintptr_t)queue->ring, queue->slot_mask, slot, wqe, 1);
	((uint64_t *)(uintptr_t)queue->doorbells)[slot & queue->slot_mask] = wqe[0];
}

/* DOORBELL_WORK_* as the bits of a control segment. */
DBL_DEVICE uint8_t dbl_queue_flags(uint32_t flags)
{
	return (uint8_t)((flags & DOORBELL_WORK_UNSIGNALED ? 0 : DBL_WR_SIGNALED) |
			 (flags & DOORBELL_WORK_SOLICITED ? DBL_WR_SOLICITED : 0) |
			 (flags & DOORBELL_WORK_FENCE ? DBL_WR_FENCE : 0));
}

DBL_DEVICE void dbl_queue_write_one(const struct doorbell_queue *queue, uint32_t slot, uint32_t opcode, uint32_t flags,
				    uint32_t imm, uint64_t add, uint64_t local_addr, uint32_t lkey, uint32_t len_bytes,
				    uint64_t remote_addr, uint32_t rkey)
{
	struct dbl_sge sge;
	struct dbl_wr wr;

	sge.len_bytes = len_bytes;
	sge.lkey = lkey;
	sge.addr = local_addr;
	wr.remote_addr = remote_addr;
	wr.swap_or_add = add;
	wr.compare = 0;
	wr.payload = &sge;
	wr.count = 1;
	wr.rkey = rkey;
	wr.qpn = queue->qpn;
	wr.imm = imm;
	wr.opcode = (uint8_t)opcode;
	wr.flags = dbl_queue_flags(flags);
	wr.is_inline = 0;
	dbl_queue_write(queue, slot, &wr);
}

/*
 * A put: writes `len_bytes` from `local_addr`, in a region of `lkey`, to `remote_addr` of the peer, in a region of `rkey`. 0, or DOORBELL_ERANGE
 * beyond DOORBELL_MESSAGE_BYTES_MAX: the slot is then to be written again.
 *
 * `flags`: DOORBELL_WORK_UNSIGNALED, _SOLICITED, _FENCE. Unsignaled slots are complete, and have room again, when a later signaled one is: the
 * last of what is submitted has to be signaled, for who waits for it, and some slot of every `capacity` in a row, or the queue is full for good.
 */
DBL_DEVICE int doorbell_write_put(const struct doorbell_queue *queue, uint32_t slot, uint32_t flags,
				  uint64_t local_addr, uint32_t lkey, uint32_t len_bytes, uint64_t remote_addr,
				  uint32_t rkey)
{
	if (len_bytes > DOORBELL_MESSAGE_BYTES_MAX)
		return DOORBELL_ERANGE;
	dbl_queue_write_one(queue, slot, DBL_OPCODE_RDMA_WRITE, flags, 0, 0, local_addr, lkey, len_bytes, remote_addr,
			    rkey);
	return DOORBELL_OK;
}

/* A put that takes one of the peer's receives, whose completion has `imm`, in host order. */
DBL_DEVICE int doorbell_write_put_imm(const struct doorbell_queue *queue, uint32_t slot, uint32_t flags,
				      uint64_t local_addr, uint32_t lkey, uint32_t len_bytes, uint64_t remote_addr,
				      uint32_t rkey, uint32_t imm)
{
	if (len_bytes > DOORBELL_MESSAGE_BYTES_MAX)
		return DOORBELL_ERANGE;
	dbl_queue_write_one(queue, slot, DBL_OPCODE_RDMA_WRITE_IMM, flags, imm, 0, local_addr, lkey, len_bytes,
			    remote_addr, rkey);
	return DOORBELL_OK;
}

/* A get: reads `len_bytes` from `remote_addr` of the peer to `local_addr`. */
DBL_DEVICE int doorbell_write_get(const struct doorbell_queue *queue, uint32_t slot, uint32_t flags,
				  uint64_t local_addr, uint32_t lkey, uint32_t len_bytes, uint64_t remote_addr,
				  uint32_t rkey)
{
	if (len_bytes > DOORBELL_MESSAGE_BYTES_MAX)
		return DOORBELL_ERANGE;
	dbl_queue_write_one(queue, slot, DBL_OPCODE_RDMA_READ, flags, 0, 0, local_addr, lkey, len_bytes, remote_addr,
			    rkey);
	return DOORBELL_OK;
}

/* Adds `add` to the 8 bytes at `remote_addr`, a multiple of 8, of the peer, and brings what they were to `result_addr`. In host order. */
DBL_DEVICE void doorbell_write_add(const struct doorbell_queue *queue, uint32_t slot, uint32_t flags,
				   uint64_t result_addr, uint32_t lkey, uint64_t remote_addr, uint32_t rkey,
				   uint64_t add)
{
	dbl_queue_write_one(queue, slot, DBL_OPCODE_ATOMIC_FA, flags, 0, add, result_addr, lkey, 8, remote_addr, rkey);
}

/* A put of `len_bytes`, up to DOORBELL_INLINE_BYTES, that are copied now. 0 or DOORBELL_ERANGE: the slot is then to be written again. */
DBL_DEVICE int doorbell_write_inline(const struct doorbell_queue *queue, uint32_t slot, uint32_t flags, const void *bytes,
				     uint32_t len_bytes, uint64_t remote_addr, uint32_t rkey)
{
	struct dbl_wr wr;

	if (len_bytes > DOORBELL_INLINE_BYTES)
		return DOORBELL_ERANGE;
	wr.remote_addr = remote_addr;
	wr.swap_or_add = 0;
	wr.compare = 0;
	wr.payload = bytes;
	wr.count = len_bytes;
	wr.rkey = rkey;
	wr.qpn = queue->qpn;
	wr.imm = 0;
	wr.opcode = DBL_OPCODE_RDMA_WRITE;
	wr.flags = dbl_queue_flags(flags);
	wr.is_inline = 1;
	dbl_queue_write(queue, slot, &wr);
	return DOORBELL_OK;
}

/*
 * A signal: stores the 8 bytes of `value` at `remote_addr`. What was put before on the same queue is there when the peer sees it, as far as
 * the peer's memory keeps the order in which the NIC writes; who looks there loads with acquire.
 */
DBL_DEVICE void doorbell_write_signal(const struct doorbell_queue *queue, uint32_t slot, uint32_t flags,
				      uint64_t remote_addr, uint32_t rkey, uint64_t value)
{
	(void)doorbell_write_inline(queue, slot, flags, &value, sizeof(value), remote_addr, rkey);
}

/* Nothing, in its turn: for a slot that turns out not to be needed. */
DBL_DEVICE void doorbell_write_nop(const struct doorbell_queue *queue, uint32_t slot, uint32_t flags)
{
	struct dbl_wr wr;

	wr.remote_addr = 0;
	wr.swap_or_add = 0;
	wr.compare = 0;
	wr.payload = 0;
	wr.count = 0;
	wr.rkey = 0;
	wr.qpn = queue->qpn;
	wr.imm = 0;
	wr.opcode = DBL_OPCODE_NOP;
	wr.flags = dbl_queue_flags(flags);
	wr.is_inline = 0;
	dbl_queue_write(queue, slot, &wr);
}

/* Behind the last of the slots in a row from `begin` on that are submitted. Relaxed; the caller has `ringing`. */
DBL_DEVICE uint32_t dbl_queue_submitted(const struct doorbell_queue *queue, uint32_t begin)
{
	uint32_t end = begin, ahead, marks[DBL_MARKS_AT_ONCE];

	do {
		/* Several at once: a way to memory and back is long, and as many of them one after the other would bound what a queue does. */
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

/* Tells the NIC of all slots that are submitted, up to the first that is not, unless another thread is at it, which looks again. */
DBL_DEVICE void dbl_queue_ring(const struct doorbell_queue *queue)
{
	struct dbl_queue_state *state = dbl_queue_state(queue);
	uint32_t begin, end;

	do {
		if (!dbl_exchange_dword(&state->ringing, 0, 1))
			return;
		begin = state->rung;
		end = dbl_queue_submitted(queue, begin);
		if (end != begin) {
			uint64_t doorbell;

			/* Acquire: the work requests and doorbells of which the marks have told. */
			dbl_fence_system();
			doorbell = ((const uint64_t *)(uintptr_t)queue->doorbells)[(end - 1) & queue->slot_mask];
			/*
			 * Before the record, by which a NIC may go that has not seen the doorbell yet: who finds a completion is to find
			 * that it was rung for. And the record before the doorbell.
			 */
			DBL_STORE_FENCED(&state->rung, end);
			dbl_fence_system();
			dbl_store_dword((void *)(uintptr_t)queue->record, dbl_be32(end & 0xffff));
			dbl_fence_system();
			/* By turns, with no word of its own: both registers do, and a burst of stores to one waits for its buffer. */
			dbl_store_qword((void *)(uintptr_t)queue->uar[(end - 1) & 1], doorbell);
		}
		DBL_RANG(queue);
		dbl_store_dword_release(&state->ringing, 0);
		/* Who has submitted meanwhile, and found it taken, has left it to this thread. Pairs with the fence of doorbell_submit(). */
		dbl_fence_system();
	} while (dbl_load_dword(dbl_queue_mark(queue, end)) == end + 1);
}

/* Submits slots that are written: they go out once all before them are submitted, too. 0, or the failure. */
DBL_DEVICE int doorbell_submit(const struct doorbell_queue *queue, uint32_t first, uint32_t count)
{
	uint32_t slot;

	/* What was stored before, the work requests among it, before the marks. */
	dbl_fence_system();
	for (slot = first; slot != first + count; slot++)
		DBL_STORE_FENCED(dbl_queue_mark(queue, slot), slot + 1);
	if (queue->record != 0) {
		/* The marks before the look whether somebody rings. */
		dbl_fence_system();
		dbl_queue_ring(queue);
	}
	return (int32_t)dbl_load_dword(&dbl_queue_state(queue)->status);
}

/*
 * Waits until all slots before `upto` are complete: `first + count` for what was submitted so. With a bound of 0 it looks once.
 * 0, DOORBELL_ETIMEOUT, DOORBELL_EWORK if the queue failed before; and if it failed behind `upto` while a thread that polls stands still, in which
 * case a later call says 0.
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
		if (dbl_load_dword(&state->completed) - upto < 0x80000000u)
			return DOORBELL_OK;
		if (status != 0) {
			/* After the look for a failure: what was complete before it, is. By whoever is at it, who is soon done. */
			for (last = 0; last < 1024 && !dbl_queue_poll(queue); last++)
				DBL_TURN();
			return dbl_load_dword(&state->completed) - upto < 0x80000000u ? DOORBELL_OK : status;
		}
		status = doorbell_poll(queue);
		if (turn == 0)
			continue;
		now_ns = dbl_now_ns();
		/* Not by `turn`, which goes round within an hour. */
		if (!has_waited)
			since_ns = now_ns;
		has_waited = 1;
		late = bound_ns == 0 || dbl_has_passed(now_ns, since_ns, bound_ns);
		/* Who comes again and again hears of a failure as well. */
		if (status == 0 && (late || turn % 16 == 0))
			status = dbl_queue_hear(queue);
		if (late && status == 0)
			return DOORBELL_ETIMEOUT;
		DBL_TURN();
	}
}

/*
 * Of the completion in error that has failed the queue: its syndrome (mlx5dv.h: MLX5_CQE_SYNDROME_*), its vendor syndrome << 8, and the low 16
 * bits of the slot << 16; 0 if there was none, as after an abort, and where the host counts completions.
 */
DBL_DEVICE uint32_t doorbell_queue_error(const struct doorbell_queue *queue)
{
	return dbl_load_dword(&dbl_queue_state(queue)->error);
}

/*
 * In one call each: reserves a slot within `timeout_ns`, writes it, signaled, and submits it; `upto`, which may be NULL, is for doorbell_wait().
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

DBL_DEVICE int doorbell_add(const struct doorbell_queue *queue, uint64_t result_addr, uint32_t lkey, uint64_t remote_addr,
			    uint32_t rkey, uint64_t add, uint64_t timeout_ns, uint32_t *upto)
{
	uint32_t slot;
	const int code = doorbell_reserve(queue, 1, timeout_ns, &slot);

	if (code != DOORBELL_OK)
		return code;
	doorbell_write_add(queue, slot, 0, result_addr, lkey, remote_addr, rkey, add);
	if (upto)
		*upto = slot + 1;
	return doorbell_submit(queue, slot, 1);
}

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

/* A put, and a signal behind it, with one doorbell. */
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
