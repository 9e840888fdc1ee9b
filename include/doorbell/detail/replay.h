/*
 * One operation of a graph that its application captures and launches by itself. The kernel doorbell_replay executes it with
 * each launch, with one thread. All that changes from launch to launch lies in memory: the counts of a device queue
 * (queue_doorbell.h), those of the receive queue below, and the cells of the operations. So a launch needs no call of the
 * host. src/endpoint/replay has the host's side. C11 and CUDA.
 *
 * Memory order of the receive queue:
 * - A receive is posted by ordinary stores and, behind a release fence of system scope, by the doorbell record. `posting` is
 *   the lock of the threads that post.
 * - The thread that takes the place n waits for the completion n. It loads it, has an acquire fence of system scope, and
 *   returns the place to the NIC when all places before are returned. `completed` is stored with release and loaded with
 *   acquire: a thread that posts writes an entry of the ring after its receive was completed.
 * - A result for the host is stored behind a release fence of system scope.
 */
#ifndef DOORBELL_REPLAY_H
#define DOORBELL_REPLAY_H

#include "../queue.h"

enum dbl_replay_kind {
	DBL_REPLAY_SEND = 1,	  /* writes a work request and rings */
	DBL_REPLAY_WAIT_SEND = 2, /* waits for the completion of the work request of `awaited` */
	DBL_REPLAY_RECV = 3,	  /* posts a receive */
	DBL_REPLAY_WAIT_RECV = 4, /* waits for the next completion of a receive */
	DBL_REPLAY_STORE = 5,	  /* stores `words[1]` at `words[0]`: 4 bytes, or 8 if `is_wide` */
	DBL_REPLAY_WAIT_WORD = 6, /* waits for the word at `words[0]`: it meets `condition` with `words[1]` */
	DBL_REPLAY_PAGES = 7,	  /* writes the pages of a table, and a signal */
};

/*
 * The words of an operation that writes pages. The table has an 8-byte entry for each page: the number of the page here, a
 * uint32_t, and the number of the page at the peer. How many entries there are is a uint32_t of its own. When the pages are
 * written, the 8 bytes of the signal become the number of launches, this one included.
 */
enum dbl_replay_page {
	DBL_PAGES_TABLE = 0, /* address of the entries */
	DBL_PAGES_COUNT = 1, /* address of their number */
	DBL_PAGES_LOCAL = 2, /* address of the page 0 for the NIC */
	DBL_PAGES_REMOTE = 3,
	DBL_PAGES_SIGNAL = 4, /* remote address of the signal */
	DBL_PAGES_KEYS = 5,   /* lkey | rkey << 32 */
	DBL_PAGES_BYTES = 6,  /* bytes of a page | rkey of the signal << 32 */
	DBL_PAGES_ENDS = 7,   /* number of pages here | number of pages at the peer << 32 */
};

/* Pages for which one doorbell is rung. */
#define DBL_PAGES_AT_ONCE 16u

/* How a word is compared with a value, which grows by `words[2]` with each launch. Conditions of more and less regard the difference as signed. */
enum dbl_replay_condition {
	DBL_REPLAY_GEQ = 0,
	DBL_REPLAY_EQ = 1,
	DBL_REPLAY_AND = 2, /* a common bit */
	DBL_REPLAY_NOR = 3, /* the inverse of their union has a bit */
};

/* What the threads share of the receive queue, in memory of the GPU. Running counts; each group of writers has its own line. */
struct dbl_replay_recv {
	uint32_t posted; /* receives */
	uint32_t line0[31];
	uint32_t taken; /* completions that threads wait for, or have seen */
	uint32_t line1[31];
	uint32_t completed; /* completions that were given back to the NIC */
	uint32_t line2[31];
	uint32_t posting; /* 1 while a thread posts */
	uint32_t line3[31];
};

/* What an operation leaves for the next launch, and a send for its wait, in memory of the GPU. */
struct dbl_replay_cell {
	uint64_t launches; /* that have executed it */
	uint32_t upto;	   /* of a send: one more than its last slot */
	uint32_t counting; /* 1 while a thread counts a launch */
};

