/*
 * Part of the interface of doorbell.h: collective operations of several ranks, queued on streams.
 *
 * doorbell.h has the rules for results, handles, threads and text buffers. docs/collectives.md lists the algorithms.
 */
#ifndef DOORBELL_COMMUNICATOR_H
#define DOORBELL_COMMUNICATOR_H

#include "group.h"
#include "message.h"
#include "stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------- collective operations */

/*
 * Ranks that carry out collective operations, each by a message queue to each other rank. An operation is prepared once
 * and launched on a stream any number of times. All ranks launch the same operations in the same order, each on whatever
 * stream. Nothing is exchanged when an operation is prepared: lengths, root, type, reduction and algorithm must agree.
 *
 * If a rank fails or does not come, the waits of its peers end at their deadline, or with the group, and their streams
 * have a fault. doorbell_communicator_failure names the rank.
 *
 * The thread of a host stream copies and reduces memory of the host. On a CUDA stream the driver copies, and a kernel of
 * the library reduces, memory of the host and of the GPU.
 */
typedef struct doorbell_communicator doorbell_communicator;

/*
 * An operation that is prepared. It keeps its memory registered. All its launches use the same memory, so launches on
 * several streams need an order among them.
 */
typedef struct doorbell_collective doorbell_collective;

/* Reports how a launch fares on this rank. */
typedef struct doorbell_collective_ticket doorbell_collective_ticket;

/* Types of elements. f16 and bf16 are computed in f32 and rounded to the nearest at each step. */
enum doorbell_type {
	DOORBELL_TYPE_F16 = 0, /* IEEE 754 binary16 */
	DOORBELL_TYPE_BF16 = 1, /* the upper half of a binary32 */
	DOORBELL_TYPE_F32 = 2, /* IEEE 754 binary32 */
	DOORBELL_TYPE_F64 = 3, /* IEEE 754 binary64 */
	DOORBELL_TYPE_I32 = 4, /* signed, 4 bytes */
	DOORBELL_TYPE_I64 = 5, /* signed, 8 bytes */
	DOORBELL_TYPE_U8 = 6 /* unsigned, 1 byte */
};

/* Reductions. */
enum doorbell_reduction {
	DOORBELL_REDUCE_SUM = 0, /* integers wrap around */
	DOORBELL_REDUCE_MIN = 1, /* of a number and a NaN the number */
	DOORBELL_REDUCE_MAX = 2, /* of a number and a NaN the number */
	DOORBELL_REDUCE_AVERAGE = 3 /* the sum, divided by the number of ranks at the end; integers towards zero */
};

/* Algorithms. docs/collectives.md says which operation has which. */
enum doorbell_algorithm {
	DOORBELL_ALGORITHM_AUTO = 0, /* the one with the least predicted time */
	DOORBELL_ALGORITHM_RING = 1,
	DOORBELL_ALGORITHM_RECURSIVE_DOUBLING = 2,
	DOORBELL_ALGORITHM_RECURSIVE_HALVING = 3,
	DOORBELL_ALGORITHM_BRUCK = 4,
	DOORBELL_ALGORITHM_PAIRWISE = 5,
	DOORBELL_ALGORITHM_BINOMIAL = 6,
	DOORBELL_ALGORITHM_SCATTER_GATHER = 7,
	DOORBELL_ALGORITHM_LINEAR = 8,
	DOORBELL_ALGORITHM_PARAMETER_SERVER = 9,
	DOORBELL_ALGORITHM_DISSEMINATION = 10,
	DOORBELL_ALGORITHM_KNOMIAL = 11
};

/* What an operation does at each launch. */
typedef struct doorbell_collective_plan {
	uint32_t struct_size;
	uint32_t algorithm;  /* DOORBELL_ALGORITHM_*, never DOORBELL_ALGORITHM_AUTO */
	uint64_t messages;   /* messages that this rank sends */
	uint64_t sent_bytes; /* their bytes together */
	uint64_t predicted_ns; /* time of the slowest rank by the costs of the communicator, in nanoseconds */
	uint64_t matched; /* 1 if doorbell_communicator_match_ahead has matched its messages, otherwise 0 */
} doorbell_collective_plan;

