/*
 * The calls of warps and blocks (doorbell/collective.cuh, doorbell/trigger.h), by warps and blocks of threads of a processor: blocks.h has those,
 * kernels.cpp the kernels. tests/kernel_blocks.rs compiles it, with and without ThreadSanitizer:
 *
 *     blocks WHAT DEPTH CONTROL    see `cases`
 *
 * CONTROL is 0 or 1, direct or proxy. The last line it prints is "ok", or it exits with 1, or with 2 when a rule of CUDA's was broken.
 */
#include <errno.h>

#include <vector>

/* Before doorbell/queue.h: its hooks. */
#include "kernels.h"

#include "pair.h"

static const kernel_of_block *const all_blocks[BLOCKS_MOST] = {block_0, block_1, block_2};

static job work;

static uint32_t threads_of(blocks_index shape)
{
	return shape.x * shape.y * shape.z;
}

/* As many blocks of that shape; back when they are done. */
static void launch(kernel what, uint32_t block_count, blocks_index shape)
{
	kernel_of_block kernels[BLOCKS_MOST];
	job given = work;

	for (uint32_t block = 0; block < block_count; block++)
		kernels[block] = all_blocks[block][what];
	given.queue = queue;
	given.local = local;
	given.remote = remote;
	given.threads = threads_of(shape);
	if (local_region) {
		given.source = (uint64_t *)doorbell_region_pointer(local_region);
		given.target = (uint64_t *)doorbell_region_pointer(remote_region);
	}
	blocks_launch(kernels, block_count, shape, &given);
}

void turned()
{
	if (doorbell_device_progress(device) != 1)
		sched_yield();
}

/* --------------------------------------------------------------------------- the NIC's part, for ThreadSanitizer's eyes */

/* What is known of a slot that is done with: by its work request, and of an operation by its slot. */
struct note {
	uint32_t times, slot;
	bool is_signaled;
};
static std::vector<note> notes;
static uint32_t rings, rung;

static uint64_t *here(uint64_t address)
{
	CHECK(address - local.addr < doorbell_region_len_bytes(local_region));
	return (uint64_t *)doorbell_region_pointer(local_region) + (address - local.addr) / 8;
}

/*
 * The NIC is not compiled with ThreadSanitizer, so its accesses are made again here, by the thread that has found it done: it reads the work
 * request and what is to be sent, and writes what was brought. That all threads wrote those before, and read this after, is what the calls
 * are to see to.
 */
void freed(const struct doorbell_queue_view *lent, uint32_t from, uint32_t upto)
{
	for (uint32_t slot = from; slot != upto; slot++) {
		uint64_t wqe[DBL_WQEBB_BYTES / 8];
		uint32_t first, len_bytes;

		CHECK(dbl_load_dword(dbl_queue_mark(lent, slot)) == slot + 1);
		memcpy(wqe, (const uint8_t *)(uintptr_t)lent->ring + (size_t)(slot & lent->slot_mask) * DBL_WQEBB_BYTES, sizeof(wqe));
		memcpy(&first, wqe, sizeof(first));
		const uint32_t opcode = dbl_be32(first) & 0xff;
		const bool is_add = opcode == DBL_OPCODE_ATOMIC_FA;
		const uint64_t *data = &wqe[is_add ? 6 : 4];
		CHECK((dbl_be32(first) >> 8 & 0xffff) == (slot & 0xffff));
		memcpy(&len_bytes, data, sizeof(len_bytes));
		len_bytes = dbl_be32(len_bytes);
		/* mlx5dv.h: MLX5_INLINE_SEG. And what no one reads. */
		if (opcode == DBL_OPCODE_NOP || len_bytes >> 31 != 0 || dbl_be64(data[1]) == lent->sink)
			continue;
		volatile uint64_t *word = here(dbl_be64(data[1]));
		for (uint32_t at = 0; at < len_bytes / 8; at++) {
			const uint64_t value = word[at];
			if (is_add || opcode == DBL_OPCODE_RDMA_READ)
				word[at] = value;
		}
		if (notes.empty())
			continue;
		const size_t operation = is_add ? (dbl_be64(data[1]) - local.addr) / 8 - work.operations : (dbl_be64(wqe[2]) - remote.addr) / 8;
		CHECK(operation < notes.size());
		notes[operation].times++;
		notes[operation].slot = slot;
		notes[operation].is_signaled = (wqe[1] >> 24 & DBL_WR_SIGNALED) != 0;
	}
}

