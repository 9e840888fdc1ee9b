/*
 * Threads of a CPU in the place of kernels: the code of doorbell/queue.h, by as many threads as one likes, over a queue of the software
 * ConnectX. tests/kernel_queue.rs compiles it, with and without ThreadSanitizer, and says what it is to do:
 *
 *     producers load    THREADS OPERATIONS DEPTH CONTROL   adds and signals in batches of random lengths: none lost, doubled or torn
 *     producers WHAT    0 0 DEPTH CONTROL                  one thing that goes wrong; see `cases`
 *
 * CONTROL is 0 or 1, direct or proxy. The last line it prints is "ok", or it exits with 1.
 */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <string.h>

/* What ThreadSanitizer cannot see, for the NIC and the host's threads are not compiled with it: a slot is used again after it was submitted. */
#define DBL_SLOTS_FREED(queue, from, upto)                                                                             \
	do {                                                                                                           \
		uint32_t freed_;                                                                                       \
		for (freed_ = (from); freed_ != (upto); freed_++)                                                      \
			(void)dbl_load_dword(dbl_queue_mark((queue), freed_));                                         \
	} while (0)

/* Of a put that takes several work requests. */
static uint32_t piece_bytes = 0x40000000u;
#define DBL_PIECE_BYTES piece_bytes

static void (*rang)(void);
#define DBL_RANG(queue) (rang ? rang() : (void)0)

#include "pair.h"

#include <doorbell/signal.h>

static uint32_t thread_count, operation_count;

/* ------------------------------------------------------------------------------------------------------------ load */

/*
 * Each operation has a number. An add of 1 to the word at 0 brings back what it was, so that no two adds may bring the same, and a signal
 * stores its number, and that number's complement in the halves, at its place. The first half of the remote memory is the counter's line.
 */
#define LINE 64

struct producer {
	pthread_t thread;
	uint32_t number, first, count;
	uint64_t seed;
};

static uint32_t draw(struct producer *producer, uint32_t below)
{
	producer->seed = producer->seed * 6364136223846793005ull + 1442695040888963407ull;
	return (uint32_t)(producer->seed >> 33) % below;
}

static uint64_t signal_of(uint32_t operation)
{
	return (uint64_t)~operation << 32 | operation;
}

static void *produce(void *argument)
{
	struct producer *producer = (struct producer *)argument;
	uint32_t done = 0;

	while (done != producer->count) {
		uint32_t batch = 1 + draw(producer, 8), first, slot;
		int code, patient;

		if (batch > producer->count - done)
			batch = producer->count - done;
		if (batch > queue.capacity)
			batch = queue.capacity;
		/* Most look once, as kernels that have other work would, and come again. */
		patient = draw(producer, 4) == 0;
		code = doorbell_device_reserve(&queue, batch, patient ? 60 * SECOND : 0, &first);
		if (code == DOORBELL_EFULL && !patient) {
			DBL_TURN();
			continue;
		}
		if (code != 0)
			fprintf(stderr, "code %d, error %#x\n", code, doorbell_device_error(&queue));
		CHECK(code == 0);
		for (slot = 0; slot < batch; slot++) {
			const uint32_t operation = producer->first + done + slot;
			/* Of some only the last is signaled. */
			const uint32_t flags =
				slot + 1 < batch && draw(producer, 2) ? (uint32_t)DOORBELL_WORK_UNSIGNALED : 0;
			if (operation % 2 == 0)
				CHECK(doorbell_device_write_fetch_add(&queue, first + slot, flags, here_at(8ull * (operation / 2), 8),
								      there_at(0, 8), 1) == 0);
			else
				CHECK(doorbell_device_write_signal(&queue, first + slot, flags, there_at(LINE + 8ull * (operation / 2), 8),
								   DOORBELL_SIGNAL_SET, signal_of(operation)) == 0);
		}
		CHECK(doorbell_device_submit(&queue, first, batch) == 0);
		done += batch;
		/* Some wait for theirs, and find what it has brought. */
		if (draw(producer, 64) == 0)
			CHECK(doorbell_device_wait(&queue, first + batch, 60 * SECOND) == 0);
		if (draw(producer, 32) == 0)
			CHECK(doorbell_device_poll(&queue) == 0);
	}
	return NULL;
}

static void load(void)
{
	const uint32_t adds = (operation_count + 1) / 2, signals = operation_count / 2;
	struct producer *producers = (struct producer *)calloc(thread_count, sizeof(*producers));
	uint8_t *seen = (uint8_t *)calloc(adds, 1);
	const uint64_t *results, *words;
	uint32_t thread, at, last, share = operation_count / thread_count;

	set_up(8ull * adds + 8, LINE + 8ull * signals + 8);
	for (thread = 0; thread < thread_count; thread++) {
		producers[thread].number = thread;
		producers[thread].seed = thread + 1;
		producers[thread].first = thread * share;
		producers[thread].count = thread + 1 < thread_count ? share : operation_count - thread * share;
		CHECK(pthread_create(&producers[thread].thread, NULL, produce, &producers[thread]) == 0);
	}
	for (thread = 0; thread < thread_count; thread++)
		CHECK(pthread_join(producers[thread].thread, NULL) == 0);
	last = dbl_queue_state(&queue)->reserved;
	CHECK(doorbell_device_wait(&queue, last, 60 * SECOND) == 0);
	words = (const uint64_t *)doorbell_region_pointer(remote_region);
	results = (const uint64_t *)doorbell_region_pointer(local_region);
	/* Every add once, and every result of its own. */
	CHECK(words[0] == adds);
	for (at = 0; at < adds; at++) {
		CHECK(results[at] < adds);
		CHECK(seen[results[at]] == 0);
		seen[results[at]] = 1;
	}
	for (at = 0; at < signals; at++)
		CHECK(words[LINE / 8 + at] == signal_of(2 * at + 1));
	CHECK(last == operation_count);
	/* The NIC has 16 bits for slots. */
	if (control == DOORBELL_CONTROL_DIRECT)
		CHECK(dbl_be32(*(const uint32_t *)(uintptr_t)queue.record) == (last & 0xffff));
	free(seen);
	free(producers);
	tear_down();
}

/* --------------------------------------------------------------------------------------------------------- failures */

static uint64_t since_ns;
static uint32_t has_put;

static void *wait_for_it(void *code)
{
	uint32_t upto = 0;

	/* To memory that the peer does not have: an error completion, if nothing else comes first. */
	CHECK(doorbell_device_put(&queue, here_at(0, 8), there_at(0, 8), 120 * SECOND, &upto) == 0);
	__atomic_store_n(&has_put, 1, __ATOMIC_RELEASE);
	*(int *)code = doorbell_device_wait(&queue, upto, 120 * SECOND);
	return NULL;
}

/* The code that a thread gets which waits for a put while `act` happens, and that it comes in time. */
static int code_of_wait(void (*act)(void))
{
	pthread_t thread;
	int code = 1;

	since_ns = dbl_now_ns();
	has_put = 0;
	CHECK(pthread_create(&thread, NULL, wait_for_it, &code) == 0);
	if (act) {
		while (!__atomic_load_n(&has_put, __ATOMIC_ACQUIRE))
			usleep(1000);
		usleep(50000);
		act();
	}
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(dbl_now_ns() - since_ns < 60 * SECOND);
	return code;
}

static void expect_cause(uint32_t cause, uint32_t wc_status)
{
	doorbell_failure failure;
	char text[256];

	CHECK(doorbell_endpoint_failure(ends[0], &failure, text, sizeof(text)) > 0);
	if (failure.cause != cause || failure.wc_status != wc_status)
		fprintf(stderr, "%s\n", text);
	CHECK(failure.cause == cause);
	CHECK(cause != DOORBELL_CAUSE_COMPLETION || failure.wc_status == wc_status);
}

static void error_completion(void)
{
	set_up(4096, 4096);
	remote.rkey ^= 0x5500;
	CHECK(code_of_wait(NULL) == DOORBELL_EWORK);
	/* IBV_WC_REM_ACCESS_ERR; the syndrome as in mlx5dv.h: MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR. */
	expect_cause(DOORBELL_CAUSE_COMPLETION, 10);
	if (control == DOORBELL_CONTROL_DIRECT)
		CHECK((doorbell_device_error(&queue) & 0xff) == 0x13);
	recover();
	tear_down();
}

