/*
 * Triggers, doorbell/trigger.h with the interpreter of doorbell/detail/execute.h, for a model checker that knows weak memory (scripts/model-check): what
 * kernel_queue.c is for queues.
 */
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "rig.h"

/* Words become structs: field by field. */
struct dbl_unit;
struct dbl_item_head;
static void decode_unit(struct dbl_unit *unit, const uint64_t *words, size_t len_bytes);
static void decode_head(struct dbl_item_head *head, const uint64_t *words, size_t len_bytes);
#undef memcpy
#define memcpy(to, from, len_bytes)                                                                                    \
	_Generic((to), struct dbl_unit *: decode_unit, struct dbl_item_head *: decode_head)(to, from, len_bytes)

/* How often a wait looks: a later look shows the same. The interpreter asks for the host's words in the sixteenth turn. */
#if defined(MODEL_released) || defined(MODEL_status)
#define TURNS 16
#else
#define TURNS 2
#endif
/* Messages are not in this model: their bytes are plain memory that nothing else uses. */
#define DOORBELL_TAKE_H
enum dbl_take_end { DBL_TAKE_DONE, DBL_TAKE_REFUSED, DBL_TAKE_UNREACHABLE, DBL_TAKE_MALFORMED };

static enum dbl_take_end dbl_take_message(const uint64_t *body, uint32_t words)
{
	(void)body;
	(void)words;
	return DBL_TAKE_MALFORMED;
}

#define DBL_FENCES_ORDER
#define DBL_PAUSE(turn) (ASSUME((turn) < TURNS), 0)
#include <doorbell/signal.h>
#include <doorbell/trigger.h>

static void decode_unit(struct dbl_unit *unit, const uint64_t *words, size_t len_bytes)
{
	(void)len_bytes;
	unit->kind = (uint8_t)words[0];
	unit->role = (uint8_t)(words[0] >> 8);
	unit->len_bytes = (uint16_t)(words[0] >> 16);
	unit->target = (uint32_t)(words[0] >> 32);
	unit->offset = words[1];
	unit->value = words[2];
}

static void decode_head(struct dbl_item_head *head, const uint64_t *words, size_t len_bytes)
{
	(void)len_bytes;
	head->kind = (uint8_t)words[0];
	head->count = (uint8_t)(words[0] >> 8);
}

static struct dbl_control control;
static uint64_t turn;
static uint32_t record, word;
static uint64_t uar;
static uint64_t data[2], brought;

static struct doorbell_trigger begin(uint64_t number)
{
	struct doorbell_trigger trigger;

	trigger.control = (uintptr_t)&control;
	trigger.turn = (uintptr_t)&turn;
	trigger.number = number;
	trigger.failures = 0;
	trigger.word_count = 0;
	return trigger;
}

static void add(struct doorbell_trigger *trigger, uint64_t value)
{
	trigger->words[trigger->word_count++] = value;
}

static void unit(struct doorbell_trigger *trigger, uint8_t kind, uint8_t role, uint32_t target, uint64_t value)
{
	add(trigger, kind | (uint64_t)role << 8 | (uint64_t)target << 32);
	add(trigger, 0);
	add(trigger, value);
}

/* A send that is the `number`th, from 0: the record, a fence, the doorbell, and that the stream has come so far. */
static struct doorbell_trigger send(uint64_t number)
{
	struct doorbell_trigger trigger = begin(number);

	add(&trigger, DBL_ITEM_TABLE | 2 << 8);
	add(&trigger, (uintptr_t)&record);
	add(&trigger, (uintptr_t)&uar);
	add(&trigger, DBL_ITEM_PROGRAM | 3 << 8);
	add(&trigger, number + 1);
	unit(&trigger, DBL_STORE_DWORD, DBL_ROLE_DOORBELL_RECORD, 0, number + 1);
	unit(&trigger, DBL_FENCE, 0, 0, DBL_FENCE_WRITE | DBL_FENCE_SYSTEM);
	unit(&trigger, DBL_STORE_QWORD, DBL_ROLE_UAR, 1, number + 1);
	add(&trigger, DBL_ITEM_COUNT);
	add(&trigger, number + 1);
	return trigger;
}

static struct doorbell_trigger wait_for_word(void)
{
	struct doorbell_trigger trigger = begin(0);

