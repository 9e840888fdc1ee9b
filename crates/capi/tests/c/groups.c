/* Groups and stores: in one process by threads, or one rank of a launcher's job with the argument "launched". */
#define _POSIX_C_SOURCE 200809L

#include "expect.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 3, CHUNK = 64 };

/* Each rank writes its number into the memory of the one after it, and a value goes round by the store. */
static void goes_round(doorbell_group *group)
{
	const uint32_t rank = (uint32_t)doorbell_group_rank(group), size = (uint32_t)doorbell_group_size(group);
	const uint32_t next = (rank + 1) % size, before = (rank + size - 1) % size;
	doorbell_endpoint *to_next, *from_before, *again;
	doorbell_domain *domain;
	doorbell_region *region;
	doorbell_remote own, *all;
	doorbell_completion completion;
	doorbell_work work;
	unsigned char *memory;
	char key[32];
	uint32_t value = 7 * rank, got = 0, failed = 99;

	WORKS(doorbell_group_domain(group, &domain));
	WORKS(doorbell_region_alloc(domain, 2 * CHUNK, DOORBELL_ACCESS_ALL, &region));
	memory = doorbell_region_pointer(region);
	memset(memory, (int)rank + 1, CHUNK);
	WORKS(doorbell_region_remote(region, &own));
	all = calloc(size, sizeof *all);
	EXPECT(all);
	WORKS(doorbell_group_gather(group, &own, sizeof own, all, DOORBELL_DEFAULT_TIMEOUT));
	EXPECT(memcmp(&all[rank], &own, sizeof own) == 0);

	FAILS(DOORBELL_ESTATE, "this process", doorbell_group_endpoint(group, rank, &again));
	FAILS(DOORBELL_ERANGE, "`peer`", doorbell_group_endpoint(group, size, &again));
	WORKS(doorbell_group_endpoint(group, next, &to_next));
	if (next != before)
		WORKS(doorbell_group_endpoint(group, before, &from_before));
	else
		from_before = NULL;
	FAILS(DOORBELL_ESTATE, "was taken before", doorbell_group_endpoint(group, next, &again));
	EXPECT(again == NULL);
	GIVES(1, doorbell_endpoint_is_connected(to_next));
	{
		const doorbell_slice slice = {region, 0, CHUNK};
		work = doorbell_work_write(&slice, 1, all[next].addr + CHUNK, all[next].rkey);
		WORKS(doorbell_post_send(to_next, &work, NULL));
		WORKS(doorbell_wait_cq(to_next, DOORBELL_QUEUE_SEND, SOON_MS, &completion));
	}
	snprintf(key, sizeof key, "value %u", rank);
	WORKS(doorbell_group_set(group, key, &value, sizeof value, SOON_MS));
	snprintf(key, sizeof key, "value %u", before);
	FAILS(DOORBELL_ERANGE, "`capacity`", doorbell_group_get(group, key, &got, 1, SOON_MS));
	GIVES(sizeof got, doorbell_group_get(group, key, &got, sizeof got, SOON_MS));
	EXPECT(got == 7 * before);
	FAILS(DOORBELL_ETIMEOUT, "", doorbell_group_get(group, "nobody's", &got, sizeof got, 20));
	WORKS(doorbell_group_barrier(group, SOON_MS));
	EXPECT(memory[CHUNK] == before + 1 && memory[2 * CHUNK - 1] == before + 1);
	WORKS(doorbell_group_check(group, 0, &failed));
	EXPECT(failed == 99);

	free(all);
	WORKS(doorbell_endpoint_destroy(to_next));
	WORKS(doorbell_endpoint_destroy(from_before));
	WORKS(doorbell_region_destroy(region));
	WORKS(doorbell_domain_destroy(domain));
}

