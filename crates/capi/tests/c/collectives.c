/* Collective operations: every one between three ranks of this process, what is refused, and how ranks end. */
#define _POSIX_C_SOURCE 200809L

#include "expect.h"

#include <pthread.h>
#include <time.h>

enum { RANKS = 3, WORDS = 12, BLOCK = WORDS / RANKS, BYTES = WORDS * 4 };

struct rank {
	doorbell_communicator *communicator;
	doorbell_stream *stream;
	doorbell_collective *collective;
	doorbell_collective_ticket *ticket;
	uint32_t *input, *output;
	doorbell_slice in, out;
};

struct ranks {
	doorbell_region *region;
	struct rank at[RANKS];
};

static doorbell_message_queue *queue_of(const struct rig *rig)
{
	doorbell_message_config config;
	doorbell_endpoint_config endpoint;
	doorbell_message_queue *queue;

	WORKS(doorbell_message_config_init(&config, sizeof config));
	WORKS(doorbell_endpoint_config_init(&endpoint, sizeof endpoint));
	endpoint.wait_timeout_ms = SOON_MS;
	endpoint.room_timeout_ms = SOON_MS;
	config.endpoint = &endpoint;
	WORKS(doorbell_message_queue_create(rig->domain, &config, &queue));
	return queue;
}

static void make(const struct rig *rig, struct ranks *ranks)
{
	doorbell_message_queue *queues[RANKS][RANKS], *twice[RANKS];
	doorbell_message_address address;
	doorbell_communicator *none;
	unsigned char *memory;
	uint32_t i, j;

	for (i = 0; i < RANKS; i++)
		for (j = 0; j < RANKS; j++)
			queues[i][j] = i == j ? NULL : queue_of(rig);
	for (i = 0; i < RANKS; i++)
		for (j = 0; j < RANKS; j++)
			if (i != j) {
				WORKS(doorbell_message_queue_address(queues[j][i], &address));
				WORKS(doorbell_message_queue_connect(queues[i][j], &address));
			}
	twice[0] = NULL;
	twice[1] = twice[2] = queues[0][1];
	FAILS(DOORBELL_EINVAL, "twice", doorbell_communicator_create(0, twice, RANKS, &none));
	EXPECT(none == NULL);
	FAILS(DOORBELL_EINVAL, "`queues`", doorbell_communicator_create(0, NULL, RANKS, &none));
	twice[2] = (doorbell_message_queue *)(void *)rig->region;
	GIVES(DOORBELL_EHANDLE, doorbell_communicator_create(0, twice, RANKS, &none));
	/* Nothing was taken so far. */
	for (i = 0; i < RANKS; i++) {
		WORKS(doorbell_communicator_create(i, queues[i], RANKS, &ranks->at[i].communicator));
		GIVES((int)i, doorbell_communicator_rank(ranks->at[i].communicator));
		GIVES(RANKS, doorbell_communicator_size(ranks->at[i].communicator));
		WORKS(doorbell_stream_create_host("rank", 0, &ranks->at[i].stream));
	}
	GIVES(DOORBELL_EHANDLE, doorbell_message_queue_abort(queues[0][1]));
	GIVES(DOORBELL_EHANDLE, doorbell_communicator_create(0, queues[0], RANKS, &none));
	/* A queue that is missing: the others are gone. */
	twice[1] = queue_of(rig);
	twice[2] = NULL;
	FAILS(DOORBELL_ESTATE, "rank 2 has no queue", doorbell_communicator_create(0, twice, RANKS, &none));
	GIVES(DOORBELL_EHANDLE, doorbell_message_queue_abort(twice[1]));

	WORKS(doorbell_region_alloc(rig->domain, 2 * RANKS * BYTES, DOORBELL_ACCESS_ALL, &ranks->region));
	memory = doorbell_region_pointer(ranks->region);
	for (i = 0; i < RANKS; i++) {
		const doorbell_slice in = {ranks->region, 2 * i * BYTES, BYTES};
		const doorbell_slice out = {ranks->region, (2 * i + 1) * BYTES, BYTES};
		ranks->at[i].in = in;
		ranks->at[i].out = out;
		ranks->at[i].input = (uint32_t *)(void *)(memory + in.offset);
		ranks->at[i].output = (uint32_t *)(void *)(memory + out.offset);
	}
}