/* By the holder of the doorbell lock. */
void rang(const struct doorbell_queue_view *lent)
{
	const uint32_t now = dbl_load_dword(&dbl_queue_state(lent)->rung);

	rings += now != rung;
	rung = now;
}

/* -------------------------------------------------------------------------------------------------------------- loads */

/* Every operation of `puts` once, at its place and in its slot, and what its threads were told. */
static void check_puts(uint32_t block_count)
{
	const uint64_t *const source = (const uint64_t *)doorbell_region_pointer(local_region);
	const uint64_t *const target = (const uint64_t *)doorbell_region_pointer(remote_region);
	std::vector<uint8_t> seen(work.operations);
	uint64_t added = 0;
	uint32_t posted = 0;

	for (uint32_t block = 0; block < block_count; block++)
		for (uint32_t warp = 0; warp * LANES < work.threads; warp++)
			for (uint32_t round = 0; round < work.rounds; round++)
				for (uint32_t group = 0; group < work.groups; group++) {
					const uint32_t mask = mask_of(&work, warp, round, group), count = __popc(mask);
					uint32_t rank = 0, upto = 0;
					for (uint32_t lane = 0; lane < LANES; lane++) {
						if ((mask >> lane & 1) == 0)
							continue;
						const uint32_t at = operation_of(&work, block, warp * LANES + lane, round);
						const outcome told = work.outcomes[at];
						CHECK(told.code == DOORBELL_OK);
						if (rank == 0)
							upto = told.upto;
						CHECK(told.upto == upto);
						CHECK(notes[at].times == 1);
						CHECK(notes[at].slot == upto - count + rank);
						CHECK(notes[at].is_signaled == (rank + 1 == count));
						if (adds(round)) {
							const uint64_t was = source[work.operations + at];
							CHECK(was < work.operations && !seen[was]);
							seen[was] = 1;
							added++;
						} else {
							CHECK(target[at] == word_of(at));
						}
						rank++;
						posted++;
					}
				}
	CHECK(target[work.operations] == added && added > 0);
	/* And nothing besides. */
	for (const note &note : notes)
		posted -= note.times;
	CHECK(posted == 0);
}

/* Begins with slots of nothing, so that the counts wrap; those of the NIC, which have 16 bits, and, where kernels ring, ours of 32. */
static void nearly_wrap()
{
	uint32_t slot, left;

	if (control == DOORBELL_CONTROL_DIRECT)
		begin_at(0xffff0000);
	for (left = 65536 - 500; left != 0; left--) {
		CHECK(doorbell_device_reserve(&queue, 1, BOUND, &slot) == 0);
		doorbell_device_write_nop(&queue, slot, 0);
		CHECK(doorbell_device_submit(&queue, slot, 1) == 0);
	}
}

static void load(uint32_t block_count, blocks_index shape, uint32_t rounds, uint32_t groups)
{
	work.threads = threads_of(shape);
	work.operations = block_count * work.threads * rounds;
	work.rounds = rounds;
	work.groups = groups;
	set_up(16ull * work.operations, 8ull * work.operations + 8);
	nearly_wrap();
	const uint32_t begin = dbl_queue_state(&queue)->reserved;
	CHECK(doorbell_device_wait(&queue, begin, BOUND) == 0);
	std::vector<outcome> outcomes(work.operations);
	work.outcomes = outcomes.data();
	notes.assign(work.operations, note());
	rings = 0;
	rung = begin;
	launch(PUTS, block_count, shape);
	const uint32_t end = dbl_queue_state(&queue)->reserved;
	CHECK(end - begin > 500 && (end & 0xffff) < (begin & 0xffff));
	CHECK(control == DOORBELL_CONTROL_PROXY || end < begin);
	CHECK(doorbell_device_wait(&queue, end, BOUND) == 0);
	check_puts(block_count);
	/* One doorbell for each group. */
	if (groups == 1 && control == DOORBELL_CONTROL_DIRECT)
		CHECK(rings == rounds);
	notes.clear();
	tear_down();
}

static void a_warp()
{
	load(1, {LANES, 1, 1}, 72, 1);
}

static void groups_of_a_warp()
{
	load(1, {LANES, 1, 1}, 72, 3);
}