/* Further endpoints beside the group's own: two to each rank, this one too, each with a word of its own. */
static void further_endpoints(doorbell_group *group)
{
	const uint32_t rank = (uint32_t)doorbell_group_rank(group), size = (uint32_t)doorbell_group_size(group);
	doorbell_group_peer *peers = calloc(2 * size, sizeof *peers);
	doorbell_endpoint **endpoints = calloc(2 * size, sizeof *endpoints), *again = NULL;
	doorbell_endpoint_config config;
	doorbell_domain *domain;
	doorbell_region *region;
	uint32_t *words, count = 0, i;

	EXPECT(peers && endpoints);
	for (; count < 2 * size; count++) {
		peers[count].rank = count / 2;
		peers[count].tag = 7 + count % 2;
	}
	WORKS(doorbell_endpoint_config_init(&config, sizeof config));
	config.send_depth = 4;
	WORKS(doorbell_group_endpoints(group, peers, count, &config, endpoints));
	FAILS(DOORBELL_ESTATE, "was opened before", doorbell_group_endpoints(group, peers, 1, NULL, &again));
	EXPECT(again == NULL);
	peers[0].reserved = 1;
	FAILS(DOORBELL_ERANGE, "reserved", doorbell_group_endpoints(group, peers, 1, NULL, &again));
	peers[0].reserved = 0;
	memset(&again, 0xff, sizeof again);
	GIVES(DOORBELL_EINVAL, doorbell_group_endpoints(NULL, peers, 1, NULL, &again));
	EXPECT(again == NULL);
	FAILS(DOORBELL_EINVAL, "`endpoints`", doorbell_group_endpoints(group, peers, 1, NULL, NULL));
	FAILS(DOORBELL_EINVAL, "`peers`", doorbell_group_endpoints(group, NULL, 1, NULL, &again));
	WORKS(doorbell_group_endpoints(group, NULL, 0, NULL, NULL));
	WORKS(doorbell_group_domain(group, &domain));
	WORKS(doorbell_region_alloc(domain, 4 * count, DOORBELL_ACCESS_ALL, &region));
	words = doorbell_region_pointer(region);
	for (i = 0; i < count; i++) {
		const doorbell_slice into = {region, 4 * i, 4};
		WORKS(doorbell_post_recv(endpoints[i], 0, &into, 1, NULL));
	}
	WORKS(doorbell_group_barrier(group, SOON_MS));
	for (i = 0; i < count; i++) {
		const uint32_t word = 100 * rank + (uint32_t)peers[i].tag;
		const doorbell_work work = doorbell_work_send_inline(&word, sizeof word);
		WORKS(doorbell_post_send(endpoints[i], &work, NULL));
	}
	for (i = 0; i < count; i++) {
		doorbell_completion completion;
		WORKS(doorbell_wait_cq(endpoints[i], DOORBELL_QUEUE_RECV, SOON_MS, &completion));
		EXPECT(words[i] == 100 * peers[i].rank + peers[i].tag);
	}
	WORKS(doorbell_group_barrier(group, SOON_MS));
	for (i = 0; i < count; i++)
		WORKS(doorbell_endpoint_destroy(endpoints[i]));
	WORKS(doorbell_region_destroy(region));
	WORKS(doorbell_domain_destroy(domain));
	free(peers);
	free(endpoints);
}

