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
#include <string.h>

/* What ThreadSanitizer cannot see, for the NIC and the host's threads are not compiled with it: a slot is used again after it was submitted. */
#define DBL_SLOTS_FREED(queue, from, upto)                                                                             \
	do {                                                                                                           \
		uint32_t freed_;                                                                                       \
		for (freed_ = (from); freed_ != (upto); freed_++)                                                      \
			(void)dbl_load_dword(dbl_queue_mark((queue), freed_));                                         \
	} while (0)

static void (*rang)(void);
#define DBL_RANG(queue) (rang ? rang() : (void)0)

#include "pair.h"

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
		code = doorbell_reserve(&queue, batch, patient ? 60 * SECOND : 0, &first);
		if (code == DOORBELL_EFULL && !patient) {
			DBL_TURN();
			continue;
		}
		if (code != 0)
			fprintf(stderr, "code %d, error %#x\n", code, doorbell_queue_error(&queue));
		CHECK(code == 0);
		for (slot = 0; slot < batch; slot++) {
			const uint32_t operation = producer->first + done + slot;
			/* Of some only the last is signaled. */
			const uint32_t flags =
				slot + 1 < batch && draw(producer, 2) ? (uint32_t)DOORBELL_WORK_UNSIGNALED : 0;
			if (operation % 2 == 0)
				doorbell_write_add(&queue, first + slot, flags, local.addr + 8ull * (operation / 2),
						   local.lkey, remote.addr, remote.rkey, 1);
			else
				doorbell_write_signal(&queue, first + slot, flags,
						      remote.addr + LINE + 8ull * (operation / 2), remote.rkey,
						      signal_of(operation));
		}
		CHECK(doorbell_submit(&queue, first, batch) == 0);
		done += batch;
		/* Some wait for theirs, and find what it has brought. */
		if (draw(producer, 64) == 0)
			CHECK(doorbell_wait(&queue, first + batch, 60 * SECOND) == 0);
		if (draw(producer, 32) == 0)
			CHECK(doorbell_poll(&queue) == 0);
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
	CHECK(doorbell_wait(&queue, last, 60 * SECOND) == 0);
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
	CHECK(doorbell_put(&queue, local.addr, local.lkey, 8, remote.addr, remote.rkey, 120 * SECOND, &upto) == 0);
	__atomic_store_n(&has_put, 1, __ATOMIC_RELEASE);
	*(int *)code = doorbell_wait(&queue, upto, 120 * SECOND);
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
		CHECK((doorbell_queue_error(&queue) & 0xff) == 0x13);
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
	CHECK(doorbell_put(&queue, local.addr, local.lkey, 8, remote.addr, remote.rkey, 0, &upto) == 0);
	for (turn = 0; turn < 60000 && doorbell_endpoint_failure(ends[0], &failure, NULL, 0) == 0; turn++)
		usleep(1000);
	expect_cause(DOORBELL_CAUSE_COMPLETION, 10);
	CHECK(doorbell_wait(&queue, upto, 20 * SECOND) == DOORBELL_EWORK);
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
		CHECK(doorbell_put(&queue, local.addr, local.lkey, 8, remote.addr, remote.rkey, 0, &upto) == 0);
	CHECK(upto == queue.capacity);
	since_ns = dbl_now_ns();
	CHECK(doorbell_reserve(&queue, 1, 0, &slot) == DOORBELL_EFULL);
	CHECK(doorbell_wait(&queue, upto, 0) == DOORBELL_ETIMEOUT);
	CHECK(dbl_now_ns() - since_ns < 60 * SECOND);
	since_ns = dbl_now_ns();
	CHECK(doorbell_reserve(&queue, 1, SECOND / 10, &slot) == DOORBELL_EFULL);
	CHECK(doorbell_wait(&queue, upto, SECOND / 10) == DOORBELL_ETIMEOUT);
	CHECK(dbl_now_ns() - since_ns >= SECOND / 5);
	CHECK(dbl_now_ns() - since_ns < 60 * SECOND);
	CHECK(doorbell_reserve(&queue, queue.capacity + 1, SECOND, &slot) == DOORBELL_ERANGE);
	CHECK(doorbell_reserve(&queue, 0, SECOND, &slot) == DOORBELL_ERANGE);
	/* A clock that steps back, and a bound that is none. */
	CHECK(dbl_has_passed(12, 10, 1) && !dbl_has_passed(11, 10, 1) && !dbl_has_passed(10, 11, 1) && !dbl_has_passed(10, 0, UINT64_MAX));
	/* Late is not failed: the endpoint still is what it was. */
	CHECK(doorbell_endpoint_failure(ends[0], NULL, NULL, 0) == 0);
	abort_it();
	CHECK(doorbell_endpoint_create(domain, &patient, &ends[1]) == 0);
	/* A call that only checks for room reports it, too. */
	for (at = 0; at < 60000 && doorbell_reserve(&queue, 1, 0, &slot) == DOORBELL_EFULL; at++)
		usleep(1000);
	CHECK(doorbell_reserve(&queue, 1, 0, &slot) == DOORBELL_EWORK);
	CHECK(doorbell_wait(&queue, upto, 0) == DOORBELL_EWORK);
	recover();
	tear_down();
}