/*
 * Makes a communicator of `count` ranks, of which this process is `rank`. `queues` has a queue for each other rank,
 * connected to the queue that the other rank has for this one, and NULL for this rank. The queues are of one domain. They
 * are destroyed, whether the call succeeds or not, unless it returns DOORBELL_EINVAL, DOORBELL_EHANDLE, DOORBELL_EBUSY or
 * DOORBELL_EPANIC. Returns DOORBELL_ESTATE if a queue is missing or too many; DOORBELL_EFOREIGN for several domains.
 * Threads: alone with queues.
 */
int doorbell_communicator_create(uint32_t rank, doorbell_message_queue *const *queues, uint32_t count,
				 doorbell_communicator **communicator);

/* Makes a communicator of one rank. */
int doorbell_communicator_create_alone(const doorbell_domain *domain, doorbell_communicator **communicator);

/*
 * Makes a communicator of the ranks `ranks` of a group, in that order; with a `rank_count` of 0 of all ranks. Each of these
 * ranks makes it, with the same ranks, tag and configuration. Its queues are those of doorbell_group_message_queues, with
 * its codes, and no other queues may have that tag. Returns DOORBELL_ESTATE if this process is not one of the ranks, or
 * one is there twice.
 */
int doorbell_group_communicator(const doorbell_group *group, const uint32_t *ranks, uint32_t rank_count, uint64_t tag,
				const doorbell_message_config *config, doorbell_communicator **communicator);

/*
 * Destroys a communicator and ends its connections: what the peers still wait for fails. Call
 * doorbell_communicator_finish first, and agree with the peers after it. What streams still use of it is kept until they
 * are done. NULL is allowed. Returns DOORBELL_EBUSY, and does not destroy it, while another thread is in a call with it.
 * Threads: alone with communicator.
 */
int doorbell_communicator_destroy(doorbell_communicator *communicator);

/*
 * Returns the rank of this process.
 * Threads: any.
 */
int doorbell_communicator_rank(const doorbell_communicator *communicator);

/*
 * Returns the number of ranks.
 * Threads: any.
 */
int doorbell_communicator_size(const doorbell_communicator *communicator);

/*
 * Sets the costs that algorithms are chosen by, for operations that are prepared later: of a message without data in
 * nanoseconds; of a byte of a message, and of a byte of a copy or of a result of a reduction, in picoseconds. All ranks
 * must set the same. Default 3000, 100 and 200.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_set_costs(doorbell_communicator *communicator, uint64_t latency_ns, uint64_t byte_ps,
				    uint64_t work_ps);

/*
 * Measures these costs, and sets them. All ranks call this at the same time, each with a stream of the kind that will carry
 * the operations out; all have the same costs afterwards, of each time that of the slowest rank. The memory for it is of the
 * GPU if that of `beside` is, which may be NULL. Writes the costs to `latency_ns`, `byte_ps` and `work_ps`, in the units of
 * doorbell_communicator_set_costs; each may be NULL. Waits for at most `timeout_ms`. Returns DOORBELL_ETIMEOUT, and the
 * codes of doorbell_communicator_launch; the communicator is aborted then.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_measure_costs(doorbell_communicator *communicator, doorbell_stream *stream,
					const doorbell_slice *beside, int64_t timeout_ms, uint64_t *latency_ns,
					uint64_t *byte_ps, uint64_t *work_ps);

/*
 * The calls that prepare operations.
 *
 * Memory of an input needs DOORBELL_ACCESS_REMOTE_READ, that of an output DOORBELL_ACCESS_LOCAL_WRITE as well. Input and
 * output must not overlap. `lens` has a length in bytes for each rank. They return DOORBELL_ERANGE for lengths that do not
 * agree and for a root that is no rank; DOORBELL_EALIGNMENT for a length that is not of whole elements; DOORBELL_ESTATE for
 * an algorithm that the operation does not have for this number of ranks, and for a region that is deregistered or lacks
 * the access; DOORBELL_EFOREIGN for a region of another domain.
 */