/* What the host learns of an operation, in its memory. */
struct dbl_replay_report {
	uint64_t launches;  /* that have executed it */
	int32_t code;	    /* of the first launch that has not; 0 while there is none */
	uint32_t len_bytes; /* of the last receive */
	uint32_t imm;
	uint32_t has_imm;
	uint32_t passed; /* 1 when it was executed: the stream may go on */
	uint32_t reserved[9];
};

/* What the operations of a stream share with the host, in its memory. */
struct dbl_replay_fault {
	int32_t code;	 /* of the stream's first failure; behind it nothing is executed, unless `goes_on` is set */
	uint32_t aborts; /* by the host; a wait for a word ends when the number changes */
	uint32_t goes_on; /* by the host: 1 if what is behind a failure is executed */
};

/* Turns of a wait for a word between two looks at the number of aborts, which may be farther away than the word. */
#define DBL_REPLAY_ABORT_TURNS 64u

/* An operation: the parameter of the kernel. Addresses are the device's. An operation without a queue has 0 for `queue.state`. */
struct dbl_replay {
	struct doorbell_queue_view queue;
	uint64_t recv; /* struct dbl_replay_recv */
	uint64_t recv_ring;
	uint64_t recv_record; /* the receive half of the doorbell record */
	uint64_t recv_completions;
	uint64_t recv_cq_record;
	uint32_t recv_mask; /* entries of the ring, less one */
	uint32_t recv_shift; /* an entry has 1 << recv_shift bytes */
	uint32_t recv_cqe_mask;
	uint32_t recv_capacity; /* most receives that are posted and not completed */
	uint32_t recv_ahead;	/* count of the first receive less that of the first completion */
	uint32_t kind;		/* enum dbl_replay_kind */
	uint64_t fault;		/* struct dbl_replay_fault */
	uint64_t cell;		/* struct dbl_replay_cell */
	uint64_t awaited;	/* that of the send which is waited for */
	uint64_t report;	/* struct dbl_replay_report */
	uint64_t timeout_ns;
	uint32_t opcode;
	uint32_t segments;  /* of a send: segments of the WQE, its control segment too; of a receive: pieces of memory; of pages: entries of the
			       table at most */
	uint32_t condition; /* enum dbl_replay_condition */
	uint32_t is_wide;
	uint64_t words[8]; /* of a send: words 1 to 7 of the WQE; of a receive: its pieces, as in the ring; of pages: enum dbl_replay_page */
};

DBL_STATIC_ASSERT(sizeof(struct dbl_replay_recv) == 512, "four lines");
DBL_STATIC_ASSERT(sizeof(struct dbl_replay_cell) == 16, "a cell");
DBL_STATIC_ASSERT(offsetof(struct dbl_replay_fault, aborts) == 4, "aborts");
DBL_STATIC_ASSERT(offsetof(struct dbl_replay_fault, goes_on) == 8, "goes_on");
DBL_STATIC_ASSERT(sizeof(struct dbl_replay_report) == 64, "a report is a cache line");
DBL_STATIC_ASSERT(sizeof(struct dbl_replay) == 296, "37 words");
DBL_STATIC_ASSERT(offsetof(struct dbl_replay, words) == 232, "words");

/* Counts from `since_ns` on. Returns whether the time is over; the first call of a wait begins it. */
DBL_DEVICE int dbl_replay_is_late(uint64_t *since_ns, uint64_t bound_ns)
{
	const uint64_t now_ns = dbl_now_ns();

	if (*since_ns == 0)
		*since_ns = now_ns;
	return dbl_has_passed(now_ns, *since_ns, bound_ns);
}

/* The operation has taken that slot last, for its wait. */
DBL_DEVICE void dbl_replay_note_slot(const struct dbl_replay *replay, struct dbl_replay_cell *cell, uint32_t slot)
{
	uint32_t upto, reserved;

	/* If another instance of the graph has executed it meanwhile, for a later slot, a wait for that slot will do. A count that is not among
	   those between is of an earlier launch. */
	do {
		upto = dbl_load_dword_relaxed(&cell->upto);
		reserved = dbl_load_dword_relaxed(&dbl_queue_state(&replay->queue)->reserved);
		if (upto - (slot + 1) <= reserved - (slot + 1))
			break;
	} while (dbl_claim_dword(&cell->upto, upto, slot + 1) != upto);
}