/* A request longer than a NIC sends takes no slot and writes none: its length would be read as another kind of segment. */
static void too_long_requests_take_no_slot(void)
{
	const uint32_t lengths[] = {DOORBELL_MESSAGE_BYTES_MAX + 1, DOORBELL_MESSAGE_BYTES_MAX + 9, UINT32_MAX};
	const uint64_t *wqe;
	uint32_t upto = 0, slot, at;

	set_up(4096, 4096);
	for (at = 0; at < 3; at++) {
		const uint32_t len = lengths[at];
		CHECK(doorbell_put(&queue, local.addr, local.lkey, len, remote.addr, remote.rkey, 0, &upto) == DOORBELL_ERANGE);
		CHECK(doorbell_put_imm(&queue, local.addr, local.lkey, len, remote.addr, remote.rkey, 1, 0, &upto) == DOORBELL_ERANGE);
		CHECK(doorbell_get(&queue, local.addr, local.lkey, len, remote.addr, remote.rkey, 0, &upto) == DOORBELL_ERANGE);
		CHECK(doorbell_put_signal(&queue, local.addr, local.lkey, len, remote.addr, remote.rkey, remote.addr, remote.rkey, 1, 0,
					  &upto) == DOORBELL_ERANGE);
	}
	CHECK(upto == 0 && dbl_queue_state(&queue)->reserved == 0);
	CHECK(doorbell_reserve(&queue, 1, 0, &slot) == 0);
	wqe = (const uint64_t *)(uintptr_t)queue.ring + 8 * (size_t)(slot & queue.slot_mask);
	for (at = 0; at < 3; at++) {
		const uint64_t first = wqe[0];
		const uint32_t len = lengths[at];
		CHECK(doorbell_write_put(&queue, slot, 0, local.addr, local.lkey, len, remote.addr, remote.rkey) == DOORBELL_ERANGE);
		CHECK(doorbell_write_put_imm(&queue, slot, 0, local.addr, local.lkey, len, remote.addr, remote.rkey, 1) == DOORBELL_ERANGE);
		CHECK(doorbell_write_get(&queue, slot, 0, local.addr, local.lkey, len, remote.addr, remote.rkey) == DOORBELL_ERANGE);
		CHECK(wqe[0] == first);
	}
	/* The longest is sent, as what it is: the region is shorter. */
	CHECK(doorbell_write_put(&queue, slot, 0, local.addr, local.lkey, DOORBELL_MESSAGE_BYTES_MAX, remote.addr, remote.rkey) == 0);
	CHECK(doorbell_submit(&queue, slot, 1) == 0);
	CHECK(doorbell_wait(&queue, slot + 1, 20 * SECOND) == DOORBELL_EWORK);
	recover();
	tear_down();
}