/* What a rank gives at an index. */
static uint32_t given(uint32_t rank, uint32_t index)
{
	return 100 * rank + index + 1;
}

static void fill_all(struct ranks *ranks)
{
	uint32_t i, j;

	for (i = 0; i < RANKS; i++)
		for (j = 0; j < WORDS; j++) {
			ranks->at[i].input[j] = given(i, j);
			ranks->at[i].output[j] = 0xeeeeeeee;
		}
}

static void *match(void *argument)
{
	struct rank *rank = argument;

	WORKS(doorbell_communicator_match_ahead(rank->communicator, rank->collective, SOON_MS));
	return NULL;
}

static void *measure(void *argument)
{
	struct rank *rank = argument;
	uint64_t latency_ns = 0, byte_ps = 0, work_ps = 0;

	WORKS(doorbell_communicator_measure_costs(rank->communicator, rank->stream, &rank->in, SOON_MS, &latency_ns,
						  &byte_ps, &work_ps));
	EXPECT(latency_ns > 0);
	/* Again, without places. */
	WORKS(doorbell_communicator_measure_costs(rank->communicator, rank->stream, NULL, SOON_MS, NULL, NULL, NULL));
	return NULL;
}

static void measure_all(struct ranks *ranks)
{
	pthread_t threads[RANKS];
	uint32_t i;

	for (i = 0; i < RANKS; i++)
		EXPECT(pthread_create(&threads[i], NULL, measure, &ranks->at[i]) == 0);
	for (i = 0; i < RANKS; i++)
		EXPECT(pthread_join(threads[i], NULL) == 0);
}

/*
 * All ranks match what they have prepared: each waits for the others, so each has a thread. An operation can be described while
 * another call has it: the first rank waits here until the others match, too.
 */
static void match_all(struct ranks *ranks)
{
	const struct timespec moment = {0, 1000000};
	doorbell_collective_plan plan;
	pthread_t threads[RANKS];
	uint32_t i;

	EXPECT(pthread_create(&threads[0], NULL, match, &ranks->at[0]) == 0);
	for (i = 0; i < 20; i++) {
		WORKS(doorbell_collective_describe(ranks->at[0].collective, &plan, sizeof(plan)));
		EXPECT(plan.matched == 0);
		nanosleep(&moment, NULL);
	}
	for (i = 1; i < RANKS; i++)
		EXPECT(pthread_create(&threads[i], NULL, match, &ranks->at[i]) == 0);
	for (i = 0; i < RANKS; i++)
		EXPECT(pthread_join(threads[i], NULL) == 0);
}

/* Launches what every rank has prepared, twice, and waits. It is matched before the second time. */
static void launch(struct ranks *ranks)
{
	uint32_t turn, i;

	for (turn = 0; turn < 2; turn++) {
		if (turn == 1)
			match_all(ranks);
		for (i = 0; i < RANKS; i++) {
			doorbell_collective_plan plan;
			WORKS(doorbell_collective_describe(ranks->at[i].collective, &plan, sizeof(plan)));
			EXPECT(plan.matched == turn);
		}
		for (i = 0; i < RANKS; i++) {
			struct rank *rank = &ranks->at[i];
			WORKS(doorbell_communicator_launch(rank->communicator, rank->stream, rank->collective,
							   &rank->ticket));
		}
		for (i = 0; i < RANKS; i++) {
			NOTIFIES(doorbell_collective_ticket, ranks->at[i].ticket);
			WORKS(doorbell_collective_ticket_wait(ranks->at[i].ticket, SOON_MS));
			GIVES(1, doorbell_collective_ticket_check(ranks->at[i].ticket));
			GIVES(0, doorbell_collective_ticket_failed_peer(ranks->at[i].ticket, NULL));
			WORKS(doorbell_collective_ticket_destroy(ranks->at[i].ticket));
		}
	}
	for (i = 0; i < RANKS; i++)
		WORKS(doorbell_collective_destroy(ranks->at[i].collective));
}