DBL_DEVICE int dbl_replay_send(const struct dbl_replay *replay, struct dbl_replay_cell *cell)
{
	const struct doorbell_queue_view *queue = &replay->queue;
	uint64_t wqe[DBL_WQEBB_BYTES / 8];
	uint32_t slot;
	const int code = doorbell_device_reserve(queue, 1, replay->timeout_ns, &slot);

	if (code != DOORBELL_OK)
		return code;
	wqe[0] = dbl_be32x2((slot & 0xffffu) << 8 | replay->opcode, queue->qpn << 8 | replay->segments);
	wqe[1] = replay->words[0];
	wqe[2] = replay->words[1];
	wqe[3] = replay->words[2];
	wqe[4] = replay->words[3];
	wqe[5] = replay->words[4];
	wqe[6] = replay->words[5];
	wqe[7] = replay->words[6];
	dbl_wqe_copy((uint8_t *)(uintptr_t)queue->ring, queue->slot_mask, slot, wqe, 1);
	if (queue->record == 0)
		((uint64_t *)(uintptr_t)queue->doorbells)[slot & queue->slot_mask] = wqe[0];
	dbl_replay_note_slot(replay, cell, slot);
	return doorbell_device_submit(queue, slot, 1);
}

/* Whether an entry names pages that there are. */
DBL_DEVICE int dbl_replay_is_entry(const struct dbl_replay *replay, uint64_t entry)
{
	const uint64_t ends = replay->words[DBL_PAGES_ENDS];

	return (uint32_t)entry < (uint32_t)ends && (uint32_t)(entry >> 32) < (uint32_t)(ends >> 32);
}

DBL_DEVICE int dbl_replay_pages(const struct dbl_replay *replay, struct dbl_replay_cell *cell)
{
	const struct doorbell_queue_view *queue = &replay->queue;
	const uint64_t *table = (const uint64_t *)(uintptr_t)replay->words[DBL_PAGES_TABLE];
	const uint32_t count = dbl_load_dword((const void *)(uintptr_t)replay->words[DBL_PAGES_COUNT]);
	const uint32_t page_bytes = (uint32_t)replay->words[DBL_PAGES_BYTES];
	const uint32_t at_once = queue->capacity < DBL_PAGES_AT_ONCE ? queue->capacity : DBL_PAGES_AT_ONCE;
	struct doorbell_remote signal;
	uint32_t done, slot, at, part;
	uint64_t entry;
	int code;

	/* All or none. */
	if (count > replay->segments)
		return DOORBELL_ERANGE;
	for (at = 0; at < count; at++)
		if (!dbl_replay_is_entry(replay, dbl_load_qword(table + at)))
			return DOORBELL_ERANGE;
	for (done = 0; done < count; done += part) {
		part = count - done < at_once ? count - done : at_once;
		code = doorbell_device_reserve(queue, part, replay->timeout_ns, &slot);
		if (code != DOORBELL_OK)
			return code;
		for (at = 0; at < part; at++) {
			entry = dbl_load_qword(table + done + at);
			if (!dbl_replay_is_entry(replay, entry)) {
				/* It was changed meanwhile. The slots are reserved, and the signal is not sent. */
				doorbell_device_write_nop(queue, slot + at, 0);
				code = DOORBELL_ERANGE;
				continue;
			}
			/* Their lengths were checked by the host. */
			dbl_queue_write_slice(queue, slot + at, DBL_OPCODE_RDMA_WRITE,
					      at + 1 < part ? (uint32_t)DOORBELL_WORK_UNSIGNALED : 0u, 0,
					      replay->words[DBL_PAGES_LOCAL] + (uint64_t)(uint32_t)entry * page_bytes,
					      (uint32_t)replay->words[DBL_PAGES_KEYS], page_bytes,
					      replay->words[DBL_PAGES_REMOTE] + (entry >> 32) * page_bytes,
					      (uint32_t)(replay->words[DBL_PAGES_KEYS] >> 32));
		}
		if (doorbell_device_submit(queue, slot, part) != DOORBELL_OK || code != DOORBELL_OK)
			return code != DOORBELL_OK ? code : DOORBELL_EWORK;
	}
	code = doorbell_device_reserve(queue, 1, replay->timeout_ns, &slot);
	if (code != DOORBELL_OK)
		return code;
	signal.addr = replay->words[DBL_PAGES_SIGNAL];
	signal.len_bytes = sizeof(uint64_t);
	signal.rkey = (uint32_t)(replay->words[DBL_PAGES_BYTES] >> 32);
	signal.reserved = 0;
	/* Its address was checked by the host. */
	(void)doorbell_device_write_signal(queue, slot, 0, signal, DOORBELL_SIGNAL_SET, dbl_load_qword(&cell->launches) + 1);
	dbl_replay_note_slot(replay, cell, slot);
	return doorbell_device_submit(queue, slot, 1);
}