/* No kernel waits or polls for it: the host finds it. */
static void host_finds_error_that_is_not_polled(void)
{
	doorbell_failure failure;
	uint32_t upto, turn;

	set_up(4096, 4096);
	remote.rkey ^= 0x5500;
	CHECK(doorbell_device_put(&queue, here_at(0, 8), there_at(0, 8), 0, &upto) == 0);
	for (turn = 0; turn < 60000 && doorbell_endpoint_failure(ends[0], &failure, NULL, 0) == 0; turn++)
		usleep(1000);
	expect_cause(DOORBELL_CAUSE_COMPLETION, 10);
	CHECK(doorbell_device_wait(&queue, upto, 20 * SECOND) == DOORBELL_EWORK);
	recover();
	tear_down();
}

static void dead_peer(void)
{
	doorbell_endpoint_config config;

	set_up(4096, 4096);
	destroy_peer();
	CHECK(code_of_wait(NULL) == DOORBELL_EWORK);
	/* IBV_WC_RETRY_EXC_ERR */
	expect_cause(DOORBELL_CAUSE_COMPLETION, 12);
	CHECK(doorbell_endpoint_config_init(&config, sizeof(config)) == 0);
	CHECK(doorbell_endpoint_create(domain, &config, &ends[1]) == 0);
	recover();
	tear_down();
}

static void aborted(void)
{
	set_up_waiting();
	CHECK(code_of_wait(abort_it) == DOORBELL_EWORK);
	expect_cause(DOORBELL_CAUSE_ABORTED, 0);
	CHECK(doorbell_endpoint_create(domain, &patient, &ends[1]) == 0);
	recover();
	tear_down();
}

static void full_and_late(void)
{
	uint32_t upto = 0, slot, at;

	set_up_waiting();
	for (at = 0; at < queue.capacity; at++)
		CHECK(doorbell_device_put(&queue, here_at(0, 8), there_at(0, 8), 0, &upto) == 0);
	CHECK(upto == queue.capacity);
	since_ns = dbl_now_ns();
	CHECK(doorbell_device_reserve(&queue, 1, 0, &slot) == DOORBELL_EFULL);
	CHECK(doorbell_device_wait(&queue, upto, 0) == DOORBELL_ETIMEOUT);
	CHECK(dbl_now_ns() - since_ns < 60 * SECOND);
	since_ns = dbl_now_ns();
	CHECK(doorbell_device_reserve(&queue, 1, SECOND / 10, &slot) == DOORBELL_EFULL);
	CHECK(doorbell_device_wait(&queue, upto, SECOND / 10) == DOORBELL_ETIMEOUT);
	CHECK(dbl_now_ns() - since_ns >= SECOND / 5);
	CHECK(dbl_now_ns() - since_ns < 60 * SECOND);
	CHECK(doorbell_device_reserve(&queue, queue.capacity + 1, SECOND, &slot) == DOORBELL_ERANGE);
	CHECK(doorbell_device_reserve(&queue, 0, SECOND, &slot) == DOORBELL_ERANGE);
	/* A clock that steps back, and a bound that is none. */
	CHECK(dbl_has_passed(12, 10, 1) && !dbl_has_passed(11, 10, 1) && !dbl_has_passed(10, 11, 1) && !dbl_has_passed(10, 0, UINT64_MAX));
	/* Late is not failed: the endpoint still is what it was. */
	CHECK(doorbell_endpoint_failure(ends[0], NULL, NULL, 0) == 0);
	abort_it();
	CHECK(doorbell_endpoint_create(domain, &patient, &ends[1]) == 0);
	/* A call that only checks for room reports it, too. */
	for (at = 0; at < 60000 && doorbell_device_reserve(&queue, 1, 0, &slot) == DOORBELL_EFULL; at++)
		usleep(1000);
	CHECK(doorbell_device_reserve(&queue, 1, 0, &slot) == DOORBELL_EWORK);
	CHECK(doorbell_device_wait(&queue, upto, 0) == DOORBELL_EWORK);
	recover();
	tear_down();
}

/* What is refused takes no slot and writes none: the length would be read as another kind of segment. */
static void refused_requests_take_no_slot(void)
{
	const uint64_t lengths[] = {DOORBELL_MESSAGE_BYTES_MAX + 1, DOORBELL_MESSAGE_BYTES_MAX + 9, UINT32_MAX, UINT64_MAX - 1};
	const doorbell_remote nothing = there_at(0, 0);
	const uint64_t *wqe;
	doorbell_local from;
	doorbell_remote to;
	struct doorbell_queue_view without;
	uint64_t first;
	uint32_t upto = 0, slot, at;

	set_up(4096, 4096);
	from = local;
	to = remote;
	/* One byte more than the peer has, and parts that are not within the memory. */
	from.len_bytes = 4097;
	CHECK(doorbell_device_put(&queue, from, to, 0, &upto) == DOORBELL_ERANGE);
	CHECK(doorbell_device_put_imm(&queue, from, to, 1, 0, &upto) == DOORBELL_ERANGE);
	CHECK(doorbell_device_get(&queue, from, to, 0, &upto) == DOORBELL_ERANGE);
	CHECK(doorbell_device_put_signal(&queue, from, to, to, DOORBELL_SIGNAL_SET, 1, 0, &upto) == DOORBELL_ERANGE);
	CHECK(doorbell_device_put(&queue, here_at(4000, 97), to, 0, &upto) == DOORBELL_ERANGE);
	CHECK(doorbell_device_put(&queue, here_at(4097, 0), to, 0, &upto) == DOORBELL_ERANGE);
	CHECK(doorbell_device_put(&queue, here_at(UINT64_MAX, 2), to, 0, &upto) == DOORBELL_ERANGE);
	CHECK(doorbell_device_put(&queue, here_at(0, 1), there_at(4096, 1), 0, &upto) == DOORBELL_ERANGE);
	CHECK(doorbell_device_put(&queue, here_at(0, 1), there_at(UINT64_MAX, 2), 0, &upto) == DOORBELL_ERANGE);
	CHECK(doorbell_device_get(&queue, here_at(0, 2), nothing, 0, &upto) == DOORBELL_ERANGE);
	CHECK(doorbell_device_signal(&queue, there_at(4092, 4), DOORBELL_SIGNAL_SET, 1, 0, &upto) == DOORBELL_ERANGE);
	CHECK(doorbell_device_signal(&queue, there_at(4096, 8), DOORBELL_SIGNAL_ADD, 1, 0, &upto) == DOORBELL_ERANGE);
	CHECK(doorbell_device_signal(&queue, there_at(0, 8), 2, 1, 0, &upto) == DOORBELL_ERANGE);
	CHECK(doorbell_device_signal(&queue, there_at(4, 8), DOORBELL_SIGNAL_SET, 1, 0, &upto) == DOORBELL_EALIGNMENT);
	CHECK(doorbell_device_signal(&queue, there_at(4, 8), DOORBELL_SIGNAL_ADD, 1, 0, &upto) == DOORBELL_EALIGNMENT);
	CHECK(doorbell_device_put_signal(&queue, here_at(0, 8), to, there_at(4, 8), DOORBELL_SIGNAL_ADD, 1, 0, &upto) == DOORBELL_EALIGNMENT);
	CHECK(doorbell_device_fetch_add(&queue, here_at(0, 7), to, 1, 0, &upto) == DOORBELL_ERANGE);
	CHECK(doorbell_device_fetch_add(&queue, here_at(4096, 8), to, 1, 0, &upto) == DOORBELL_ERANGE);
	CHECK(doorbell_device_fetch_add(&queue, here_at(0, 8), there_at(0, 7), 1, 0, &upto) == DOORBELL_ERANGE);
	/* As on a device without atomics. */
	without = queue;
	CHECK(queue.sink != 0 && queue.sink % 8 == 0);
	without.sink = 0;
	CHECK(doorbell_device_signal(&without, to, DOORBELL_SIGNAL_ADD, 1, 0, &upto) == DOORBELL_ESTATE);
	CHECK(doorbell_device_put_signal(&without, here_at(0, 8), to, to, DOORBELL_SIGNAL_ADD, 1, 0, &upto) == DOORBELL_ESTATE);
	CHECK(doorbell_device_fetch_add(&without, here_at(0, 8), to, 1, 0, &upto) == DOORBELL_ESTATE);
	CHECK(upto == 0 && dbl_queue_state(&queue)->reserved == 0);
	CHECK(doorbell_device_signal(&without, to, DOORBELL_SIGNAL_SET, 1, 0, &upto) == 0);
	CHECK(doorbell_device_wait(&queue, upto, 20 * SECOND) == 0);
	CHECK(doorbell_device_reserve(&queue, 1, 0, &slot) == 0);
	wqe = (const uint64_t *)(uintptr_t)queue.ring + 8 * (size_t)(slot & queue.slot_mask);
	first = wqe[0];
	to.len_bytes = UINT64_MAX;
	for (at = 0; at < 4; at++) {
		from.len_bytes = lengths[at];
		CHECK(doorbell_device_write_put(&queue, slot, 0, from, to) == DOORBELL_ERANGE);
		CHECK(doorbell_device_write_put_imm(&queue, slot, 0, from, to, 1) == DOORBELL_ERANGE);
		CHECK(doorbell_device_write_get(&queue, slot, 0, from, to) == DOORBELL_ERANGE);
	}
	CHECK(doorbell_device_write_put(&queue, slot, 0, here_at(0, 8), there_at(0, 7)) == DOORBELL_ERANGE);
	CHECK(doorbell_device_write_inline(&queue, slot, 0, "12345678", 8, there_at(0, 7)) == DOORBELL_ERANGE);
	CHECK(doorbell_device_write_fetch_add(&queue, slot, 0, here_at(0, 8), there_at(4, 8), 1) == DOORBELL_EALIGNMENT);
	CHECK(doorbell_device_write_signal(&queue, slot, 0, there_at(4, 8), DOORBELL_SIGNAL_SET, 1) == DOORBELL_EALIGNMENT);
	CHECK(wqe[0] == first);
	/* The longest is sent, as what it is: the region is shorter. */
	from.len_bytes = DOORBELL_MESSAGE_BYTES_MAX;
	CHECK(doorbell_device_write_put(&queue, slot, 0, from, to) == 0);
	CHECK(doorbell_device_submit(&queue, slot, 1) == 0);
	CHECK(doorbell_device_wait(&queue, slot + 1, 20 * SECOND) == DOORBELL_EWORK);
	recover();
	tear_down();
}

