/*
 * The protocol of doorbell/queue.h for a model checker that knows weak memory (scripts/model-check): every execution that the memory model of
 * C11 allows, fences included, of a few threads that do what a few threads of a GPU would. A second submit, a second lap, a second poller: what
 * goes wrong between threads goes wrong with so many.
 *
 * The header is included as kernels have it: marks are relaxed stores behind a fence. What is not its code is the NIC, and on the proxy path the
 * host's thread: threads here that load and store as those are allowed to, and no stronger.
 *
 * A data race, of the plain accesses to work requests and data, is an error that the checker finds itself. -DMODEL_... says
 * which.
 */
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "rig.h"

#define DBL_FENCES_ORDER
#define DBL_MARKS_AT_ONCE 2
#include <doorbell/queue.h>

#define SLOTS 2u
#define CQES 8u

static _Alignas(64) struct dbl_queue_state state;
static _Alignas(64) struct dbl_queue_control control;
static uint32_t marks[SLOTS];
static uint64_t doorbells[SLOTS];
static _Alignas(64) uint64_t ring[SLOTS * 8];
static uint32_t record;
static uint64_t uar[2];
static _Alignas(64) uint32_t completions[CQES * 16];
static uint32_t cq_record;
static uint64_t data[2];

static struct doorbell_queue_view queue_of(uint32_t capacity, int is_proxy)
{
	struct doorbell_queue_view queue;

	queue.state = (uintptr_t)&state;
	queue.control = (uintptr_t)&control;
	queue.marks = (uintptr_t)marks;
	queue.doorbells = (uintptr_t)doorbells;
	queue.ring = (uintptr_t)ring;
	queue.record = is_proxy ? 0 : (uintptr_t)&record;
	queue.uar[0] = (uintptr_t)&uar[0];
	queue.uar[1] = (uintptr_t)&uar[1];
	queue.completions = (uintptr_t)completions;
	queue.cq_record = (uintptr_t)&cq_record;
	queue.slot_mask = capacity - 1;
	queue.cqe_mask = CQES - 1;
	queue.capacity = capacity;
	queue.qpn = 7;
	queue.sink = 0;
	queue.sink_lkey = 0;
	queue.mode = DBL_QUEUE_SHARED;
	return queue;
}

/* No completion is there: the owner bit of the lap before (mlx5dv.h: MLX5_CQE_INVALID). */
static void prepare(void)
{
	uint32_t cqe;

	for (cqe = 0; cqe < CQES; cqe++)
		completions[cqe * 16 + 15] = 0xf1000000u;
}

/* ----------------------------------------------------------------------------------------------------------- the NIC */

/* Reads the work request of a slot as DMA does, in no order of its own, and looks that it is that slot's. */
static void fetch(uint32_t slot, uint32_t slot_mask)
{
	const uint64_t *wqe = &ring[(slot & slot_mask) * 8];
	uint32_t word;

	REQUIRE(wqe[0] == dbl_be32x2((slot & 0xffff) << 8 | DBL_OPCODE_NOP, 7u << 8 | 1u));
	for (word = 2; word < 8; word++)
		REQUIRE(wqe[word] == 0);
}

/* What a NIC needs of a doorbell: the number of the queue, and where its work requests of one WQEBB end. */
static uint64_t doorbell_of(uint32_t slot)
{
	return dbl_be32x2((slot & 0xffff) << 8, 7u << 8 | 1u);
}

/* Waits for the doorbell of a slot, or of one behind it that comes through the same register, and reads the record. */
static void see_doorbell(uint32_t slot)
{
	const uint64_t word = __atomic_load_n(&uar[slot & 1], __ATOMIC_RELAXED);

	ASSUME(word != 0);
	/* PCIe: what the NIC reads because of a write comes after it. */
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	REQUIRE(word == doorbell_of(slot));
	REQUIRE(dbl_be32(__atomic_load_n(&record, __ATOMIC_RELAXED)) >= slot + 1);
}

/* Tells of a slot; PCIe: behind everything that was written before. */
static void complete(uint32_t index, uint32_t slot)
{
	const uint32_t owner = (index & CQES) != 0;

	__atomic_store_n(&completions[(index & (CQES - 1)) * 16 + 15], dbl_be32(slot << 16) | owner << 24,
			 __ATOMIC_RELEASE);
}