/* Prepares an operation on all ranks by CALL, in which `it` is the rank and `i` its number; fills memory, and launches. */
#define ON_ALL(ranks, CALL)                                                                                  \
	do {                                                                                                 \
		uint32_t i;                                                                                  \
		fill_all(ranks);                                                                             \
		for (i = 0; i < RANKS; i++) {                                                                \
			struct rank *it = &(ranks)->at[i];                                                   \
			WORKS(CALL);                                                                         \
		}                                                                                            \
		launch(ranks);                                                                               \
	} while (0)

static void moves(struct ranks *ranks)
{
	const uint64_t lens[RANKS] = {4, 8, 36};
	const uint32_t starts[RANKS] = {0, 1, 3};
	const uint64_t equal[RANKS] = {BYTES / 3, BYTES / 3, BYTES / 3};
	struct rank *at = ranks->at;
	uint32_t i, j;

	ON_ALL(ranks, doorbell_communicator_barrier(it->communicator, DOORBELL_ALGORITHM_DISSEMINATION, &it->collective));
	ON_ALL(ranks, doorbell_communicator_broadcast(it->communicator, i == 1 ? &it->in : &it->out, 1,
						      DOORBELL_ALGORITHM_SCATTER_GATHER, &it->collective));
	for (j = 0; j < WORDS; j++)
		EXPECT(at[0].output[j] == given(1, j) && at[2].output[j] == given(1, j));
	ON_ALL(ranks, (it->in.len_bytes = lens[i],
		       doorbell_communicator_gather(it->communicator, &it->in, i == 2 ? &it->out : NULL, lens, 2, 0,
						    &it->collective)));
	for (i = 0; i < RANKS; i++)
		for (j = 0; j < lens[i] / 4; j++)
			EXPECT(at[2].output[starts[i] + j] == given(i, j));
	ON_ALL(ranks, (it->in.len_bytes = lens[i],
		       doorbell_communicator_all_gather(it->communicator, &it->in, &it->out, lens,
							DOORBELL_ALGORITHM_BRUCK, &it->collective)));
	for (i = 0; i < RANKS; i++)
		for (j = 0; j < lens[i] / 4; j++)
			EXPECT(at[0].output[starts[i] + j] == given(i, j) && at[1].output[starts[i] + j] == given(i, j));
	for (i = 0; i < RANKS; i++)
		at[i].in.len_bytes = BYTES;
	ON_ALL(ranks, (it->out.len_bytes = lens[i],
		       doorbell_communicator_scatter(it->communicator, i == 0 ? &it->in : NULL, &it->out, lens, 0, 0,
						     &it->collective)));
	for (i = 0; i < RANKS; i++)
		for (j = 0; j < WORDS; j++)
			EXPECT(at[i].output[j] == (j < lens[i] / 4 ? given(0, starts[i] + j) : 0xeeeeeeee));
	for (i = 0; i < RANKS; i++)
		at[i].out.len_bytes = BYTES;
	/* In place: each rank's block of the output is there. */
	ON_ALL(ranks, (it->output[i * BLOCK] = 7 + i, doorbell_communicator_all_gather(it->communicator, NULL, &it->out,
			equal, DOORBELL_ALGORITHM_RING, &it->collective)));
	for (i = 0; i < RANKS; i++)
		for (j = 0; j < RANKS; j++)
			EXPECT(at[i].output[j * BLOCK] == 7 + j);
	ON_ALL(ranks, doorbell_communicator_all_to_all(it->communicator, &it->in, &it->out, DOORBELL_ALGORITHM_BRUCK,
						       &it->collective));
	for (i = 0; i < RANKS; i++)
		for (j = 0; j < WORDS; j++)
			EXPECT(at[i].output[j] == given(j / BLOCK, i * BLOCK + j % BLOCK));
	ON_ALL(ranks, doorbell_communicator_all_to_all_v(it->communicator, &it->in, &it->out, equal, equal, 0,
							 &it->collective));
	for (i = 0; i < RANKS; i++)
		for (j = 0; j < WORDS; j++)
			EXPECT(at[i].output[j] == given(j / BLOCK, i * BLOCK + j % BLOCK));
}