/* Each rank sends its number to all others, by two tags, and the queues of a call are those of its list. */
static void messages(doorbell_group *group)
{
	const uint32_t rank = (uint32_t)doorbell_group_rank(group), size = (uint32_t)doorbell_group_size(group);
	doorbell_group_peer *peers = calloc(2 * size, sizeof *peers);
	doorbell_message_queue **queues = calloc(2 * size, sizeof *queues), *again = NULL;
	doorbell_domain *domain;
	doorbell_region *region;
	uint32_t *words, count = 0, i;

	EXPECT(peers && queues);
	for (i = 0; i < 2 * size; i++)
		if (i / 2 != rank) {
			peers[count].rank = i / 2;
			peers[count++].tag = 1000000000000 + i % 2;
		}
	WORKS(doorbell_group_message_queues(group, peers, count, NULL, queues));
	FAILS(DOORBELL_ESTATE, "was opened before", doorbell_group_message_queues(group, peers, 1, NULL, &again));
	EXPECT(again == NULL);
	peers[0].reserved = 1;
	FAILS(DOORBELL_ERANGE, "reserved", doorbell_group_message_queues(group, peers, 1, NULL, &again));
	peers[0].reserved = 0;
	{
		doorbell_message_config config;
		WORKS(doorbell_message_config_init(&config, sizeof config));
		config.reserved = 1;
		memset(&again, 0xff, sizeof again);
		FAILS(DOORBELL_ERANGE, "`reserved`", doorbell_group_message_queues(group, peers, 1, &config, &again));
		EXPECT(again == NULL);
		memset(&again, 0xff, sizeof again);
		GIVES(DOORBELL_EINVAL, doorbell_group_message_queues(NULL, peers, 1, NULL, &again));
		EXPECT(again == NULL);
		FAILS(DOORBELL_EINVAL, "`queues`", doorbell_group_message_queues(group, peers, 1, NULL, NULL));
	}
	peers[0].rank = rank;
	FAILS(DOORBELL_ESTATE, "this process", doorbell_group_message_queues(group, peers, 1, NULL, &again));
	WORKS(doorbell_group_message_queues(group, NULL, 0, NULL, NULL));
	WORKS(doorbell_group_domain(group, &domain));
	WORKS(doorbell_region_alloc(domain, 8 * count + 8, DOORBELL_ACCESS_ALL, &region));
	words = doorbell_region_pointer(region);
	for (i = 0; i < count; i++) {
		const doorbell_slice from = {region, 4 * i, 4};
		words[i] = 100 * rank + (uint32_t)(peers[i].tag & 1);
		WORKS(doorbell_message_queue_send_now(queues[i], &from, 1, SOON_MS));
	}
	for (i = 0; i < count; i++) {
		const doorbell_slice to = {region, 4 * (count + i), 4};
		const uint32_t peer = i / 2 + (i / 2 >= rank);
		WORKS(doorbell_message_queue_recv_now(queues[i], &to, 1, NULL, SOON_MS));
		EXPECT(words[count + i] == 100 * peer + i % 2);
	}
	for (i = 0; i < count; i++)
		WORKS(doorbell_message_queue_finish(queues[i], SOON_MS));
	WORKS(doorbell_group_barrier(group, SOON_MS));
	for (i = 0; i < count; i++)
		WORKS(doorbell_message_queue_destroy(queues[i]));
	WORKS(doorbell_region_destroy(region));
	WORKS(doorbell_domain_destroy(domain));
	free(peers);
	free(queues);
}

/* Each rank sends its number to all ranks, in another order, and takes the numbers as they come. */
static void matches(doorbell_group *group)
{
	const uint32_t rank = (uint32_t)doorbell_group_rank(group), size = (uint32_t)doorbell_group_size(group);
	uint32_t *order = calloc(size, sizeof *order), *words, seen = 0, i;
	doorbell_matcher *matcher, *again;
	doorbell_envelope envelope;
	doorbell_domain *domain;
	doorbell_region *region;
	doorbell_slice from, to;

	EXPECT(order);
	for (i = 0; i < size; i++)
		order[i] = size - 1 - i;
	WORKS(doorbell_group_matcher(group, order, size, 8, NULL, &matcher));
	if (size > 1)
		FAILS(DOORBELL_ESTATE, "was opened before", doorbell_group_matcher(group, NULL, 0, 8, NULL, &again));
	order[0] = order[size - 1] = rank;
	if (size > 1)
		FAILS(DOORBELL_ESTATE, "there twice", doorbell_group_matcher(group, order, size, 9, NULL, &again));
	WORKS(doorbell_group_domain(group, &domain));
	WORKS(doorbell_region_alloc(domain, 16, DOORBELL_ACCESS_ALL, &region));
	words = doorbell_region_pointer(region);
	words[0] = rank;
	from.region = to.region = region;
	from.offset = 0;
	to.offset = 8;
	from.len_bytes = to.len_bytes = 4;
	for (i = 0; i < size; i++)
		WORKS(doorbell_matcher_send_now(matcher, i, rank, &from, 1, SOON_MS));
	for (i = 0; i < size; i++) {
		WORKS(doorbell_matcher_recv_now(matcher, DOORBELL_ANY_PEER, 0, DOORBELL_ANY_TAG, &to, 1, &envelope, SOON_MS));
		EXPECT(envelope.tag == words[2] && envelope.peer == size - 1 - words[2] && envelope.len_bytes == 4);
		seen |= 1u << words[2];
	}
	EXPECT(seen == (1u << size) - 1);
	WORKS(doorbell_matcher_finish(matcher, SOON_MS));
	WORKS(doorbell_group_barrier(group, SOON_MS));
	WORKS(doorbell_matcher_destroy(matcher));
	WORKS(doorbell_region_destroy(region));
	WORKS(doorbell_domain_destroy(domain));
	free(order);
}

