/*
 * The interpreter of programs: one thread of a GPU (cuda/kernels.cu), or of a CPU in tests, executes them by loads and
 * stores. C11 and CUDA.
 *
 * Its input is a batch: an array of 64-bit words with items. Each item is a head followed by its data.
 *
 *     TABLE    the addresses of `count` targets; later programs name targets by their index in this table
 *     PROGRAM  its number, then `count` struct dbl_unit
 *     COUNT    a number to report: the batch has been executed up to here
 *     TAKE     `count` words, those of a struct dbl_take: takes a message out of its slot, see take.h
 *
 * Memory order. All accesses have system scope, because the other sides are CPUs and NICs. A store is relaxed, one
 * access of its width. A poll loads relaxed, so that a turn does not invalidate the caches of the multiprocessor, and
 * has an acquire fence when the condition holds: what was stored before the word is visible to everything that follows
 * on the stream. Before its first unit, a program has a release fence, which orders all earlier work of the stream,
 * kernels included, before its own stores. A fence in the program has acquire and release. It orders the stores of the
 * program among themselves, but no store before a later poll: a poll repeats its load. A count is stored after a
 * release fence, so after everything before it.
 *
 * Every wait ends. The host ends a wait by `release`. The caller may set a time limit. If the host stops checking the
 * stream (see `alive`), the interpreter stops: later programs of the batch are not executed, because what the wait
 * protects must not be sent. Memory operations that the stream executes after the batch are not affected.
 */
#ifndef DOORBELL_EXECUTE_H
#define DOORBELL_EXECUTE_H

#include <string.h>

#include "access.h"
#include "bytecode.h"
#include "executor.h"
#include "take.h"

/*
 * Words of a batch: short for a send or a wait, long for many. A batch is the one parameter of a kernel; the driver
 * copies it at the launch.
 */
#define DBL_BATCH_SHORT_WORDS 62
#define DBL_BATCH_LONG_WORDS 2046

enum dbl_item { DBL_ITEM_TABLE = 1, DBL_ITEM_PROGRAM = 2, DBL_ITEM_COUNT = 3, DBL_ITEM_TAKE = 4 };

/* The first word of an item. */
struct dbl_item_head {
	uint8_t kind;  /* enum dbl_item */
	uint8_t count; /* number of addresses, units or words */
	uint16_t reserved[3];
};

/* Why execution has stopped: dbl_control.stop. */
enum dbl_stop {
	DBL_STOP_ABANDONED = 1, /* the host has not checked the stream for the time of the lease */
	DBL_STOP_MALFORMED = 2, /* an item or a unit is invalid */
	DBL_STOP_TIMED_OUT = 3  /* a wait took longer than the caller's limit */
};

/* A failure in dbl_control.status: DOORBELL_EWORK of doorbell.h. */
#define DBL_STATUS_WORK (-19)

/* The opcode of a completion in error that the host lets go; above it are MLX5_CQE_REQ_ERR and MLX5_CQE_RESP_ERR. */
#define DBL_CQE_RELEASED 7

/*
 * The control block that a stream and the host share, in host memory. Each writer has its own cache lines.
 * src/cuda/stream_words.rs is the host's side.
 */
