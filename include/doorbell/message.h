/*
 * Part of the interface of doorbell.h: messages between two processes, queued on streams.
 *
 * doorbell.h has the rules for results, handles, threads and text buffers. docs/messages.md has the protocol.
 */
#ifndef DOORBELL_MESSAGE_H
#define DOORBELL_MESSAGE_H

#include "group.h"
#include "stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------------ messages */

/*
 * One end of a connection for messages. The k-th receive of one side takes the k-th send of the other. A message may be
 * shorter than the memory of its receive. If it is longer, nothing is stored: the receive fails with DOORBELL_EBOUNDS,
 * its stream has a fault, and the send completes.
 *
 * A message of at most `eager_bytes` of the receiving side goes into a slot there, whether a receive is queued or not.
 * A longer message is read by the receiving side, straight into place: it is one slice, of a region with
 * DOORBELL_ACCESS_REMOTE_READ, it is received into one slice, and its send is done when it has been received. A sender
 * that has used all slots waits, on its stream, until the receiver has emptied one.
 *
 * A wait that misses its deadline, or that its stream discards, fails the queue. The peer may still receive what was sent, with
 * whatever is in the memory by then, until this queue is destroyed or aborted.
 */
typedef struct doorbell_message_queue doorbell_message_queue;

/* A message that a stream sends, and that no stream waits for yet. */
typedef struct doorbell_pending_send doorbell_pending_send;

/* A message that a thread has sent, and has not waited for. */
typedef struct doorbell_posted_send doorbell_posted_send;

/* Reports how a message that was queued on a stream fares. */
typedef struct doorbell_message_ticket doorbell_message_ticket;

/* Configuration of a message queue. Initialise it with doorbell_message_config_init. Each side chooses its own. */
typedef struct doorbell_message_config {
	uint32_t struct_size;
	uint32_t slots;       /* messages of the peer that may be here and not received yet, 1 to 1024, rounded up to a
				 power of two; default 16 */
	uint32_t eager_bytes; /* longest message in bytes that goes into a slot, 0 to 1 MiB; default 8192 */
	uint32_t ahead;       /* messages that can be queued on streams in each direction and are not done, 1 to 1024;
				 as many can be sent behind a send whose wait is not queued; default 64 */
	uint32_t max_slices;  /* slices of a message, 1 to 15; default 3 */
	uint32_t reserved;    /* 0 */
	const doorbell_endpoint_config *endpoint; /* configuration of the two endpoints of a queue; NULL, the default,
						     means their defaults. The queue sets depths, slices and inline
						     bytes itself, and adds the access that it needs. */
} doorbell_message_config;

#define DOORBELL_MESSAGE_ADDRESS_BYTES 128

/* What the peer needs to connect: opaque bytes, which the program sends to the peer. */
typedef struct doorbell_message_address {
	uint8_t bytes[DOORBELL_MESSAGE_ADDRESS_BYTES];
} doorbell_message_address;

/* Fills a configuration with the defaults: doorbell_message_config_init(&config, sizeof config). */
int doorbell_message_config_init(doorbell_message_config *config, uint32_t struct_size);

/* Creates a queue. If `config` is NULL, the defaults are used. */
int doorbell_message_queue_create(const doorbell_domain *domain, const doorbell_message_config *config,
				  doorbell_message_queue **queue);

/*
 * Destroys a queue and ends its connection: what the peer still waits for fails. Call doorbell_message_queue_finish
 * first, and agree with the peer after it. What streams still use of the queue is kept until they are done. NULL is
 * allowed. Returns DOORBELL_EBUSY, and does not destroy the queue, while another thread is in a call with it.
 * Threads: alone with queue.
 */
int doorbell_message_queue_destroy(doorbell_message_queue *queue);

/*
 * Writes the address that the peer needs to connect.
 * Threads: one at a time for queue.
 */
int doorbell_message_queue_address(const doorbell_message_queue *queue, doorbell_message_address *address);

/*
 * Connects to the peer's queue. Both sides make this call, in any order. Returns DOORBELL_EMALFORMED if the bytes are
 * not an address or have another version; DOORBELL_ESTATE if the queue is already connected or the peer does not exist.
 * Threads: one at a time for queue.
 */
int doorbell_message_queue_connect(doorbell_message_queue *queue, const doorbell_message_address *peer);