/* A submitted put is in flight: giving queue and memory back without a wait does not stop it. */
static void put_outlives_the_kernel_queue(void)
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
			CHECK(doorbell_put(&queue, local.addr, local.lkey, (uint32_t)bytes, remote.addr, remote.rkey, 0, &upto) == 0);
		CHECK(doorbell_signal(&queue, remote.addr, remote.rkey, 1, 0, &upto) == 0);
		CHECK(doorbell_kernel_queue_destroy(kernel_queue) == 0);
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
		CHECK(doorbell_kernel_queue_create(ends[0], DOORBELL_KERNELS_HOST, &kernel_queue) == 0);
		CHECK(doorbell_kernel_queue_view(kernel_queue, &queue, sizeof(queue)) == 0);
		CHECK(doorbell_put(&queue, local.addr, local.lkey, 8, remote.addr, remote.rkey, 0, &upto) == 0);
		CHECK(doorbell_wait(&queue, upto, 20 * SECOND) == DOORBELL_EWORK);
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
	CHECK(doorbell_reserve(&queue, 1, 0, &first) == 0);
	CHECK(doorbell_reserve(&queue, 1, 0, &second) == 0);
	doorbell_write_signal(&queue, second, 0, remote.addr, remote.rkey, 2);
	CHECK(doorbell_submit(&queue, second, 1) == 0);
	CHECK(doorbell_wait(&queue, second + 1, SECOND / 20) == DOORBELL_ETIMEOUT);
	CHECK(__atomic_load_n(word, __ATOMIC_ACQUIRE) == 0);
	doorbell_write_signal(&queue, first, 0, remote.addr, remote.rkey, 1);
	CHECK(doorbell_submit(&queue, first, 1) == 0);
	CHECK(doorbell_wait(&queue, second + 1, 20 * SECOND) == 0);
	CHECK(__atomic_load_n(word, __ATOMIC_ACQUIRE) == 2);
	tear_down();
}

