/*
 * The interpreter of programs for who has nothing but memory: one thread of a GPU (kernels.cu), or of a CPU in tests. C11 and CUDA.
 *
 * What it is given is a batch of words of 64 bits: items, each a head and what follows it.
 *
 *     TABLE    the addresses of targets, `count` of them; the programs after it name their targets by their places in it
 *     PROGRAM  its number, then `count` struct dbl_unit
 *     COUNT    a number: the batch has come so far
 *
 * Memory order. All accesses are of system scope: the other sides are CPUs and NICs. A store is relaxed, one access of its width; a poll
 * loads with acquire: what was stored before the word is seen by all that the stream does later. Before its first op a program orders what
 * the stream did before, kernels as well, before its own stores; what orders those among themselves are its fences. A count is ordered
 * after all.
 *
 * No wait is for ever. The host ends one by `release`; who executes may bound it by a time of its own; and if it has stopped looking (see `alive`), so does everything here: what was
 * protected by the wait must not be sent. What the stream's memory operations execute behind it, they execute.
 */
#ifndef DOORBELL_EXECUTE_H
#define DOORBELL_EXECUTE_H

#include <string.h>

#include "access.h"
#include "peer.h"

/* What a batch can hold: a send or a wait; many. Each is the one parameter of a kernel, which the driver copies with the launch. */
#define DBL_BATCH_SHORT_WORDS 62
#define DBL_BATCH_LONG_WORDS 2046

enum dbl_item { DBL_ITEM_TABLE = 1, DBL_ITEM_PROGRAM = 2, DBL_ITEM_COUNT = 3 };

/* The first word of an item. */
struct dbl_item_head {
	uint8_t kind;  /* enum dbl_item */
	uint8_t count; /* addresses or units */
	uint16_t reserved[3];
};

/* Why nothing is executed any more: dbl_control.stop. */
enum dbl_stop {
	DBL_STOP_ABANDONED = 1, /* the host has not looked for the length of the lease */
	DBL_STOP_MALFORMED = 2, /* an item or a unit makes no sense */
	DBL_STOP_TIMED_OUT = 3  /* a wait took longer than who executes it would wait */
};

/* A failure, as kernels find it in dbl_control.status: DOORBELL_EWORK of doorbell.h. */
#define DBL_STATUS_WORK (-19)

/* What a stream and the host share: host memory, on lines of their own by who writes. src/cuda/word.rs is the host's side. */
struct dbl_control {
	/* The host writes. */
	uint64_t release;  /* waits of the programs up to this number end, held or not */
	uint64_t alive;    /* changes while the host looks at the stream */
	uint64_t lease_ns; /* how long it may not change while there is a wait */
	uint32_t failures; /* how many the host has found, or caused by ending waits; goes round */
	uint32_t reserved;
	uint64_t host[12];
	/* The stream writes. */
	uint64_t released; /* the number of the last program of which a wait was released */
	uint64_t stopped;  /* the number of the first program that was not executed, if `stop` is not 0 */
	uint32_t stop;     /* enum dbl_stop */
	uint32_t done;     /* how far it has come: the low half of the last COUNT */
	uint64_t stream[13];
	/* Both write, and only where it is 0. */
	int32_t status; /* 0, or the code of the first failure */
	uint32_t both[31];
};

DBL_STATIC_ASSERT(sizeof(struct dbl_item_head) == 8, "a head is a word");
DBL_STATIC_ASSERT(offsetof(struct dbl_control, alive) == 8, "alive");
DBL_STATIC_ASSERT(offsetof(struct dbl_control, lease_ns) == 16, "lease_ns");
DBL_STATIC_ASSERT(offsetof(struct dbl_control, failures) == 24, "failures");
DBL_STATIC_ASSERT(offsetof(struct dbl_control, released) == 128, "released");
DBL_STATIC_ASSERT(offsetof(struct dbl_control, stopped) == 136, "stopped");
DBL_STATIC_ASSERT(offsetof(struct dbl_control, stop) == 144, "stop");
DBL_STATIC_ASSERT(offsetof(struct dbl_control, done) == 148, "done");
DBL_STATIC_ASSERT(offsetof(struct dbl_control, status) == 256, "status");
DBL_STATIC_ASSERT(sizeof(struct dbl_control) == 384, "a control block is 384 bytes");

#ifdef __CUDACC__

/* Inline, for who includes this and uses a part. */
#define DBL_EXECUTOR static inline __device__

/* Addresses of GPUs are good, or end the context. */
#define DBL_REACH(address, len_bytes) ((void *)(address))
/* Nobody ends a kernel but itself. */
#define DBL_PAUSE(turn) 0

#else

#define DBL_EXECUTOR static inline
/* Whoever includes this may have addresses of another kind; null where there is nothing. */
#ifndef DBL_REACH
#define DBL_REACH(address, len_bytes) ((void *)(uintptr_t)(address))
#endif
/* Once in each turn of a wait; not 0 ends the batch where it is. */
#ifndef DBL_PAUSE
#define DBL_PAUSE(turn) 0
#endif