static void warps_and_blocks()
{
	/* Of one and a half warps, and of a block of three dimensions. */
	load(3, {48, 1, 1}, 24, 3);
	load(2, {8, 4, 2}, 24, 3);
}

/* Each block's signals as they come, behind what they tell of. */
static void *peer_of_block(void *argument)
{
	const uint32_t block = (uint32_t)(uintptr_t)argument;

	for (uint32_t round = 0; round < work.rounds; round++) {
		const uint32_t part = block * work.rounds + round;
		const uint64_t *const target = (const uint64_t *)doorbell_region_pointer(remote_region);
		while (__atomic_load_n(&target[work.operations + part], __ATOMIC_ACQUIRE) != word_of(part))
			turned();
		for (uint32_t thread = 0; thread < work.threads; thread++)
			CHECK(target[part * work.threads + thread] == word_of(part * work.threads + thread));
	}
	return NULL;
}

static void put_signal_and_get()
{
	const blocks_index shapes[] = {{48, 1, 1}, {4, 8, 2}};
	const uint32_t block_count = 2;

	for (const blocks_index &shape : shapes) {
		pthread_t peers[block_count];
		work.threads = threads_of(shape);
		work.rounds = 12;
		work.operations = block_count * work.rounds * work.threads;
		set_up(16ull * block_count * work.threads, 8ull * (work.operations + block_count * work.rounds));
		for (uint32_t block = 0; block < block_count; block++)
			CHECK(pthread_create(&peers[block], NULL, peer_of_block, (void *)(uintptr_t)block) == 0);
		launch(PUT_SIGNAL_AND_GET, block_count, shape);
		for (uint32_t block = 0; block < block_count; block++)
			CHECK(pthread_join(peers[block], NULL) == 0);
		tear_down();
	}
}

/* Each operation of a warp and of a block, in each round once: the peer's receives, its counter and the slots tell how many were made. */
static void scopes()
{
	const blocks_index shapes[] = {{48, 1, 1}, {8, 4, 2}};
	const uint32_t block_count = 2;

	for (const blocks_index &shape : shapes) {
		for (const bool by_warps : {true, false}) {
			const uint32_t threads = threads_of(shape), teams = block_count * (by_warps ? (threads + LANES - 1) / LANES : 1);
			work.threads = threads;
			work.rounds = 6;
			work.by_warps = by_warps;
			work.operations = teams * work.rounds;
			set_up(64 + (8ull * threads + 64) * teams, 64 + (8ull * threads + 64) * teams);
			for (uint32_t receive = 0; receive < work.operations; receive++)
				CHECK(doorbell_post_recv(ends[1], receive, NULL, 0, NULL) == 0);
			launch(SCOPES, block_count, shape);
			const uint64_t *const target = (const uint64_t *)doorbell_region_pointer(remote_region);
			CHECK(target[0] == work.operations);
			/* put, put_signal (two), signal, get, put_imm, fetch_add, put_inline */
			CHECK(dbl_queue_state(&queue)->reserved == 8 * work.operations);
			std::vector<uint8_t> seen(work.rounds * 64);
			for (uint32_t receive = 0; receive < work.operations; receive++) {
				doorbell_completion completion;
				CHECK(doorbell_wait_cq(ends[1], DOORBELL_QUEUE_RECV, 20000, &completion) == 0);
				CHECK(completion.imm < seen.size() && completion.imm % 64 < teams && !seen[completion.imm]);
				seen[completion.imm] = 1;
			}
			tear_down();
		}
	}
}

/* A lane that is late, for it waits for what another warp has sent, keeps no slots from going out. */
static void late_lane()
{
	uint64_t told_it = 0;

	set_up(4096, 4096);
	work.data = &told_it;
	launch(LATE_LANE, 1, {2 * LANES, 1, 1});
	CHECK(dbl_queue_state(&queue)->reserved == LANES + 1);
	tear_down();
}

/* ------------------------------------------------------------------------------------------------------------ failures */

static outcome outcomes_of_one[WARPS_MOST * LANES];