/* ---------------------------------------------------------------------------------------------------------- kernels */

/* So many slots were reserved, submitted and rung before the threads begin. */
static void pretend_rung(uint32_t count)
{
	state.reserved = state.rung = count;
}

static void submit_nop(const struct doorbell_queue_view *queue, uint32_t *slot)
{
	const int code = doorbell_device_reserve(queue, 1, 0, slot);

	ASSUME(code == DOORBELL_OK);
	data[*slot & 1] = *slot + 1;
	doorbell_device_write_nop(queue, *slot, 0);
	REQUIRE(doorbell_device_submit(queue, *slot, 1) == DOORBELL_OK);
}

#if defined MODEL_submit
/* Two threads submit at once: in every interleaving the NIC gets doorbells that cover both, and no third one. */
static void *producer(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(SLOTS, 0);
	uint32_t slot;

	(void)unused;
	submit_nop(&queue, &slot);
	return 0;
}

int main(void)
{
	prepare();
	RUN(producer, producer);
	REQUIRE(state.rung == 2);
	REQUIRE(record == dbl_be32(2));
	REQUIRE(uar[1] == doorbell_of(1));
	REQUIRE(uar[0] == 0 || uar[0] == doorbell_of(0));
	REQUIRE(state.ringing == 0);
	return 0;
}

#elif defined MODEL_doorbell
/*
 * The NIC receives the later doorbell: it finds both work requests, the data of both threads, and a record that has them. It is the queue's second lap, so
 * that the marks of the first one are there.
 */
static void *producer(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(SLOTS, 0);
	uint32_t slot;

	(void)unused;
	submit_nop(&queue, &slot);
	return 0;
}

static void *nic(void *unused)
{
	(void)unused;
	see_doorbell(3);
	fetch(2, 1);
	fetch(3, 1);
	REQUIRE(data[0] == 3 && data[1] == 4);
	return 0;
}

int main(void)
{
	prepare();
	pretend_rung(2);
	state.completed = 2;
	marks[0] = 1;
	marks[1] = 2;
	RUN(producer, producer, nic);
	return 0;
}

#elif defined MODEL_lap
/* A queue of one slot, used again: its next work request is written after the NIC has read the one before, whichever thread has polled. */
static void *producer(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(1, 0);
	uint32_t slot;

	(void)unused;
	submit_nop(&queue, &slot);
	return 0;
}

static void *nic(void *unused)
{
	(void)unused;
	see_doorbell(0);
	fetch(0, 0);
	complete(0, 0);
	return 0;
}

int main(void)
{
	const struct doorbell_queue_view queue = queue_of(1, 0);

	prepare();
	RUN(producer, producer, nic);
	REQUIRE(state.completed == 1 && state.rung == 2 && cq_record == dbl_be32(1));
	(void)queue;
	return 0;
}

#elif defined MODEL_wait
/* Data from the NIC is visible to the waiting thread, whichever thread has polled. */
static uint64_t brought;

static void *waiter(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(SLOTS, 0);

	(void)unused;
	ASSUME(doorbell_device_wait(&queue, 1, 0) == DOORBELL_OK);
	REQUIRE(brought == 5);
	return 0;
}

static void *nic(void *unused)
{
	(void)unused;
	brought = 5;
	complete(0, 0);
	return 0;
}

int main(void)
{
	prepare();
	pretend_rung(1);
	RUN(waiter, waiter, nic);
	REQUIRE(state.cq_index == 1 && state.polling == 0);
	return 0;
}

#elif defined MODEL_poll
/* Threads that poll one after another: one that finds nothing passes on the count of the one before. */
static void *poller(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(SLOTS, 0);

	(void)unused;
	REQUIRE(doorbell_device_poll(&queue) == DOORBELL_OK);
	return 0;
}

static void *nic(void *unused)
{
	(void)unused;
	complete(0, 0);
	complete(1, 1);
	return 0;
}

int main(void)
{
	prepare();
	pretend_rung(2);
	RUN(poller, poller, poller, nic);
	/* Nothing is counted twice, and the index is that of what was counted. */
	REQUIRE(state.completed <= 2 && state.cq_index == state.completed);
	REQUIRE(cq_record == dbl_be32(state.cq_index));
	REQUIRE(state.polling == 0 && state.status == 0);
	return 0;
}

