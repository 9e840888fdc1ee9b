/* Registrations that stay, and memory that no NIC reaches. */
#define _DEFAULT_SOURCE

#include "expect.h"

#include <pthread.h>
#include <sys/mman.h>

enum { PAGES = 64 * 4096 };

static uint64_t number_of(const void *pointer)
{
	return (uint64_t)(uintptr_t)pointer;
}

static doorbell_cache_counters count(const doorbell_cache *cache)
{
	doorbell_cache_counters counters;

	WORKS(doorbell_cache_read_counters(cache, &counters, sizeof counters));
	EXPECT(counters.struct_size == sizeof counters);
	return counters;
}

static void caches(struct rig *rig, int is_explicit)
{
	doorbell_cache_config config;
	doorbell_cache *cache;
	doorbell_region *first, *second, *held;
	uint64_t offset = 1;
	uint32_t by = 99;
	char why[256];
	unsigned char *memory = mmap(NULL, PAGES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	EXPECT(memory != MAP_FAILED);
	WORKS(doorbell_cache_config_init(&config, sizeof config));
	EXPECT(config.max_entries == 1024 && config.max_bytes == (uint64_t)64 << 30 && !config.is_explicit);
	config.max_entries = 0;
	FAILS(DOORBELL_ERANGE, "`max_entries`", doorbell_cache_create(rig->domain, &config, &cache));
	config.max_entries = 4;
	config.is_explicit = 2;
	FAILS(DOORBELL_ERANGE, "`is_explicit`", doorbell_cache_create(rig->domain, &config, &cache));
	config.is_explicit = (uint32_t)is_explicit;
	WORKS(doorbell_cache_create(rig->domain, &config, &cache));
	EXPECT(doorbell_cache_invalidation(cache, &by, why, sizeof why) > 0);
	EXPECT(is_explicit ? by == DOORBELL_INVALIDATION_EXPLICIT : by != DOORBELL_INVALIDATION_EXPLICIT);
	FAILS(DOORBELL_EINVAL, "`address`", doorbell_cache_get(cache, 0, 8, 0, &first, &offset));
	FAILS(DOORBELL_EINVAL, "address space", doorbell_cache_get(cache, 64, UINT64_MAX, 0, &first, &offset));
	WORKS(doorbell_cache_get(cache, number_of(memory), PAGES, DOORBELL_ACCESS_ALL, &first, &offset));
	EXPECT(offset == 0 && doorbell_region_pointer(first) == memory);
	WORKS(doorbell_cache_get(cache, number_of(memory) + 4096, 64, DOORBELL_ACCESS_ALL, &second, &offset));
	if (by != DOORBELL_INVALIDATION_NONE) {
		/* The same registration, and what was asked for within it. */
		EXPECT(offset == 4096 && doorbell_region_pointer(second) == memory);
		EXPECT(count(cache).hits == 1 && count(cache).misses == 1 && count(cache).entries == 1);
		EXPECT(count(cache).bytes >= PAGES);
		GIVES(1, doorbell_cache_invalidate(cache, number_of(memory), 1));
		GIVES(0, doorbell_cache_invalidate(cache, number_of(memory), PAGES));
		EXPECT(count(cache).entries == 0 && count(cache).invalidations == 1);
	} else {
		EXPECT(count(cache).hits == 0 && count(cache).uncached == 2);
	}
	WORKS(doorbell_region_destroy(first));
	WORKS(doorbell_region_destroy(second));
	WORKS(doorbell_cache_hold(cache, number_of(memory), 4096, DOORBELL_ACCESS_ALL, &held));
	EXPECT(doorbell_region_pointer(held) == memory && doorbell_region_len_bytes(held) == 4096);
	WORKS(doorbell_cache_get(cache, number_of(memory), 64, DOORBELL_ACCESS_ALL, &first, &offset));
	EXPECT(by == DOORBELL_INVALIDATION_NONE || count(cache).hits == 2);
	{
		/* It transfers as any region. */
		const doorbell_slice from = {first, offset, 64};
		doorbell_completion completion;
		doorbell_remote remote;
		doorbell_work work;

		memset(memory, 0x3c, 64);
		WORKS(doorbell_region_remote(rig->region, &remote));
		work = doorbell_work_write(&from, 1, remote.addr, remote.rkey);
		WORKS(doorbell_post_send(rig->a, &work, NULL));
		WORKS(doorbell_wait_cq(rig->a, DOORBELL_QUEUE_SEND, SOON_MS, &completion));
		EXPECT(((unsigned char *)doorbell_region_pointer(rig->region))[63] == 0x3c);
	}
	WORKS(doorbell_region_destroy(first));
	/* Dropped in an unusual order. */
	WORKS(doorbell_cache_destroy(cache));
	WORKS(doorbell_region_destroy(held));
	EXPECT(munmap(memory, PAGES) == 0);
}

static void of_a_gpu(struct rig *rig)
{
	doorbell_cache *cache;
	doorbell_bounce_config config;
	doorbell_bounce *bounce;
	doorbell_region *region;
	uint64_t offset;
	uint32_t by;

	WORKS(doorbell_bounce_config_init(&config, sizeof config));
	config.engine = DOORBELL_ENGINE_CUDA;
	if (!WITH_CUDA) {
		FAILS(DOORBELL_EFEATURE, "`cuda`", doorbell_cache_create_device(rig->domain, NULL, &cache));
		EXPECT(cache == NULL);
		FAILS(DOORBELL_EFEATURE, "`cuda`", doorbell_bounce_create(rig->domain, &config, &bounce));
		EXPECT(bounce == NULL);
		return;
	}
	/* This thread has no context, and perhaps there is no driver: what there is says so. */
	WORKS(doorbell_cache_create_device(rig->domain, NULL, &cache));
	EXPECT(doorbell_cache_invalidation(cache, &by, NULL, 0) > 0 && by == DOORBELL_INVALIDATION_EXPLICIT);
	GIVES(DOORBELL_ESTATE, doorbell_cache_get(cache, 4096, 64, 0, &region, &offset));
	FAILS(DOORBELL_EINVAL, "`cache`", doorbell_cache_hold(cache, 4096, 64, 0, &region));
	GIVES(0, doorbell_cache_invalidate(cache, 4096, 64));
	EXPECT(count(cache).misses == 0);
	WORKS(doorbell_cache_destroy(cache));
	GIVES(DOORBELL_ESTATE, doorbell_bounce_create(rig->domain, &config, &bounce));
}

struct receiver {
	doorbell_endpoint *endpoint;
	doorbell_bounce *bounce;
	unsigned char *memory;
};

enum { LONG = 100000 };

static void *receive(void *argument)
{
	const struct receiver *receiver = argument;

	WORKS(doorbell_bounce_recv(receiver->bounce, receiver->endpoint, number_of(receiver->memory), LONG, SOON_MS));
	return NULL;
}

static void bounces(struct rig *rig)
{
	doorbell_bounce_config config;
	doorbell_bounce *bounce;
	struct receiver receiver;
	doorbell_region *far;
	doorbell_remote remote;
	pthread_t thread;
	unsigned char *from = malloc(LONG), *to = malloc(LONG);
	int i;

	EXPECT(from && to);
	for (i = 0; i < LONG; i++)
		from[i] = (unsigned char)(i * 7);
	WORKS(doorbell_bounce_config_init(&config, sizeof config));
	EXPECT(config.chunk_bytes == 256 << 10 && config.slots == 4 && config.engine == DOORBELL_ENGINE_MEMCPY);
	config.slots = 257;
	FAILS(DOORBELL_ERANGE, "`slots`", doorbell_bounce_create(rig->domain, &config, &bounce));
	config.slots = 3;
	config.engine = 2;
	FAILS(DOORBELL_ERANGE, "`engine`", doorbell_bounce_create(rig->domain, &config, &bounce));
	config.engine = DOORBELL_ENGINE_MEMCPY;
	config.chunk_bytes = 7000;
	WORKS(doorbell_bounce_create(rig->domain, &config, &bounce));
	WORKS(doorbell_bounce_create(rig->domain, &config, &receiver.bounce));
	WORKS(doorbell_region_alloc(rig->domain, LONG, DOORBELL_ACCESS_ALL, &far));
	WORKS(doorbell_region_remote(far, &remote));
	WORKS(doorbell_bounce_write(bounce, rig->a, number_of(from), LONG, &remote, 0, SOON_MS));
	EXPECT(memcmp(doorbell_region_pointer(far), from, LONG) == 0);
	memset(to, 0, LONG);
	WORKS(doorbell_bounce_read(bounce, rig->a, &remote, 1, number_of(to), LONG - 1, SOON_MS));
	EXPECT(memcmp(to, from + 1, LONG - 1) == 0);
	FAILS(DOORBELL_EBOUNDS, "", doorbell_bounce_write(bounce, rig->a, number_of(from), LONG, &remote, 1, SOON_MS));
	receiver.endpoint = rig->b;
	receiver.memory = to;
	EXPECT(pthread_create(&thread, NULL, receive, &receiver) == 0);
	WORKS(doorbell_bounce_send(bounce, rig->a, number_of(from), LONG, SOON_MS));
	EXPECT(pthread_join(thread, NULL) == 0);
	EXPECT(memcmp(to, from, LONG) == 0);
	WORKS(doorbell_bounce_destroy(bounce));
	WORKS(doorbell_bounce_destroy(receiver.bounce));
	WORKS(doorbell_region_destroy(far));
	free(from);
	free(to);
}

int main(void)
{
	struct rig rig;

	rig_make(&rig);
	caches(&rig, 0);
	caches(&rig, 1);
	of_a_gpu(&rig);
	bounces(&rig);
	rig_end(&rig);
	puts("done");
	return 0;
}
