/* doorbell.h, a part of it: transfers of memory that no NIC reaches, by pinned memory. */
#ifndef DOORBELL_BOUNCE_H
#define DOORBELL_BOUNCE_H

#include "endpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/* -------------------------------------------------------------------------------------------------------- bounce */

/*
 * Pinned memory between memory that no NIC reaches and the NIC: transfers of any length in chunks, of which one is copied while
 * another is on the wire. Each call returns when all is done. The endpoint that a call is given has no completions that were
 * not taken. When a transfer fails the foreign memory is the caller's again, and how much has arrived is not known; after a
 * timeout with chunks on the wire, and after any failure of a send or recv, the endpoint is aborted.
 */
typedef struct doorbell_bounce doorbell_bounce;

/* What copies. */
enum doorbell_engine {
	/* The processor: addresses are this process's. */
	DOORBELL_ENGINE_MEMCPY = 0,
	/* The copy engines of the current context's GPU, on a stream of their own, which waits for no other: addresses are
	   those of the GPU. */
	DOORBELL_ENGINE_CUDA = 1
};

/* How much memory is pinned, and how it is divided. Begin with doorbell_bounce_config_init. */
typedef struct doorbell_bounce_config {
	uint32_t struct_size;
	uint32_t chunk_bytes; /* 1 to 2^30, the same on both sides of send and recv; default 256 KiB */
	uint32_t slots;       /* chunks under way at once, 1 to 256; default 4 */
	uint32_t engine;      /* DOORBELL_ENGINE_*; default DOORBELL_ENGINE_MEMCPY */
} doorbell_bounce_config;

/*
 * Fills a configuration with the defaults: doorbell_bounce_config_init(&config, sizeof config).
 * Threads: any.
 */
int doorbell_bounce_config_init(doorbell_bounce_config *config, uint32_t struct_size);

/*
 * Pins memory. A `config` of NULL is the defaults.
 * Threads: any.
 */
int doorbell_bounce_create(const doorbell_domain *domain, const doorbell_bounce_config *config,
			   doorbell_bounce **bounce);

/*
 * Writes `len_bytes` at `address` to the peer's region, from `offset` on.
 * Threads: one at a time for bounce, one at a time for endpoint.
 */
int doorbell_bounce_write(doorbell_bounce *bounce, doorbell_endpoint *endpoint, uint64_t address, uint64_t len_bytes,
			  const doorbell_remote *remote, uint64_t offset, int64_t timeout_ms);

/*
 * Reads `len_bytes` of the peer's region, from `offset` on, to `address`.
 * Threads: one at a time for bounce, one at a time for endpoint.
 */
int doorbell_bounce_read(doorbell_bounce *bounce, doorbell_endpoint *endpoint, const doorbell_remote *remote,
			 uint64_t offset, uint64_t address, uint64_t len_bytes, int64_t timeout_ms);

/*
 * Sends to a peer that calls doorbell_bounce_recv for as many bytes.
 * Threads: one at a time for bounce, one at a time for endpoint.
 */
int doorbell_bounce_send(doorbell_bounce *bounce, doorbell_endpoint *endpoint, uint64_t address, uint64_t len_bytes,
			 int64_t timeout_ms);

/*
 * Receives what the peer's doorbell_bounce_send sends. DOORBELL_EMALFORMED if that has another length or other chunks.
 * Threads: one at a time for bounce, one at a time for endpoint.
 */
int doorbell_bounce_recv(doorbell_bounce *bounce, doorbell_endpoint *endpoint, uint64_t address, uint64_t len_bytes,
			 int64_t timeout_ms);

/*
 * Ends the handle. NULL is allowed.
 * Threads: alone with bounce.
 */
int doorbell_bounce_destroy(doorbell_bounce *bounce);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_BOUNCE_H */
