/*
 * Part of the interface of doorbell.h: exchange of addresses and keys between processes, by rendezvous, groups and
 * stores.
 *
 * doorbell.h has the rules for results, handles, threads and text buffers.
 */
#ifndef DOORBELL_GROUP_H
#define DOORBELL_GROUP_H

#include "endpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------------- rendezvous */

/* Rendezvous: short messages over TCP, for programs that have no other way to exchange addresses and keys. */

/* A listening TCP socket. */
typedef struct doorbell_listener doorbell_listener;

/* A connection with a peer. After a failed call its state is unknown, and it can only be destroyed. */
typedef struct doorbell_channel doorbell_channel;

/* Listens at an address such as "127.0.0.1:7471". Port 0 selects a free port. */
int doorbell_listener_create(const char *address, doorbell_listener **listener);

/* Writes the listening address, with its port, to a text buffer. */
int doorbell_listener_address(const doorbell_listener *listener, char *text, size_t capacity);

/* Waits for a peer. Returns DOORBELL_EMALFORMED if the peer is another program or uses another version. */
int doorbell_listener_accept(const doorbell_listener *listener, int64_t timeout_ms, doorbell_channel **channel);

/*
 * Stops listening and destroys the handle. Accepted channels remain open. NULL is allowed.
 * Threads: alone with listener.
 */
int doorbell_listener_destroy(doorbell_listener *listener);

/*
 * Connects to a peer that listens at `address`. If no peer listens yet, the call retries until `timeout_ms` have
 * passed.
 */
int doorbell_channel_connect(const char *address, int64_t timeout_ms, doorbell_channel **channel);

/*
 * Sends a message of up to 1 MiB and receives the peer's message. Both sides make the call. Returns the length of the
 * received message in bytes, or DOORBELL_ERANGE if it does not fit in `capacity`. `message` and `answer` may be the
 * same memory. Messages of 0 bytes act as a barrier.
 * Threads: one at a time for channel.
 */
int doorbell_channel_exchange(doorbell_channel *channel, const void *message, size_t len_bytes, void *answer,
			      size_t capacity, int64_t timeout_ms);

/*
 * Sends a message of up to 1 MiB.
 * Threads: one at a time for channel.
 */
int doorbell_channel_send(doorbell_channel *channel, const void *message, size_t len_bytes, int64_t timeout_ms);

/*
 * Receives a message. Returns its length in bytes, DOORBELL_ERANGE if it does not fit in `capacity`, or
 * DOORBELL_ESTATE if the peer has closed the connection.
 * Threads: one at a time for channel.
 */
int doorbell_channel_receive(doorbell_channel *channel, void *message, size_t capacity, int64_t timeout_ms);

/*
 * Closes a connection and destroys the handle. NULL is allowed.
 * Threads: alone with channel.
 */
int doorbell_channel_destroy(doorbell_channel *channel);

/* -------------------------------------------------------------------------------------------------------- groups */

/*
 * A group: the processes of a job, including this one. A group fails as a whole. If a process ends, or destroys its
 * group, without doorbell_group_leave, all other processes are notified: their calls return DOORBELL_ERANK, with the
 * failed rank in the text, and all endpoints of the group are aborted.
 */
typedef struct doorbell_group doorbell_group;

/* How to join a group. Initialise it with doorbell_group_config_init. */
typedef struct doorbell_group_config {
	uint32_t struct_size;
	uint32_t rank;            /* rank of this process, from 0 */
	uint32_t size;            /* number of processes, up to 65536; default 0: rank, size, address and token come
				     from the launcher */
	uint32_t token_len_bytes; /* length of `token` */
	int64_t timeout_ms;       /* for joining, and for calls with DOORBELL_DEFAULT_TIMEOUT, in ms; default 60000;
				     DOORBELL_NO_TIMEOUT is refused */
	const char *address;      /* where rank 0 listens, such as "10.0.0.1:7471" */
	const void *token;        /* a secret that all ranks share */
	const doorbell_endpoint_config *endpoint; /* configuration of the endpoints; NULL, the default, means their
						     defaults */
} doorbell_group_config;

/* Fills a configuration with the defaults: doorbell_group_config_init(&config, sizeof config). */
int doorbell_group_config_init(doorbell_group_config *config, uint32_t struct_size);