#elif defined MODEL_reuse
/* A slot is used again by a thread that need not have polled itself; when the NIC gets its doorbell, the entry of the previous completion is free again. */
static void *poller(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(1, 0);

	(void)unused;
	REQUIRE(doorbell_device_poll(&queue) == DOORBELL_OK);
	return 0;
}

static void *writer(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(1, 0);
	uint32_t slot;

	(void)unused;
	ASSUME(doorbell_device_reserve(&queue, 1, 0, &slot) == DOORBELL_OK);
	REQUIRE(slot == 1);
	doorbell_device_write_nop(&queue, slot, 0);
	REQUIRE(doorbell_device_submit(&queue, slot, 1) == DOORBELL_OK);
	return 0;
}

static void *nic(void *unused)
{
	(void)unused;
	fetch(0, 0);
	complete(0, 0);
	see_doorbell(1);
	fetch(1, 0);
	REQUIRE(__atomic_load_n(&cq_record, __ATOMIC_RELAXED) == dbl_be32(1));
	return 0;
}

int main(void)
{
	const struct doorbell_queue_view queue = queue_of(1, 0);

	prepare();
	doorbell_device_write_nop(&queue, 0, 0);
	pretend_rung(1);
	RUN(poller, writer, nic);
	return 0;
}

#elif defined MODEL_record
/*
 * A NIC that looks at the record without a doorbell, as it may: the work requests that it tells of are there, and who finds the completions takes
 * them for those of what was rung.
 */
static void *producer(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(SLOTS, 0);
	uint32_t slot;

	(void)unused;
	submit_nop(&queue, &slot);
	return 0;
}

static void *nic(void *unused)
{
	const uint32_t told = dbl_be32(__atomic_load_n(&record, __ATOMIC_RELAXED));
	uint32_t slot;

	(void)unused;
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	for (slot = 0; slot != told; slot++) {
		fetch(slot, 1);
		complete(slot, slot);
	}
	return 0;
}

static void *poller(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(SLOTS, 0);

	(void)unused;
	REQUIRE(doorbell_device_poll(&queue) == DOORBELL_OK);
	return 0;
}

int main(void)
{
	prepare();
	RUN(producer, producer, nic, poller);
	return 0;
}

#elif defined MODEL_proxy
/* The proxy path: a thread of the host finds the mark (src/endpoint/shared/proxy_doorbells.rs), rings for the NIC, the host counts, the slot is reused. */
static uint64_t brought;

static void *waiter(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(1, 1);

	(void)unused;
	ASSUME(doorbell_device_wait(&queue, 1, 0) == DOORBELL_OK);
	REQUIRE(brought == 5);
	return 0;
}

static void *producer(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(1, 1);
	uint32_t slot;

	(void)unused;
	submit_nop(&queue, &slot);
	return 0;
}

static void *host(void *unused)
{
	(void)unused;
	ASSUME(__atomic_load_n(&marks[0], __ATOMIC_ACQUIRE) == 1);
	REQUIRE(doorbells[0] == dbl_be32x2(DBL_OPCODE_NOP, 7u << 8 | 1u));
	fetch(0, 0);
	REQUIRE(data[0] == 1);
	brought = 5;
	__atomic_store_n(&control.completed, 1, __ATOMIC_RELEASE);
	ASSUME(__atomic_load_n(&marks[0], __ATOMIC_ACQUIRE) == 2);
	fetch(1, 0);
	REQUIRE(data[1] == 2);
	return 0;
}

int main(void)
{
	const struct doorbell_queue_view queue = queue_of(1, 1);
	uint32_t slot;

	prepare();
	submit_nop(&queue, &slot);
	RUN(waiter, producer, host);
	return 0;
}

#elif defined MODEL_error
/* A completion in error: the wait for it returns the error, and earlier work is complete for all threads. */
static uint64_t brought;

static void *waiter(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(SLOTS, 0);
	const int code = doorbell_device_wait(&queue, 1, 0);

	(void)unused;
	ASSUME(code != DOORBELL_ETIMEOUT);
	REQUIRE(code == DOORBELL_OK && brought == 5);
	return 0;
}