#endif

/* What becomes of a batch, or of a part of it. */
enum dbl_end {
	DBL_END_DONE = 0,
	DBL_END_STOPPED = 1,     /* by what dbl_control.stop says: from here on only counts are executed */
	DBL_END_PAUSED = 2,      /* DBL_PAUSE said so */
	DBL_END_UNREACHABLE = 3, /* DBL_REACH had nothing */
	DBL_END_MALFORMED = 4,
	DBL_END_TIMED_OUT = 5 /* a wait, by the bound of who executes */
};

/* An execution: what it is bounded by, and what it has come to. */
struct dbl_run {
	struct dbl_control *control;
	uint64_t start_ns;   /* 0: it is when it first has to wait, so that nobody asks for the time before a doorbell */
	uint64_t timeout_ns; /* of all of it, from the start on; all ones: only the host ends its waits */
	uint32_t waited;     /* there was a wait */
	uint32_t failed;     /* a completion in error, or a wait that the host has ended */
	uint32_t stopped;    /* enum dbl_stop, or 0; only counts are executed from then on */
};

/* Whether it has taken longer than it may. */
DBL_EXECUTOR int dbl_run_is_late(struct dbl_run *run, uint64_t now_ns)
{
	if (run->start_ns == 0)
		run->start_ns = now_ns;
	return dbl_has_passed(now_ns, run->start_ns, run->timeout_ns);
}

DBL_EXECUTOR void dbl_note(struct dbl_control *control, int32_t status)
{
	/* Not an exchange: a GPU has none on the memory of most hosts. Of two failures at once either may be the first. */
	if (dbl_load_dword(&control->status) == 0)
		dbl_store_dword(&control->status, (uint32_t)status);
}

/* Waits as `unit` says for the word at `at`. */
DBL_EXECUTOR enum dbl_end dbl_wait(const struct dbl_unit *unit, const void *at, uint64_t number, struct dbl_run *run)
{
	struct dbl_control *control = run->control;
	uint64_t seen = 0, since_ns = 0, now_ns, alive;
	uint32_t turn, word;
	int has_looked = 0;

	run->waited = 1;
	for (turn = 0;; turn++) {
		word = dbl_load_dword(at);
		if (dbl_poll_satisfied(unit->kind, word, (uint32_t)unit->value))
			break;
		/* The host's words now and then: each load of them takes as long as one of the word that is waited for. */
		if (turn % 16 == 15) {
			if (dbl_load_qword(&control->release) >= number) {
				dbl_store_qword(&control->released, number);
				run->failed = 1;
				return DBL_END_DONE;
			}
			now_ns = dbl_now_ns();
			if (dbl_run_is_late(run, now_ns))
				return DBL_END_TIMED_OUT;
			/* What passes between the clock and the word is no part of the lease, however long it is: this may stand
			 * still there while the host does not. So the clock is before the word that ends it, and behind the one
			 * that begins it. */
			alive = dbl_load_qword(&control->alive);
			/* Not by `turn`, which goes round within an hour. */
			if (!has_looked || alive != seen) {
				has_looked = 1;
				seen = alive;
				since_ns = dbl_now_ns();
			} else if (dbl_has_passed(now_ns, since_ns, dbl_load_qword(&control->lease_ns))) {
				return DBL_END_STOPPED;
			}
		}
		if (DBL_PAUSE(turn))
			return DBL_END_PAUSED;
	}
	/* The opcode of a CQE is in the word that has the owner bit (mlx5dv.h: MLX5_CQE_REQ_ERR, MLX5_CQE_RESP_ERR). Known here before
	 * any kernel behind the wait runs, and to the host some time later. */
	if (unit->role == DBL_ROLE_COMPLETIONS && (word >> 28 == 13 || word >> 28 == 14)) {
		dbl_note(control, DBL_STATUS_WORK);
		run->failed = 1;
	}
	return DBL_END_DONE;
}

/* Words as what they stand for. Copied, since to a compiler they are of another type. */
DBL_EXECUTOR struct dbl_unit dbl_unit_of(const uint64_t *words)
{
	struct dbl_unit unit;
	memcpy(&unit, words, sizeof(unit));
	return unit;
}

DBL_EXECUTOR void dbl_item_head_of(struct dbl_item_head *head, const uint64_t *words)
{
	memcpy(head, words, sizeof(*head));
}

#define DBL_UNIT_WORDS ((uint32_t)(sizeof(struct dbl_unit) / sizeof(uint64_t)))

