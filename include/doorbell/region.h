/*
 * Part of the interface of doorbell.h: registered memory, and caches of registrations.
 *
 * doorbell.h has the rules for results, handles, threads and text buffers.
 */
#ifndef DOORBELL_REGION_H
#define DOORBELL_REGION_H

#include "core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------------- regions */

/* Access rights of a region, or of the peer of an endpoint: flags with the values of ibv_access_flags. */
enum doorbell_access {
	/* The local device may write: receives, and results of reads and atomics. */
	DOORBELL_ACCESS_LOCAL_WRITE = 1,
	DOORBELL_ACCESS_REMOTE_WRITE = 2,
	DOORBELL_ACCESS_REMOTE_READ = 4,
	DOORBELL_ACCESS_REMOTE_ATOMIC = 8,
	DOORBELL_ACCESS_ALL = 15
};

/* Memory that is registered with a device. Work in flight keeps the registration that it needs. */
typedef struct doorbell_region doorbell_region;

/* What a peer needs to read or write a region. It may be sent to the peer as it is. */
typedef struct doorbell_remote {
	uint64_t addr; /* of the first byte, in the owner's address space; add an offset for other bytes */
	uint64_t len_bytes;
	uint32_t rkey;
	uint32_t reserved; /* 0 */
} doorbell_remote;

/*
 * Allocates `len_bytes` bytes (1 to 1 TiB) of zeroed, page-aligned memory and registers it with the rights
 * `access_flags` (DOORBELL_ACCESS_*). The region owns the memory. It is freed after doorbell_region_destroy, as soon
 * as no work in flight uses it.
 */
int doorbell_region_alloc(const doorbell_domain *domain, uint64_t len_bytes, uint32_t access_flags,
			  doorbell_region **region);

/*
 * Like doorbell_region_alloc, but uses huge pages if the system has reserved some; otherwise the kernel is advised to
 * use huge pages (madvise). Missing huge pages are not an error.
 */
int doorbell_region_alloc_huge(const doorbell_domain *domain, uint64_t len_bytes, uint32_t access_flags,
			       doorbell_region **region);

/*
 * Registers `len_bytes` bytes of the caller's memory at `start`. The memory must stay valid until the region is
 * destroyed and all work that names it is done, including waits for its words and stores to them on streams. For a
 * CUDA stream that is when doorbell_stream_synchronize or doorbell_stream_query reports it; tickets and events may
 * complete a millisecond or more before the library has released the memory.
 */
int doorbell_region_register(const doorbell_domain *domain, void *start, uint64_t len_bytes, uint32_t access_flags,
			     doorbell_region **region);

/*
 * Allocates `len_bytes` bytes of memory of the GPU whose context is current (cuMemAlloc) and registers it in the best
 * way that is available. The memory is not initialised. doorbell_region_destroy frees it, and may wait for GPU work as
 * cuMemFree does. If work in flight uses it, or a stream of this library has work, the next call that destroys a region, a
 * device queue or a stream, or synchronizes a stream, frees it. Returns DOORBELL_ESTATE if the device cannot reach GPU
 * memory; the text has the reason for each way.
 */
int doorbell_region_alloc_device(const doorbell_domain *domain, uint64_t len_bytes, uint32_t access_flags,
				 doorbell_region **region);

/*
 * Registers GPU memory that the caller has allocated, in the current context or device. The memory must stay valid as
 * for doorbell_region_register. Returns the codes of doorbell_region_alloc_device, and DOORBELL_ESTATE if the address
 * is not device memory, is managed memory, or if the range leaves its allocation. The caller is responsible
 * for ordering: a synchronous copy into memory of a pool (cudaMallocAsync) may return before the bytes are there.
 */
int doorbell_region_register_device(const doorbell_domain *domain, uint64_t device_pointer, uint64_t len_bytes,
				    uint32_t access_flags, doorbell_region **region);

/*
 * Registers `len_bytes` bytes of another device's memory, exported as the dmabuf `fd`, from `offset` (bytes) on. Work
 * requests and peers name the first byte by the address `iova`, which must not be 0. The kernel keeps the dmabuf, so
 * `fd` may be closed after the call. The CPU cannot access the memory through the region. Returns DOORBELL_ESTATE if
 * the device does not support dmabufs, DOORBELL_ESYSTEM if the kernel refuses.
 */
int doorbell_region_register_dmabuf(const doorbell_domain *domain, int fd, uint64_t offset, uint64_t len_bytes,
				    uint64_t iova, uint32_t access_flags, doorbell_region **region);

