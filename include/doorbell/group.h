/* doorbell.h, a part of it: rendezvous, groups and stores of processes. */
#ifndef DOORBELL_GROUP_H
#define DOORBELL_GROUP_H

#include "endpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------------- rendezvous */

/* A way to exchange addresses and keys for programs that have none of their own: short messages over TCP. */

/* Waits for peers at a TCP address. */
typedef struct doorbell_listener doorbell_listener;

/* A connection with a peer. After a call that failed its state is unknown: destroy it. */
typedef struct doorbell_channel doorbell_channel;

/*
 * Listens at an address such as "127.0.0.1:7471"; port 0 is a free one.
 * Threads: any.
 */
int doorbell_listener_create(const char *address, doorbell_listener **listener);

/*
 * The address at which it listens, with its port: a text buffer.
 * Threads: any.
 */
int doorbell_listener_address(const doorbell_listener *listener, char *text, size_t capacity);

/*
 * Waits for a peer. DOORBELL_EMALFORMED if who comes is none, or one of another version.
 * Threads: any.
 */
int doorbell_listener_accept(const doorbell_listener *listener, int64_t timeout_ms, doorbell_channel **channel);

/*
 * Stops listening. Channels stay. NULL is allowed.
 * Threads: alone with listener.
 */
int doorbell_listener_destroy(doorbell_listener *listener);

/*
 * Goes to the peer that listens at `address`; if none does yet, tries until `timeout_ms` have passed.
 * Threads: any.
 */
int doorbell_channel_connect(const char *address, int64_t timeout_ms, doorbell_channel **channel);

/*
 * Gives the peer a message of up to 1 MiB and takes the peer's, which must fit `capacity`, else DOORBELL_ERANGE. Its length
 * in bytes. Both sides make the call. `message` and `answer` may be the same memory. Messages of no bytes are a barrier.
 * Threads: one at a time for channel.
 */
int doorbell_channel_exchange(doorbell_channel *channel, const void *message, size_t len_bytes, void *answer,
			      size_t capacity, int64_t timeout_ms);

/*
 * Sends the peer a message of up to 1 MiB.
 * Threads: one at a time for channel.
 */
int doorbell_channel_send(doorbell_channel *channel, const void *message, size_t len_bytes, int64_t timeout_ms);

/*
 * Receives a message, which must fit `capacity`, else DOORBELL_ERANGE. Its length in bytes. DOORBELL_ESTATE if the peer is
 * gone.
 * Threads: one at a time for channel.
 */
int doorbell_channel_receive(doorbell_channel *channel, void *message, size_t capacity, int64_t timeout_ms);

/*
 * Ends a connection. NULL is allowed.
 * Threads: alone with channel.
 */
int doorbell_channel_destroy(doorbell_channel *channel);

/* -------------------------------------------------------------------------------------------------------- groups */

/*
 * The processes of a job, of which this is one. A group fails as a whole: when a rank ends that has not left, or its group is
 * destroyed without doorbell_group_leave, every other one is told. Its calls give DOORBELL_ERANK from then on, with that
 * rank in the text, and all endpoints of the group are aborted.
 */
typedef struct doorbell_group doorbell_group;

/* How a group is joined. Begin with doorbell_group_config_init. */
typedef struct doorbell_group_config {
	uint32_t struct_size;
	uint32_t rank;            /* of this process, from 0 */
	uint32_t size;            /* of the group, up to 65536; default 0: the launcher says rank, size, address and token */
	uint32_t token_len_bytes; /* of `token` */
	int64_t timeout_ms;       /* of joining, and of each exchange where DOORBELL_DEFAULT_TIMEOUT is given; default 60000 */
	const char *address;      /* where rank 0 listens, such as "10.0.0.1:7471" */
	const void *token;        /* bytes that all ranks have and strangers do not */
	const doorbell_endpoint_config *endpoint; /* how endpoints are made; NULL, the default, is their defaults */
} doorbell_group_config;

/*
 * Fills a configuration with the defaults: doorbell_group_config_init(&config, sizeof config).
 * Threads: any.
 */
int doorbell_group_config_init(doorbell_group_config *config, uint32_t struct_size);

/*
 * Joins a group, whose endpoints are of `domain`; waits until rank 0 is there, who hosts it. A `config` of NULL is the
 * defaults. What the launcher says is read from the environment: DOORBELL_RANK and DOORBELL_SIZE, or the variables of
 * torchrun, Open MPI, MPICH, Slurm or PMIx; DOORBELL_MASTER_ADDR, DOORBELL_MASTER_PORT and DOORBELL_TOKEN go before theirs.
 * DOORBELL_ESTATE if one is missing or the group has another token or size; DOORBELL_EMALFORMED for one that makes no
 * sense, or if who answers is no group; DOORBELL_ETIMEOUT if nobody answers.
 * Threads: any.
 */
int doorbell_group_join(const doorbell_domain *domain, const doorbell_group_config *config, doorbell_group **group);

/*
 * What the launcher says of this process, read as by doorbell_group_join and with its errors: which rank it is, and of how
 * many. For who must know before, as which GPU to take.
 * Threads: any.
 */
int doorbell_group_place_from_env(uint32_t *rank, uint32_t *size);

/*
 * Joins the launcher's group with the device DOORBELL_DEVICE of the environment, or "softcx" where that is not set.
 * Threads: any.
 */