DBL_DEVICE int dbl_replay_wait_send(const struct dbl_replay *replay)
{
	const struct dbl_replay_cell *sent = (const struct dbl_replay_cell *)(uintptr_t)replay->awaited;

	return doorbell_device_wait(&replay->queue, dbl_load_dword_relaxed(&sent->upto), replay->timeout_ns);
}

DBL_DEVICE int dbl_replay_recv(const struct dbl_replay *replay)
{
	struct dbl_replay_recv *recv = (struct dbl_replay_recv *)(uintptr_t)replay->recv;
	const uint64_t bound_ns = dbl_bounded(replay->timeout_ns);
	uint64_t since_ns = 0;
	uint64_t *entry;
	uint32_t posted, at;
	int code;

	for (;;) {
		code = dbl_queue_progress(&replay->queue);
		if (code != DOORBELL_OK)
			return code;
		if (dbl_take_dword(&recv->posting, 0, 1)) {
			posted = dbl_load_dword_relaxed(&recv->posted);
			if (posted - replay->recv_ahead - dbl_load_dword_gpu(&recv->completed) < replay->recv_capacity)
				break;
			dbl_store_dword_release_gpu(&recv->posting, 0);
		}
		if (dbl_replay_is_late(&since_ns, bound_ns))
			return DOORBELL_EFULL;
		DBL_TURN();
	}
	entry = (uint64_t *)(uintptr_t)(replay->recv_ring + ((uint64_t)(posted & replay->recv_mask) << replay->recv_shift));
	for (at = 0; at < replay->segments; at++) {
		entry[2 * at] = replay->words[2 * at];
		entry[2 * at + 1] = replay->words[2 * at + 1];
	}
	if (replay->segments << 4 != 1u << replay->recv_shift) {
		/* The end of a list that is shorter than the entry: mlx5dv.h, MLX5_INVALID_LKEY. */
		entry[2 * at] = dbl_be32x2(0, DBL_INVALID_LKEY);
		entry[2 * at + 1] = 0;
	}
	posted++;
	dbl_fence_release();
	dbl_store_dword((void *)(uintptr_t)replay->recv_record, dbl_be32(posted & 0xffffu));
	dbl_store_dword(&recv->posted, posted);
	dbl_store_dword_release_gpu(&recv->posting, 0);
	return DOORBELL_OK;
}