/* Each rank sends two messages to the next one, and one to itself. */
static void exchanges(struct ranks *ranks)
{
	struct rank *at = ranks->at;
	doorbell_slice sends[RANKS][3], receives[RANKS][3];
	uint32_t to[RANKS][3], from[RANKS][3];
	doorbell_collective *none;
	uint32_t i, j;

	for (i = 0; i < RANKS; i++)
		for (j = 0; j < 3; j++) {
			to[i][j] = j == 2 ? i : (i + 1) % RANKS;
			from[i][j] = j == 2 ? i : (i + RANKS - 1) % RANKS;
			sends[i][j] = at[i].in;
			receives[i][j] = at[i].out;
			sends[i][j].offset += 4 * BLOCK * j;
			receives[i][j].offset += 4 * BLOCK * j;
			sends[i][j].len_bytes = receives[i][j].len_bytes = 4 * BLOCK;
		}
	ON_ALL(ranks, doorbell_communicator_exchange(it->communicator, to[i], sends[i], 3, from[i], receives[i], 3,
						     &it->collective));
	for (i = 0; i < RANKS; i++)
		for (j = 0; j < 3 * BLOCK; j++)
			EXPECT(at[i].output[j] == given(from[i][j / BLOCK], j));
	FAILS(DOORBELL_EINVAL, "`to`", doorbell_communicator_exchange(at[0].communicator, NULL, sends[0], 1, NULL, NULL, 0,
								      &none));
	FAILS(DOORBELL_EINVAL, "`receives`", doorbell_communicator_exchange(at[0].communicator, NULL, NULL, 0, from[0], NULL,
									    1, &none));
	FAILS(DOORBELL_ERANGE, "`receives from itself`", doorbell_communicator_exchange(at[0].communicator, to[0], sends[0], 3,
											from[0], receives[0], 2, &none));
	receives[0][1].offset -= 4;
	FAILS(DOORBELL_ESTATE, "overlaps", doorbell_communicator_exchange(at[0].communicator, to[0], sends[0], 3, from[0],
									  receives[0], 3, &none));
}

static void reduces(struct ranks *ranks)
{
	const uint64_t lens[RANKS] = {0, 8, 40};
	struct rank *at = ranks->at;
	uint32_t i, j;

	ON_ALL(ranks, doorbell_communicator_all_reduce(it->communicator, &it->in, &it->out, DOORBELL_TYPE_I32,
						       DOORBELL_REDUCE_SUM, DOORBELL_ALGORITHM_RING, &it->collective));
	for (i = 0; i < RANKS; i++)
		for (j = 0; j < WORDS; j++)
			EXPECT(at[i].output[j] == 300 + 3 * (j + 1) && at[i].input[j] == given(i, j));
	ON_ALL(ranks, doorbell_communicator_reduce(it->communicator, &it->in, i == 1 ? &it->out : NULL,
						   DOORBELL_TYPE_I32, DOORBELL_REDUCE_AVERAGE, 1, 0, &it->collective));
	for (j = 0; j < WORDS; j++)
		EXPECT(at[1].output[j] == given(1, j));
	ON_ALL(ranks, (it->out.len_bytes = lens[i],
		       doorbell_communicator_reduce_scatter(it->communicator, &it->in, &it->out, lens, DOORBELL_TYPE_I32,
							    DOORBELL_REDUCE_MAX, 0, &it->collective)));
	for (j = 0; j < 10; j++)
		EXPECT(at[2].output[j] == given(2, 2 + j));
	for (i = 0; i < RANKS; i++)
		at[i].out.len_bytes = BYTES;
}