/* The ranks, in another order, add up their numbers; the tag of the communicator is its own. */
static void adds_up(doorbell_group *group)
{
	const uint32_t rank = (uint32_t)doorbell_group_rank(group), size = (uint32_t)doorbell_group_size(group);
	uint32_t *order = calloc(size, sizeof *order), *words, i;
	doorbell_communicator *communicator, *again;
	doorbell_collective *sum;
	doorbell_collective_ticket *ticket;
	doorbell_domain *domain;
	doorbell_region *region;
	doorbell_stream *stream;
	doorbell_slice in, out;

	EXPECT(order);
	for (i = 0; i < size; i++)
		order[i] = size - 1 - i;
	WORKS(doorbell_group_communicator(group, order, size, 5, NULL, &communicator));
	GIVES((int)(size - 1 - rank), doorbell_communicator_rank(communicator));
	FAILS(DOORBELL_ESTATE, "was opened before", doorbell_group_communicator(group, NULL, 0, 5, NULL, &again));
	EXPECT(again == NULL);
	order[0] = order[1];
	FAILS(DOORBELL_ESTATE, "", doorbell_group_communicator(group, order, size, 6, NULL, &again));
	WORKS(doorbell_group_domain(group, &domain));
	WORKS(doorbell_region_alloc(domain, 16, DOORBELL_ACCESS_ALL, &region));
	WORKS(doorbell_stream_create_host("sum", 0, &stream));
	words = doorbell_region_pointer(region);
	words[0] = rank + 1;
	in.region = out.region = region;
	in.offset = 0;
	out.offset = 8;
	in.len_bytes = out.len_bytes = 4;
	WORKS(doorbell_communicator_all_reduce(communicator, &in, &out, DOORBELL_TYPE_I32, DOORBELL_REDUCE_SUM,
					       DOORBELL_ALGORITHM_AUTO, &sum));
	WORKS(doorbell_communicator_launch(communicator, stream, sum, &ticket));
	WORKS(doorbell_collective_ticket_wait(ticket, SOON_MS));
	EXPECT(words[2] == size * (size + 1) / 2);
	WORKS(doorbell_communicator_finish(communicator, SOON_MS));
	WORKS(doorbell_group_barrier(group, SOON_MS));
	WORKS(doorbell_collective_ticket_destroy(ticket));
	WORKS(doorbell_collective_destroy(sum));
	WORKS(doorbell_communicator_destroy(communicator));
	WORKS(doorbell_stream_destroy(stream));
	WORKS(doorbell_region_destroy(region));
	WORKS(doorbell_domain_destroy(domain));
	free(order);
}

