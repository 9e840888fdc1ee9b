/* doorbell.h, a part of it: regions of registered memory, and caches of registrations. */
#ifndef DOORBELL_REGION_H
#define DOORBELL_REGION_H

#include "core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------------- regions */

/* What may be done to a region, and what a peer may do through an endpoint: flags with the values of ibv_access_flags. */
enum doorbell_access {
	/* The device may write for this side: receives, results of reads and atomics. */
	DOORBELL_ACCESS_LOCAL_WRITE = 1,
	DOORBELL_ACCESS_REMOTE_WRITE = 2,
	DOORBELL_ACCESS_REMOTE_READ = 4,
	DOORBELL_ACCESS_REMOTE_ATOMIC = 8,
	DOORBELL_ACCESS_ALL = 15
};

/* Memory that is registered with a device. Work in flight holds what it needs of it. */
typedef struct doorbell_region doorbell_region;

/* What a peer needs to read or write a region: to be sent there as it is. */
typedef struct doorbell_remote {
	uint64_t addr; /* of the first byte, over there; add an offset for others */
	uint64_t len_bytes;
	uint32_t rkey;
	uint32_t reserved; /* 0 */
} doorbell_remote;

/*
 * Allocates `len_bytes` (1 to 1 TiB) of zeroed, page-aligned memory, and registers it. The memory is the region's: it is
 * freed after doorbell_region_destroy, when no work in flight needs it any more.
 * Threads: any.
 */
int doorbell_region_alloc(const doorbell_domain *domain, uint64_t len_bytes, uint32_t access_flags,
			  doorbell_region **region);

/*
 * As doorbell_region_alloc, in huge pages where the system has set some aside, or else with the kernel asked to make huge
 * pages of ordinary ones. That there are none is no error.
 * Threads: any.
 */
int doorbell_region_alloc_huge(const doorbell_domain *domain, uint64_t len_bytes, uint32_t access_flags,
			       doorbell_region **region);

/*
 * Registers memory of the caller's. It must stay valid until the region is destroyed and all work that names it is done,
 * waits for and stores of its words on streams included. Of a CUDA stream that is when doorbell_stream_synchronize or
 * doorbell_stream_query says so: tickets and events may say it a millisecond or more before the library has let go of the memory.
 * Threads: any.
 */
int doorbell_region_register(const doorbell_domain *domain, void *start, uint64_t len_bytes, uint32_t access_flags,
			     doorbell_region **region);

/*
 * Allocates memory of the GPU of the current context (cuMemAlloc), and registers it in the best way there is. What is in it
 * is not known. It is freed after doorbell_region_destroy, when no work in flight needs it any more, by a thread of the
 * library. DOORBELL_ESTATE if the device does not reach such memory; the text has the reason of each way.
 * Threads: any.
 */
int doorbell_region_alloc_device(const doorbell_domain *domain, uint64_t len_bytes, uint32_t access_flags,
				 doorbell_region **region);

/*
 * Registers memory of a GPU that the caller has allocated, of the current context or device. Errors as of
 * doorbell_region_alloc_device; DOORBELL_ESTATE, too, if it is no device memory, or managed memory, or if its allocation ends
 * before. It must stay valid as with doorbell_region_register. To keep order is the caller's: a synchronous copy into memory
 * of a pool (cudaMallocAsync) may return before the bytes are there.
 * Threads: any.
 */
int doorbell_region_register_device(const doorbell_domain *domain, uint64_t device_pointer, uint64_t len_bytes,
				    uint32_t access_flags, doorbell_region **region);

/*
 * Registers a part of a dmabuf of another device's memory, from `offset` on, which work requests and peers name by the
 * address `iova`; not 0. The kernel holds the dmabuf: `fd` may be closed after the call. DOORBELL_ESTATE if the device has
 * none of this, DOORBELL_ESYSTEM if the kernel refuses. The processor does not reach the memory through the region.
 * Threads: any.
 */
int doorbell_region_register_dmabuf(const doorbell_domain *domain, int fd, uint64_t offset, uint64_t len_bytes,
				    uint64_t iova, uint32_t access_flags, doorbell_region **region);

/*
 * Registers memory of another device by its address there, which the kernel finds by a module such as nvidia-peermem. It must
 * stay valid as with doorbell_region_register. DOORBELL_ESTATE if the device has none of this, or if the kernel does not know
 * whose memory it is. For memory of CUDA there is doorbell_region_register_device, which tries all ways.
 * Threads: any.
 */