/* A submitted put is in flight: giving queue and memory back without a wait does not stop it. */
static void put_outlives_the_device_queue(void)
{
	const uint64_t bytes = 1 << 20;
	volatile uint8_t *there;
	uint32_t upto, at;
	int round;

	for (round = 0; round < 10; round++) {
		set_up(bytes, bytes);
		there = (volatile uint8_t *)doorbell_region_pointer(remote_region);
		memset(doorbell_region_pointer(local_region), 7, bytes);
		for (at = 0; at < 8; at++)
			CHECK(doorbell_device_put(&queue, here_at(0, (uint32_t)bytes), there_at(0, (uint32_t)bytes), 0, &upto) == 0);
		CHECK(doorbell_device_signal(&queue, there_at(0, 8), DOORBELL_SIGNAL_SET, 1, 0, &upto) == 0);
		CHECK(doorbell_device_queue_destroy(device_queue) == 0);
		CHECK(doorbell_region_destroy(local_region) == 0);
		for (at = 0; at < 20000 && there[0] != 1; at++) {
			CHECK(doorbell_endpoint_failure(ends[0], NULL, NULL, 0) == 0);
			usleep(1000);
		}
		CHECK(there[0] == 1 && there[8] == 7 && there[bytes - 1] == 7);
		/* With the endpoint's next life nothing of it is, nor its memory. */
		for (at = 0; at < 2; at++)
			CHECK(doorbell_endpoint_reset(ends[at]) == 0);
		connect_ends();
		CHECK(doorbell_device_queue_create(ends[0], DOORBELL_KERNELS_HOST, &device_queue) == 0);
		CHECK(doorbell_device_queue_view(device_queue, &queue, sizeof(queue)) == 0);
		CHECK(doorbell_device_put(&queue, here_at(0, 8), there_at(0, 8), 0, &upto) == 0);
		CHECK(doorbell_device_wait(&queue, upto, 20 * SECOND) == DOORBELL_EWORK);
		CHECK(doorbell_region_alloc(domain, 8, DOORBELL_ACCESS_ALL, &local_region) == 0);
		tear_down();
	}
}

/* Slots that are submitted in another order than they were reserved are sent in the order of reservation. */
static void slots_are_sent_in_order_of_reservation(void)
{
	uint64_t *word;
	uint32_t first, second;

	set_up(4096, 4096);
	word = (uint64_t *)doorbell_region_pointer(remote_region);
	CHECK(doorbell_device_reserve(&queue, 1, 0, &first) == 0);
	CHECK(doorbell_device_reserve(&queue, 1, 0, &second) == 0);
	CHECK(doorbell_device_write_signal(&queue, second, 0, there_at(0, 8), DOORBELL_SIGNAL_SET, 2) == 0);
	CHECK(doorbell_device_submit(&queue, second, 1) == 0);
	CHECK(doorbell_device_wait(&queue, second + 1, SECOND / 20) == DOORBELL_ETIMEOUT);
	CHECK(__atomic_load_n(word, __ATOMIC_ACQUIRE) == 0);
	CHECK(doorbell_device_write_signal(&queue, first, 0, there_at(0, 8), DOORBELL_SIGNAL_SET, 1) == 0);
	CHECK(doorbell_device_submit(&queue, first, 1) == 0);
	CHECK(doorbell_device_wait(&queue, second + 1, 20 * SECOND) == 0);
	CHECK(__atomic_load_n(word, __ATOMIC_ACQUIRE) == 2);
	tear_down();
}

static void *post_nops(void *unused)
{
	const uint32_t batch = depth < 128 ? 1 : 64;
	uint32_t done, first, slot;

	(void)unused;
	for (done = 0; done != operation_count; done += batch) {
		CHECK(doorbell_device_reserve(&queue, batch, 60 * SECOND, &first) == 0);
		for (slot = first; slot != first + batch; slot++)
			doorbell_device_write_nop(&queue, slot, 0);
		CHECK(doorbell_device_submit(&queue, first, batch) == 0);
	}
	return NULL;
}

/*
 * A completion for each slot, and as many places for them as slots: the thread that counts them, the host's or a polling one, gives the
 * NIC a place back before the slot, or it has none for the next.
 */