static void *post_nops(void *unused)
{
	const uint32_t batch = depth < 128 ? 1 : 64;
	uint32_t done, first, slot;

	(void)unused;
	for (done = 0; done != operation_count; done += batch) {
		CHECK(doorbell_reserve(&queue, batch, 60 * SECOND, &first) == 0);
		for (slot = first; slot != first + batch; slot++)
			doorbell_write_nop(&queue, slot, 0);
		CHECK(doorbell_submit(&queue, first, batch) == 0);
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
	while (doorbell_wait(&queue, upto, 0) == DOORBELL_ETIMEOUT)
		CHECK(doorbell_endpoint_failure(ends[0], NULL, NULL, 0) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(doorbell_wait(&queue, upto, 0) == 0);
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
	CHECK(doorbell_wait(&queue, begin + 2 * operation_count, 60 * SECOND) == 0);
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
	CHECK(doorbell_submit(&queue, late_slot, 1) == 0);
	CHECK(dbl_queue_state(&queue)->rung == late_slot);
}

/* A thread that finds the lock taken leaves the doorbell to the holder, which rings for both slots before it returns. */
static void doorbell_is_left_to_the_lock_holder(void)
{
	uint32_t slot;

	set_up(4096, 4096);
	CHECK(doorbell_reserve(&queue, 2, 0, &slot) == 0);
	late_slot = slot + 1;
	doorbell_write_signal(&queue, slot, 0, remote.addr, remote.rkey, 1);
	doorbell_write_signal(&queue, late_slot, 0, remote.addr, remote.rkey, 2);
	if (control == DOORBELL_CONTROL_DIRECT)
		rang = submit_late_slot;
	CHECK(doorbell_submit(&queue, slot, 1) == 0);
	if (control == DOORBELL_CONTROL_DIRECT)
		CHECK(rang == NULL && dbl_queue_state(&queue)->rung == slot + 2);
	else
		CHECK(doorbell_submit(&queue, late_slot, 1) == 0);
	CHECK(doorbell_wait(&queue, slot + 2, 20 * SECOND) == 0);
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
	CHECK(doorbell_put(&queue, local.addr, local.lkey, 100, remote.addr + 3, remote.rkey, 0, &upto) == 0);
	CHECK(doorbell_wait(&queue, upto, 20 * SECOND) == 0);
	CHECK(there[2] == 0 && there[3] == 7 && there[102] == 7 && there[103] == 0);
	CHECK(doorbell_get(&queue, local.addr + 2048, local.lkey, 8, remote.addr, remote.rkey, 0, &upto) == 0);
	CHECK(doorbell_wait(&queue, upto, 20 * SECOND) == 0);
	CHECK(memcmp(here + 2048, there, 8) == 0);
	CHECK(doorbell_post_recv(ends[1], 77, NULL, 0, NULL) == 0);
	CHECK(doorbell_put_imm(&queue, local.addr, local.lkey, 4, remote.addr + 200, remote.rkey, 0x1234567, 0, &upto) == 0);
	CHECK(doorbell_wait(&queue, upto, 20 * SECOND) == 0);
	CHECK(doorbell_wait_cq(ends[1], DOORBELL_QUEUE_RECV, 20000, &completion) == 0);
	CHECK(completion.wr_id == 77 && completion.has_imm == 1 && completion.imm == 0x1234567);
	CHECK(doorbell_signal(&queue, remote.addr + 256, remote.rkey, 40, 0, &upto) == 0);
	CHECK(doorbell_add(&queue, local.addr + 3000, local.lkey, remote.addr + 260, remote.rkey, 2, 0, &upto) == DOORBELL_EALIGNMENT);
	CHECK(doorbell_add(&queue, local.addr + 3000, local.lkey, remote.addr + 256, remote.rkey, 2, 0, &upto) == 0);
	CHECK(doorbell_wait(&queue, upto, 20 * SECOND) == 0);
	memcpy(&word, here + 3000, 8);
	CHECK(word == 40);
	memcpy(&word, there + 256, 8);
	CHECK(word == 42);
	CHECK(doorbell_reserve(&queue, 2, 0, &slot) == 0);
	CHECK(doorbell_write_inline(&queue, slot, 0, text, 29, remote.addr + 300, remote.rkey) == DOORBELL_ERANGE);
	CHECK(doorbell_write_inline(&queue, slot, DOORBELL_WORK_UNSIGNALED, text, 28, remote.addr + 300, remote.rkey) == 0);
	doorbell_write_nop(&queue, slot + 1, 0);
	CHECK(doorbell_submit(&queue, slot, 2) == 0);
	CHECK(doorbell_wait(&queue, slot + 2, 20 * SECOND) == 0);
	CHECK(memcmp(there + 300, text, 28) == 0 && there[328] == 0);
	CHECK(doorbell_put_signal(&queue, local.addr, local.lkey, 16, remote.addr + 400, remote.rkey, remote.addr + 440,
				  remote.rkey, 9, 0, &upto) == 0);
	CHECK(doorbell_wait(&queue, upto, 20 * SECOND) == 0);
	memcpy(&word, there + 440, 8);
	CHECK(word == 9 && there[415] == 7 && there[416] == 0);
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
	wr.remote_addr = opcode == DBL_OPCODE_NOP ? 0 : 0x0123456789abcdefull;
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
	const uint64_t here = 0xfedcba9876543210ull, there = 0x0123456789abcdefull, add = 0x1122334455667788ull;
	const uint32_t lkey = 0x13579bdf, rkey = 0x89abcdef;
	uint8_t text[DOORBELL_INLINE_BYTES];
	uint32_t slot, flags, at;

	set_up(4096, 4096);
	for (at = 0; at < sizeof(text); at++)
		text[at] = (uint8_t)(0xe0 - 7 * at);
	/* Not the first one of the ring. */
	for (at = 0; at < 3; at++) {
		CHECK(doorbell_reserve(&queue, 1, 0, &slot) == 0);
		doorbell_write_nop(&queue, slot, 0);
		CHECK(doorbell_submit(&queue, slot, 1) == 0);
	}
	CHECK(doorbell_reserve(&queue, 1, 0, &slot) == 0);
	for (flags = 0; flags < 16; flags++) {
		for (at = 0; at < sizeof(lengths) / sizeof(lengths[0]); at++) {
			const struct dbl_sge sge = {lengths[at], lkey, here};

			CHECK(doorbell_write_put(&queue, slot, flags, here, lkey, lengths[at], there, rkey) == 0);
			same_bytes(slot, DBL_OPCODE_RDMA_WRITE, flags, &sge, 1, 0, 0);
			CHECK(doorbell_write_put_imm(&queue, slot, flags, here, lkey, lengths[at], there, rkey, 0x76543210) == 0);
			same_bytes(slot, DBL_OPCODE_RDMA_WRITE_IMM, flags, &sge, 1, 0, 0);
			CHECK(doorbell_write_get(&queue, slot, flags, here, lkey, lengths[at], there, rkey) == 0);
			same_bytes(slot, DBL_OPCODE_RDMA_READ, flags, &sge, 1, 0, 0);
		}
		for (at = 0; at <= DOORBELL_INLINE_BYTES; at++) {
			CHECK(doorbell_write_inline(&queue, slot, flags, text, at, there, rkey) == 0);
			same_bytes(slot, DBL_OPCODE_RDMA_WRITE, flags, text, at, 1, 0);
		}
		{
			const struct dbl_sge sge = {8, lkey, here};

			doorbell_write_add(&queue, slot, flags, here, lkey, there, rkey, add);
			same_bytes(slot, DBL_OPCODE_ATOMIC_FA, flags, &sge, 1, 0, add);
		}
		doorbell_write_signal(&queue, slot, flags, there, rkey, add);
		same_bytes(slot, DBL_OPCODE_RDMA_WRITE, flags | DOORBELL_WORK_ORDERED, &add, sizeof(add), 1, 0);
		doorbell_write_nop(&queue, slot, flags);
		same_bytes(slot, DBL_OPCODE_NOP, flags, NULL, 0, 0, 0);
	}
	doorbell_write_nop(&queue, slot, 0);
	CHECK(doorbell_submit(&queue, slot, 1) == 0);
	CHECK(doorbell_wait(&queue, slot + 1, 20 * SECOND) == 0);
	tear_down();
}

/* What is lent is not the endpoint's, until it is reset. */
static void loans(void)
{
	doorbell_kernel_queue *other = (doorbell_kernel_queue *)&other;
	const doorbell_slice slice = {local_region, 0, 8};
	doorbell_work work;
	struct doorbell_queue view;
	uint32_t upto;

	set_up(4096, 4096);
	work = doorbell_work_write(&slice, 0, remote.addr, remote.rkey);
	CHECK(doorbell_post_send(ends[0], &work, NULL) == DOORBELL_ESTATE);
	CHECK(strstr(doorbell_last_error(), "owned by kernels") != NULL);
	CHECK(doorbell_kernel_queue_create(ends[0], DOORBELL_KERNELS_HOST, &other) == DOORBELL_ESTATE && other == NULL);
	CHECK(doorbell_kernel_queue_create(ends[0], 7, &other) == DOORBELL_ERANGE);
	CHECK(doorbell_kernel_queue_view(kernel_queue, &view, sizeof(view) - 8) == DOORBELL_EINVAL);
	/* The peer's end still sends and receives. */
	CHECK(doorbell_post_send(ends[1], &work, NULL) == 0);
	CHECK(doorbell_wait_cq(ends[1], DOORBELL_QUEUE_SEND, 20000, NULL) == DOORBELL_EINVAL);
	CHECK(doorbell_put(&queue, local.addr, local.lkey, 8, remote.addr, remote.rkey, 0, &upto) == 0);
	CHECK(doorbell_wait(&queue, upto, 20 * SECOND) == 0);
	CHECK(doorbell_kernel_queue_destroy(kernel_queue) == 0);
	CHECK(doorbell_post_send(ends[0], &work, NULL) == DOORBELL_ESTATE);
	CHECK(strstr(doorbell_last_error(), "reset it first") != NULL);
	CHECK(doorbell_endpoint_reset(ends[0]) == 0);
	CHECK(doorbell_endpoint_reset(ends[1]) == 0);
	connect_ends();
	CHECK(doorbell_post_send(ends[0], &work, NULL) == 0);
	/* In flight, or not collected: not to be lent. */
	CHECK(doorbell_kernel_queue_create(ends[0], DOORBELL_KERNELS_HOST, &other) == DOORBELL_ESTATE);
	{
		doorbell_completion completion;
		CHECK(doorbell_wait_cq(ends[0], DOORBELL_QUEUE_SEND, 20000, &completion) == 0);
	}
	/* With the counts that the endpoint has come to. */
	lend();
	CHECK(dbl_queue_state(&queue)->reserved == 1);
	CHECK(doorbell_put(&queue, local.addr, local.lkey, 8, remote.addr, remote.rkey, 0, &upto) == 0);
	CHECK(doorbell_wait(&queue, upto, 20 * SECOND) == 0);
	/* The endpoint goes first. */
	CHECK(doorbell_endpoint_destroy(ends[0]) == 0);
	ends[0] = NULL;
	CHECK(doorbell_put(&queue, local.addr, local.lkey, 8, remote.addr, remote.rkey, 0, &upto) == 0);
	CHECK(doorbell_wait(&queue, upto, 20 * SECOND) == 0);
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
	{"too_long_requests_take_no_slot", too_long_requests_take_no_slot},
	{"put_outlives_the_kernel_queue", put_outlives_the_kernel_queue},
	{"counts_wrap", counts_wrap},
	{"all_signaled", all_signaled},
	{"doorbell_is_left_to_the_lock_holder", doorbell_is_left_to_the_lock_holder},
	{"kinds", kinds},
	{"formats", formats},
	{"loans", loans},
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