DBL_DEVICE int dbl_replay_wait_recv(const struct dbl_replay *replay, struct dbl_replay_report *report)
{
	struct dbl_replay_recv *recv = (struct dbl_replay_recv *)(uintptr_t)replay->recv;
	const uint64_t bound_ns = dbl_bounded(replay->timeout_ns);
	const uint32_t place = dbl_add_dword(&recv->taken, 1);
	const uint8_t *cqe = (const uint8_t *)(uintptr_t)replay->recv_completions + (size_t)(place & replay->recv_cqe_mask) * 64;
	const uint32_t lap_is_odd = (place & (replay->recv_cqe_mask + 1)) != 0;
	uint64_t since_ns = 0;
	uint32_t word;
	int code;

	/* The entry may still have the completion of the lap before the last one, which looks alike: only when fewer than a lap is between. */
	while (place - dbl_load_dword_gpu(&recv->completed) > replay->recv_cqe_mask) {
		code = dbl_queue_progress(&replay->queue);
		if (code != DOORBELL_OK)
			return code;
		if (dbl_replay_is_late(&since_ns, bound_ns))
			return DOORBELL_ETIMEOUT;
		DBL_TURN();
	}
	for (;;) {
		word = dbl_load_dword_relaxed(cqe + 60);
		if (word >> 28 != 0xf && (word >> 24 & 1) == lap_is_odd)
			break;
		code = dbl_queue_progress(&replay->queue);
		if (code != DOORBELL_OK)
			return code;
		if (dbl_replay_is_late(&since_ns, bound_ns))
			return DOORBELL_ETIMEOUT;
		DBL_TURN();
	}
	/* What the NIC wrote before it. */
	dbl_fence_acquire();
	/* It is not consumed, so that the host finds it. */
	if (dbl_completion_is_error(word))
		return DOORBELL_EWORK;
	/* mlx5dv.h: MLX5_CQE_RESP_WR_IMM and MLX5_CQE_RESP_SEND_IMM. */
	dbl_store_dword(&report->has_imm, word >> 28 == 1 || word >> 28 == 3);
	/* mlx5dv.h, struct mlx5_cqe64: imm_inval_pkey is at 36, byte_cnt at 44. */
	dbl_store_dword(&report->imm, dbl_be32(dbl_load_dword_relaxed(cqe + 36)));
	dbl_store_dword(&report->len_bytes, dbl_be32(dbl_load_dword_relaxed(cqe + 44)));
	while (dbl_load_dword_gpu(&recv->completed) != place) {
		code = dbl_queue_progress(&replay->queue);
		if (code != DOORBELL_OK)
			return code;
		if (dbl_replay_is_late(&since_ns, bound_ns))
			return DOORBELL_ETIMEOUT;
		DBL_TURN();
	}
	/* The loads of the completion are over before the NIC may write the next lap's there. */
	dbl_fence_acquire();
	dbl_store_dword((void *)(uintptr_t)replay->recv_cq_record, dbl_be32((place + 1) & 0xffffffu));
	dbl_store_dword_release_gpu(&recv->completed, place + 1);
	return DOORBELL_OK;
}

DBL_DEVICE int dbl_replay_meets(const struct dbl_replay *replay, uint64_t found, uint64_t value)
{
	if (!replay->is_wide) {
		found = (uint32_t)found;
		value = (uint32_t)value;
	}
	switch (replay->condition) {
	case DBL_REPLAY_GEQ:
		return replay->is_wide ? (int64_t)(found - value) >= 0 : (int32_t)((uint32_t)found - (uint32_t)value) >= 0;
	case DBL_REPLAY_EQ:
		return found == value;
	case DBL_REPLAY_AND:
		return (found & value) != 0;
	default:
		return replay->is_wide ? ~(found | value) != 0 : ~((uint32_t)found | (uint32_t)value) != 0;
	}
}

DBL_DEVICE int dbl_replay_wait_word(const struct dbl_replay *replay, const struct dbl_replay_cell *cell)
{
	const void *word = (const void *)(uintptr_t)replay->words[0];
	const uint64_t value = replay->words[1] + replay->words[2] * dbl_load_qword(&cell->launches);
	const uint64_t bound_ns = dbl_bounded(replay->timeout_ns);
	const struct dbl_replay_fault *fault = (const struct dbl_replay_fault *)(uintptr_t)replay->fault;
	const uint32_t aborts = dbl_load_dword_relaxed(&fault->aborts);
	uint64_t since_ns = 0;
	uint32_t turn = 0;

	while (!dbl_replay_meets(replay, replay->is_wide ? dbl_load_qword(word) : dbl_load_dword(word), value)) {
		if (dbl_replay_is_late(&since_ns, bound_ns))
			return DOORBELL_ETIMEOUT;
		if (++turn % DBL_REPLAY_ABORT_TURNS == 0 && dbl_load_dword_relaxed(&fault->aborts) != aborts)
			return DOORBELL_EASYNC;
		DBL_TURN();
	}
	return DOORBELL_OK;
}