int doorbell_region_register_peermem(const doorbell_domain *domain, uint64_t address, uint64_t len_bytes,
				     uint32_t access_flags, doorbell_region **region);

/*
 * Takes the region from the device. When this returns, the device does not touch the memory any more; work in flight that
 * names it fails. 1 if the region was registered, 0 if it no longer was. The handle remains, to be destroyed. Before the
 * caller frees the memory, doorbell_stream_wait_value32 and its like must be done with the region, too.
 * Threads: any.
 */
int doorbell_region_deregister(const doorbell_region *region);

/*
 * Ends the handle; the region is deregistered when no work in flight needs it any more: when a ticket, a poll or the library's own look, once a
 * millisecond, has found that such work is done. To be sure of it on return: doorbell_region_deregister first. NULL is allowed.
 * Threads: alone with region.
 */
int doorbell_region_destroy(doorbell_region *region);

/*
 * The first byte; NULL if the call fails. It is the region's, and valid as long as its handle. The device, and through it a
 * peer, may write there at any time. Of a GPU's memory it is the address on the GPU, which the processor does not reach: the
 * words of such a region are DOORBELL_ESTATE to doorbell_stream_wait_value32 and its like.
 * Threads: any.
 */
void *doorbell_region_pointer(const doorbell_region *region);

/*
 * The address by which kernels of the current context reach the first byte of host memory, as words that they signal or wait for
 * (doorbell/trigger.h: doorbell_kernel_write_value32, doorbell_kernel_wait_value32). It is valid as long as the handle. With the
 * first call in a context the memory is registered with the driver, which unregisters it with the region. DOORBELL_ESTATE if it is
 * no host memory, or if the driver maps its parts apart; DOORBELL_ECUDA if it does not map it.
 * Threads: any.
 */
int doorbell_region_device_pointer(const doorbell_region *region, uint64_t *device_pointer);

/*
 * The length; 0 if the call fails.
 * Threads: any.
 */
uint64_t doorbell_region_len_bytes(const doorbell_region *region);

/* How a device reaches the memory of a region. */
enum doorbell_region_kind {
	/* It is memory of this process. */
	DOORBELL_REGION_HOST = 0,
	/* Another device's, which its driver exported as a dmabuf. */
	DOORBELL_REGION_DMABUF = 1,
	/* Another device's, found by its address. */
	DOORBELL_REGION_PEERMEM = 2,
	/* A GPU's, which the software NIC has the GPU copy. */
	DOORBELL_REGION_COPIED = 3
};

/*
 * How the device reaches the memory: DOORBELL_REGION_*.
 * Threads: any.
 */
int doorbell_region_kind(const doorbell_region *region);

/*
 * Why the device reaches a GPU's memory in no better way: a line for each that was tried before, best first, with its reason. A
 * text buffer; "" where there is none, as of memory of this process, and of regions that doorbell_cache_get has given.
 * Threads: any.
 */
int doorbell_region_reasons(const doorbell_region *region, char *text, size_t capacity);

/*
 * Why the last copy failed that a software NIC had made of memory of the region's GPU, whose work request can only say that
 * memory was not to be had. A text buffer. The length of the text, or 0 if none has failed, as of all regions that are not
 * DOORBELL_REGION_COPIED, and then nothing is written.
 * Threads: any.
 */
int doorbell_region_copy_failure(const doorbell_region *region, char *text, size_t capacity);

/*
 * The size of the huge pages that were set aside for the memory, in bytes; 0 if there are none, or it is not known.
 * Threads: any.
 */
uint64_t doorbell_region_page_bytes(const doorbell_region *region);

/*
 * The key by which work requests of this side name the region, for who writes them himself.
 * Threads: any.
 */
int doorbell_region_lkey(const doorbell_region *region, uint32_t *lkey);

/*
 * What a peer needs to know.
 * Threads: any.
 */
int doorbell_region_remote(const doorbell_region *region, doorbell_remote *remote);

/* -------------------------------------------------------------------------------------------------------- caches */

/*
 * Registrations that outlive their use, so that the next one of the same memory costs nothing. Entries that nobody uses make
 * room for others, the one used longest ago first. In a child of fork() the calls are DOORBELL_ESTATE.
 */
typedef struct doorbell_cache doorbell_cache;