static void *loser(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(SLOTS, 0);
	const int code = doorbell_device_wait(&queue, 2, 0);

	(void)unused;
	ASSUME(code != DOORBELL_ETIMEOUT);
	REQUIRE(code == DOORBELL_EWORK);
	REQUIRE(doorbell_device_error(&queue) == (0x12u | 0x34u << 8 | 1u << 16));
	return 0;
}

static void *nic(void *unused)
{
	(void)unused;
	brought = 5;
	complete(0, 0);
	/* mlx5dv.h, struct mlx5_err_cqe: vendor_err_synd and syndrome at 54 and 55. */
	__atomic_store_n(&completions[1 * 16 + 13], 0x12340000u, __ATOMIC_RELAXED);
	__atomic_store_n(&completions[1 * 16 + 15], dbl_be32(1u << 16) | 13u << 28, __ATOMIC_RELEASE);
	return 0;
}

int main(void)
{
	prepare();
	pretend_rung(2);
	RUN(waiter, loser, nic);
	return 0;
}

#elif defined MODEL_told
/* A thread that gets a completion in error from another polling thread finds the cause of the error. */
static void *poller(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(SLOTS, 0);

	(void)unused;
	ASSUME(doorbell_device_poll(&queue) == DOORBELL_EWORK);
	REQUIRE(doorbell_device_error(&queue) == (0x12u | 0x34u << 8 | 0u << 16));
	return 0;
}

static void *nic(void *unused)
{
	(void)unused;
	/* mlx5dv.h, struct mlx5_err_cqe: vendor_err_synd and syndrome at 54 and 55. */
	__atomic_store_n(&completions[13], 0x12340000u, __ATOMIC_RELAXED);
	__atomic_store_n(&completions[15], dbl_be32(0) | 13u << 28, __ATOMIC_RELEASE);
	return 0;
}

int main(void)
{
	prepare();
	pretend_rung(1);
	RUN(poller, poller, nic);
	return 0;
}

#elif defined MODEL_alarm || defined MODEL_alarm_proxy
#ifdef MODEL_alarm
#define ON_PROXY 0
#else
#define ON_PROXY 1
#endif

/* On either path the host says that the endpoint has failed, after a completion: work that was complete before is reported as complete, the rest as failed. */
static void *waiter(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(SLOTS, ON_PROXY);
	const int code = doorbell_device_wait(&queue, 1, 0);

	(void)unused;
	ASSUME(code != DOORBELL_ETIMEOUT);
	REQUIRE(code == DOORBELL_OK);
	return 0;
}

static void *loser(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(SLOTS, ON_PROXY);
	const int code = doorbell_device_wait(&queue, 2, 0);

	(void)unused;
	REQUIRE(code == DOORBELL_ETIMEOUT || code == DOORBELL_EWORK);
	return 0;
}

static void *host(void *unused)
{
	(void)unused;
	if (ON_PROXY)
		__atomic_store_n(&control.completed, 1, __ATOMIC_RELEASE);
	else
		complete(0, 0);
	__atomic_store_n((uint32_t *)&control.status, (uint32_t)DOORBELL_EWORK, __ATOMIC_RELEASE);
	return 0;
}

int main(void)
{
	prepare();
	pretend_rung(2);
	RUN(waiter, loser, host);
	return 0;
}

#elif defined MODEL_heard || defined MODEL_heard_proxy
#ifdef MODEL_heard
#define ON_PROXY 0
#else
#define ON_PROXY 1
#endif
/* A thread that gets the host's failure, be it from another polling thread, sees what the host had seen before it. */
static uint64_t brought;

static void *poller(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(SLOTS, ON_PROXY);

	(void)unused;
	ASSUME(doorbell_device_poll(&queue) == DOORBELL_EWORK);
	REQUIRE(brought == 5);
	return 0;
}

static void *host(void *unused)
{
	(void)unused;
	brought = 5;
	__atomic_store_n((uint32_t *)&control.status, (uint32_t)DOORBELL_EWORK, __ATOMIC_RELEASE);
	return 0;
}

int main(void)
{
	prepare();
	pretend_rung(1);
	RUN(poller, poller, host);
	return 0;
}