/*
 * Queues a message on a stream, and a wait until its memory may be used again. The slices are sent one after the other.
 * `ticket` may be NULL. Returns DOORBELL_EFULL, or with a room_timeout_ms DOORBELL_ETIMEOUT, if `ahead` messages are not
 * done; DOORBELL_EWORK if the queue has failed; DOORBELL_EFOREIGN for a region of another domain; DOORBELL_EBOUNDS for a
 * slice outside its region; DOORBELL_ESTATE if the queue is not connected or the region lacks the access; and what the
 * stream refuses.
 * Threads: one at a time for queue.
 */
int doorbell_message_queue_send(doorbell_message_queue *queue, doorbell_stream *stream, const doorbell_slice *slices,
				uint32_t slice_count, doorbell_message_ticket **ticket);

/*
 * Queues a message on a stream like doorbell_message_queue_send, but no wait. So both sides can send before they receive,
 * whatever the length. The memory must not be changed until the wait of doorbell_message_queue_wait_send is over.
 * Threads: one at a time for queue.
 */
int doorbell_message_queue_start_send(doorbell_message_queue *queue, doorbell_stream *stream,
				      const doorbell_slice *slices, uint32_t slice_count,
				      doorbell_pending_send **pending);

/*
 * Queues the wait for a message that was started, on the same stream or on another one. `pending` is destroyed, whether
 * the call succeeds or not, unless it returns DOORBELL_EINVAL, DOORBELL_EHANDLE, DOORBELL_EBUSY or DOORBELL_EPANIC.
 * After another failure the message is sent all the same; doorbell_message_queue_finish waits for it. `ticket` may be NULL.
 * Threads: one at a time for queue, alone with pending.
 */
int doorbell_message_queue_wait_send(doorbell_message_queue *queue, doorbell_stream *stream,
				     doorbell_pending_send *pending, doorbell_message_ticket **ticket);

/*
 * Destroys the handle of a message that was started. The message is sent all the same; doorbell_message_queue_finish
 * waits for it. NULL is allowed.
 * Threads: alone with pending.
 */
int doorbell_pending_send_destroy(doorbell_pending_send *pending);

/*
 * Queues a receive on a stream: the stream waits for the next message, and stores it into the slices, one after the
 * other. Memory behind the end of the message stays as it is. On a stream of a GPU a kernel stores short messages, into
 * memory of the GPU's context or of the host; after a receive that has failed, its memory must not be used before the
 * stream is synchronized. `ticket` may be NULL. Codes are as for doorbell_message_queue_send, DOORBELL_EFOREIGN for memory
 * of another CUDA context, and DOORBELL_ESTATE if the stream cannot store into the memory, such as memory of a GPU whose
 * address there is not known (doorbell_region_register_dmabuf, doorbell_region_register_peermem).
 * Threads: one at a time for queue.
 */
int doorbell_message_queue_recv(doorbell_message_queue *queue, doorbell_stream *stream, const doorbell_slice *slices,
				uint32_t slice_count, doorbell_message_ticket **ticket);

/*
 * Sends a message from this thread, and waits until its memory may be used again. After DOORBELL_ETIMEOUT the message
 * may have been sent; its memory must not be changed before doorbell_message_queue_finish. Returns DOORBELL_ESTATE if
 * streams have messages of this queue that they have not executed.
 * Threads: one at a time for queue.
 */
int doorbell_message_queue_send_now(doorbell_message_queue *queue, const doorbell_slice *slices, uint32_t slice_count,
				    int64_t timeout_ms);

/*
 * Sends a message from this thread like doorbell_message_queue_send_now, and does not wait until its memory may be used
 * again: so a thread can send before it receives, whatever the length. The memory must not be changed until
 * doorbell_message_queue_wait_send_now has returned 0. After DOORBELL_ETIMEOUT nothing was sent.
 * Threads: one at a time for queue.
 */
int doorbell_message_queue_start_send_now(doorbell_message_queue *queue, const doorbell_slice *slices,
					  uint32_t slice_count, doorbell_posted_send **posted, int64_t timeout_ms);

/*
 * Waits in this thread until the memory of a message may be used again. Can be repeated, also after DOORBELL_ETIMEOUT.
 * Returns DOORBELL_EFOREIGN for a message of another queue; DOORBELL_EWORK if the queue has failed.
 * Threads: one at a time for queue.
 */
int doorbell_message_queue_wait_send_now(doorbell_message_queue *queue, doorbell_posted_send *posted,
					 int64_t timeout_ms);

/*
 * Destroys the handle of a message that a thread has sent. doorbell_message_queue_finish waits for the message. NULL is
 * allowed.
 * Threads: alone with posted.
 */
int doorbell_posted_send_destroy(doorbell_posted_send *posted);