/* What the group has opened for itself is to be asked like any other device. */
static void device_comes_from_the_environment(doorbell_group *group)
{
	char text[4096];
	doorbell_device *device;
	doorbell_domain *domain;

	WORKS(doorbell_group_domain(group, &domain));
	WORKS(doorbell_domain_device(domain, &device));
	EXPECT(doorbell_device_describe(device, text, sizeof text) > 0);
	/* Without how it is to be used. */
	EXPECT(strncmp(text, getenv("DOORBELL_DEVICE"), strcspn(getenv("DOORBELL_DEVICE"), ",")) == 0);
	WORKS(doorbell_device_close(device));
	WORKS(doorbell_domain_destroy(domain));
}

struct rank {
	pthread_t thread;
	uint32_t number;
	int fails;
	const char *address;
	doorbell_domain *domain;
};

static void *member(void *argument)
{
	const struct rank *rank = argument;
	doorbell_group_config config;
	doorbell_endpoint_config endpoint_config;
	doorbell_group *group;
	doorbell_endpoint *endpoint;
	uint32_t failed = 99;

	WORKS(doorbell_group_config_init(&config, sizeof config));
	EXPECT(config.size == 0 && config.timeout_ms == 60000 && !config.endpoint);
	WORKS(doorbell_endpoint_config_init(&endpoint_config, sizeof endpoint_config));
	endpoint_config.send_depth = 16;
	config.rank = rank->number;
	config.size = RANKS;
	config.address = rank->address;
	config.token = "secret";
	config.token_len_bytes = 6;
	config.timeout_ms = SOON_MS;
	config.endpoint = &endpoint_config;
	WORKS(doorbell_group_join(rank->domain, &config, &group));
	if (!rank->fails) {
		goes_round(group);
		further_endpoints(group);
		messages(group);
		matches(group);
		adds_up(group);
		WORKS(doorbell_group_leave(group));
		return NULL;
	}
	/* The last rank ends without leaving: the failure is reported to the others, and their endpoints fail. */
	if (rank->number == RANKS - 1) {
		WORKS(doorbell_group_endpoint(group, 0, &endpoint));
		WORKS(doorbell_group_barrier(group, SOON_MS));
		WORKS(doorbell_endpoint_destroy(endpoint));
		WORKS(doorbell_group_destroy(group));
		return NULL;
	}
	WORKS(doorbell_group_barrier(group, SOON_MS));
	if (rank->number == 0) {
		int code;
		time_t begun = time(NULL);
		/* Two seconds may not be enough for the last rank, which has yet to end. */
		while ((code = doorbell_group_check(group, 1, &failed)) == 0)
			EXPECT(time(NULL) - begun < SOON_MS / 1000);
		GIVES(DOORBELL_ERANK, code);
		EXPECT(failed == RANKS - 1);
	}
	FAILS(DOORBELL_ERANK, "rank 2", doorbell_group_barrier(group, SOON_MS));
	GIVES(DOORBELL_ERANK, doorbell_group_check(group, 0, NULL));
	FAILS(DOORBELL_ERANK, "rank 2", doorbell_group_endpoint(group, RANKS - 1, &endpoint));
	{
		uint32_t ranks[RANKS] = {9, 9, 9};
		doorbell_group *smaller;
		FAILS(DOORBELL_ERANGE, "`capacity`", doorbell_group_shrink(group, ranks, RANKS - 1, &smaller));
		EXPECT(smaller == NULL);
		WORKS(doorbell_group_shrink(group, ranks, RANKS, &smaller));
		EXPECT(ranks[0] == 0 && ranks[1] == 1 && ranks[2] == 9);
		GIVES(RANKS - 1, doorbell_group_size(smaller));
		GIVES((int)rank->number, doorbell_group_rank(smaller));
		adds_up(smaller);
		WORKS(doorbell_group_leave(smaller));
	}
	FAILS(DOORBELL_ERANK, "rank 2", doorbell_group_leave(group));
	return NULL;
}