#elif defined MODEL_quiet
/*
 * The thread that has a slot, and one that has met it, wait for what was submitted so far: it is complete, and what it has brought is there. The
 * other thread counts that slot, though it loads the count without any order.
 */
static uint64_t brought;
static uint32_t met;

static void *owner(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(SLOTS, 0);
	uint32_t slot;

	(void)unused;
	REQUIRE(doorbell_device_reserve(&queue, 1, 0, &slot) == DOORBELL_OK && slot == 0);
	__atomic_store_n(&met, 1, __ATOMIC_RELEASE);
	return 0;
}

static void *other(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(SLOTS, 0);

	(void)unused;
	ASSUME(__atomic_load_n(&met, __ATOMIC_ACQUIRE) == 1);
	ASSUME(doorbell_device_quiet(&queue, 0) == DOORBELL_OK);
	REQUIRE(brought == 5);
	return 0;
}

static void *nic(void *unused)
{
	(void)unused;
	brought = 5;
	complete(0, 0);
	return 0;
}

int main(void)
{
	prepare();
	state.rung = 1;
	RUN(owner, other, nic);
	return 0;
}

#elif defined MODEL_exclusive
/*
 * A queue of one slot that goes from one thread to another, each with the view of doorbell_device_exclusive(), which takes no lock: the NIC finds both work requests and their
 * data, and the second is written after the NIC has read the first. The word by which it goes is theirs.
 */
static uint32_t turn;

static void *first(void *unused)
{
	struct doorbell_queue_view queue = queue_of(1, 0);
	uint32_t slot;

	(void)unused;
	queue.mode = DBL_QUEUE_EXCLUSIVE;
	submit_nop(&queue, &slot);
	REQUIRE(slot == 0);
	__atomic_store_n(&turn, 1, __ATOMIC_RELEASE);
	return 0;
}

static void *second(void *unused)
{
	struct doorbell_queue_view queue = queue_of(1, 0);
	uint32_t slot;

	(void)unused;
	queue.mode = DBL_QUEUE_EXCLUSIVE;
	ASSUME(__atomic_load_n(&turn, __ATOMIC_ACQUIRE) == 1);
	submit_nop(&queue, &slot);
	REQUIRE(slot == 1);
	return 0;
}

static void *nic(void *unused)
{
	(void)unused;
	see_doorbell(0);
	fetch(0, 0);
	REQUIRE(data[0] == 1);
	complete(0, 0);
	see_doorbell(1);
	fetch(1, 0);
	REQUIRE(data[1] == 2);
	REQUIRE(__atomic_load_n(&cq_record, __ATOMIC_RELAXED) == dbl_be32(1));
	return 0;
}

int main(void)
{
	prepare();
	RUN(first, second, nic);
	REQUIRE(state.ringing == 0 && state.polling == 0 && state.rung == 2 && state.completed == 1 && marks[0] == 2);
	return 0;
}

#elif defined MODEL_alternate
/* Behind an exclusive view threads share the queue: both doorbells, and no mark of the one who was alone, mislead nobody. */
static void *producer(void *unused)
{
	const struct doorbell_queue_view queue = queue_of(SLOTS, 0);
	uint32_t slot;

	(void)unused;
	submit_nop(&queue, &slot);
	return 0;
}

static void *nic(void *unused)
{
	(void)unused;
	see_doorbell(3);
	fetch(2, 1);
	fetch(3, 1);
	return 0;
}

int main(void)
{
	struct doorbell_queue_view queue = queue_of(SLOTS, 0);
	uint32_t slot;

	prepare();
	queue.mode = DBL_QUEUE_EXCLUSIVE;
	submit_nop(&queue, &slot);
	submit_nop(&queue, &slot);
	REQUIRE(uar[0] == doorbell_of(0) && uar[1] == doorbell_of(1) && record == dbl_be32(2));
	uar[0] = uar[1] = 0;
	complete(0, 0);
	complete(1, 1);
	REQUIRE(doorbell_device_poll(&queue) == DOORBELL_OK);
	RUN(producer, producer, nic);
	REQUIRE(state.rung == 4 && record == dbl_be32(4) && state.ringing == 0);
	return 0;
}

#else
#error "which model? -DMODEL_submit, for one"
#endif