	add(&trigger, DBL_ITEM_TABLE | 1 << 8);
	add(&trigger, (uintptr_t)&word);
	add(&trigger, DBL_ITEM_PROGRAM | 1 << 8);
	add(&trigger, 1);
	unit(&trigger, DBL_POLL_GEQ, DBL_ROLE_MEMORY, 0, 1);
	add(&trigger, DBL_ITEM_COUNT);
	add(&trigger, 1);
	return trigger;
}

#if defined MODEL_once
/* Two threads execute the same trigger: one does, and the other gets an error. */
static int codes[2];

static void *first(void *unused)
{
	const struct doorbell_trigger trigger = send(0);

	(void)unused;
	codes[0] = doorbell_device_trigger(&trigger, 0);
	return 0;
}

static void *second(void *unused)
{
	const struct doorbell_trigger trigger = send(0);

	(void)unused;
	codes[1] = doorbell_device_trigger(&trigger, 0);
	return 0;
}

int main(void)
{
	RUN(first, second);
	REQUIRE((codes[0] == DOORBELL_OK && codes[1] == DOORBELL_ESTATE) || (codes[1] == DOORBELL_OK && codes[0] == DOORBELL_ESTATE));
	REQUIRE(turn == 2 && record == 1 && uar == 1 && control.done == 1);
	return 0;
}

#elif defined MODEL_turns
/* Two triggers of two threads, which come in their order: the NIC that sees the later doorbell finds the data of both, and the later record. */
static void *first(void *unused)
{
	const struct doorbell_trigger trigger = send(0);

	(void)unused;
	data[0] = 1;
	REQUIRE(doorbell_device_trigger(&trigger, 0) == DOORBELL_OK);
	return 0;
}

static void *second(void *unused)
{
	const struct doorbell_trigger trigger = send(1);

	(void)unused;
	data[1] = 2;
	ASSUME(doorbell_device_trigger(&trigger, 0) == DOORBELL_OK);
	return 0;
}

static void *nic(void *unused)
{
	(void)unused;
	ASSUME(__atomic_load_n(&uar, __ATOMIC_RELAXED) == 2);
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	REQUIRE(__atomic_load_n(&record, __ATOMIC_RELAXED) == 2);
	REQUIRE(data[0] == 1 && data[1] == 2);
	return 0;
}

int main(void)
{
	RUN(first, second, nic);
	REQUIRE(turn == 4 && record == 2 && uar == 2 && control.done == 2);
	return 0;
}

#elif defined MODEL_record
/* A NIC that looks at the record without a doorbell, as it may. */
static void *first(void *unused)
{
	const struct doorbell_trigger trigger = send(0);

	(void)unused;
	data[0] = 1;
	REQUIRE(doorbell_device_trigger(&trigger, 0) == DOORBELL_OK);
	return 0;
}

static void *nic(void *unused)
{
	(void)unused;
	ASSUME(__atomic_load_n(&record, __ATOMIC_RELAXED) == 1);
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	REQUIRE(data[0] == 1);
	return 0;
}

int main(void)
{
	RUN(first, nic);
	return 0;
}

#elif defined MODEL_brought
/* What the NIC has brought is there behind a wait, and, by the turn, for the thread that executes the next trigger. */
static void *first(void *unused)
{
	const struct doorbell_trigger trigger = wait_for_word();

	(void)unused;
	ASSUME(doorbell_device_trigger(&trigger, UINT64_MAX) == DOORBELL_OK);
	REQUIRE(brought == 5);
	return 0;
}

static void *second(void *unused)
{
	const struct doorbell_trigger trigger = send(1);

	(void)unused;
	ASSUME(doorbell_device_trigger(&trigger, 0) == DOORBELL_OK);
	REQUIRE(brought == 5);
	return 0;
}

static void *nic(void *unused)
{
	(void)unused;
	brought = 5;
	__atomic_store_n(&word, 1, __ATOMIC_RELEASE);
	return 0;
}

int main(void)
{
	RUN(first, second, nic);
	return 0;
}

#elif defined MODEL_released
/* The host ends a wait that nothing meets: the kernel gets an error, and the host finds by the count which wait it was. */
static void *executor(void *unused)
{
	const struct doorbell_trigger trigger = wait_for_word();

	(void)unused;
	ASSUME(doorbell_device_trigger(&trigger, UINT64_MAX) == DOORBELL_EWORK);
	return 0;
}