int doorbell_group_from_env(doorbell_group **group);

/*
 * Leaves the group: the end of this process is no failure from now on. Rank 0 waits until all others have left. The handle is
 * gone, on an error as well: DOORBELL_ERANK if a rank failed before, DOORBELL_ETIMEOUT. A barrier before this makes sure
 * that nothing is under way.
 * Threads: alone with group.
 */
int doorbell_group_leave(doorbell_group *group);

/*
 * Ends the handle of a group that was not left, which is a failure to the others. NULL is allowed.
 * Threads: alone with group.
 */
int doorbell_group_destroy(doorbell_group *group);

/*
 * The number of this process.
 * Threads: any.
 */
int doorbell_group_rank(const doorbell_group *group);

/*
 * How many processes there are.
 * Threads: any.
 */
int doorbell_group_size(const doorbell_group *group);

/*
 * The domain of the group's endpoints, in which regions for them are made: a handle of its own, to be destroyed.
 * Threads: any.
 */
int doorbell_group_domain(const doorbell_group *group, doorbell_domain **domain);

/*
 * The endpoint that is connected with rank `peer`, as the peer's is with it, once; it is the caller's, to be destroyed. Waits
 * until the peer's process has joined: its program need not do anything. DOORBELL_ESTATE if it was given before, or for this process's own rank.
 * Threads: any.
 */
int doorbell_group_endpoint(const doorbell_group *group, uint32_t peer, doorbell_endpoint **endpoint);

/*
 * Waits until every rank has come here. DOORBELL_ETIMEOUT; DOORBELL_ERANK if a rank has ended, or has left;
 * DOORBELL_EBUSY while another thread is in a barrier or gathering of this group.
 * Threads: any.
 */
int doorbell_group_barrier(const doorbell_group *group, int64_t timeout_ms);

/*
 * Remembers up to 64 KiB under a key of up to 256 bytes, in place of what was there.
 * Threads: any.
 */
int doorbell_group_set(const doorbell_group *group, const char *key, const void *value, size_t len_bytes,
		       int64_t timeout_ms);

/*
 * The value under a key, which must fit `capacity`, else DOORBELL_ERANGE; waits until some rank has set it. Its length.
 * Threads: any.
 */
int doorbell_group_get(const doorbell_group *group, const char *key, void *value, size_t capacity,
		       int64_t timeout_ms);

/*
 * Gives every rank the values of all, by rank: `values` has room for as many as there are ranks. All are `len_bytes` long, up
 * to 64 KiB, else DOORBELL_EMALFORMED. DOORBELL_EBUSY while another thread is in a barrier or gathering of this group.
 * Threads: any.
 */
int doorbell_group_gather(const doorbell_group *group, const void *value, size_t len_bytes, void *values,
			  int64_t timeout_ms);

/*
 * 0 if the group is whole, or DOORBELL_ERANK, and the first rank that failed goes to `rank`, which may be NULL. An endpoint
 * may notice before: with a `wait_for_word` of 1, for who has seen an operation fail, this waits for the word, up to two
 * seconds.
 * Threads: any.
 */
int doorbell_group_check(const doorbell_group *group, uint32_t wait_for_word, uint32_t *rank);

/* -------------------------------------------------------------------------------------------------------- stores */

/*
 * What the processes of a job exchange, without a device and without endpoints: for programs that connect theirs themselves. A
 * group has one of its own, which its calls use. It fails as a group does.
 */
typedef struct doorbell_store doorbell_store;

/*
 * Goes to the store of the job, which rank 0 starts in this call; waits until it is there. `config` and errors as of
 * doorbell_group_join, but `endpoint` is NULL.
 * Threads: any.
 */
int doorbell_store_join(const doorbell_group_config *config, doorbell_store **store);

/*
 * As doorbell_group_leave.
 * Threads: alone with store.
 */
int doorbell_store_leave(doorbell_store *store);

/*
 * Ends the handle of a store that was not left, which is a failure to the others. NULL is allowed.
 * Threads: alone with store.
 */
int doorbell_store_destroy(doorbell_store *store);

/*
 * The number of this process.
 * Threads: any.
 */
int doorbell_store_rank(const doorbell_store *store);

/*
 * How many processes there are.
 * Threads: any.
 */
int doorbell_store_size(const doorbell_store *store);

/*
 * As doorbell_group_barrier.
 * Threads: any.
 */
int doorbell_store_barrier(const doorbell_store *store, int64_t timeout_ms);

/*
 * As doorbell_group_set.
 * Threads: any.
 */
int doorbell_store_set(const doorbell_store *store, const char *key, const void *value, size_t len_bytes,
		       int64_t timeout_ms);

/*
 * As doorbell_group_get.
 * Threads: any.
 */
int doorbell_store_get(const doorbell_store *store, const char *key, void *value, size_t capacity, int64_t timeout_ms);

/*
 * As doorbell_group_gather.
 * Threads: any.
 */
int doorbell_store_gather(const doorbell_store *store, const void *value, size_t len_bytes, void *values,
			  int64_t timeout_ms);

/*
 * 0 if all ranks are there, or DOORBELL_ERANK, and the first rank that failed goes to `rank`, which may be NULL.
 * Threads: any.
 */
int doorbell_store_check(const doorbell_store *store, uint32_t *rank);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_GROUP_H */