static void refuses(const struct rig *rig, struct ranks *ranks)
{
	const uint64_t lens[RANKS] = {4, 4, 4};
	struct rank *at = ranks->at;
	doorbell_slice odd = at[0].in, whole = at[0].out;
	doorbell_collective_plan plan;
	doorbell_communicator *alone;
	doorbell_collective *none;
	char text[256];

	FAILS(DOORBELL_ERANGE, "`type`", doorbell_communicator_all_reduce(at[0].communicator, &at[0].in, &at[0].out, 7,
									  DOORBELL_REDUCE_SUM, 0, &none));
	EXPECT(none == NULL);
	FAILS(DOORBELL_ERANGE, "`op`", doorbell_communicator_all_reduce(at[0].communicator, &at[0].in, &at[0].out, 0, 4, 0,
									&none));
	FAILS(DOORBELL_ERANGE, "`algorithm`", doorbell_communicator_barrier(at[0].communicator, 12, &none));
	FAILS(DOORBELL_ESTATE, "dissemination",
	      doorbell_communicator_barrier(at[0].communicator, DOORBELL_ALGORITHM_RING, &none));
	/* Three ranks are no power of two. */
	whole.len_bytes = 12;
	GIVES(DOORBELL_ESTATE, doorbell_communicator_all_gather(at[0].communicator, NULL, &whole, lens,
								DOORBELL_ALGORITHM_RECURSIVE_DOUBLING, &none));
	FAILS(DOORBELL_ERANGE, "`root`", doorbell_communicator_broadcast(at[0].communicator, &at[0].in, 3, 0, &none));
	FAILS(DOORBELL_EINVAL, "`input`", doorbell_communicator_all_to_all(at[0].communicator, NULL, &at[0].out, 0, &none));
	FAILS(DOORBELL_EINVAL, "`lens`", doorbell_communicator_all_gather(at[0].communicator, NULL, &at[0].out, NULL, 0,
									  &none));
	FAILS(DOORBELL_ERANGE, "output", doorbell_communicator_all_gather(at[0].communicator, NULL, &at[0].out, lens, 0,
									  &none));
	FAILS(DOORBELL_EINVAL, "pairwise", doorbell_communicator_all_to_all_v(at[0].communicator, &at[0].in, &at[0].out, lens,
									      lens, DOORBELL_ALGORITHM_BRUCK, &none));
	odd.len_bytes = 5;
	GIVES(DOORBELL_EALIGNMENT, doorbell_communicator_reduce(at[0].communicator, &odd, &at[0].out, DOORBELL_TYPE_F32,
								DOORBELL_REDUCE_SUM, 0, 0, &none));
	odd.len_bytes = 4;
	FAILS(DOORBELL_ESTATE, "is the root", doorbell_communicator_gather(at[0].communicator, &odd, NULL, lens, 0, 0, &none));

	WORKS(doorbell_communicator_all_reduce(at[0].communicator, &at[0].in, &at[0].out, DOORBELL_TYPE_F32,
					       DOORBELL_REDUCE_SUM, DOORBELL_ALGORITHM_RING, &at[0].collective));
	WORKS(doorbell_collective_describe(at[0].collective, &plan, sizeof plan));
	EXPECT(plan.struct_size == sizeof plan && plan.algorithm == DOORBELL_ALGORITHM_RING);
	EXPECT(plan.messages == 4 && plan.sent_bytes == 4 * BYTES / 3 && plan.predicted_ns > 4 * 3000);
	/* A message is dear: the algorithm with the fewest is chosen. */
	WORKS(doorbell_communicator_set_costs(at[0].communicator, 1000000000, 0, 0));
	WORKS(doorbell_communicator_all_reduce(at[0].communicator, &at[0].in, &at[0].out, DOORBELL_TYPE_F32,
					       DOORBELL_REDUCE_SUM, DOORBELL_ALGORITHM_AUTO, &none));
	WORKS(doorbell_collective_describe(none, &plan, sizeof plan));
	EXPECT(plan.algorithm == DOORBELL_ALGORITHM_RECURSIVE_DOUBLING && plan.predicted_ns >= 1000000000);
	WORKS(doorbell_collective_destroy(none));
	WORKS(doorbell_communicator_set_costs(at[0].communicator, 3000, 100, 200));
	/* It belongs to the communicator that has prepared it. */
	GIVES(DOORBELL_EFOREIGN,
	      doorbell_communicator_launch(at[1].communicator, at[1].stream, at[0].collective, &at[1].ticket));
	EXPECT(at[1].ticket == NULL);
	WORKS(doorbell_collective_destroy(at[0].collective));
	GIVES(DOORBELL_EHANDLE, doorbell_collective_destroy(at[0].collective));
	GIVES(DOORBELL_EHANDLE,
	      doorbell_communicator_launch(at[0].communicator, at[0].stream, at[0].collective, NULL));

	WORKS(doorbell_communicator_create_alone(rig->domain, &alone));
	GIVES(1, doorbell_communicator_size(alone));
	FAILS(DOORBELL_EINVAL, "single rank", doorbell_communicator_path(alone, NULL, text, sizeof text));
	WORKS(doorbell_communicator_all_reduce(alone, &at[0].in, &at[0].out, DOORBELL_TYPE_I64, DOORBELL_REDUCE_MIN, 0, &none));
	fill_all(ranks);
	WORKS(doorbell_communicator_launch(alone, at[0].stream, none, NULL));
	WORKS(doorbell_stream_synchronize(at[0].stream, SOON_MS));
	EXPECT(memcmp(at[0].input, at[0].output, BYTES) == 0);
	WORKS(doorbell_collective_destroy(none));
	WORKS(doorbell_communicator_destroy(alone));
}