static void *host(void *unused)
{
	(void)unused;
	__atomic_store_n(&control.failures, 1, __ATOMIC_RELAXED);
	__atomic_store_n(&control.release, 1, __ATOMIC_RELEASE);
	ASSUME(__atomic_load_n(&control.done, __ATOMIC_ACQUIRE) == 1);
	REQUIRE(__atomic_load_n(&control.released, __ATOMIC_RELAXED) == 1);
	return 0;
}

int main(void)
{
	RUN(executor, host);
	return 0;
}

#elif defined MODEL_stopped
/* A program that cannot be executed stops the stream: the host, which sees why, finds which one it was. */
static void *executor(void *unused)
{
	struct doorbell_trigger trigger = begin(0);

	(void)unused;
	add(&trigger, DBL_ITEM_PROGRAM | 1 << 8);
	add(&trigger, 7);
	/* There is no table. */
	unit(&trigger, DBL_STORE_DWORD, DBL_ROLE_MEMORY, 0, 1);
	REQUIRE(doorbell_device_trigger(&trigger, 0) == DOORBELL_EWORK);
	return 0;
}

static void *host(void *unused)
{
	(void)unused;
	ASSUME(__atomic_load_n(&control.stop, __ATOMIC_ACQUIRE) == DBL_STOP_MALFORMED);
	REQUIRE(__atomic_load_n(&control.stopped, __ATOMIC_RELAXED) == 7);
	return 0;
}

int main(void)
{
	RUN(executor, host);
	return 0;
}

#elif defined MODEL_failure
/* A failure that the host has counted before the completion becomes visible is reported behind the wait. */
static void *executor(void *unused)
{
	const struct doorbell_trigger trigger = wait_for_word();
	const int code = doorbell_device_trigger(&trigger, UINT64_MAX);

	(void)unused;
	ASSUME(code != DOORBELL_ETIMEOUT);
	REQUIRE(code == DOORBELL_EWORK);
	return 0;
}

static void *host(void *unused)
{
	(void)unused;
	__atomic_store_n(&control.failures, 1, __ATOMIC_RELAXED);
	__atomic_store_n(&word, 1, __ATOMIC_RELEASE);
	return 0;
}

int main(void)
{
	RUN(executor, host);
	return 0;
}

#elif defined MODEL_value
/* A value from kernel to kernel, with what was stored before it. */
static void *writer(void *unused)
{
	(void)unused;
	brought = 5;
	doorbell_device_write_value32(&word, 1);
	return 0;
}

static void *reader(void *unused)
{
	(void)unused;
	ASSUME(doorbell_device_wait_value32(&word, DOORBELL_WAIT_GEQ, 1, UINT64_MAX, 0) == DOORBELL_OK);
	REQUIRE(brought == 5);
	return 0;
}

int main(void)
{
	RUN(writer, reader);
	return 0;
}

#elif defined MODEL_status
/* A wait that ends with a failure: what was stored before the status word is there. */
static int32_t status;

static void *writer(void *unused)
{
	(void)unused;
	brought = 5;
	__atomic_store_n(&status, DOORBELL_EWORK, __ATOMIC_RELEASE);
	return 0;
}

static void *reader(void *unused)
{
	(void)unused;
	ASSUME(doorbell_device_wait_value32(&word, DOORBELL_WAIT_GEQ, 1, UINT64_MAX, &status) == DOORBELL_EWORK);
	REQUIRE(brought == 5);
	return 0;
}

int main(void)
{
	RUN(writer, reader);
	return 0;
}

#elif defined MODEL_signal
/* A signal of 64 bits, with what was stored before it: for a thread that waits, and for one that has a look. */
static uint64_t signal;

static void *writer(void *unused)
{
	(void)unused;
	brought = 5;
	doorbell_device_write_value64(&signal, 1ull << 40);
	return 0;
}

static void *waiter(void *unused)
{
	(void)unused;
	ASSUME(doorbell_device_signal_wait_until(&signal, DOORBELL_CMP_GE, 1, UINT64_MAX, 0) == DOORBELL_OK);
	REQUIRE(brought == 5);
	return 0;
}

static void *looker(void *unused)
{
	(void)unused;
	ASSUME(doorbell_device_signal_fetch(&signal) != 0);
	REQUIRE(brought == 5);
	return 0;
}

int main(void)
{
	RUN(writer, waiter, looker);
	return 0;
}

#else
#error "which model? -DMODEL_once, for one"
#endif