static void all_signaled(void)
{
	const uint32_t upto = operation_count = 100000;
	pthread_t thread;

	set_up(4096, 4096);
	CHECK(pthread_create(&thread, NULL, post_nops, NULL) == 0);
	while (doorbell_device_wait(&queue, upto, 0) == DOORBELL_ETIMEOUT)
		CHECK(doorbell_endpoint_failure(ends[0], NULL, NULL, 0) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(doorbell_device_wait(&queue, upto, 0) == 0);
	tear_down();
}

/* The 32 bits of our counts, and the 24 of the completion queue's consumer index (mlx5dv.h): each request has a completion of its own. */
static void counts_wrap(void)
{
	const uint32_t begin = 0xff000000;
	pthread_t threads[2];
	int thread;

	operation_count = (1u << 23) + (1u << 16);
	set_up(4096, 4096);
	begin_at(begin);
	for (thread = 0; thread < 2; thread++)
		CHECK(pthread_create(&threads[thread], NULL, post_nops, NULL) == 0);
	for (thread = 0; thread < 2; thread++)
		CHECK(pthread_join(threads[thread], NULL) == 0);
	CHECK(doorbell_device_wait(&queue, begin + 2 * operation_count, 60 * SECOND) == 0);
	CHECK(dbl_queue_state(&queue)->reserved == 1u << 17);
	CHECK(dbl_queue_state(&queue)->cq_index == (1u << 24) + (1u << 17));
	CHECK(dbl_be32(*(const uint32_t *)(uintptr_t)queue.cq_record) == 1u << 17);
	/* The host finds the error of a queue whose index has wrapped, and what it resets works. */
	remote.rkey ^= 0x5500;
	CHECK(code_of_wait(NULL) == DOORBELL_EWORK);
	expect_cause(DOORBELL_CAUSE_COMPLETION, 10);
	recover();
	tear_down();
}

static uint32_t late_slot;

/* As another thread would that submits while the lock of the doorbell is held. */
static void submit_late_slot(void)
{
	rang = NULL;
	CHECK(doorbell_device_submit(&queue, late_slot, 1) == 0);
	CHECK(dbl_queue_state(&queue)->rung == late_slot);
}

/* A thread that finds the lock taken leaves the doorbell to the holder, which rings for both slots before it returns. */
static void doorbell_is_left_to_the_lock_holder(void)
{
	uint32_t slot;

	set_up(4096, 4096);
	CHECK(doorbell_device_reserve(&queue, 2, 0, &slot) == 0);
	late_slot = slot + 1;
	CHECK(doorbell_device_write_signal(&queue, slot, 0, there_at(0, 8), DOORBELL_SIGNAL_SET, 1) == 0);
	CHECK(doorbell_device_write_signal(&queue, late_slot, 0, there_at(0, 8), DOORBELL_SIGNAL_SET, 2) == 0);
	if (control == DOORBELL_CONTROL_DIRECT)
		rang = submit_late_slot;
	CHECK(doorbell_device_submit(&queue, slot, 1) == 0);
	if (control == DOORBELL_CONTROL_DIRECT)
		CHECK(rang == NULL && dbl_queue_state(&queue)->rung == slot + 2);
	else
		CHECK(doorbell_device_submit(&queue, late_slot, 1) == 0);
	CHECK(doorbell_device_wait(&queue, slot + 2, 20 * SECOND) == 0);
	CHECK(*(volatile uint64_t *)doorbell_region_pointer(remote_region) == 2);
	tear_down();
}

/* Each kind of work request, with what it does at the other end. */
static void kinds(void)
{
	const char text[] = "twenty-eight bytes of payload";
	doorbell_completion completion;
	uint8_t *here, *there;
	uint32_t upto, slot;
	uint64_t word;

	set_up(4096, 4096);
	here = (uint8_t *)doorbell_region_pointer(local_region);
	there = (uint8_t *)doorbell_region_pointer(remote_region);
	memset(here, 7, 2048);
	CHECK(doorbell_device_put(&queue, here_at(0, 100), there_at(3, 100), 0, &upto) == 0);
	CHECK(doorbell_device_wait(&queue, upto, 20 * SECOND) == 0);
	CHECK(there[2] == 0 && there[3] == 7 && there[102] == 7 && there[103] == 0);
	CHECK(doorbell_device_get(&queue, here_at(2048, 8), there_at(0, 8), 0, &upto) == 0);
	CHECK(doorbell_device_wait(&queue, upto, 20 * SECOND) == 0);
	CHECK(memcmp(here + 2048, there, 8) == 0);
	CHECK(doorbell_post_recv(ends[1], 77, NULL, 0, NULL) == 0);
	CHECK(doorbell_device_put_imm(&queue, here_at(0, 4), there_at(200, 4), 0x1234567, 0, &upto) == 0);
	CHECK(doorbell_device_wait(&queue, upto, 20 * SECOND) == 0);
	CHECK(doorbell_wait_cq(ends[1], DOORBELL_QUEUE_RECV, 20000, &completion) == 0);
	CHECK(completion.wr_id == 77 && completion.has_imm == 1 && completion.imm == 0x1234567);
	CHECK(doorbell_device_signal(&queue, there_at(256, 8), DOORBELL_SIGNAL_SET, 40, 0, &upto) == 0);
	CHECK(doorbell_device_fetch_add(&queue, here_at(3000, 8), there_at(260, 8), 2, 0, &upto) == DOORBELL_EALIGNMENT);
	CHECK(doorbell_device_fetch_add(&queue, here_at(3000, 8), there_at(256, 8), 2, 0, &upto) == 0);
	CHECK(doorbell_device_wait(&queue, upto, 20 * SECOND) == 0);
	memcpy(&word, here + 3000, 8);
	CHECK(word == 40);
	memcpy(&word, there + 256, 8);
	CHECK(word == 42);
	CHECK(doorbell_device_reserve(&queue, 2, 0, &slot) == 0);
	CHECK(doorbell_device_write_inline(&queue, slot, 0, text, 29, there_at(300, 29)) == DOORBELL_ERANGE);
	CHECK(doorbell_device_write_inline(&queue, slot, DOORBELL_WORK_UNSIGNALED, text, 28, there_at(300, 28)) == 0);
	doorbell_device_write_nop(&queue, slot + 1, 0);
	CHECK(doorbell_device_submit(&queue, slot, 2) == 0);
	CHECK(doorbell_device_wait(&queue, slot + 2, 20 * SECOND) == 0);
	CHECK(memcmp(there + 300, text, 28) == 0 && there[328] == 0);
	CHECK(doorbell_device_put_signal(&queue, here_at(0, 16), there_at(400, 16), there_at(440, 8),
				   DOORBELL_SIGNAL_SET, 9, 0, &upto) == 0);
	CHECK(doorbell_device_wait(&queue, upto, 20 * SECOND) == 0);
	memcpy(&word, there + 440, 8);
	CHECK(word == 9 && there[415] == 7 && there[416] == 0);
	/* An addition of which no one has the result. */
	CHECK(doorbell_device_signal(&queue, there_at(440, 8), DOORBELL_SIGNAL_ADD, 1ull << 40, 0, &upto) == 0);
	CHECK(doorbell_device_put_signal(&queue, here_at(0, 16), there_at(500, 16), there_at(440, 8), DOORBELL_SIGNAL_ADD, 2, 0, &upto) == 0);
	CHECK(doorbell_device_quiet(&queue, 20 * SECOND) == 0);
	memcpy(&word, there + 440, 8);
	CHECK(word == (1ull << 40) + 11 && there[515] == 7 && there[516] == 0);
	CHECK(doorbell_device_put_inline(&queue, text, 28, there_at(600, 28), 0, &upto) == 0);
	CHECK(doorbell_device_put_inline(&queue, text, 0, there_at(4096, 0), 0, &upto) == 0);
	CHECK(doorbell_device_put_inline(&queue, text, 29, there_at(600, 29), 0, &upto) == DOORBELL_ERANGE);
	CHECK(doorbell_device_put_inline(&queue, text, 8, there_at(600, 7), 0, &upto) == DOORBELL_ERANGE);
	CHECK(doorbell_device_wait(&queue, upto, 20 * SECOND) == 0);
	CHECK(memcmp(there + 600, text, 28) == 0 && there[628] == 0);
	/* No bytes, behind the end of the memory. */
	CHECK(doorbell_device_put(&queue, here_at(4096, 0), there_at(4096, 0), 0, &upto) == 0);
	CHECK(doorbell_device_flush(&queue, 20 * SECOND) == 0);
	tear_down();
}

/* The slot has the bytes that the general builder makes, and where the host rings its doorbell. */
static void same_bytes(uint32_t slot, uint32_t opcode, uint32_t flags, const void *payload, uint32_t count, int is_inline, uint64_t add)
{
	const uint64_t *written = (const uint64_t *)(uintptr_t)queue.ring + 8 * (slot & queue.slot_mask);
	uint64_t wqe[DBL_WQE_WORDS_MAX];
	struct dbl_wr wr;

	memset(wqe, 0, sizeof(wqe));
	memset(&wr, 0, sizeof(wr));
	wr.remote_addr = opcode == DBL_OPCODE_NOP ? 0 : 0x0123456789abcde8ull;
	wr.rkey = opcode == DBL_OPCODE_NOP ? 0 : 0x89abcdef;
	wr.swap_or_add = add;
	wr.payload = payload;
	wr.count = count;
	wr.qpn = queue.qpn;
	wr.imm = 0x76543210;
	wr.opcode = (uint8_t)opcode;
	wr.flags = dbl_queue_flags(flags);
	wr.is_inline = (uint16_t)is_inline;
	CHECK(dbl_wqe_build(wqe, slot, &wr, is_inline) <= 4);
	CHECK(memcmp(written, wqe, 64) == 0);
	if (queue.record == 0)
		CHECK(((const uint64_t *)(uintptr_t)queue.doorbells)[slot & queue.slot_mask] == wqe[0]);
}

/* Each kind of work request, each flag, each length: none of these goes out. */
static void formats(void)
{
	static const uint32_t lengths[] = {0, 1, 8, 0x01020304, DOORBELL_MESSAGE_BYTES_MAX};
	const uint64_t add = 0x1122334455667788ull;
	doorbell_local from = {0xfedcba9876543210ull, 8, 0x13579bdf, 0};
	const doorbell_remote to = {0x0123456789abcde8ull, UINT64_MAX, 0x89abcdef, 0};
	uint8_t text[DOORBELL_INLINE_BYTES];
	uint32_t slot, flags, at;

	set_up(4096, 4096);
	for (at = 0; at < sizeof(text); at++)
		text[at] = (uint8_t)(0xe0 - 7 * at);
	/* Not the first one of the ring. */
	for (at = 0; at < 3; at++) {
		CHECK(doorbell_device_reserve(&queue, 1, 0, &slot) == 0);
		doorbell_device_write_nop(&queue, slot, 0);
		CHECK(doorbell_device_submit(&queue, slot, 1) == 0);
	}
	CHECK(doorbell_device_reserve(&queue, 1, 0, &slot) == 0);
	for (flags = 0; flags < 16; flags++) {
		for (at = 0; at < sizeof(lengths) / sizeof(lengths[0]); at++) {
			const struct dbl_sge sge = {lengths[at], from.lkey, from.addr};

			from.len_bytes = lengths[at];
			CHECK(doorbell_device_write_put(&queue, slot, flags, from, to) == 0);
			same_bytes(slot, DBL_OPCODE_RDMA_WRITE, flags, &sge, 1, 0, 0);
			CHECK(doorbell_device_write_put_imm(&queue, slot, flags, from, to, 0x76543210) == 0);
			same_bytes(slot, DBL_OPCODE_RDMA_WRITE_IMM, flags, &sge, 1, 0, 0);
			CHECK(doorbell_device_write_get(&queue, slot, flags, from, to) == 0);
			same_bytes(slot, DBL_OPCODE_RDMA_READ, flags, &sge, 1, 0, 0);
		}
		for (at = 0; at <= DOORBELL_INLINE_BYTES; at++) {
			CHECK(doorbell_device_write_inline(&queue, slot, flags, text, at, to) == 0);
			same_bytes(slot, DBL_OPCODE_RDMA_WRITE, flags, text, at, 1, 0);
		}
		{
			const struct dbl_sge sge = {8, from.lkey, from.addr}, sink = {8, queue.sink_lkey, queue.sink};

			from.len_bytes = 8;
			CHECK(doorbell_device_write_fetch_add(&queue, slot, flags, from, to, add) == 0);
			same_bytes(slot, DBL_OPCODE_ATOMIC_FA, flags, &sge, 1, 0, add);
			CHECK(doorbell_device_write_signal(&queue, slot, flags, to, DOORBELL_SIGNAL_ADD, add) == 0);
			same_bytes(slot, DBL_OPCODE_ATOMIC_FA, flags, &sink, 1, 0, add);
		}
		CHECK(doorbell_device_write_signal(&queue, slot, flags, to, DOORBELL_SIGNAL_SET, add) == 0);
		same_bytes(slot, DBL_OPCODE_RDMA_WRITE, flags | DOORBELL_WORK_ORDERED, &add, sizeof(add), 1, 0);
		doorbell_device_write_nop(&queue, slot, flags);
		same_bytes(slot, DBL_OPCODE_NOP, flags, NULL, 0, 0, 0);
	}
	doorbell_device_write_nop(&queue, slot, 0);
	CHECK(doorbell_device_submit(&queue, slot, 1) == 0);
	CHECK(doorbell_device_wait(&queue, slot + 1, 20 * SECOND) == 0);
	tear_down();
}

/* What is lent is not the endpoint's, until it is reset. */
static void loans(void)
{
	doorbell_device_queue *other = (doorbell_device_queue *)&other;
	const doorbell_slice slice = {local_region, 0, 8};
	doorbell_work work;
	struct doorbell_queue_view view;
	uint32_t upto;

	set_up(4096, 4096);
	work = doorbell_work_write(&slice, 0, remote.addr, remote.rkey);
	CHECK(doorbell_post_send(ends[0], &work, NULL) == DOORBELL_ESTATE);
	CHECK(strstr(doorbell_last_error(), "owned by kernels") != NULL);
	CHECK(doorbell_device_queue_create(ends[0], DOORBELL_KERNELS_HOST, &other) == DOORBELL_ESTATE && other == NULL);
	CHECK(doorbell_device_queue_create(ends[0], 7, &other) == DOORBELL_ERANGE);
	CHECK(doorbell_device_queue_view(device_queue, &view, sizeof(view) - 8) == DOORBELL_EINVAL);
	/* The peer's end still sends and receives. */
	CHECK(doorbell_post_send(ends[1], &work, NULL) == 0);
	CHECK(doorbell_wait_cq(ends[1], DOORBELL_QUEUE_SEND, 20000, NULL) == DOORBELL_EINVAL);
	CHECK(doorbell_device_put(&queue, here_at(0, 8), there_at(0, 8), 0, &upto) == 0);
	CHECK(doorbell_device_wait(&queue, upto, 20 * SECOND) == 0);
	CHECK(doorbell_device_queue_destroy(device_queue) == 0);
	CHECK(doorbell_post_send(ends[0], &work, NULL) == DOORBELL_ESTATE);
	CHECK(strstr(doorbell_last_error(), "reset it first") != NULL);
	CHECK(doorbell_endpoint_reset(ends[0]) == 0);
	CHECK(doorbell_endpoint_reset(ends[1]) == 0);
	connect_ends();
	CHECK(doorbell_post_send(ends[0], &work, NULL) == 0);
	/* In flight, or not collected: not to be lent. */
	CHECK(doorbell_device_queue_create(ends[0], DOORBELL_KERNELS_HOST, &other) == DOORBELL_ESTATE);
	{
		doorbell_completion completion;
		CHECK(doorbell_wait_cq(ends[0], DOORBELL_QUEUE_SEND, 20000, &completion) == 0);
	}
	/* With the counts that the endpoint has come to. */
	lend();
	CHECK(dbl_queue_state(&queue)->reserved == 1);
	CHECK(doorbell_device_put(&queue, here_at(0, 8), there_at(0, 8), 0, &upto) == 0);
	CHECK(doorbell_device_wait(&queue, upto, 20 * SECOND) == 0);
	/* The endpoint goes first. */
	CHECK(doorbell_endpoint_destroy(ends[0]) == 0);
	ends[0] = NULL;
	CHECK(doorbell_device_put(&queue, here_at(0, 8), there_at(0, 8), 0, &upto) == 0);
	CHECK(doorbell_device_wait(&queue, upto, 20 * SECOND) == 0);
	tear_down();
}

/* ----------------------------------------------------------------------------------------------------------- signals */

/*
 * Threads that put and signal at random, and an oracle. Each has 8 words of the remote memory, and a word for signals that
 * set; the counters are for all. It knows what its words are, behind each quiet, and all additions together are known at the
 * end. Some use blocks of several words.
 */
#define COUNTERS 4u
#define WORDS 8u

struct signaller {
	struct producer producer;
	uint64_t words[WORDS], set, added[COUNTERS];
};

static uint64_t *remote_words(void)
{
	return (uint64_t *)doorbell_region_pointer(remote_region);
}

static void *signal_at_random(void *argument)
{
	struct signaller *self = (struct signaller *)argument;
	struct producer *producer = &self->producer;
	const uint64_t mine = COUNTERS + (WORDS + 1) * (uint64_t)producer->number;
	uint64_t *from = (uint64_t *)doorbell_region_pointer(local_region) + (WORDS + 1) * (uint64_t)producer->number;
	uint32_t done, word, count, at, counter, upto = 0;
	uint64_t value;

	for (done = 0; done != producer->count; done++) {
		word = draw(producer, WORDS);
		count = 1 + draw(producer, WORDS - word);
		counter = draw(producer, COUNTERS);
		value = (uint64_t)draw(producer, UINT32_MAX) << 12 | done;
		switch (draw(producer, 6)) {
		case 0:
			self->added[counter] += value;
			CHECK(doorbell_device_signal(&queue, there_at(8 * counter, 8), DOORBELL_SIGNAL_ADD, value, 60 * SECOND, &upto) == 0);
			break;
		case 1:
			self->set = value;
			CHECK(doorbell_device_signal(&queue, there_at(8 * (mine + WORDS), 8), DOORBELL_SIGNAL_SET, value, 60 * SECOND, NULL) == 0);
			break;
		case 2:
		case 3:
			/* The memory is used again: the last put from it is complete. */
			CHECK(doorbell_device_flush(&queue, 60 * SECOND) == 0);
			for (at = word; at < word + count; at++)
				from[at] = self->words[at] = value + at;
			if (draw(producer, 2)) {
				self->added[counter] += done;
				CHECK(doorbell_device_put_signal(&queue, here_at(8 * ((WORDS + 1) * producer->number + word), 8 * count),
								 there_at(8 * (mine + word), 8 * count), there_at(8 * counter, 8),
								 DOORBELL_SIGNAL_ADD, done, 60 * SECOND, &upto) == 0);
			} else {
				self->set = value;
				CHECK(doorbell_device_put_signal(&queue, here_at(8 * ((WORDS + 1) * producer->number + word), 8 * count),
								 there_at(8 * (mine + word), 8 * count), there_at(8 * (mine + WORDS), 8),
								 DOORBELL_SIGNAL_SET, value, 60 * SECOND, &upto) == 0);
			}
			break;
		case 4:
			/* It finds its own additions: others only add. */
			value = self->added[counter];
			CHECK(doorbell_device_fetch_add(&queue, here_at(8 * ((WORDS + 1) * producer->number + WORDS), 8), there_at(8 * counter, 8),
							0, 60 * SECOND, &upto) == 0);
			CHECK(doorbell_device_wait(&queue, upto, 60 * SECOND) == 0);
			CHECK(doorbell_device_signal_fetch(&from[WORDS]) >= value);
			break;
		default:
			CHECK(doorbell_device_quiet(&queue, 60 * SECOND) == 0);
			for (at = 0; at < WORDS; at++)
				CHECK(doorbell_device_signal_fetch(&remote_words()[mine + at]) == self->words[at]);
			CHECK(doorbell_device_signal_fetch(&remote_words()[mine + WORDS]) == self->set);
		}
	}
	/* Not waited for. */
	return NULL;
}

static void signals(void)
{
	struct signaller *all = (struct signaller *)calloc(thread_count, sizeof(*all));
	uint64_t added[COUNTERS] = {0};
	uint32_t thread, at;

	set_up(8ull * (WORDS + 1) * thread_count, 8ull * (COUNTERS + (WORDS + 1) * thread_count));
	for (thread = 0; thread < thread_count; thread++) {
		all[thread].producer.number = thread;
		all[thread].producer.seed = (uint64_t)dbl_now_ns() + thread;
		all[thread].producer.count = operation_count / thread_count;
		fprintf(stderr, "thread %u: seed %llu\n", thread, (unsigned long long)all[thread].producer.seed);
		CHECK(pthread_create(&all[thread].producer.thread, NULL, signal_at_random, &all[thread]) == 0);
	}
	for (thread = 0; thread < thread_count; thread++)
		CHECK(pthread_join(all[thread].producer.thread, NULL) == 0);
	/* By a thread that has submitted nothing, and has joined those that have. */
	CHECK(doorbell_device_quiet(&queue, 60 * SECOND) == 0);
	for (thread = 0; thread < thread_count; thread++) {
		const uint64_t *words = &remote_words()[COUNTERS + (WORDS + 1) * thread];
		for (at = 0; at < WORDS; at++)
			CHECK(words[at] == all[thread].words[at]);
		CHECK(words[WORDS] == all[thread].set);
		for (at = 0; at < COUNTERS; at++)
			added[at] += all[thread].added[at];
	}
	for (at = 0; at < COUNTERS; at++)
		CHECK(remote_words()[at] == added[at]);
	free(all);
	tear_down();
}

/* A quiet waits for what was submitted, and ends with the code of what hinders it. */
static void quiet_ends(void)
{
	uint32_t upto, slot;

	set_up_waiting();
	/* Nothing to wait for. */
	CHECK(doorbell_device_quiet(&queue, 0) == 0);
	CHECK(doorbell_device_put(&queue, here_at(0, 8), there_at(0, 8), 0, &upto) == 0);
	CHECK(doorbell_device_quiet(&queue, 0) == DOORBELL_ETIMEOUT);
	CHECK(doorbell_device_quiet(&queue, SECOND / 20) == DOORBELL_ETIMEOUT);
	CHECK(doorbell_device_flush(&queue, SECOND / 20) == DOORBELL_ETIMEOUT);
	abort_it();
	CHECK(doorbell_device_quiet(&queue, 60 * SECOND) == DOORBELL_EWORK);
	CHECK(doorbell_device_flush(&queue, 60 * SECOND) == DOORBELL_EWORK);
	CHECK(doorbell_endpoint_create(domain, &patient, &ends[1]) == 0);
	recover();
	CHECK(doorbell_device_quiet(&queue, 60 * SECOND) == 0);
	/* Of slots in steps, too. */
	CHECK(doorbell_device_reserve(&queue, 2, 0, &slot) == 0);
	doorbell_device_write_nop(&queue, slot, DOORBELL_WORK_UNSIGNALED);
	CHECK(doorbell_device_write_signal(&queue, slot + 1, 0, there_at(8, 8), DOORBELL_SIGNAL_SET, 5) == 0);
	CHECK(doorbell_device_submit(&queue, slot, 2) == 0);
	CHECK(doorbell_device_quiet(&queue, 60 * SECOND) == 0);
	CHECK(remote_words()[1] == 5);
	tear_down();
}

static uint64_t awaited, becomes;

static void *store_soon(void *unused)
{
	(void)unused;
	usleep(20000);
	doorbell_device_write_value64(&awaited, becomes);
	return NULL;
}

/* Each comparison of 64-bit words: whether it holds, that the wait ends when it does, and that it ends otherwise. */
static void comparisons(void)
{
	/* All that tell the halves of a word, and signed from unsigned numbers, apart. */
	static const uint64_t values[] = {0, 1, 0xffffffff, 0x100000000, 0x100000001, INT64_MAX, 1ull << 63, UINT64_MAX - 1, UINT64_MAX};
	const uint32_t count = sizeof(values) / sizeof(values[0]);
	int32_t status = 0;
	uint32_t cmp, left, right, other;
	pthread_t thread;

	for (cmp = DOORBELL_CMP_EQ; cmp <= DOORBELL_CMP_LE; cmp++) {
		for (left = 0; left < count; left++) {
			for (right = 0; right < count; right++) {
				const int holds[] = {left == right, left != right, left > right, left >= right, left < right, left <= right};
				awaited = values[left];
				CHECK(doorbell_device_signal_wait_until(&awaited, cmp, values[right], 0, NULL) ==
				      (holds[cmp] ? DOORBELL_OK : DOORBELL_ETIMEOUT));
			}
		}
		/* From a word for which it does not hold to one for which it does. */
		for (left = 0; left < count && !dbl_cmp_holds(values[left], cmp, values[4]); left++)
			;
		for (other = 0; other < count && dbl_cmp_holds(values[other], cmp, values[4]); other++)
			;
		CHECK(left < count && other < count);
		awaited = values[other];
		becomes = values[left];
		CHECK(pthread_create(&thread, NULL, store_soon, NULL) == 0);
		CHECK(doorbell_device_signal_wait_until(&awaited, cmp, values[4], 60 * SECOND, &status) == DOORBELL_OK);
		CHECK(doorbell_device_signal_fetch(&awaited) == values[left]);
		CHECK(pthread_join(thread, NULL) == 0);
		awaited = values[other];
		since_ns = dbl_now_ns();
		CHECK(doorbell_device_signal_wait_until(&awaited, cmp, values[4], SECOND / 50, &status) == DOORBELL_ETIMEOUT);
		CHECK(dbl_now_ns() - since_ns >= SECOND / 50);
		/* A failure ends it, unless the condition holds. */
		status = DOORBELL_EWORK;
		CHECK(doorbell_device_signal_wait_until(&awaited, cmp, values[4], 60 * SECOND, &status) == DOORBELL_EWORK);
		awaited = values[left];
		CHECK(doorbell_device_signal_wait_until(&awaited, cmp, values[4], 60 * SECOND, &status) == DOORBELL_OK);
		status = 0;
	}
	CHECK(doorbell_device_signal_wait_until(&awaited, DOORBELL_CMP_LE + 1, 0, SECOND, NULL) == DOORBELL_EINVAL);
	/* The endpoint's own word. */
	set_up_waiting();
	awaited = 0;
	CHECK(doorbell_device_signal_wait_until(&awaited, DOORBELL_CMP_NE, 0, 0, doorbell_device_status_word(&queue)) == DOORBELL_ETIMEOUT);
	abort_it();
	CHECK(doorbell_device_signal_wait_until(&awaited, DOORBELL_CMP_NE, 0, 60 * SECOND, doorbell_device_status_word(&queue)) ==
	      DOORBELL_EWORK);
	CHECK(doorbell_device_poll(&queue) == DOORBELL_EWORK);
	CHECK(doorbell_endpoint_create(domain, &patient, &ends[1]) == 0);
	recover();
	tear_down();
}

/* ------------------------------------------------------------------------------------------------------------ pieces */

static uint32_t opcode_of(uint32_t slot)
{
	const uint64_t *wqe = (const uint64_t *)(uintptr_t)queue.ring + 8 * (size_t)(slot & queue.slot_mask);

	return dbl_be32((uint32_t)wqe[0]) & 0xff;
}

/* Puts and gets that are longer than a work request, of all lengths about its multiples; more of them than the queue has slots. */
static void pieces(void)
{
	const uint32_t bytes = 1 << 16;
	doorbell_completion completion;
	uint8_t *from, *to;
	uint32_t count, less, len, at, upto, began, slots;

	set_up(2 * bytes, 2 * bytes + 8);
	from = (uint8_t *)doorbell_region_pointer(local_region);
	to = (uint8_t *)doorbell_region_pointer(remote_region);
	for (at = 0; at < bytes; at++)
		from[at] = (uint8_t)(at * 7 + (at >> 8));
	piece_bytes = 256;
	for (count = 1; count <= 3; count++) {
		for (less = 0; less < 3; less++) {
			len = 256 * count + 1 - less;
			slots = (len + 255) / 256;
			memset(to, 0xee, bytes);
			began = dbl_queue_state(&queue)->reserved;
			CHECK(doorbell_device_put(&queue, here_at(0, len), there_at(8, len + 1), 60 * SECOND, &upto) == 0);
			CHECK(upto == began + slots && dbl_queue_state(&queue)->reserved == upto);
			CHECK(doorbell_device_wait(&queue, upto, 20 * SECOND) == 0);
			CHECK(memcmp(to + 8, from, len) == 0 && to[7] == 0xee && to[8 + len] == 0xee);
			memset(from + bytes, 0xdd, bytes);
			CHECK(doorbell_device_get(&queue, here_at(bytes + 8, len), there_at(8, len), 60 * SECOND, &upto) == 0);
			CHECK(upto == began + 2 * slots);
			CHECK(doorbell_device_wait(&queue, upto, 20 * SECOND) == 0);
			CHECK(memcmp(from + bytes + 8, from, len) == 0 && from[bytes + 7] == 0xdd && from[bytes + 8 + len] == 0xdd);
			/* The last one has the immediate data, and takes the only receive. */
			CHECK(doorbell_post_recv(ends[1], len, NULL, 0, NULL) == 0);
			CHECK(doorbell_device_put_imm(&queue, here_at(0, len), there_at(bytes, len), 77, 60 * SECOND, &upto) == 0);
			for (at = began + 2 * slots; at != upto; at++)
				CHECK(opcode_of(at) == (at + 1 == upto ? DBL_OPCODE_RDMA_WRITE_IMM : DBL_OPCODE_RDMA_WRITE));
			CHECK(doorbell_device_wait(&queue, upto, 20 * SECOND) == 0);
			CHECK(doorbell_wait_cq(ends[1], DOORBELL_QUEUE_RECV, 20000, &completion) == 0);
			CHECK(completion.wr_id == len && completion.imm == 77 && memcmp(to + bytes, from, len) == 0);
			/* The signal comes behind all of them, once. */
			memset(to, 0, bytes);
			CHECK(doorbell_device_put_signal(&queue, here_at(0, len), there_at(8, len), there_at(2 * bytes, 8), DOORBELL_SIGNAL_ADD,
							 3, 60 * SECOND, &upto) == 0);
			CHECK(doorbell_device_wait(&queue, upto, 20 * SECOND) == 0);
			CHECK(memcmp(to + 8, from, len) == 0);
		}
	}
	CHECK(remote_words()[2 * bytes / 8] == 9 * 3);
	/* 4096 pieces. */
	piece_bytes = 16;
	memset(to, 0, bytes);
	CHECK(doorbell_device_put_signal(&queue, here_at(0, bytes), there_at(0, bytes), there_at(2 * bytes, 8), DOORBELL_SIGNAL_SET, 1,
					 60 * SECOND, &upto) == 0);
	CHECK(doorbell_device_wait(&queue, upto, 60 * SECOND) == 0);
	CHECK(memcmp(to, from, bytes) == 0 && remote_words()[2 * bytes / 8] == 1);
	tear_down();
	/* Without room for all, some are sent. */
	set_up_waiting();
	CHECK(doorbell_device_put(&queue, here_at(0, 16 * queue.capacity + 1), there_at(0, 4096), SECOND / 50, &upto) == DOORBELL_EFULL);
	CHECK(dbl_queue_state(&queue)->reserved == queue.capacity && upto == queue.capacity);
	abort_it();
	CHECK(doorbell_endpoint_create(domain, &patient, &ends[1]) == 0);
	recover();
	tear_down();
}

/* A put of more than the longest work request has bytes, as DBL_PIECE_BYTES is unless a test sets it. */
static void longest(void)
{
	const uint64_t whole = DBL_PIECE_BYTES, more = 4097, near_end[] = {0, whole - 64, whole - 8, whole, whole + 64, whole + more - 9};
	uint8_t *from, *to;
	uint32_t upto;
	size_t at;

	CHECK(whole == DOORBELL_MESSAGE_BYTES_MAX);
	set_up(whole + more, whole + more + 8);
	from = (uint8_t *)doorbell_region_pointer(local_region);
	to = (uint8_t *)doorbell_region_pointer(remote_region);
	for (at = 0; at < sizeof(near_end) / sizeof(near_end[0]); at++)
		memset(from + near_end[at], 0x30 + (int)at, 9);
	memset(to, 0xee, whole + more + 8);
	CHECK(doorbell_device_put(&queue, here_at(0, whole + more), there_at(4, whole + more), 60 * SECOND, &upto) == 0 && upto == 2);
	CHECK(doorbell_device_wait(&queue, upto, 60 * SECOND) == 0);
	CHECK(memcmp(to + 4, from, whole + more) == 0 && to[3] == 0xee && to[whole + more + 4] == 0xee);
	tear_down();
}

/* --------------------------------------------------------------------------------------------------------- exclusive */

static pthread_mutex_t turn_of = PTHREAD_MUTEX_INITIALIZER;

/* Takes the queue for some operations, by the view of one thread. */
static void *produce_in_turns(void *argument)
{
	struct signaller *self = (struct signaller *)argument;
	struct producer *producer = &self->producer;
	const struct doorbell_queue_view own = doorbell_device_exclusive(&queue);
	uint32_t done = 0, batch, first, slot;

	while (done != producer->count) {
		batch = 1 + draw(producer, 8);
		if (batch > producer->count - done)
			batch = producer->count - done;
		if (batch > own.capacity)
			batch = own.capacity;
		pthread_mutex_lock(&turn_of);
		CHECK(doorbell_device_reserve(&own, batch, 60 * SECOND, &first) == 0);
		for (slot = first; slot != first + batch; slot++) {
			self->added[0] += slot;
			CHECK(doorbell_device_write_signal(&own, slot, slot + 1 == first + batch ? 0 : (uint32_t)DOORBELL_WORK_UNSIGNALED,
							   there_at(0, 8), DOORBELL_SIGNAL_ADD, slot) == 0);
		}
		CHECK(doorbell_device_submit(&own, first, batch) == 0);
		done += batch;
		if (draw(producer, 16) == 0)
			CHECK(doorbell_device_quiet(&own, 60 * SECOND) == 0);
		pthread_mutex_unlock(&turn_of);
	}
	return NULL;
}

/* Threads that have the queue one after another, without its locks; then all at once with them; and so on. */
static void exclusive_turns(void)
{
	struct signaller *all = (struct signaller *)calloc(thread_count, sizeof(*all));
	uint64_t expected = 0;
	uint32_t thread, round;

	set_up(8ull * (WORDS + 1) * thread_count, 8ull * (COUNTERS + (WORDS + 1) * thread_count));
	for (round = 0; round < 4; round++) {
		memset(remote_words() + COUNTERS, 0, 8 * (WORDS + 1) * thread_count);
		for (thread = 0; thread < thread_count; thread++) {
			memset(&all[thread], 0, sizeof(all[thread]));
			all[thread].producer.number = thread;
			all[thread].producer.seed = round * 100 + thread;
			all[thread].producer.count = operation_count / thread_count / 4;
			CHECK(pthread_create(&all[thread].producer.thread, NULL, round % 2 == 0 ? produce_in_turns : signal_at_random,
					     &all[thread]) == 0);
		}
		for (thread = 0; thread < thread_count; thread++) {
			CHECK(pthread_join(all[thread].producer.thread, NULL) == 0);
			expected += all[thread].added[0];
		}
		CHECK(doorbell_device_quiet(&queue, 60 * SECOND) == 0);
		CHECK(remote_words()[0] == expected);
	}
	free(all);
	tear_down();
}

/* One thread that has the queue: every call, its codes, and the order that it promises. */
static void exclusive(void)
{
	struct doorbell_queue_view own;
	uint32_t upto = 0, slot, later, at;

	set_up(4096, 4096);
	own = doorbell_device_exclusive(&queue);
	remote_words()[0] = 0;
	for (at = 0; at < 10 * own.capacity; at++) {
		*(uint64_t *)doorbell_region_pointer(local_region) = at;
		CHECK(doorbell_device_put_signal(&own, here_at(0, 8), there_at(8, 8), there_at(0, 8), DOORBELL_SIGNAL_ADD, 1, 20 * SECOND, &upto) ==
		      0);
		CHECK(upto == 2 * (at + 1));
		CHECK(doorbell_device_wait(&own, upto, 20 * SECOND) == 0);
		CHECK(remote_words()[0] == at + 1 && remote_words()[1] == at);
	}
	CHECK(doorbell_device_get(&own, here_at(64, 8), there_at(0, 8), 0, &upto) == 0);
	CHECK(doorbell_device_fetch_add(&own, here_at(72, 8), there_at(0, 8), 5, 0, &upto) == 0);
	CHECK(doorbell_device_quiet(&own, 20 * SECOND) == 0);
	CHECK(((uint64_t *)doorbell_region_pointer(local_region))[9] == 10 * own.capacity);
	CHECK(doorbell_device_reserve(&own, 1, 0, &slot) == 0);
	CHECK(doorbell_device_reserve(&own, 1, 0, &later) == 0 && later == slot + 1);
	doorbell_device_write_nop(&own, slot, 0);
	doorbell_device_write_nop(&own, later, 0);
	if (control == DOORBELL_CONTROL_DIRECT)
		CHECK(doorbell_device_submit(&own, later, 1) == DOORBELL_ESTATE);
	CHECK(doorbell_device_submit(&own, slot, 1) == 0);
	CHECK(doorbell_device_submit(&own, later, 1) == 0);
	CHECK(doorbell_device_wait(&own, later + 1, 20 * SECOND) == 0);
	remote.rkey ^= 0x5500;
	CHECK(doorbell_device_put(&own, here_at(0, 8), there_at(0, 8), 0, &upto) == 0);
	CHECK(doorbell_device_wait(&own, upto, 60 * SECOND) == DOORBELL_EWORK);
	CHECK(doorbell_device_put(&own, here_at(0, 8), there_at(0, 8), 0, &upto) == DOORBELL_EWORK);
	CHECK(doorbell_device_reserve(&own, 1, 60 * SECOND, &slot) == DOORBELL_EWORK);
	recover();
	tear_down();
	set_up_waiting();
	own = doorbell_device_exclusive(&queue);
	for (at = 0; at < own.capacity; at++)
		CHECK(doorbell_device_put(&own, here_at(0, 8), there_at(0, 8), 0, &upto) == 0);
	CHECK(doorbell_device_reserve(&own, 1, 0, &slot) == DOORBELL_EFULL);
	since_ns = dbl_now_ns();
	CHECK(doorbell_device_reserve(&own, 1, SECOND / 20, &slot) == DOORBELL_EFULL);
	CHECK(doorbell_device_quiet(&own, SECOND / 20) == DOORBELL_ETIMEOUT);
	CHECK(dbl_now_ns() - since_ns >= SECOND / 10);
	CHECK(doorbell_device_reserve(&own, own.capacity + 1, 0, &slot) == DOORBELL_ERANGE);
	abort_it();
	CHECK(doorbell_device_reserve(&own, 1, 60 * SECOND, &slot) == DOORBELL_EWORK);
	CHECK(doorbell_endpoint_create(domain, &patient, &ends[1]) == 0);
	recover();
	tear_down();
}

static const struct {
	const char *name;
	void (*run)(void);
} cases[] = {
	{"load", load},
	{"error_completion", error_completion},
	{"host_finds_error_that_is_not_polled", host_finds_error_that_is_not_polled},
	{"dead_peer", dead_peer},
	{"aborted", aborted},
	{"full_and_late", full_and_late},
	{"slots_are_sent_in_order_of_reservation", slots_are_sent_in_order_of_reservation},
	{"refused_requests_take_no_slot", refused_requests_take_no_slot},
	{"put_outlives_the_device_queue", put_outlives_the_device_queue},
	{"counts_wrap", counts_wrap},
	{"all_signaled", all_signaled},
	{"doorbell_is_left_to_the_lock_holder", doorbell_is_left_to_the_lock_holder},
	{"kinds", kinds},
	{"formats", formats},
	{"loans", loans},
	{"signals", signals},
	{"quiet_ends", quiet_ends},
	{"comparisons", comparisons},
	{"pieces", pieces},
	{"longest", longest},
	{"exclusive", exclusive},
	{"exclusive_turns", exclusive_turns},
};

int main(int argc, char **argv)
{
	size_t at;

	CHECK(argc == 6);
	thread_count = (uint32_t)atoi(argv[2]);
	operation_count = (uint32_t)atoi(argv[3]);
	depth = (uint32_t)atoi(argv[4]);
	control = (uint32_t)atoi(argv[5]);
	for (at = 0; at < sizeof(cases) / sizeof(cases[0]); at++) {
		if (strcmp(argv[1], cases[at].name) == 0) {
			cases[at].run();
			puts("ok");
			return 0;
		}
	}
	fprintf(stderr, "%s: no such case\n", argv[1]);
	return 1;
}