/* What the lanes of `mask` do, and the code that all of them get, and no other lane. */
static void expect_codes(kernel what, uint32_t mask, int code)
{
	for (outcome &outcome : outcomes_of_one)
		outcome = {77, 77};
	work.outcomes = outcomes_of_one;
	work.mask = mask;
	launch(what, 1, {LANES, 1, 1});
	for (uint32_t lane = 0; lane < LANES; lane++) {
		const int expected = (mask >> lane & 1) != 0 ? code : 77;
		if (outcomes_of_one[lane].code != expected)
			fprintf(stderr, "mask %#x, lane %u: code %d instead of %d\n", mask, lane, outcomes_of_one[lane].code, expected);
		CHECK(outcomes_of_one[lane].code == expected);
	}
}

/* One put by all of them together: it takes one slot. */
static void expect_together(uint32_t mask, uint64_t timeout_ns, int code)
{
	const uint32_t before = dbl_queue_state(&queue)->reserved, slots = code == DOORBELL_OK ? 1 : 0;

	work.timeout_ns = timeout_ns;
	expect_codes(ONE_PUT_TOGETHER, mask, code);
	for (uint32_t lane = 0; lane < LANES; lane++)
		CHECK(outcomes_of_one[lane].upto == ((mask >> lane & 1) != 0 && code == DOORBELL_OK ? before + 1 : 77));
	CHECK(dbl_queue_state(&queue)->reserved == before + slots);
}

/* One put by each of them. */
static void expect_one(uint32_t mask, uint64_t timeout_ns, int code)
{
	const uint32_t before = dbl_queue_state(&queue)->reserved;

	work.timeout_ns = timeout_ns;
	expect_codes(ONE_PUT, mask, code);
	for (uint32_t lane = 0; lane < LANES; lane++) {
		const bool has_upto = (mask >> lane & 1) != 0 && code == DOORBELL_OK;
		CHECK(outcomes_of_one[lane].upto == (has_upto ? before + __popc(mask) : 77));
	}
	CHECK(dbl_queue_state(&queue)->reserved == before + (code == DOORBELL_OK ? __popc(mask) : 0));
}

/* Of a block, of which all threads get those codes. */
static void expect_block(int code, int wait_code)
{
	work.outcomes = outcomes_of_one;
	work.timeout_ns = SECOND / 20;
	launch(ONE_SIGNAL, 1, {8, 5, 1});
	for (uint32_t thread = 0; thread < 40; thread++) {
		CHECK(outcomes_of_one[thread].code == code);
		CHECK((int)outcomes_of_one[thread].upto == wait_code);
	}
}

static void too_many_lanes()
{
	set_up(4096, 4096);
	CHECK(queue.capacity == 16);
	/* One for all has room. */
	expect_together(0xffffffff, BOUND, DOORBELL_OK);
	expect_together(0x80000001, BOUND, DOORBELL_OK);
	expect_together(0x00010000, BOUND, DOORBELL_OK);
	expect_one(0xffffffff, BOUND, DOORBELL_ERANGE);
	expect_one(0x8421ffff, BOUND, DOORBELL_ERANGE);
	expect_one(0xffff0000, BOUND, DOORBELL_OK);
	expect_one(0x80000000, BOUND, DOORBELL_OK);
	expect_codes(ONE_TOO_LONG, 0xf, DOORBELL_ERANGE);
	expect_one(0xf, BOUND, DOORBELL_OK);
	tear_down();
}

static void *abort_soon(void *)
{
	usleep(50000);
	abort_it();
	return NULL;
}

static void full_and_aborted()
{
	pthread_t aborting;

	set_up_waiting();
	CHECK(queue.capacity == 64);
	expect_one(0xfffffffe, 0, DOORBELL_OK);
	expect_one(0xaaaaaaaa, 0, DOORBELL_OK);
	/* Room for 17 more, and not for 18. */
	expect_one(0x3ffff, 0, DOORBELL_EFULL);
	expect_one(0xff0f00fc, SECOND / 20, DOORBELL_EFULL);
	expect_one(0xffff8000, 0, DOORBELL_OK);
	const uint64_t since_ns = dbl_now_ns();
	expect_one(0x80000000, SECOND / 10, DOORBELL_EFULL);
	CHECK(dbl_now_ns() - since_ns >= SECOND / 10);
	expect_together(0xf0f0f0f0, 0, DOORBELL_EFULL);
	expect_block(DOORBELL_EFULL, DOORBELL_ETIMEOUT);
	/* And an abort, while they wait for room. */
	CHECK(pthread_create(&aborting, NULL, abort_soon, NULL) == 0);
	expect_one(0x0ff0f000, BOUND, DOORBELL_EWORK);
	CHECK(pthread_join(aborting, NULL) == 0);
	CHECK(dbl_now_ns() - since_ns < BOUND - BOUND / 8);
	expect_one(0xffffffff, BOUND, DOORBELL_EWORK);
	expect_together(0xffffffff, BOUND, DOORBELL_EWORK);
	expect_block(DOORBELL_EWORK, DOORBELL_EWORK);
	CHECK(doorbell_endpoint_create(domain, &patient, &ends[1]) == 0);
	recover();
	expect_one(0xffffffff, BOUND, DOORBELL_OK);
	tear_down();
}