/* Stores a code unless there is one. */
DBL_DEVICE void dbl_replay_tell(int32_t *word, int code)
{
	if (dbl_load_dword(word) == 0)
		dbl_store_dword(word, (uint32_t)code);
}

/*
 * The operation was not executed. Nothing behind it is, of this endpoint or of this stream, in this launch or a later one:
 * a signal must not be sent behind data that were not.
 */
DBL_DEVICE void dbl_replay_fail(const struct dbl_replay *replay, struct dbl_replay_report *report, int code, int is_skipped)
{
	struct dbl_queue_control *control = (struct dbl_queue_control *)(uintptr_t)replay->queue.control;
	/* What has failed is another operation of the stream, which may be of another endpoint. */
	const int of_queue = is_skipped ? DOORBELL_EASYNC : code;

	dbl_replay_tell(&report->code, code);
	if (replay->queue.state) {
		(void)dbl_claim_dword((uint32_t *)&dbl_queue_state(&replay->queue)->status, 0, (uint32_t)of_queue);
		if (dbl_load_dword(&control->replay_code) == 0) {
			dbl_store_qword(&control->replay_timeout_ns, replay->timeout_ns);
			dbl_fence_release();
			dbl_replay_tell(&control->replay_code, of_queue);
		}
	}
	/* Last: who finds the stream's failure finds its cause. */
	dbl_fence_release();
	dbl_replay_tell(&((struct dbl_replay_fault *)(uintptr_t)replay->fault)->code, code);
}

/* Executes an operation. Returns its code. */
DBL_DEVICE int dbl_replay_execute(const struct dbl_replay *replay)
{
	struct dbl_replay_cell *cell = (struct dbl_replay_cell *)(uintptr_t)replay->cell;
	struct dbl_replay_report *report = (struct dbl_replay_report *)(uintptr_t)replay->report;
	const struct dbl_replay_fault *fault = (const struct dbl_replay_fault *)(uintptr_t)replay->fault;
	int code = dbl_load_dword_relaxed(&fault->goes_on) ? DOORBELL_OK : (int32_t)dbl_load_dword(&fault->code);
	const int is_skipped = code != DOORBELL_OK;
	uint64_t launches;

	if (!is_skipped) {
		switch (replay->kind) {
		case DBL_REPLAY_SEND:
			code = dbl_replay_send(replay, cell);
			break;
		case DBL_REPLAY_PAGES:
			code = dbl_replay_pages(replay, cell);
			break;
		case DBL_REPLAY_WAIT_SEND:
			code = dbl_replay_wait_send(replay);
			break;
		case DBL_REPLAY_RECV:
			code = dbl_replay_recv(replay);
			break;
		case DBL_REPLAY_WAIT_RECV:
			code = dbl_replay_wait_recv(replay, report);
			break;
		case DBL_REPLAY_STORE:
			/* What the stream did before. */
			dbl_fence_release();
			if (replay->is_wide)
				dbl_store_qword((void *)(uintptr_t)replay->words[0], replay->words[1]);
			else
				dbl_store_dword((void *)(uintptr_t)replay->words[0], (uint32_t)replay->words[1]);
			break;
		case DBL_REPLAY_WAIT_WORD:
			code = dbl_replay_wait_word(replay, cell);
			break;
		default:
			code = DOORBELL_ERANGE;
		}
	}
	if (code != DOORBELL_OK) {
		dbl_replay_fail(replay, report, code, is_skipped);
		return code;
	}
	/* Another instance of the graph may execute it at the same time. */
	while (!dbl_take_dword(&cell->counting, 0, 1))
		DBL_TURN();
	launches = dbl_load_qword(&cell->launches) + 1;
	dbl_store_qword(&cell->launches, launches);
	/* What the operation has brought, and the details, before the count. */
	dbl_fence_release();
	dbl_store_dword(&report->passed, 1);
	dbl_store_qword(&report->launches, launches);
	dbl_store_dword_release_gpu(&cell->counting, 0);
	return DOORBELL_OK;
}

#endif