static void ends(struct ranks *ranks)
{
	struct rank *at = ranks->at;
	doorbell_failure failure;
	uint32_t control = 99, peer = 99, i;
	char text[1024];

	for (i = 0; i < RANKS; i++)
		WORKS(doorbell_communicator_finish(at[i].communicator, SOON_MS));
	GIVES(0, doorbell_communicator_failure(at[0].communicator, &peer, &failure, text, sizeof text));
	EXPECT(doorbell_communicator_path(at[0].communicator, &control, text, sizeof text) > 0);
	EXPECT(control <= DOORBELL_CONTROL_SYNC && peer == 99);
	WORKS(doorbell_communicator_barrier(at[0].communicator, 0, &at[0].collective));
	if (control != DOORBELL_CONTROL_SYNC) {
		/* The others do not come. */
		WORKS(doorbell_communicator_launch(at[0].communicator, at[0].stream, at[0].collective, &at[0].ticket));
		GIVES(DOORBELL_ETIMEOUT, doorbell_collective_ticket_wait(at[0].ticket, 20));
		GIVES(0, doorbell_collective_ticket_check(at[0].ticket));
		WORKS(doorbell_communicator_abort(at[0].communicator));
		GIVES(DOORBELL_EWORK, doorbell_collective_ticket_wait(at[0].ticket, SOON_MS));
		GIVES(1, doorbell_collective_ticket_failed_peer(at[0].ticket, &peer));
		EXPECT(peer == 1 || peer == 2);
		WORKS(doorbell_collective_ticket_destroy(at[0].ticket));
	} else
		WORKS(doorbell_communicator_abort(at[0].communicator));
	peer = 99;
	EXPECT(doorbell_communicator_failure(at[0].communicator, &peer, &failure, text, sizeof text) > 0);
	EXPECT(failure.cause == DOORBELL_CAUSE_ABORTED && (peer == 1 || peer == 2));
	GIVES(DOORBELL_EWORK,
	      doorbell_communicator_launch(at[0].communicator, at[1].stream, at[0].collective, NULL));
	for (i = 0; i < RANKS; i++) {
		WORKS(doorbell_communicator_destroy(at[i].communicator));
		WORKS(doorbell_stream_destroy(at[i].stream));
	}
	GIVES(DOORBELL_EHANDLE, doorbell_communicator_abort(at[0].communicator));
	WORKS(doorbell_collective_destroy(at[0].collective));
	WORKS(doorbell_communicator_destroy(NULL));
	WORKS(doorbell_collective_destroy(NULL));
	WORKS(doorbell_collective_ticket_destroy(NULL));
	WORKS(doorbell_region_destroy(ranks->region));
}

int main(void)
{
	struct rig rig;
	struct ranks ranks;

	rig_make(&rig);
	make(&rig, &ranks);
	moves(&ranks);
	exchanges(&ranks);
	reduces(&ranks);
	refuses(&rig, &ranks);
	measure_all(&ranks);
	moves(&ranks);
	ends(&ranks);
	rig_end(&rig);
	puts("done");
	return 0;
}