/* A completion in error: the call that makes it goes well, and the ones behind it do not. */
static void failed()
{
	set_up(4096, 4096);
	remote.rkey ^= 0x5500;
	expect_one(0x00ff0000, BOUND, DOORBELL_OK);
	CHECK(doorbell_device_wait(&queue, outcomes_of_one[16].upto, BOUND) == DOORBELL_EWORK);
	expect_one(0x00ff0000, BOUND, DOORBELL_EWORK);
	expect_one(0xffffffff, 0, DOORBELL_EWORK);
	recover();
	expect_one(0xffffffff, BOUND, DOORBELL_OK);
	/* Found when they have their slots. */
	remote.rkey ^= 0x5500;
	expect_codes(FAILURE_BETWEEN, 0xfffffff0, DOORBELL_EWORK);
	recover();
	tear_down();
}

/* ------------------------------------------------------------------------------------------------------------ triggers */

static dbl_control stream_control;
static uint64_t turn;
static uint32_t answered, told;

/* As the library makes them of one program: a wait for `answered` if there is one, then `told` becomes `value`; and a count. */
static doorbell_trigger trigger_of(uint64_t number, uint32_t awaited, uint32_t value)
{
	doorbell_trigger made = {};
	dbl_unit units[2] = {}, *unit = units;
	const uint32_t count = awaited ? 2 : 1;

	made.control = (uintptr_t)&stream_control;
	made.turn = (uintptr_t)&turn;
	made.number = number;
	made.words[0] = DBL_ITEM_TABLE | 2 << 8;
	made.words[1] = (uintptr_t)&answered;
	made.words[2] = (uintptr_t)&told;
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

static void begin(bool by_warps)
{
	stream_control = {};
	stream_control.lease_ns = 100 * SECOND;
	turn = 0;
	answered = told = 0;
	work.by_warps = by_warps;
}

/* The host's side of `ping`: sees that the turn has passed, what all threads wrote before, and answers. */
static void *answer(void *)
{
	for (uint32_t round = 0; round < work.rounds; round++) {
		while (__atomic_load_n(&turn, __ATOMIC_ACQUIRE) < 2 * (2 * round + 1))
			sched_yield();
		CHECK(__atomic_load_n(&told, __ATOMIC_RELAXED) == 2 * round + 1);
		for (uint32_t thread = 0; thread < work.threads; thread++) {
			CHECK(work.data[thread] == word_of(round * work.threads + thread));
			work.replies[thread] = ~work.data[thread];
		}
		doorbell_device_write_value32(&answered, round + 1);
	}
	return NULL;
}

static void ping()
{
	const blocks_index shapes[] = {{LANES, 1, 1}, {48, 1, 1}, {4, 4, 4}};

	for (const blocks_index &shape : shapes) {
		std::vector<doorbell_trigger> triggers;
		uint64_t data[WARPS_MOST * LANES], replies[WARPS_MOST * LANES];
		pthread_t host;

		begin(shape.x == LANES);
		work.threads = threads_of(shape);
		work.rounds = 24;
		work.data = data;
		work.replies = replies;
		for (uint32_t at = 0; at < 2 * work.rounds; at++)
			triggers.push_back(trigger_of(at, at % 2 == 0 ? 0 : at / 2 + 1, at + 1));
		work.triggers = triggers.data();
		CHECK(pthread_create(&host, NULL, answer, NULL) == 0);
		launch(PING, 1, shape);
		CHECK(pthread_join(host, NULL) == 0);
		CHECK(turn == 4 * work.rounds && stream_control.done == 2 * work.rounds && stream_control.stop == 0);
	}
}

/* Two warps of two blocks, or three blocks; the triggers are those of one stream. */
static void relay()
{
	for (const bool by_warps : {true, false}) {
		const uint32_t threads = 2 * LANES, size = by_warps ? LANES : threads, teams = 2 * threads / size;
		std::vector<doorbell_trigger> triggers;

		begin(by_warps);
		work.rounds = 12;
		std::vector<uint64_t> data(work.rounds * teams * size);
		work.data = data.data();
		for (uint32_t at = 0; at < work.rounds * teams; at++)
			triggers.push_back(trigger_of(at, 0, at + 1));
		work.triggers = triggers.data();
		launch(RELAY, 2, {threads, 1, 1});
		CHECK(turn == 2 * triggers.size() && told == triggers.size() && stream_control.done == triggers.size());
	}
}

/* One trigger, by a warp or a block of which all threads get that code. */
static void expect_code(const doorbell_trigger &trigger, uint64_t timeout_ns, int code)
{
	const blocks_index shape = {work.by_warps ? LANES : 40, 1, 1};

	for (outcome &outcome : outcomes_of_one)
		outcome.code = 77;
	work.outcomes = outcomes_of_one;
	work.triggers = &trigger;
	work.timeout_ns = timeout_ns;
	launch(EXECUTE, 1, shape);
	for (uint32_t thread = 0; thread < shape.x; thread++)
		CHECK(outcomes_of_one[thread].code == code);
}

static void codes_of_triggers()
{
	for (const bool by_warps : {true, false}) {
		begin(by_warps);
		const doorbell_trigger first = trigger_of(0, 0, 7), second = trigger_of(1, 0, 8), late = trigger_of(2, 1, 9);
		const doorbell_trigger last = trigger_of(3, 0, 10);
		expect_code(second, SECOND / 50, DOORBELL_ETIMEOUT);
		CHECK(turn == 0 && told == 0);
		expect_code(first, SECOND, DOORBELL_OK);
		expect_code(first, SECOND, DOORBELL_ESTATE);
		expect_code(second, 0, DOORBELL_OK);
		CHECK(told == 8 && stream_control.done == 2);
		expect_code(late, SECOND / 50, DOORBELL_ETIMEOUT);
		expect_code(late, SECOND, DOORBELL_ESTATE);
		expect_code(last, SECOND, DOORBELL_EWORK);
		CHECK(told == 8 && stream_control.stop == DBL_STOP_TIMED_OUT);
		const doorbell_trigger nothing = {};
		expect_code(nothing, 0, DOORBELL_OK);
	}
}

/* --------------------------------------------------------------------------------------- that blocks.h is what it says */

static void check(kernel what, uint32_t block_count, blocks_index shape)
{
	uint64_t data[WARPS_MOST * LANES];

	work.data = data;
	work.rounds = 25;
	launch(what, block_count, shape);
}

static void shuffle_alone()
{
	check(SHUFFLE_ALONE, 1, {LANES, 1, 1});
}

static void barriers()
{
	check(WARP_BARRIER, 1, {LANES, 1, 1});
	check(BLOCK_BARRIER, 1, {WARPS_MOST * LANES, 1, 1});
	check(OWN_SHARED, 3, {LANES / 2, 2, 2});
}

static const struct {
	const char *name;
	void (*run)();
} cases[] = {
	{"a_warp", a_warp},
	{"groups_of_a_warp", groups_of_a_warp},
	{"warps_and_blocks", warps_and_blocks},
	{"scopes", scopes},
	{"late_lane", late_lane},
	{"put_signal_and_get", put_signal_and_get},
	{"too_many_lanes", too_many_lanes},
	{"full_and_aborted", full_and_aborted},
	{"failed", failed},
	{"ping", ping},
	{"relay", relay},
	{"codes_of_triggers", codes_of_triggers},
	{"shuffle_alone", shuffle_alone},
	{"barriers", barriers},
};

int main(int argc, char **argv)
{
	CHECK(argc == 4);
	depth = (uint32_t)atoi(argv[2]);
	control = (uint32_t)atoi(argv[3]);
	for (const auto &one : cases) {
		if (strcmp(argv[1], one.name) == 0) {
			one.run();
			puts("ok");
			return 0;
		}
	}
	fprintf(stderr, "%s: no such case\n", argv[1]);
	return 1;
}