/*
 * Joins a group whose endpoints use `domain`. Rank 0 hosts the group; the other ranks wait for it. If `config` is
 * NULL, the defaults are used: rank, size, address and token are read from the environment. DOORBELL_RANK,
 * DOORBELL_SIZE, DOORBELL_MASTER_ADDR, DOORBELL_MASTER_PORT and DOORBELL_TOKEN take precedence over the variables of
 * torchrun, Open MPI, MPICH, Slurm and PMIx. Returns DOORBELL_ESTATE if a variable is missing or the group has another
 * token or size; DOORBELL_EMALFORMED if a variable is invalid or another program answers; DOORBELL_ETIMEOUT if nothing
 * answers.
 */
int doorbell_group_join(const doorbell_domain *domain, const doorbell_group_config *config, doorbell_group **group);

/*
 * Reads rank and size of this process from the launcher's environment, like doorbell_group_join and with its codes.
 * Useful to select a GPU before joining.
 */
int doorbell_group_rank_from_env(uint32_t *rank, uint32_t *size);

/*
 * Joins the group of the launcher, with the device that the environment variable DOORBELL_DEVICE names, or else
 * "softcx".
 */
int doorbell_group_from_env(doorbell_group **group);

/*
 * Leaves the group. After that the end of this process is not a failure of the group. Rank 0 waits until all others
 * have left. The handle is gone in any case; the endpoints of doorbell_group_endpoint stay usable. Returns
 * DOORBELL_ERANK if a rank failed before, or DOORBELL_ETIMEOUT. Call doorbell_group_barrier first to make sure that no
 * rank has work in flight.
 * Threads: alone with group.
 */
int doorbell_group_leave(doorbell_group *group);

/*
 * Makes a group of the ranks that are still here, once all of them have made this call, for instance after another rank has
 * ended. `ranks`, which may be NULL, has room for `capacity` numbers, at least the size of `group`; it receives the ranks
 * that the members have in `group`, ordered by their ranks in the new group. The new group has the domain, the
 * configuration and the timeout of `group`, and nothing else: endpoints, message queues and communicators are made again.
 * A rank that has not joined `group` yet is waited for. `group` stays as it is; destroy it when the new one is there. After a failure the call can be made again. Returns
 * DOORBELL_ERANK if rank 0, which hosts the group, has ended; DOORBELL_ETIMEOUT if a rank that is here does not make the
 * call, or ends before it has come to the new group; DOORBELL_ESTATE while another thread is in this call.
 */
int doorbell_group_shrink(const doorbell_group *group, uint32_t *ranks, uint32_t capacity,
			  doorbell_group **survivors);

/*
 * Destroys the handle. If the group was not left, the other ranks see a failure, and the endpoints of this rank are
 * aborted. NULL is allowed.
 * Threads: alone with group.
 */
int doorbell_group_destroy(doorbell_group *group);

/* Returns the rank of this process. */
int doorbell_group_rank(const doorbell_group *group);

/* Returns the number of processes. */
int doorbell_group_size(const doorbell_group *group);

/*
 * Returns a new handle of the domain of the group's endpoints, which the caller destroys. Regions for these endpoints
 * are made in it.
 */
int doorbell_group_domain(const doorbell_group *group, doorbell_domain **domain);

/*
 * Returns the endpoint that is connected to rank `peer`, once. The caller owns and destroys it. Waits until the peer's
 * process has joined; the peer's program need not make a call. Returns DOORBELL_ESTATE if it was returned before, or
 * if `peer` is this process.
 */
int doorbell_group_endpoint(const doorbell_group *group, uint32_t peer, doorbell_endpoint **endpoint);

/* One of several connections with another rank of a group. */
typedef struct doorbell_group_peer {
	uint32_t rank;
	uint32_t reserved; /* 0 */
	uint64_t tag;      /* any number */
} doorbell_group_peer;

/*
 * Makes further endpoints between ranks, one for each of the `peer_count` entries of `peers`, beside the one of
 * doorbell_group_endpoint, and waits until all are connected: for threads of their own, or with another configuration.
 * `config` may be NULL. Each peer makes its side, with the same tag, in any order, in one call or in several. Tags of
 * message queues are others. An endpoint of this process to itself receives what it sends; atomics by it are atomic with
 * those of other ranks. `endpoints` receives a handle for each entry, which the caller destroys. If the group fails,
 * they are aborted. Returns DOORBELL_ESTATE if an endpoint with that tag was made before;
 * DOORBELL_ETIMEOUT if a peer does not make its side within the timeout of the group; DOORBELL_ERANK if the group has
 * failed. After a failure the endpoints of the call cannot be made again.
 */