/*
 * Prepares a barrier: no stream passes its launch before all ranks have come to theirs.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_barrier(const doorbell_communicator *communicator, uint32_t algorithm,
				  doorbell_collective **collective);

/*
 * Prepares a broadcast of `buffer` of the rank `root` into that of all others.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_broadcast(const doorbell_communicator *communicator, const doorbell_slice *buffer,
				    uint32_t root, uint32_t algorithm, doorbell_collective **collective);

/*
 * Prepares a gather: the inputs of all ranks, of the lengths `lens`, go into `output` of the rank `root`, one behind the
 * other. Other ranks give NULL for the output.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_gather(const doorbell_communicator *communicator, const doorbell_slice *input,
				 const doorbell_slice *output, const uint64_t *lens, uint32_t root, uint32_t algorithm,
				 doorbell_collective **collective);

/*
 * Prepares a scatter: each rank receives its block of `input` of the rank `root`. The blocks are of the lengths `lens`.
 * Other ranks give NULL for the input.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_scatter(const doorbell_communicator *communicator, const doorbell_slice *input,
				  const doorbell_slice *output, const uint64_t *lens, uint32_t root,
				  uint32_t algorithm, doorbell_collective **collective);

/*
 * Prepares an all-gather: the inputs of all ranks, of the lengths `lens`, go into the output of each, one behind the other.
 * If `input` is NULL, the operation is in place: the input is this rank's block of the output.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_all_gather(const doorbell_communicator *communicator, const doorbell_slice *input,
				     const doorbell_slice *output, const uint64_t *lens, uint32_t algorithm,
				     doorbell_collective **collective);

/*
 * Prepares an all-to-all: each rank sends a block of its input to each rank, and receives one from each into its output. All
 * blocks are of one length, a part of `input` and of `output` for each rank. Returns DOORBELL_EALIGNMENT for a length that
 * is no multiple of the number of ranks.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_all_to_all(const doorbell_communicator *communicator, const doorbell_slice *input,
				     const doorbell_slice *output, uint32_t algorithm,
				     doorbell_collective **collective);

/*
 * Prepares an all-to-all of blocks of the lengths `sends` and `receives`, which have an entry for each rank, also for this
 * one. `algorithm` is DOORBELL_ALGORITHM_AUTO or DOORBELL_ALGORITHM_PAIRWISE.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_all_to_all_v(const doorbell_communicator *communicator, const doorbell_slice *input,
				       const doorbell_slice *output, const uint64_t *sends, const uint64_t *receives,
				       uint32_t algorithm, doorbell_collective **collective);

/*
 * Prepares a list of messages: `sends[i]` goes to the rank `to[i]`, and `receives[i]` comes from the rank `from[i]`. Ranks
 * give lists of their own. The messages from one rank to another are received in the order in which they are sent, by
 * slices as long as theirs; a rank may name itself. No order of the lists makes ranks wait for each other. Returns
 * DOORBELL_ESTATE if a slice that is received into overlaps another one.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_exchange(const doorbell_communicator *communicator, const uint32_t *to,
				   const doorbell_slice *sends, size_t send_count, const uint32_t *from,
				   const doorbell_slice *receives, size_t receive_count,
				   doorbell_collective **collective);

/*
 * Prepares a reduction of the inputs of all ranks into `output` of the rank `root`. All inputs and the output have one
 * length. Other ranks give NULL for the output.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_reduce(const doorbell_communicator *communicator, const doorbell_slice *input,
				 const doorbell_slice *output, uint32_t type, uint32_t op, uint32_t root,
				 uint32_t algorithm, doorbell_collective **collective);

/*
 * Prepares a reduction of the inputs of all ranks, of which each rank has a block in its output. The blocks are of the
 * lengths `lens`.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_reduce_scatter(const doorbell_communicator *communicator, const doorbell_slice *input,
					 const doorbell_slice *output, const uint64_t *lens, uint32_t type,
					 uint32_t op, uint32_t algorithm, doorbell_collective **collective);

/*
 * Prepares a reduction of the inputs of all ranks into the output of each. Input and output have one length, and may be
 * the same memory. Every rank has the same bits; the order of the elements in the reduction depends on the algorithm and
 * the number of ranks only.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_all_reduce(const doorbell_communicator *communicator, const doorbell_slice *input,
				     const doorbell_slice *output, uint32_t type, uint32_t op, uint32_t algorithm,
				     doorbell_collective **collective);

/*
 * Matches the messages of an operation with those of the other ranks, once for all its launches: each rank tells the others
 * where it receives. The NIC then writes the messages straight into place; neither the CPU nor a kernel copies them. A
 * message waits, on the stream of its sender, until the stream of its receiver has come so far that the memory is free. All
 * ranks call this, for the same operations in the same order.
 *
 * Memory that a message is received into needs DOORBELL_ACCESS_REMOTE_WRITE. The call waits until streams have executed what
 * they were given of this communicator, and then for the other ranks, for at most `timeout_ms`. If the operation is matched
 * already, it does nothing. Returns DOORBELL_ESTATE if memory lacks the access, and if another rank refuses or has prepared
 * another operation: no rank has matched it then. Returns DOORBELL_EFOREIGN for an operation of another communicator;
 * DOORBELL_ETIMEOUT and DOORBELL_EWORK, after which the communicator is aborted.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_match_ahead(doorbell_communicator *communicator, doorbell_collective *collective,
				      int64_t timeout_ms);

/*
 * Queues an operation on a stream. Its result is there for what the stream executes next. `ticket` may be NULL. Returns
 * DOORBELL_EFOREIGN for an operation of another communicator; DOORBELL_ESTATE if the stream cannot carry it out;
 * DOORBELL_EWORK if the communicator has failed; and the codes of doorbell_message_queue_start_send. If a message queue is
 * full when a part of the operation is queued already, the call waits until the stream has made room, for at most the
 * endpoints' wait_timeout. If a part of the operation was queued before a failure, the communicator is aborted.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_launch(doorbell_communicator *communicator, doorbell_stream *stream,
				 const doorbell_collective *collective, doorbell_collective_ticket **ticket);

/*
 * Waits in this thread until the peers have received all that this rank has sent.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_finish(doorbell_communicator *communicator, int64_t timeout_ms);

/*
 * Fails the communicator: all waits of streams for it end. It stays so.
 * Threads: any.
 */
