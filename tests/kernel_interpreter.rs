//! The interpreter that kernels consist of, `include/doorbell/detail/execute.h`, on the CPU: cases that no stream can be made to reach, and, with
//! ThreadSanitizer, data races between it and the host.

mod waived;

use std::path::Path;
use std::process::Command;

use waived::waived;

const PROGRAM: &str = r#"
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#define DBL_PAUSE(turn) (sched_yield(), 0)
#include <doorbell/detail/execute.h>

#define CHECK(condition)                                                                                               \
	do {                                                                                                           \
		if (!(condition)) {                                                                                    \
			fprintf(stderr, "%s:%d: %s\n", test, __LINE__, #condition);                                    \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

static const char *test;
static struct dbl_control control;
static uint32_t word, out[2];
static uint64_t block[4];
static uint64_t words[128];
static uint32_t word_count;

static void begin(const char *name, uint64_t lease_ms)
{
	test = name;
	memset(&control, 0, sizeof(control));
	control.lease_ns = lease_ms * 1000000;
	word = out[0] = out[1] = word_count = 0;
	memset(block, 0, sizeof(block));
}

static void add(uint64_t value)
{
	words[word_count++] = value;
}

static void head(uint8_t kind, uint8_t count)
{
	add(kind | (uint64_t)count << 8);
}

static void table(void)
{
	head(DBL_ITEM_TABLE, 3);
	add((uintptr_t)&word);
	add((uintptr_t)out);
	add((uintptr_t)block);
}

static void unit(uint8_t kind, uint8_t role, uint16_t len_bytes, uint32_t target, uint64_t offset, uint64_t value)
{
	add(kind | (uint64_t)role << 8 | (uint64_t)len_bytes << 16 | (uint64_t)target << 32);
	add(offset);
	add(value);
}

static void program(uint64_t number, uint8_t count)
{
	head(DBL_ITEM_PROGRAM, count);
	add(number);
}

static void count(uint64_t number)
{
	head(DBL_ITEM_COUNT, 0);
	add(number);
}

/* A wait and a store behind it, then another store. */
static void wait_and_stores(uint8_t role)
{
	table();
	program(1, 2);
	unit(DBL_POLL_GEQ, role, 4, 0, 0, 1);
	unit(DBL_STORE_DWORD, DBL_ROLE_MEMORY, 4, 1, 0, 5);
	count(1);
	program(2, 1);
	unit(DBL_STORE_DWORD, DBL_ROLE_MEMORY, 4, 1, 4, 6);
	count(0x100000002u);
}

static void *run(void *unused)
{
	(void)unused;
	CHECK(dbl_execute(words, word_count, &control) == DBL_END_DONE);
	return NULL;
}

/* A slot for 100 bytes, with a message for two slices, or the READ of a long one. */
enum { EAGER = 100, NUMBER = 0xffffffffu, GUARD = 0xee };

static struct {
	struct dbl_message_header header;
	uint8_t bytes[EAGER];
} slot __attribute__((aligned(64)));
static struct dbl_taken result __attribute__((aligned(64)));
static uint8_t target[512], wqe[64] __attribute__((aligned(64)));

/* The words to take a message into slices of these lengths, each at an offset of its own. */
static void take(const uint32_t *lens, uint8_t slices, int has_wqe)
{
	uint8_t at;

	begin("take", 60000);
	memset(&result, 0, sizeof(result));
	/* As the host begins: the mark of the message is 0. */
	result.taken = result.seen = result.skip = NUMBER;
	memset(target, GUARD, sizeof(target));
	memset(wqe, GUARD, sizeof(wqe));
	head(DBL_ITEM_TAKE, DBL_TAKE_WORDS + DBL_TAKE_SLICE_WORDS * slices);
	add((uintptr_t)&slot);
	add((uintptr_t)&result);
	add(has_wqe ? (uintptr_t)wqe : 0);
	add(NUMBER | (uint64_t)EAGER << 32);
	add(7 | (uint64_t)0x123456 << 32);
	for (at = 0; at < slices; at++) {
		add((uintptr_t)target + 200 * at + at);
		add(lens[at]);
	}
	count(1);
}

static void message(uint32_t number, uint32_t kind, uint64_t len_bytes)
{
	uint8_t at;

	slot.header.number = number;
	slot.header.kind = kind;
	slot.header.len_bytes = len_bytes;
	slot.header.addr = 0x1122334455667788u;
	slot.header.rkey = 0xcafe;
	for (at = 0; at < EAGER; at++)
		slot.bytes[at] = at + 1;
}

/* How many bytes of the slices the message has, and that no other byte was changed. */
static uint32_t taken(const uint32_t *lens, uint8_t slices)
{
	uint32_t at, in_slice, total = 0, is_over = 0;

	for (at = 0; at < slices; at++)
		for (in_slice = 0; in_slice < 200; in_slice++) {
			if (in_slice < lens[at] && target[200 * at + at + in_slice] == (uint8_t)(total + 1) && !is_over)
				total++;
			else {
				CHECK(target[200 * at + at + in_slice] == GUARD);
				is_over |= in_slice < lens[at];
			}
		}
	return total;
}

static void check_refused(void)
{
	run(NULL);
	CHECK(control.done == 1 && control.status == DBL_STATUS_WORK && control.stop == 0);
	CHECK(result.seen == NUMBER + 1 && result.taken == NUMBER);
	CHECK(memcmp(&result.header, &slot.header, sizeof(slot.header)) == 0);
}

static void takes(void)
{
	static const uint32_t lens[2] = {17, 60};
	uint8_t expected[64];
	uint32_t len, at;

	for (len = 0; len <= 78; len++) {
		take(lens, 2, 0);
		message(NUMBER, DBL_MESSAGE_EAGER, len);
		if (len > 77) {
			check_refused();
			CHECK(taken(lens, 2) == 0);
			continue;
		}
		run(NULL);
		CHECK(taken(lens, 2) == len && control.status == 0 && control.done == 1);
		CHECK(result.taken == NUMBER + 1 && result.seen == NUMBER + 1);
		CHECK(memcmp(&result.header, &slot.header, sizeof(slot.header)) == 0);
	}
	for (at = 0; at < 7; at++) {
		static const uint32_t long_lens[1] = {150};
		static const struct {
			uint32_t number, kind, len_bytes;
			int has_wqe;
		} wrong[] = {
			{NUMBER - 1, DBL_MESSAGE_EAGER, 8, 1},      /* the message before */
			{NUMBER, 0, 8, 1},			     /* of no kind */
			{NUMBER, 3, 8, 1},
			{NUMBER, DBL_MESSAGE_EAGER, EAGER + 1, 1},   /* longer than its slot */
			{NUMBER, DBL_MESSAGE_RENDEZVOUS, EAGER, 1},  /* which belongs into a slot */
			{NUMBER, DBL_MESSAGE_RENDEZVOUS, 151, 1},    /* longer than the slice */
			{NUMBER, DBL_MESSAGE_RENDEZVOUS, 120, 0},    /* nothing to read it with */
		};
		take(long_lens, 1, wrong[at].has_wqe);
		message(wrong[at].number, wrong[at].kind, wrong[at].len_bytes);
		check_refused();
		CHECK(taken(long_lens, 1) == 0 && wqe[0] == GUARD && wqe[63] == GUARD);
	}
	for (len = EAGER + 1; len <= 150; len++) {
		static const uint32_t long_lens[1] = {150};
		take(long_lens, 1, 1);
		message(NUMBER, DBL_MESSAGE_RENDEZVOUS, len);
		memcpy(expected, wqe, sizeof(expected));
		dbl_wqe_read_over_nop(expected, 0, 7, 0x123456, 0x1122334455667788u, 0xcafe, len);
		run(NULL);
		CHECK(memcmp(wqe, expected, sizeof(expected)) == 0 && taken(long_lens, 1) == 0);
		CHECK(result.taken == NUMBER + 1 && control.status == 0);
	}
	/* The host has given it up. */
	take(lens, 2, 0);
	message(NUMBER, DBL_MESSAGE_EAGER, 8);
	result.skip = NUMBER + 1;
	run(NULL);
	CHECK(taken(lens, 2) == 0 && result.seen == NUMBER && result.taken == NUMBER && control.done == 1);
	/* Not those of a struct dbl_take. */
	take(lens, 2, 0);
	words[0] = DBL_ITEM_TAKE | (uint64_t)(DBL_TAKE_WORDS + 1) << 8;
	run(NULL);
	CHECK(control.stop == DBL_STOP_MALFORMED && taken(lens, 2) == 0);
}

static void *set_word(void *value)
{
	usleep(20000);
	__atomic_store_n(&word, (uint32_t)(uintptr_t)value, __ATOMIC_RELEASE);
	return NULL;
}

/* A completion in error, which the stream notes and does not pass, until the host lets it go. */
static void *fail_word(void *unused)
{
	(void)unused;
	__atomic_store_n(&word, 0xd0000001u, __ATOMIC_RELEASE);
	while (!__atomic_load_n(&control.status, __ATOMIC_ACQUIRE))
		usleep(1000);
	usleep(5000);
	CHECK(__atomic_load_n(&out[0], __ATOMIC_ACQUIRE) == 0 && control.done == 0);
	__atomic_store_n(&word, 0x70000001u, __ATOMIC_RELEASE);
	return NULL;
}

/* Looks at the stream for longer than the lease, then does what is waited for. Between two looks it may have got no processor: how long. */
static uint64_t longest_ns;

static void *look(void *unused)
{
	const uint64_t start_ns = dbl_now_ns();
	uint64_t last_ns = start_ns, now_ns = start_ns;
	(void)unused;
	longest_ns = 0;
	while (now_ns - start_ns < 2 * control.lease_ns) {
		__atomic_fetch_add(&control.alive, 1, __ATOMIC_RELAXED);
		usleep(1000);
		now_ns = dbl_now_ns();
		if (now_ns - last_ns > longest_ns)
			longest_ns = now_ns - last_ns;
		last_ns = now_ns;
	}
	__atomic_store_n(&word, 1, __ATOMIC_RELEASE);
	return NULL;
}

static void *release(void *unused)
{
	(void)unused;
	usleep(20000);
	/* As the host: what the failure is before what ends the wait. */
	__atomic_store_n(&control.status, DBL_STATUS_WORK, __ATOMIC_SEQ_CST);
	__atomic_store_n(&control.release, 1, __ATOMIC_RELEASE);
	return NULL;
}

static void beside(void *(*host)(void *), void *argument)
{
	pthread_t stream, other;
	if (pthread_create(&stream, NULL, run, NULL) || pthread_create(&other, NULL, host, argument))
		abort();
	pthread_join(stream, NULL);
	pthread_join(other, NULL);
}

int main(void)
{
	uint32_t at;

	begin("a wait that is met", 60000);
	wait_and_stores(DBL_ROLE_MEMORY);
	beside(set_word, (void *)1);
	CHECK(out[0] == 5 && out[1] == 6 && control.done == 2 && control.status == 0 && control.stop == 0);

	begin("a completion in error", 60000);
	wait_and_stores(DBL_ROLE_COMPLETIONS);
	/* As the owner bit is waited for; the opcode is MLX5_CQE_REQ_ERR. */
	words[6] = (words[6] & ~(uint64_t)0xff) | DBL_POLL_AND;
	beside(fail_word, NULL);
	CHECK(out[0] == 5 && control.status == DBL_STATUS_WORK && control.released == 0);

	begin("a wait that is released", 60000);
	wait_and_stores(DBL_ROLE_MEMORY);
	beside(release, NULL);
	CHECK(control.released == 1 && word == 0 && out[0] == 5 && out[1] == 6 && control.done == 2);
	CHECK(control.status == DBL_STATUS_WORK && control.stop == 0);

	begin("a release is for no later program", 60000);
	control.release = 1;
	table();
	program(2, 1);
	unit(DBL_POLL_GEQ, DBL_ROLE_MEMORY, 4, 0, 0, 1);
	beside(set_word, (void *)1);
	CHECK(control.released == 0 && control.stop == 0);

	/* Again, if it was not there for most of the lease; each time with a longer one. */
	for (at = 1000; at < 30000; at *= 3) {
		begin("a host that looks", at);
		wait_and_stores(DBL_ROLE_MEMORY);
		beside(look, NULL);
		if (longest_ns < control.lease_ns / 2)
			break;
	}
	CHECK(out[0] == 5 && control.stop == 0 && control.status == 0);

	begin("a host that looks no more", 50);
	wait_and_stores(DBL_ROLE_MEMORY);
	run(NULL);
	CHECK(control.stop == DBL_STOP_ABANDONED && control.stopped == 1 && control.status == DBL_STATUS_WORK);
	CHECK(out[0] == 0 && out[1] == 0 && control.done == 2);
	/* So it is with all that comes later, though the wait would be met now. */
	word = 1;
	control.done = 0;
	run(NULL);
	CHECK(out[0] == 0 && out[1] == 0 && control.done == 2 && control.stopped == 1);

	/* Bounded by the executing thread: a wait that is not met in time, and one that is. */
	for (at = 0; at < 2; at++) {
		struct dbl_run run;
		begin("a bound", 60000);
		wait_and_stores(DBL_ROLE_MEMORY);
		memset(&run, 0, sizeof(run));
		run.control = &control;
		run.start_ns = dbl_now_ns();
		run.timeout_ns = 30000000;
		word = at;
		CHECK(dbl_execute_bounded(words, word_count, &run) == DBL_END_DONE);
		CHECK(run.waited && !run.failed && control.done == 2);
		if (at == 0) {
			CHECK(dbl_now_ns() - run.start_ns > 30000000 && run.stopped == DBL_STOP_TIMED_OUT);
			CHECK(control.stop == DBL_STOP_TIMED_OUT && control.stopped == 1 && out[0] == 0 && out[1] == 0);
			CHECK(control.status == DBL_STATUS_WORK);
		} else
			CHECK(!run.stopped && control.stop == 0 && out[0] == 5 && out[1] == 6);
	}

	begin("a block", 60000);
	table();
	program(1, 4);
	unit(DBL_COPY_BLOCK, DBL_ROLE_UAR, 32, 2, 0, 0);
	for (at = 0; at < 6; at++)
		add(0x1111111111111111u * (at + 1));
	unit(DBL_STORE_QWORD, DBL_ROLE_UAR, 8, 2, 0, 0x99);
	run(NULL);
	CHECK(block[0] == 0x99 && block[1] == 0x2222222222222222u && block[3] == 0x4444444444444444u);

	/* What makes no sense is not executed, nor is anything behind it. */
	for (at = 0; at < 4; at++) {
		begin("malformed", 60000);
		table();
		program(1, 1);
		if (at == 0)
			unit(99, 0, 4, 0, 0, 1);
		else if (at == 1)
			unit(DBL_STORE_DWORD, DBL_ROLE_MEMORY, 4, 3, 0, 1);
		else if (at == 2)
			unit(DBL_COPY_BLOCK, DBL_ROLE_UAR, 32, 2, 0, 0);
		else
			unit(DBL_COPY_BLOCK, DBL_ROLE_UAR, 12, 2, 0, 0);
		program(2, 1);
		unit(DBL_STORE_DWORD, DBL_ROLE_MEMORY, 4, 1, 0, 5);
		count(2);
		run(NULL);
		CHECK(control.stop == DBL_STOP_MALFORMED && control.stopped == 1 && out[0] == 0 && control.done == 2);
	}
	takes();

	begin("cut off", 60000);
	table();
	program(1, 2);
	unit(DBL_STORE_DWORD, DBL_ROLE_MEMORY, 4, 1, 0, 5);
	run(NULL);
	CHECK(control.stop == DBL_STOP_MALFORMED && out[0] == 0);
	return 0;
}
"#;

/// Triggers executed by threads in place of kernels. Each stores to plain memory before, so that ThreadSanitizer checks the order.
const TRIGGERS: &str = r#"
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#define DBL_PAUSE(turn) (sched_yield(), 0)
#include <doorbell/trigger.h>

#define CHECK(condition)                                                                                               \
	do {                                                                                                           \
		if (!(condition)) {                                                                                    \
			fprintf(stderr, "%s:%d: %s\n", test, __LINE__, #condition);                                    \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

enum { COUNT = 4000, THREADS = 4, SECOND = 1000000000 };

static const char *test = "order";
static struct dbl_control control;
static uint64_t turn;
static uint32_t word, out;
static uint32_t data[COUNT]; /* Not atomic. */
static struct doorbell_trigger triggers[COUNT];
static uint32_t next, executed[COUNT];

/* One program: a wait for `word` if there is one, then a store of `value`; and a count. */
static struct doorbell_trigger trigger(uint64_t number, uint32_t awaited, uint32_t value)
{
	struct doorbell_trigger made;
	struct dbl_unit units[2], *unit = units;
	uint32_t count = awaited ? 2 : 1;

	memset(&made, 0, sizeof(made));
	memset(units, 0, sizeof(units));
	made.control = (uintptr_t)&control;
	made.turn = (uintptr_t)&turn;
	made.number = number;
	made.failures = control.failures;
	made.words[0] = DBL_ITEM_TABLE | 2 << 8;
	made.words[1] = (uintptr_t)&word;
	made.words[2] = (uintptr_t)&out;
	made.words[3] = DBL_ITEM_PROGRAM | count << 8;
	made.words[4] = number + 1;
	if (awaited) {
		unit->kind = DBL_POLL_GEQ;
		unit->role = DBL_ROLE_MEMORY;
		unit->len_bytes = 4;
		unit->value = awaited;
		unit++;
	}
	unit->kind = DBL_STORE_DWORD;
	unit->len_bytes = 4;
	unit->target = 1;
	unit->value = value;
	memcpy(&made.words[5], units, count * sizeof(*units));
	made.words[5 + 3 * count] = DBL_ITEM_COUNT;
	made.words[6 + 3 * count] = number + 1;
	made.word_count = 7 + 3 * count;
	return made;
}

static void begin(const char *name)
{
	test = name;
	memset(&control, 0, sizeof(control));
	control.lease_ns = 60ull * SECOND;
	turn = 0;
	word = out = next = 0;
}

/* Takes the triggers in an order of its own and executes each; some twice. */
static void *kernel(void *argument)
{
	uint32_t at, place, code, seed = (uint32_t)(uintptr_t)argument;

	for (;;) {
		place = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
		if (place >= COUNT)
			return NULL;
		/* Neighbours change places: a thread that is early waits for the thread before it. */
		at = place ^ 1;
		data[at] = at;
		code = (uint32_t)doorbell_device_trigger(&triggers[at], 50ull * SECOND);
		CHECK(code == DOORBELL_OK);
		/* All before it were executed, and what was stored before them is here. */
		if (at > 0)
			CHECK(data[at - 1] == at - 1);
		__atomic_fetch_add(&executed[at], 1, __ATOMIC_RELAXED);
		seed = seed * 1664525 + 1013904223;
		if (seed % 4 == 0)
			CHECK(doorbell_device_trigger(&triggers[at], SECOND) == DOORBELL_ESTATE);
	}
}

static void *twice(void *trigger)
{
	return (void *)(intptr_t)doorbell_device_trigger((struct doorbell_trigger *)trigger, 50ull * SECOND);
}

static void *signaller(void *unused)
{
	uint32_t at;
	(void)unused;
	for (at = 0; at < COUNT; at++) {
		data[at] = 2 * at;
		doorbell_device_write_value32(&word, at + 1);
	}
	return NULL;
}

static void *fail_and_let_go(void *unused)
{
	(void)unused;
	usleep(20000);
	/* As the host: the failure is counted before the wait goes on. */
	__atomic_fetch_add(&control.failures, 1, __ATOMIC_RELEASE);
	__atomic_store_n(&word, 1, __ATOMIC_RELEASE);
	return NULL;
}

static void *release(void *unused)
{
	(void)unused;
	usleep(20000);
	__atomic_store_n(&control.release, 1, __ATOMIC_RELEASE);
	return NULL;
}

static pthread_t start(void *(*function)(void *), void *argument)
{
	pthread_t thread;
	if (pthread_create(&thread, NULL, function, argument))
		abort();
	return thread;
}

int main(void)
{
	pthread_t threads[THREADS];
	void *codes[2];
	uint64_t start_ns;
	uint32_t at;
	struct doorbell_trigger first, second;

	begin("order");
	for (at = 0; at < COUNT; at++)
		triggers[at] = trigger(at, 0, at + 1);
	for (at = 0; at < THREADS; at++)
		threads[at] = start(kernel, (void *)(uintptr_t)at);
	for (at = 0; at < THREADS; at++)
		pthread_join(threads[at], NULL);
	for (at = 0; at < COUNT; at++)
		CHECK(executed[at] == 1);
	CHECK(out == COUNT && control.done == COUNT && turn == 2 * COUNT && control.stop == 0);

	begin("twice at once");
	for (at = 0; at < 500; at++) {
		first = trigger(at, 0, at + 1);
		threads[0] = start(twice, &first);
		threads[1] = start(twice, &first);
		pthread_join(threads[0], &codes[0]);
		pthread_join(threads[1], &codes[1]);
		CHECK((intptr_t)codes[0] + (intptr_t)codes[1] == DOORBELL_ESTATE);
		CHECK(out == at + 1 && turn == 2 * (at + 1));
	}

	begin("values");
	threads[0] = start(signaller, NULL);
	for (at = 0; at < COUNT; at++) {
		CHECK(doorbell_device_wait_value32(&word, DOORBELL_WAIT_GEQ, at + 1, 50ull * SECOND, NULL) == DOORBELL_OK);
		CHECK(data[at] == 2 * at);
	}
	pthread_join(threads[0], NULL);
	start_ns = dbl_now_ns();
	CHECK(doorbell_device_wait_value32(&word, DOORBELL_WAIT_AND, 1u << 31, 20000000, &control.status) == DOORBELL_ETIMEOUT);
	CHECK(doorbell_device_ok(&control.status));
	CHECK(dbl_now_ns() - start_ns > 20000000);
	control.status = DOORBELL_EWORK;
	CHECK(doorbell_device_wait_value32(&word, DOORBELL_WAIT_AND, 1u << 31, 50ull * SECOND, &control.status) == DOORBELL_EWORK);
	CHECK(!doorbell_device_ok(&control.status));
	CHECK(doorbell_device_wait_value32(&word, DOORBELL_WAIT_NOR, 0, 50ull * SECOND, &control.status) == DOORBELL_OK);
	CHECK(doorbell_device_wait_value32(&word, 3, 0, SECOND, NULL) == DOORBELL_EINVAL);

	begin("not its turn");
	first = trigger(0, 0, 7);
	second = trigger(1, 0, 8);
	CHECK(doorbell_device_trigger(&second, 20000000) == DOORBELL_ETIMEOUT);
	CHECK(turn == 0 && out == 0 && control.done == 0 && control.stop == 0);
	CHECK(doorbell_device_trigger(&first, 0) == DOORBELL_OK && doorbell_device_trigger(&second, 0) == DOORBELL_OK);
	CHECK(out == 8 && control.done == 2);

	begin("gives up");
	first = trigger(0, 1, 7);
	second = trigger(1, 0, 8);
	CHECK(doorbell_device_trigger(&first, 20000000) == DOORBELL_ETIMEOUT);
	CHECK(control.stop == DBL_STOP_TIMED_OUT && control.stopped == 1 && control.done == 1 && out == 0);
	CHECK(doorbell_device_trigger(&first, SECOND) == DOORBELL_ESTATE);
	CHECK(doorbell_device_trigger(&second, SECOND) == DOORBELL_EWORK);
	CHECK(out == 0 && control.done == 2 && control.stopped == 1);

	begin("a failure that the host finds");
	first = trigger(0, 1, 7);
	threads[0] = start(fail_and_let_go, NULL);
	CHECK(doorbell_device_trigger(&first, 50ull * SECOND) == DOORBELL_EWORK);
	pthread_join(threads[0], NULL);
	CHECK(out == 7 && control.stop == 0 && control.released == 0);
	/* Not of one that is taken later, nor of one that waits for nothing. */
	second = trigger(1, 1, 8);
	CHECK(doorbell_device_trigger(&second, SECOND) == DOORBELL_OK);
	second = trigger(2, 0, 9);
	second.failures--;
	CHECK(doorbell_device_trigger(&second, SECOND) == DOORBELL_OK && out == 9);

	begin("a wait that is released");
	first = trigger(0, 1, 7);
	threads[0] = start(release, NULL);
	CHECK(doorbell_device_trigger(&first, 50ull * SECOND) == DOORBELL_EWORK);
	pthread_join(threads[0], NULL);
	CHECK(out == 7 && control.released == 1 && control.stop == 0);

	begin("nothing, and nonsense");
	memset(&first, 0, sizeof(first));
	CHECK(doorbell_device_trigger(&first, 0) == DOORBELL_OK);
	first = trigger(0, 0, 7);
	first.word_count = DOORBELL_TRIGGER_WORDS + 1;
	CHECK(doorbell_device_trigger(&first, 0) == DOORBELL_EINVAL && turn == 0);
	first = trigger(0, 0, 7);
	first.words[3] = 9;
	CHECK(doorbell_device_trigger(&first, 0) == DOORBELL_EWORK && control.stop == DBL_STOP_MALFORMED && out == 0);
	return 0;
}
"#;

fn compile_and_run(name: &str, text: &str, sanitizer: &[&str]) -> Option<()> {
    let folder = std::env::temp_dir().join(format!(
        "doorbell-interpreter-{name}-{}",
        std::process::id()
    ));
    std::fs::create_dir_all(&folder).unwrap();
    let (source, program) = (folder.join(format!("{name}.c")), folder.join(name));
    std::fs::write(&source, text).unwrap();
    let headers = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let compiled = Command::new("cc")
        .args([
            "-std=gnu11",
            "-O2",
            "-g",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pthread",
        ])
        .args(sanitizer)
        .arg("-I")
        .arg(&headers)
        .arg("-include")
        .arg("string.h")
        .arg("-o")
        .args([&program, &source])
        .output();
    let result = match compiled {
        Err(_) => None,
        Ok(output) if !output.status.success() => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            // Of a sanitizer that is not installed.
            assert!(
                !sanitizer.is_empty() && said.contains("cannot find"),
                "{said}"
            );
            None
        }
        Ok(_) => {
            // The time limit of a hang. Under a sanitizer and on a busy machine the program takes a minute.
            let output = Command::new("timeout")
                .arg("400")
                .arg(&program)
                .env("TSAN_OPTIONS", "halt_on_error=1:exitcode=66")
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            // On a kernel that places memory where the sanitizer wants its own.
            if said.contains("unexpected memory mapping") {
                None
            } else {
                assert!(output.status.success(), "{:?} {said}", output.status);
                Some(())
            }
        }
    };
    std::fs::remove_dir_all(&folder).unwrap();
    result
}

#[test]
fn interpreter_waits_stops_and_resumes_by_its_control_block() {
    if compile_and_run("plain", PROGRAM, &[]).is_none() {
        waived(
            "interpreter_waits_stops_and_resumes_by_its_control_block",
            "there is no C compiler",
        );
    }
}

#[test]
fn the_interpreter_and_its_host_have_no_data_race() {
    // The fences order atomics only: gcc warns that its sanitizer does not support fences, which is not needed here.
    let flags = ["-fsanitize=thread", "-Wno-tsan"];
    if compile_and_run("tsan", PROGRAM, &flags).is_none() {
        waived(
            "the_interpreter_and_its_host",
            "there is no ThreadSanitizer",
        );
    }
}

#[test]
fn triggers_are_executed_once_and_in_order_within_their_bounds() {
    if compile_and_run("triggers", TRIGGERS, &[]).is_none() {
        waived("triggers_are_executed_once", "there is no C compiler");
    }
}

#[test]
fn threads_that_execute_triggers_have_no_data_race() {
    let flags = ["-fsanitize=thread", "-Wno-tsan"];
    if compile_and_run("triggers_tsan", TRIGGERS, &flags).is_none() {
        waived(
            "threads_that_execute_triggers",
            "there is no ThreadSanitizer",
        );
    }
}