/*
 * Registers memory of another device by its address there. A kernel module such as nvidia-peermem must know the
 * address. The memory must stay valid as for doorbell_region_register. Returns DOORBELL_ESTATE if the device does not
 * support this, or if no kernel module knows the address. For CUDA memory use doorbell_region_register_device, which
 * tries all ways.
 */
int doorbell_region_register_peermem(const doorbell_domain *domain, uint64_t address, uint64_t len_bytes,
				     uint32_t access_flags, doorbell_region **region);

/*
 * Deregisters the region. After this call the device does not access the memory; work in flight that names it fails.
 * Waits for the device's command, for which mlx5's driver gives up after 60 s.
 * Returns 1 if the region was registered, 0 if it was already deregistered, and an error if the device refuses: then peers
 * may still read and write the memory, and it must not be used for anything else. The next call asks again.
 * The handle stays valid and must still be
 * destroyed. Before the caller frees the memory, waits and stores on streams (doorbell_stream_wait_value32,
 * doorbell_stream_write_value32) and receives of messages (doorbell_message_queue_recv) that use the region must also be
 * done.
 */
int doorbell_region_deregister(const doorbell_region *region);

/*
 * Destroys the handle. The region is deregistered when no work in flight uses it any more. The library notices this in
 * a ticket call, in a poll, or in its own check once a millisecond. Call doorbell_region_deregister first if the
 * region must be deregistered on return. NULL is allowed.
 * Threads: alone with region.
 */
int doorbell_region_destroy(doorbell_region *region);

/*
 * Returns the address of the first byte, or NULL on failure and for adopted memory that begins at the address 0. The memory belongs to the region; the pointer is valid as
 * long as the handle. The device, and through it a peer, may write to the memory at any time. For GPU memory the
 * result is the address on the GPU, which the CPU cannot access. Words in it are for CUDA streams that have kernels of this
 * library and belong to that GPU (doorbell_stream_wait_value64); doorbell_stream_wait_value32 and similar calls return
 * DOORBELL_ESTATE for other streams, and doorbell_wait_value32 and doorbell_wait_value64 always.
 */
void *doorbell_region_pointer(const doorbell_region *region);

/*
 * Writes the address at which GPU kernels of the current context see the first byte of host memory, for
 * doorbell_device_write_value32 and doorbell_device_wait_value32 (doorbell/signal.h). It is valid as long as the
 * handle. The first call in a context registers the memory with the driver; it is unregistered with the region.
 * Returns DOORBELL_ESTATE if the region is not host memory, or if the driver maps its parts at separate addresses;
 * DOORBELL_ECUDA if the driver cannot map it.
 */
int doorbell_region_device_pointer(const doorbell_region *region, uint64_t *device_pointer);

/* Returns the length in bytes, or 0 on failure. */
uint64_t doorbell_region_len_bytes(const doorbell_region *region);

/* How a device accesses the memory of a region. */
enum doorbell_region_kind {
	/* Memory of this process. */
	DOORBELL_REGION_HOST = 0,
	/* Memory of another device, exported as a dmabuf by its driver. */
	DOORBELL_REGION_DMABUF = 1,
	/* Memory of another device, registered by its address (peermem). */
	DOORBELL_REGION_PEERMEM = 2,
	/* Memory of a GPU; the software NIC lets the GPU copy it. */
	DOORBELL_REGION_COPIED = 3
};

/* Returns how the device accesses the memory: DOORBELL_REGION_*. */
int doorbell_region_kind(const doorbell_region *region);

/*
 * Writes to a text buffer why no better way to access GPU memory is used: one line with the reason for each way that
 * was tried before, best first. The text is "" for host memory and for regions of doorbell_cache_get.
 */
int doorbell_region_reasons(const doorbell_region *region, char *text, size_t capacity);

/*
 * Writes to a text buffer why the last copy of the region's GPU memory by a software NIC failed. The failed work
 * request itself reports only that the memory was not accessible. Returns the length of the text. Returns 0 and writes
 * nothing if no copy has failed; this is always so unless the kind is DOORBELL_REGION_COPIED.
 */
int doorbell_region_copy_failure(const doorbell_region *region, char *text, size_t capacity);

/*
 * Returns the size in bytes of the reserved huge pages that the memory uses, or 0 if it uses none or the size is not
 * known.
 */
uint64_t doorbell_region_page_bytes(const doorbell_region *region);

/* Writes the local key of the region, for callers that write work requests themselves. */
int doorbell_region_lkey(const doorbell_region *region, uint32_t *lkey);

/* Writes what a peer needs to access the region. */
int doorbell_region_remote(const doorbell_region *region, doorbell_remote *remote);

/* -------------------------------------------------------------------------------------------------------- caches */

/*
 * A cache of registrations: memory that was registered before is not registered again. If the cache is full, the
 * unused entry that was used longest ago is removed. In a child process of fork() the calls return DOORBELL_ESTATE.
 */