struct dbl_control {
	/* Written by the host. */
	uint64_t release;  /* waits of programs up to this number end, whether the condition holds or not */
	uint64_t alive;    /* changes as long as the host checks the stream */
	uint64_t lease_ns; /* longest time in ns without a change of `alive` during a wait */
	uint32_t failures; /* number of failures that the host has found, or caused by ending waits; wraps */
	uint32_t reserved;
	uint64_t host[12];
	/* Written by the stream. */
	uint64_t released; /* number of the last program whose wait was released */
	uint64_t stopped;  /* number of the first program that was not executed, if `stop` is not 0 */
	uint32_t stop;     /* enum dbl_stop */
	uint32_t done;     /* progress: the low half of the last COUNT */
	uint64_t stream[13];
	/* Written by both, only if it is 0. */
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

/* The result of a batch, or of a part of it. */
enum dbl_end {
	DBL_END_DONE = 0,
	DBL_END_STOPPED = 1,     /* stopped, see dbl_control.stop: from now on only counts are executed */
	DBL_END_PAUSED = 2,      /* DBL_PAUSE ended it */
	DBL_END_UNREACHABLE = 3, /* DBL_MAP_ADDRESS returned NULL */
	DBL_END_MALFORMED = 4,
	DBL_END_TIMED_OUT = 5 /* a wait exceeded the caller's limit */
};

/* The limits and results of one execution. */
struct dbl_run {
	struct dbl_control *control;
	uint64_t start_ns;   /* start time; 0 until the first wait, so that the clock is not read before a doorbell */
	uint64_t timeout_ns; /* limit for the whole execution, from start_ns; UINT64_MAX: only the host ends waits */
	uint32_t waited;     /* 1: a wait was executed */
	uint32_t failed;     /* 1: a completion with an error, a wait that the host has ended, or a message that was not taken */
	uint32_t stopped;    /* enum dbl_stop, or 0; if set, only counts are executed */
};

/* Whether the execution has exceeded its limit. */
DBL_EXECUTOR int dbl_run_is_late(struct dbl_run *run, uint64_t now_ns)
{
	if (run->start_ns == 0)
		run->start_ns = now_ns;
	return dbl_has_passed(now_ns, run->start_ns, run->timeout_ns);
}

DBL_EXECUTOR void dbl_note(struct dbl_control *control, int32_t status)
{
	/* Not a compare-and-swap: GPUs do not support it on the memory of most hosts. Of two simultaneous failures
	   either one is kept. */
	if (dbl_load_dword_relaxed(&control->status) == 0)
		dbl_store_dword(&control->status, (uint32_t)status);
}

/*
 * Waits until the word at `at` meets the condition of `unit`. A wait for a completion in error lasts until the host lets it
 * go, by storing DBL_CQE_RELEASED as its opcode: before that, the host makes sure that the doorbells behind the wait
 * transmit nothing.
 */
DBL_EXECUTOR enum dbl_end dbl_wait(const struct dbl_unit *unit, const void *at, uint64_t number, struct dbl_run *run)
{
	struct dbl_control *control = run->control;
	uint64_t seen = 0, since_ns = 0, now_ns, alive;
	uint32_t turn, word, opcode;
	int has_looked = 0, has_failed = 0;

	run->waited = 1;
	for (turn = 0;; turn++) {
		word = DBL_LOAD_FENCED(at);
		if (dbl_poll_satisfied(unit->kind, word, (uint32_t)unit->value)) {
			/* The word with the owner bit also has the opcode of the CQE. */
			opcode = unit->role == DBL_ROLE_COMPLETIONS ? word >> 28 : 0;
			if (opcode >= DBL_CQE_RELEASED && !has_failed) {
				/* Kernels after the wait see the error; the host finds it later. */
				dbl_note(control, DBL_STATUS_WORK);
				run->failed = 1;
				has_failed = 1;
			}
			if (opcode <= DBL_CQE_RELEASED) {
				/* What was stored before the word. */
				dbl_fence_acquire();
				break;
			}
		}
		/* The host's words only every 16 turns: each load of them takes as long as a load of the awaited
		   word. */
		if (turn % 16 == 15) {
			if (dbl_load_qword(&control->release) >= number) {
				dbl_store_qword(&control->released, number);
				run->failed = 1;
				return DBL_END_DONE;
			}
			now_ns = dbl_now_ns();
			if (dbl_run_is_late(run, now_ns))
				return DBL_END_TIMED_OUT;
			/* This thread may be stopped while the host is not. So the time between reading the clock
			   and reading `alive` must not count towards the lease: the clock is read before the load
			   that ends the lease, and after the load that starts it. */
			alive = dbl_load_qword(&control->alive);
			/* Not by `turn`, which wraps within an hour. */
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
	return DBL_END_DONE;
}

/* Reads a unit or a head from words. Copied, because the types may not alias. */
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

	dbl_fence_release();
	for (at = 0; at < unit_count; at += 1 + payload) {
		const struct dbl_unit unit = dbl_unit_of(units + DBL_UNIT_WORDS * at);
		const uint64_t *bytes = units + DBL_UNIT_WORDS * (at + 1);

		payload = 0;
		if (unit.kind == DBL_FENCE) {
			/* Whatever the bits request. */
			dbl_fence_system();
			continue;
		}
		len_bytes = unit.kind == DBL_STORE_QWORD ? 8 : unit.kind == DBL_COPY_BLOCK ? unit.len_bytes : 4;
		if (unit.target >= target_count || table[unit.target] == 0)
			return DBL_END_MALFORMED;
		place = (uint8_t *)DBL_MAP_ADDRESS(table[unit.target] + unit.offset, len_bytes);
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
			/* In ascending order, as the BlueFlame buffer of a NIC requires. */
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

/* Takes a message out of its slot. One that cannot be taken is a failure, which the host finds in the result. */
DBL_EXECUTOR enum dbl_end dbl_take_item(const uint64_t *body, uint32_t words, struct dbl_run *run)
{
	switch (dbl_take_message(body, words)) {
	case DBL_TAKE_DONE:
		return DBL_END_DONE;
	case DBL_TAKE_REFUSED:
		dbl_note(run->control, DBL_STATUS_WORK);
		run->failed = 1;
		return DBL_END_DONE;
	case DBL_TAKE_UNREACHABLE:
		return DBL_END_UNREACHABLE;
	default:
		return DBL_END_MALFORMED;
	}
}

/*
 * Executes a batch of `word_count` words. Returns DBL_END_DONE, also if execution was stopped (see run->stopped), or
 * DBL_END_PAUSED or DBL_END_UNREACHABLE.
 */
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
			     head.kind == DBL_ITEM_TAKE	   ? head.count :
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
			dbl_fence_release();
			dbl_store_dword(&control->done, (uint32_t)body[0]);
		} else if (head.kind == DBL_ITEM_TAKE) {
			if (!run->stopped)
				end = dbl_take_item(body, head.count, run);
		} else
			end = DBL_END_MALFORMED;
		if (end == DBL_END_STOPPED || end == DBL_END_MALFORMED || end == DBL_END_TIMED_OUT) {
			run->stopped = end == DBL_END_STOPPED	? DBL_STOP_ABANDONED :
				       end == DBL_END_MALFORMED ? DBL_STOP_MALFORMED :
								  DBL_STOP_TIMED_OUT;
			dbl_store_qword(&control->stopped, head.kind == DBL_ITEM_PROGRAM ? body[0] : 0);
			/* The reason is stored after what it explains. */
			dbl_fence_release();
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

/* Executes a batch of a stream, without a time limit: only the host ends its waits. */
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