/* Executes the units of a program. `table` has `target_count` addresses. */
DBL_EXECUTOR enum dbl_end dbl_program(const uint64_t *units, uint32_t unit_count, const uint64_t *table,
				      uint32_t target_count, uint64_t number, struct dbl_run *run)
{
	uint32_t at, word, len_bytes, payload;
	enum dbl_end end;
	uint8_t *place;

	dbl_fence_system();
	for (at = 0; at < unit_count; at += 1 + payload) {
		const struct dbl_unit unit = dbl_unit_of(units + DBL_UNIT_WORDS * at);
		const uint64_t *bytes = units + DBL_UNIT_WORDS * (at + 1);

		payload = 0;
		if (unit.kind == DBL_FENCE) {
			/* The strongest of what its bits may ask for. */
			dbl_fence_system();
			continue;
		}
		len_bytes = unit.kind == DBL_STORE_QWORD ? 8 : unit.kind == DBL_COPY_BLOCK ? unit.len_bytes : 4;
		if (unit.target >= target_count || table[unit.target] == 0)
			return DBL_END_MALFORMED;
		place = (uint8_t *)DBL_REACH(table[unit.target] + unit.offset, len_bytes);
		if (!place)
			return DBL_END_UNREACHABLE;
		switch (unit.kind) {
		case DBL_STORE_DWORD:
			dbl_store_dword(place, (uint32_t)unit.value);
			break;
		case DBL_STORE_QWORD:
			dbl_store_qword(place, unit.value);
			break;
		case DBL_COPY_BLOCK:
			payload = (len_bytes + (uint32_t)sizeof(unit) - 1) / (uint32_t)sizeof(unit);
			if (len_bytes % 8 != 0 || payload >= unit_count - at)
				return DBL_END_MALFORMED;
			/* Ascending, as the BlueFlame buffer of a NIC wants it. */
			for (word = 0; word < len_bytes / 8; word++)
				dbl_store_qword(place + 8 * word, bytes[word]);
			break;
		case DBL_POLL_GEQ:
		case DBL_POLL_AND:
		case DBL_POLL_NOR:
			end = dbl_wait(&unit, place, number, run);
			if (end != DBL_END_DONE)
				return end;
			break;
		default:
			return DBL_END_MALFORMED;
		}
	}
	return DBL_END_DONE;
}

/* Executes a batch of `word_count` words. DONE, though it may have been stopped, as `run` says; PAUSED or UNREACHABLE. */
DBL_EXECUTOR enum dbl_end dbl_execute_bounded(const uint64_t *words, uint32_t word_count, struct dbl_run *run)
{
	struct dbl_control *control = run->control;
	const uint64_t *table = words;
	uint32_t at, body_words, target_count = 0;

	for (at = 0; at < word_count; at += 1 + body_words) {
		const uint64_t *body = &words[at + 1];
		enum dbl_end end = DBL_END_DONE;
		struct dbl_item_head head;

		dbl_item_head_of(&head, &words[at]);
		body_words = head.kind == DBL_ITEM_TABLE   ? head.count :
			     head.kind == DBL_ITEM_PROGRAM ? 1 + 3 * (uint32_t)head.count :
							      1;
		if (body_words >= word_count - at)
			end = DBL_END_MALFORMED;
		else if (head.kind == DBL_ITEM_TABLE) {
			table = body;
			target_count = head.count;
		} else if (head.kind == DBL_ITEM_PROGRAM) {
			if (!run->stopped)
				end = dbl_program(body + 1, head.count, table, target_count,
						  body[0], run);
		} else if (head.kind == DBL_ITEM_COUNT) {
			dbl_fence_system();
			dbl_store_dword(&control->done, (uint32_t)body[0]);
		} else
			end = DBL_END_MALFORMED;
		if (end == DBL_END_STOPPED || end == DBL_END_MALFORMED || end == DBL_END_TIMED_OUT) {
			run->stopped = end == DBL_END_STOPPED	? DBL_STOP_ABANDONED :
				       end == DBL_END_MALFORMED ? DBL_STOP_MALFORMED :
								  DBL_STOP_TIMED_OUT;
			dbl_store_qword(&control->stopped, head.kind == DBL_ITEM_PROGRAM ? body[0] : 0);
			/* The reason behind what it is about. */
			dbl_fence_system();
			dbl_store_dword(&control->stop, run->stopped);
			dbl_note(control, DBL_STATUS_WORK);
			if (end == DBL_END_MALFORMED && head.kind != DBL_ITEM_PROGRAM)
				return DBL_END_DONE;
		} else if (end != DBL_END_DONE) {
			return end;
		}
	}
	return DBL_END_DONE;
}

/* The same for a stream, whose waits the host alone ends. */
DBL_EXECUTOR enum dbl_end dbl_execute(const uint64_t *words, uint32_t word_count, struct dbl_control *control)
{
	struct dbl_run run;

	run.control = control;
	run.start_ns = 0;
	run.timeout_ns = UINT64_MAX;
	run.waited = run.failed = 0;
	run.stopped = dbl_load_dword(&control->stop);
	return dbl_execute_bounded(words, word_count, &run);
}

#endif