/* How large a cache may become. Begin with doorbell_cache_config_init. */
typedef struct doorbell_cache_config {
	uint32_t struct_size;
	uint32_t max_entries; /* 1 to 65536; default 1024 */
	uint64_t max_bytes;   /* of all entries together, from 1; default 64 GiB */
	uint32_t is_explicit; /* 1: the program calls doorbell_cache_invalidate before memory that was given to the cache is
				 unmapped, moved or discarded, by free() too, and gets all kinds of memory kept and hits
				 without a system call for it; default 0 */
	uint32_t reserved;    /* 0 */
} doorbell_cache_config;

/* What a cache has, and has done so far. */
typedef struct doorbell_cache_counters {
	uint32_t struct_size;
	uint32_t entries;
	uint64_t bytes;         /* of the entries */
	uint64_t hits;          /* requests that an entry answered */
	uint64_t misses;        /* requests that took a registration */
	uint64_t unkept;        /* of these, registrations that the cache did not keep */
	uint64_t evictions;     /* entries that made room */
	uint64_t invalidations; /* entries whose memory went, or was named to doorbell_cache_invalidate */
} doorbell_cache_counters;

/* Who tells a cache of memory that goes. */
enum doorbell_invalidation {
	/* The kernel, by userfaultfd: Linux 5.19 or later. Only private anonymous memory is kept. */
	DOORBELL_INVALIDATION_KERNEL = 0,
	/* The program. */
	DOORBELL_INVALIDATION_EXPLICIT = 1,
	/* Nobody; so nothing is kept. */
	DOORBELL_INVALIDATION_NONE = 2
};

/*
 * Fills a configuration with the defaults: doorbell_cache_config_init(&config, sizeof config).
 * Threads: any.
 */
int doorbell_cache_config_init(doorbell_cache_config *config, uint32_t struct_size);

/*
 * Makes a cache for memory of this process. A `config` of NULL is the defaults.
 * Threads: any.
 */
int doorbell_cache_create(const doorbell_domain *domain, const doorbell_cache_config *config, doorbell_cache **cache);

/*
 * Makes a cache for memory of GPUs, by whole allocations, which the driver numbers: memory that was freed and allocated anew
 * is registered anew. A `config` of NULL is the defaults; is_explicit means nothing here.
 * Threads: any.
 */
int doorbell_cache_create_device(const doorbell_domain *domain, const doorbell_cache_config *config,
				 doorbell_cache **cache);

/*
 * Registered memory: an entry with these rights that has all of these bytes, or newly registered. The region may begin before
 * them: they are at `offset` in it. Its handle is the caller's, to be destroyed; until then the bytes stay mapped as they
 * are. `address` is a pointer as a number, or of a GPU's memory its CUdeviceptr.
 * Threads: any.
 */
int doorbell_cache_get(const doorbell_cache *cache, uint64_t address, uint64_t len_bytes, uint32_t access_flags,
		       doorbell_region **region, uint64_t *offset);

/*
 * Registered memory of just these bytes, of which the caller says that it stays as it is until the handle is destroyed: until
 * then doorbell_cache_get of any part asks the kernel nothing. Not of a GPU's memory: DOORBELL_EINVAL.
 * Threads: any.
 */
int doorbell_cache_hold(const doorbell_cache *cache, uint64_t address, uint64_t len_bytes, uint32_t access_flags,
			doorbell_region **region);

/*
 * Takes out every entry that has any of these bytes, because they are about to go. How many there were.
 * Threads: any.
 */
int doorbell_cache_invalidate(const doorbell_cache *cache, uint64_t address, uint64_t len_bytes);

/*
 * Who tells the cache of memory that goes: DOORBELL_INVALIDATION_* to `by`, which may be NULL, and how or why in a text
 * buffer.
 * Threads: any.
 */
int doorbell_cache_invalidation(const doorbell_cache *cache, uint32_t *by, char *text, size_t capacity);

/*
 * What it has and has done: doorbell_cache_count(cache, &counters, sizeof counters).
 * Threads: any.
 */
int doorbell_cache_count(const doorbell_cache *cache, doorbell_cache_counters *counters, uint32_t struct_size);

/*
 * Ends the handle. Regions that came of it stay. NULL is allowed.
 * Threads: alone with cache.
 */
int doorbell_cache_destroy(doorbell_cache *cache);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_REGION_H */
