/*
 * Part of the interface of doorbell.h: transfers of memory that the NIC cannot access, through pinned buffers.
 *
 * doorbell.h has the rules for results, handles, threads and text buffers.
 */
#ifndef DOORBELL_BOUNCE_H
#define DOORBELL_BOUNCE_H

#include "endpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/* -------------------------------------------------------------------------------------------------------- bounce */

/*
 * Pinned buffers between the NIC and memory that the NIC cannot access. Transfers may have any length. They are split
 * into chunks, and one chunk is copied while another one is on the wire. Each call returns when the whole transfer is
 * done. All completions of the endpoint's send queue must be collected, for doorbell_bounce_recv those of its receive
 * queue; otherwise calls return DOORBELL_ESTATE. After a failed transfer the caller may reuse its memory, but it is not
 * known how many bytes have arrived. The endpoint is aborted after a timeout with chunks on the wire, and after any
 * failure of doorbell_bounce_send or doorbell_bounce_recv that has begun. The wr_id of a failure that a chunk
 * caused is 2^63 plus its number.
 */
typedef struct doorbell_bounce doorbell_bounce;

/* What copies between the caller's memory and the pinned buffers. */
enum doorbell_engine {
	/* The CPU: addresses are pointers of this process. */
	DOORBELL_ENGINE_MEMCPY = 0,
	/* The copy engines of the current context's GPU, on a separate stream that does not wait for others:
	   addresses are GPU addresses. */
	DOORBELL_ENGINE_CUDA = 1
};

/* Size and division of the pinned memory. Initialise it with doorbell_bounce_config_init. */
typedef struct doorbell_bounce_config {
	uint32_t struct_size;
	uint32_t chunk_bytes; /* 1 to 2^30, the same on both sides of send and recv; default 256 KiB */
	uint32_t slots;       /* chunks in flight at once, 1 to 256; default 4 */
	uint32_t engine;      /* DOORBELL_ENGINE_*; default DOORBELL_ENGINE_MEMCPY */
} doorbell_bounce_config;

/* Fills a configuration with the defaults: doorbell_bounce_config_init(&config, sizeof config). */
int doorbell_bounce_config_init(doorbell_bounce_config *config, uint32_t struct_size);

/* Allocates and pins the buffers. If `config` is NULL, the defaults are used. */
int doorbell_bounce_create(const doorbell_domain *domain, const doorbell_bounce_config *config,
			   doorbell_bounce **bounce);

/*
 * Writes `len_bytes` bytes at `address` to the peer's region `remote`, starting at `offset` (bytes).
 * Threads: one at a time for bounce, one at a time for endpoint.
 */
int doorbell_bounce_write(doorbell_bounce *bounce, doorbell_endpoint *endpoint, uint64_t address, uint64_t len_bytes,
			  const doorbell_remote *remote, uint64_t offset, int64_t timeout_ms);

/*
 * Reads `len_bytes` bytes from the peer's region `remote`, starting at `offset` (bytes), to `address`.
 * Threads: one at a time for bounce, one at a time for endpoint.
 */
int doorbell_bounce_read(doorbell_bounce *bounce, doorbell_endpoint *endpoint, const doorbell_remote *remote,
			 uint64_t offset, uint64_t address, uint64_t len_bytes, int64_t timeout_ms);

/*
 * Sends `len_bytes` bytes at `address` to a peer that calls doorbell_bounce_recv with the same length.
 * Threads: one at a time for bounce, one at a time for endpoint.
 */
int doorbell_bounce_send(doorbell_bounce *bounce, doorbell_endpoint *endpoint, uint64_t address, uint64_t len_bytes,
			 int64_t timeout_ms);

/*
 * Receives `len_bytes` bytes from a peer that calls doorbell_bounce_send, to `address`. Returns DOORBELL_EMALFORMED if
 * the peer uses another length or another chunk size.
 * Threads: one at a time for bounce, one at a time for endpoint.
 */
int doorbell_bounce_recv(doorbell_bounce *bounce, doorbell_endpoint *endpoint, uint64_t address, uint64_t len_bytes,
			 int64_t timeout_ms);

/*
 * Destroys the handle and frees the buffers. NULL is allowed.
 * Threads: alone with bounce.
 */
int doorbell_bounce_destroy(doorbell_bounce *bounce);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_BOUNCE_H */