typedef struct doorbell_cache doorbell_cache;

/* Limits of a cache. Initialise it with doorbell_cache_config_init. */
typedef struct doorbell_cache_config {
	uint32_t struct_size;
	uint32_t max_entries; /* 1 to 65536; default 1024 */
	uint64_t max_bytes;   /* total bytes of all entries, 1 or more; default 64 GiB */
	uint32_t is_explicit; /* 1: the program calls doorbell_cache_invalidate before memory that it gave to the
				 cache is unmapped, moved or discarded, also by free(); in return the cache keeps all
				 kinds of memory and a hit needs no system call. default 0 */
	uint32_t reserved;    /* 0 */
} doorbell_cache_config;

/* Contents and statistics of a cache. */
typedef struct doorbell_cache_counters {
	uint32_t struct_size;
	uint32_t entries;
	uint64_t bytes;         /* total bytes of the entries */
	uint64_t hits;          /* requests that were answered by an entry */
	uint64_t misses;        /* requests that needed a registration */
	uint64_t uncached;        /* misses whose registration was not kept */
	uint64_t evictions;     /* entries that were removed to make room */
	uint64_t invalidations; /* entries whose memory went away or was invalidated */
} doorbell_cache_counters;

/* How a cache learns that memory goes away. */
enum doorbell_invalidation {
	/* From the kernel, by userfaultfd (Linux 5.19 or later). Only private anonymous memory is kept. */
	DOORBELL_INVALIDATION_KERNEL = 0,
	/* From the program, which calls doorbell_cache_invalidate. */
	DOORBELL_INVALIDATION_EXPLICIT = 1,
	/* Not at all; so nothing is kept. */
	DOORBELL_INVALIDATION_NONE = 2
};

/* Fills a configuration with the defaults: doorbell_cache_config_init(&config, sizeof config). */
int doorbell_cache_config_init(doorbell_cache_config *config, uint32_t struct_size);

/* Creates a cache for host memory of this process. If `config` is NULL, the defaults are used. */
int doorbell_cache_create(const doorbell_domain *domain, const doorbell_cache_config *config, doorbell_cache **cache);

/*
 * Creates a cache for GPU memory. Entries are whole allocations. The driver numbers allocations, so memory that was
 * freed and allocated again is registered again. If `config` is NULL, the defaults are used; is_explicit is ignored.
 */
int doorbell_cache_create_device(const doorbell_domain *domain, const doorbell_cache_config *config,
				 doorbell_cache **cache);

/*
 * Gives a region that contains `len_bytes` bytes at `address` with the rights `access_flags`: an entry of the cache,
 * or a new registration. `address` is a pointer as a number, or a CUdeviceptr for a cache of GPU memory. The region
 * may begin before `address`; `*offset` is the offset of `address` in the region, in bytes. The caller owns the handle
 * and destroys it. Until then the bytes must stay mapped as they are. Handles of one entry are one registration:
 * doorbell_region_deregister with one of them takes the memory from the holders of the others, too.
 */
int doorbell_cache_get(const doorbell_cache *cache, uint64_t address, uint64_t len_bytes, uint32_t access_flags,
		       doorbell_region **region, uint64_t *offset);

/*
 * Gives a region of exactly these bytes. The caller guarantees that the memory stays mapped as it is until the handle
 * is destroyed; until then doorbell_cache_get of any part of it needs no system call. Returns DOORBELL_EINVAL for a
 * cache of GPU memory.
 */
int doorbell_cache_hold(const doorbell_cache *cache, uint64_t address, uint64_t len_bytes, uint32_t access_flags,
			doorbell_region **region);

/*
 * Removes all entries that contain any of the `len_bytes` bytes at `address`, because the memory is about to go away.
 * Returns the number of removed entries.
 */
int doorbell_cache_invalidate(const doorbell_cache *cache, uint64_t address, uint64_t len_bytes);

/*
 * Writes how the cache learns that memory goes away: DOORBELL_INVALIDATION_* to `by`, which may be NULL, and the
 * reason to a text buffer.
 */
int doorbell_cache_invalidation(const doorbell_cache *cache, uint32_t *by, char *text, size_t capacity);

/* Reads the statistics: doorbell_cache_read_counters(cache, &counters, sizeof counters). */
int doorbell_cache_read_counters(const doorbell_cache *cache, doorbell_cache_counters *counters, uint32_t struct_size);

/*
 * Destroys the handle. Regions that the cache gave out stay valid. NULL is allowed.
 * Threads: alone with cache.
 */
int doorbell_cache_destroy(doorbell_cache *cache);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_REGION_H */