static void in_this_process(doorbell_domain *domain, int fails, void *(*body)(void *))
{
	static unsigned int port = 20000;
	const unsigned int pid = (unsigned int)getpid();
	struct rank ranks[RANKS];
	char address[64];
	uint32_t i;

	/* Of this process and this call alone, and below the ports that the kernel gives away. */
	snprintf(address, sizeof address, "127.%u.%u.%u:%u", pid >> 16 & 255, pid >> 8 & 255, pid & 255, port++);
	for (i = 0; i < RANKS; i++) {
		ranks[i].number = i;
		ranks[i].fails = fails;
		ranks[i].address = address;
		ranks[i].domain = domain;
		EXPECT(pthread_create(&ranks[i].thread, NULL, body, &ranks[i]) == 0);
	}
	for (i = 0; i < RANKS; i++)
		EXPECT(pthread_join(ranks[i].thread, NULL) == 0);
}

/* A store without a group: of threads that have no device. */
static void *exchanger(void *argument)
{
	const struct rank *rank = argument;
	doorbell_endpoint_config endpoint_config;
	doorbell_group_config config;
	doorbell_store *store, *none;
	uint32_t own = 100 + rank->number, all[RANKS], failed = 99, i;
	char got[16];

	WORKS(doorbell_group_config_init(&config, sizeof config));
	config.rank = rank->number;
	config.size = RANKS;
	config.address = rank->address;
	config.token = "secret";
	config.token_len_bytes = 6;
	config.timeout_ms = SOON_MS;
	config.endpoint = &endpoint_config;
	FAILS(DOORBELL_EINVAL, "`endpoint`", doorbell_store_join(&config, &none));
	EXPECT(none == NULL);
	config.endpoint = NULL;
	WORKS(doorbell_store_join(&config, &store));
	GIVES((int)rank->number, doorbell_store_rank(store));
	GIVES(RANKS, doorbell_store_size(store));
	WORKS(doorbell_store_gather(store, &own, sizeof own, all, DOORBELL_DEFAULT_TIMEOUT));
	for (i = 0; i < RANKS; i++)
		EXPECT(all[i] == 100 + i);
	/* Ranks with different lengths get an error. */
	FAILS(DOORBELL_EMALFORMED, rank->number == 0 ? "rank 1 gave 2 bytes" : "rank 0 gave 1 bytes",
	      doorbell_store_gather(store, &own, 1 + (rank->number != 0), all, SOON_MS));
	FAILS(DOORBELL_EINVAL, "`values`", doorbell_store_gather(store, &own, sizeof own, NULL, SOON_MS));
	if (rank->number == 1)
		WORKS(doorbell_store_set(store, "a key", "value", 5, SOON_MS));
	GIVES(5, doorbell_store_get(store, "a key", got, sizeof got, DOORBELL_DEFAULT_TIMEOUT));
	EXPECT(memcmp(got, "value", 5) == 0);
	FAILS(DOORBELL_ERANGE, "`capacity`", doorbell_store_get(store, "a key", got, 4, SOON_MS));
	FAILS(DOORBELL_ETIMEOUT, "", doorbell_store_get(store, "nobody's", got, sizeof got, 20));
	FAILS(DOORBELL_EINVAL, "`key`", doorbell_store_get(store, NULL, got, sizeof got, 20));
	FAILS(DOORBELL_EINVAL, "`timeout_ms`", doorbell_store_barrier(store, -3));
	FAILS(DOORBELL_EINVAL, "`value`", doorbell_store_set(store, "a key", NULL, 1, SOON_MS));
	WORKS(doorbell_store_check(store, &failed));
	EXPECT(failed == 99);
	WORKS(doorbell_store_barrier(store, SOON_MS));
	if (!rank->fails) {
		WORKS(doorbell_store_leave(store));
		return NULL;
	}
	if (rank->number == RANKS - 1) {
		WORKS(doorbell_store_destroy(store));
		return NULL;
	}
	FAILS(DOORBELL_ERANK, "rank 2", doorbell_store_barrier(store, SOON_MS));
	GIVES(DOORBELL_ERANK, doorbell_store_check(store, &failed));
	EXPECT(failed == RANKS - 1);
	GIVES(DOORBELL_ERANK, doorbell_store_check(store, NULL));
	FAILS(DOORBELL_ERANK, "rank 2", doorbell_store_leave(store));
	return NULL;
}