int doorbell_group_endpoints(const doorbell_group *group, const doorbell_group_peer *peers, uint32_t peer_count,
			     const doorbell_endpoint_config *config, doorbell_endpoint **endpoints);

/*
 * Waits until all ranks have called it. Returns DOORBELL_ERANK if a rank has ended or left; DOORBELL_EBUSY while
 * another thread is in a barrier or gather of this group.
 */
int doorbell_group_barrier(const doorbell_group *group, int64_t timeout_ms);

/* Stores up to 64 KiB under a key of up to 256 bytes. An existing value is replaced. */
int doorbell_group_set(const doorbell_group *group, const char *key, const void *value, size_t len_bytes,
		       int64_t timeout_ms);

/*
 * Reads the value of a key. Waits until some rank has set it. Returns its length in bytes, or DOORBELL_ERANGE if it
 * does not fit in `capacity`.
 */
int doorbell_group_get(const doorbell_group *group, const char *key, void *value, size_t capacity,
		       int64_t timeout_ms);

/*
 * Collects a value of `len_bytes` bytes, up to 64 KiB, from each rank. `values` receives the values of all ranks,
 * ordered by rank; it must have room for size * len_bytes bytes. Returns DOORBELL_EMALFORMED if the ranks give
 * different lengths; DOORBELL_EBUSY while another thread is in a barrier or gather of this group.
 */
int doorbell_group_gather(const doorbell_group *group, const void *value, size_t len_bytes, void *values,
			  int64_t timeout_ms);

/*
 * Returns 0 if no rank has failed. Otherwise returns DOORBELL_ERANK and writes the first rank that failed to `rank`,
 * which may be NULL. An endpoint may fail before the notification of the failed rank arrives. With `wait_for_notification` = 1
 * the call waits up to 2 s for the notification; use it after an operation has failed.
 */
int doorbell_group_check(const doorbell_group *group, uint32_t wait_for_notification, uint32_t *rank);

/* -------------------------------------------------------------------------------------------------------- stores */

/*
 * A key-value store of the processes of a job, without device and endpoints, for programs that connect their own
 * endpoints. A group contains one. A store fails like a group.
 */
typedef struct doorbell_store doorbell_store;

/*
 * Joins the store of the job, which rank 0 hosts. Waits until rank 0 is there. `config` and codes are as for
 * doorbell_group_join, but `config->endpoint` must be NULL.
 */
int doorbell_store_join(const doorbell_group_config *config, doorbell_store **store);

/*
 * Like doorbell_group_leave.
 * Threads: alone with store.
 */
int doorbell_store_leave(doorbell_store *store);

/*
 * Destroys the handle. If the store was not left, the other ranks see a failure. NULL is allowed.
 * Threads: alone with store.
 */
int doorbell_store_destroy(doorbell_store *store);

/* Returns the rank of this process. */
int doorbell_store_rank(const doorbell_store *store);

/* Returns the number of processes. */
int doorbell_store_size(const doorbell_store *store);

/* Like doorbell_group_barrier. */
int doorbell_store_barrier(const doorbell_store *store, int64_t timeout_ms);

/* Like doorbell_group_set. */
int doorbell_store_set(const doorbell_store *store, const char *key, const void *value, size_t len_bytes,
		       int64_t timeout_ms);

/* Like doorbell_group_get. */
int doorbell_store_get(const doorbell_store *store, const char *key, void *value, size_t capacity, int64_t timeout_ms);

/* Like doorbell_group_gather. */
int doorbell_store_gather(const doorbell_store *store, const void *value, size_t len_bytes, void *values,
			  int64_t timeout_ms);

/*
 * Returns 0 if no rank has failed. Otherwise returns DOORBELL_ERANK and writes the first rank that failed to `rank`,
 * which may be NULL.
 */
int doorbell_store_check(const doorbell_store *store, uint32_t *rank);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_GROUP_H */