/*
 * Receives the next message in this thread, and writes its length in bytes to `len_bytes`, which may be NULL. Returns
 * DOORBELL_ETIMEOUT if no message came; DOORBELL_ESTATE if streams have receives of this queue that they have not executed.
 * DOORBELL_EBOUNDS has two reasons: the message is longer than the memory, and is consumed; or a slice is outside its
 * region, and nothing has changed. doorbell_last_error() tells which; a program that checks its slices needs not ask.
 * Threads: one at a time for queue.
 */
int doorbell_message_queue_recv_now(doorbell_message_queue *queue, const doorbell_slice *slices, uint32_t slice_count,
				    uint64_t *len_bytes, int64_t timeout_ms);

/*
 * Receives the next message of whichever of `queues` has one, in this thread: from any peer, or of any tag. Writes the index
 * of the queue to `index` and the length in bytes to `len_bytes`, each of which may be NULL. Queues that have messages take
 * turns. A queue that has failed ends the call with its error, though others may have messages: see
 * doorbell_message_queue_failure. After any error `index` is not written, also if a message was consumed. All are of one protection domain, that of the memory. A queue that is there twice is
 * DOORBELL_EBUSY. Otherwise as doorbell_message_queue_recv_now, for each of them.
 * Threads: one at a time for queues.
 */
int doorbell_message_queues_recv_any_now(doorbell_message_queue *const *queues, size_t queue_count,
					 const doorbell_slice *slices, uint32_t slice_count, size_t *index,
					 uint64_t *len_bytes, int64_t timeout_ms);

/*
 * Waits in this thread until the peer has received all messages of this side, and knows which messages this side has
 * received.
 * Threads: one at a time for queue.
 */
int doorbell_message_queue_finish(doorbell_message_queue *queue, int64_t timeout_ms);

/*
 * Fails the queue: all waits of streams for it end. It stays so.
 * Threads: any.
 */
int doorbell_message_queue_abort(doorbell_message_queue *queue);

/*
 * Describes the failure of the queue, like doorbell_endpoint_failure.
 * Threads: one at a time for queue.
 */
int doorbell_message_queue_failure(const doorbell_message_queue *queue, doorbell_failure *failure, char *text,
				   size_t capacity);

/*
 * Writes the control path in use, and the reasons why no better one is, like doorbell_endpoint_path.
 * Threads: one at a time for queue.
 */
int doorbell_message_queue_path(const doorbell_message_queue *queue, uint32_t *control, char *text, size_t capacity);

/*
 * Returns 1 if the message is sent or received, and writes its length in bytes to `len_bytes`, which may be NULL; 0 if it
 * is not yet. Returns DOORBELL_EWORK if an operation has failed; DOORBELL_EBOUNDS if the message was longer than the
 * memory; DOORBELL_EMALFORMED if the peer sent no message; DOORBELL_ESTATE if the stream has discarded the operation.
 */
int doorbell_message_ticket_check(const doorbell_message_ticket *ticket, uint64_t *len_bytes);

/* Waits until the message is sent or received. Otherwise like doorbell_message_ticket_check, but returns 0. */
int doorbell_message_ticket_wait(const doorbell_message_ticket *ticket, uint64_t *len_bytes, int64_t timeout_ms);

/* Adds 1 to an eventfd when the message is sent or received, or has failed, like doorbell_ticket_notify. */
int doorbell_message_ticket_notify(const doorbell_message_ticket *ticket, int eventfd);

/*
 * Destroys the handle. The message is not affected. NULL is allowed.
 * Threads: alone with ticket.
 */
int doorbell_message_ticket_destroy(doorbell_message_ticket *ticket);

/* --------------------------------------------------------------------------------------------- messages of groups */

/*
 * Opens queues with other ranks of a group, one for each of the `peer_count` entries of `peers`, and waits until all are
 * connected. Each peer opens its side, with the same tag, in any order, in one call or in several. Messages of different
 * tags have no order. `queues` receives a
 * handle for each entry, which the caller destroys. If the group fails, its queues are aborted. Returns DOORBELL_ESTATE
 * if a rank is this process or a queue with that tag was opened before; DOORBELL_ETIMEOUT if a peer does not open its side
 * within the timeout of the group; DOORBELL_ERANK if the group has failed. After a failure the queues of the call cannot
 * be opened again.
 */
int doorbell_group_message_queues(const doorbell_group *group, const doorbell_group_peer *peers, uint32_t peer_count,
				  const doorbell_message_config *config, doorbell_message_queue **queues);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_MESSAGE_H */