static void refused_calls(doorbell_domain *domain)
{
	doorbell_group_config config;
	doorbell_group *group;
	doorbell_store *store;
	uint32_t rank = 77, size = 77;

	WORKS(doorbell_group_config_init(&config, sizeof config));
	config.rank = 1;
	FAILS(DOORBELL_EINVAL, "the launcher", doorbell_store_join(&config, &store));
	EXPECT(store == NULL);
	FAILS(DOORBELL_EINVAL, "the launcher", doorbell_group_join(domain, &config, &group));
	EXPECT(group == NULL);
	config.size = 1;
	FAILS(DOORBELL_EINVAL, "`address`", doorbell_group_join(domain, &config, &group));
	config.address = "127.0.0.1:1";
	FAILS(DOORBELL_ERANGE, "`rank`", doorbell_group_join(domain, &config, &group));
	config.size = 2;
	config.address = "nowhere";
	FAILS(DOORBELL_EMALFORMED, "port", doorbell_group_join(domain, &config, &group));
	config.address = "127.0.0.1:1";
	config.timeout_ms = DOORBELL_NO_TIMEOUT;
	FAILS(DOORBELL_EINVAL, "`timeout_ms`", doorbell_group_join(domain, &config, &group));
	config.timeout_ms = 50;
	FAILS(DOORBELL_ETIMEOUT, "", doorbell_group_join(domain, &config, &group));
	/* No launcher's variables are set here. */
	FAILS(DOORBELL_ESTATE, "DOORBELL_RANK", doorbell_group_join(domain, NULL, &group));
	FAILS(DOORBELL_ESTATE, "DOORBELL_RANK", doorbell_group_from_env(&group));
	FAILS(DOORBELL_ESTATE, "DOORBELL_RANK", doorbell_store_join(NULL, &store));
	EXPECT(store == NULL);
	FAILS(DOORBELL_ESTATE, "DOORBELL_RANK", doorbell_group_rank_from_env(&rank, &size));
	EXPECT(rank == 77 && size == 77);
	/* A group of one, as its launcher says. */
	EXPECT(setenv("DOORBELL_RANK", "x", 1) == 0 && setenv("DOORBELL_SIZE", "1", 1) == 0);
	FAILS(DOORBELL_EMALFORMED, "DOORBELL_RANK", doorbell_group_rank_from_env(&rank, &size));
	EXPECT(unsetenv("DOORBELL_RANK") == 0 && unsetenv("DOORBELL_SIZE") == 0);
}

int main(int argc, char **argv)
{
	doorbell_device *device;
	doorbell_domain *domain;

	if (argc > 1 && strcmp(argv[1], "launched") == 0) {
		doorbell_group *group;
		uint32_t rank = 77, size = 77;

		WORKS(doorbell_group_rank_from_env(&rank, &size));
		WORKS(doorbell_group_from_env(&group));
		GIVES((int)rank, doorbell_group_rank(group));
		GIVES((int)size, doorbell_group_size(group));
		EXPECT(size == 3);
		device_comes_from_the_environment(group);
		goes_round(group);
		WORKS(doorbell_group_leave(group));
		puts("done");
		return 0;
	}
	WORKS(doorbell_device_open(rig_device_name(), &device));
	WORKS(doorbell_domain_create(device, &domain));
	refused_calls(domain);
	in_this_process(domain, 0, member);
	in_this_process(domain, 1, member);
	in_this_process(NULL, 0, exchanger);
	in_this_process(NULL, 1, exchanger);
	WORKS(doorbell_domain_destroy(domain));
	WORKS(doorbell_device_close(device));
	puts("done");
	return 0;
}