int doorbell_communicator_abort(doorbell_communicator *communicator);

/*
 * Describes the failure of the communicator, like doorbell_endpoint_failure, and writes the peer whose connection has
 * failed to `peer`, which may be NULL.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_failure(const doorbell_communicator *communicator, uint32_t *peer, doorbell_failure *failure,
				  char *text, size_t capacity);

/*
 * Writes the control path in use, and the reasons why no better one is, like doorbell_endpoint_path. Returns
 * DOORBELL_EINVAL for a communicator of one rank, which has no connections.
 * Threads: one at a time for communicator.
 */
int doorbell_communicator_path(const doorbell_communicator *communicator, uint32_t *control, char *text,
			       size_t capacity);

/*
 * Describes an operation: doorbell_collective_describe(collective, &plan, sizeof plan). No other call with the operation is
 * disturbed by it. While a doorbell_communicator_match_ahead is not over, `matched` is 0.
 */
int doorbell_collective_describe(const doorbell_collective *collective, doorbell_collective_plan *plan,
				 uint32_t struct_size);

/*
 * Destroys an operation. Launches are not affected. NULL is allowed.
 * Threads: alone with collective.
 */
int doorbell_collective_destroy(doorbell_collective *collective);

/*
 * Returns 1 if the operation is over on this rank: its memory has the result, and may be changed. Returns 0 if it is not
 * yet. Codes are those of doorbell_message_ticket_check, of the first message that has failed.
 */
int doorbell_collective_ticket_check(const doorbell_collective_ticket *ticket);

/* Waits until the operation is over on this rank. Otherwise like doorbell_collective_ticket_check, but returns 0. */
int doorbell_collective_ticket_wait(const doorbell_collective_ticket *ticket, int64_t timeout_ms);

/* Adds 1 to an eventfd when the operation is over on this rank, like doorbell_ticket_notify. */
int doorbell_collective_ticket_notify(const doorbell_collective_ticket *ticket, int eventfd);

/*
 * Returns 1 if a message of the operation has failed, and not only been discarded behind another failure, and writes its
 * peer to `peer`, which may be NULL. Otherwise returns 0.
 */
int doorbell_collective_ticket_failed_peer(const doorbell_collective_ticket *ticket, uint32_t *peer);

/*
 * Destroys the handle. The operation is not affected. NULL is allowed.
 * Threads: alone with ticket.
 */
int doorbell_collective_ticket_destroy(doorbell_collective_ticket *ticket);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_COMMUNICATOR_H */
