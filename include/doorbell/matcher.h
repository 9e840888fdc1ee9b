/*
 * Part of the interface of doorbell.h: messages with tags, received from any peer or a named one.
 *
 * doorbell.h has the rules for results, handles, threads and text buffers. docs/messages.md has the protocol.
 */
#ifndef DOORBELL_MATCHER_H
#define DOORBELL_MATCHER_H

#include "group.h"
#include "message.h"
#include "stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------------- matchers */

/*
 * Message queues to several peers, one of which may be this process, and receives that match their messages by peer and tag.
 *
 * Receives are posted in the order of the calls. A message goes to the earliest receive that matches it and has none. If no
 * receive matches, it waits, and the next receive that matches takes the earliest message that waits. A thread of the
 * library matches. It stores a message once the stream of its receive has come to it. The NIC stores messages in memory of a
 * GPU.
 *
 * A message that is longer than the memory of its receive is not stored: the receive fails with DOORBELL_EBOUNDS, its stream
 * has a fault, and the send completes. Messages without a receive are bounded, for each peer by `unexpected` and by the slots
 * of its queue. A peer that sends more waits on its stream.
 *
 * If the connection with a peer fails, receives that name it fail with DOORBELL_EWORK, and so do receives from any peer until
 * doorbell_matcher_exclude. Messages that had arrived can still be received.
 */
typedef struct doorbell_matcher doorbell_matcher;

/* Reports how a receive of a matcher on a stream fares. */
typedef struct doorbell_match_ticket doorbell_match_ticket;

/* In place of the index of a peer: any peer. */
#define DOORBELL_ANY_PEER 4294967295

/* As the bits of a tag that are ignored: all of them, so any tag. 0 ignores none. */
#define DOORBELL_ANY_TAG 4294967295

/* Configuration of a matcher. Initialise it with doorbell_matcher_config_init. */
typedef struct doorbell_matcher_config {
	uint32_t struct_size;
	uint32_t unexpected; /* messages of each peer that may be here without a receive and not use a slot, 0 to 65536;
				each has a block of `eager_bytes`; default 64 */
	uint32_t receives;   /* receives on streams that are not over, 1 to 65536; default 256 */
	uint32_t reserved;   /* 0 */
	const doorbell_message_config *messages; /* configuration of the queues that the matcher opens; NULL, the default,
						    means their defaults. wait_timeout_ms of its endpoint is the deadline of
						    a receive that gets no message, room_timeout_ms how long a call waits
						    where `receives` receives are not over. */
} doorbell_matcher_config;

/* What is known of a message. */
typedef struct doorbell_envelope {
	uint64_t len_bytes; /* its length */
	uint32_t peer;      /* index of the peer that has sent it */
	uint32_t tag;
} doorbell_envelope;

/* Fills a configuration with the defaults: doorbell_matcher_config_init(&config, sizeof config). */
int doorbell_matcher_config_init(doorbell_matcher_config *config, uint32_t struct_size);

/*
 * Makes a matcher of `count` peers. `queues` has a connected queue to each, of that domain; one may be NULL, which is this
 * process. The queues are destroyed, whether the call succeeds or not, unless it returns DOORBELL_EINVAL, DOORBELL_EHANDLE,
 * DOORBELL_EBUSY or DOORBELL_EPANIC. So they are destroyed after DOORBELL_ERANGE, too, which is returned for a value in
 * `config`, and for a `count` of 0. If `config` is NULL, the defaults are used. Returns DOORBELL_ESTATE if a queue is not
 * connected, or if two are NULL; DOORBELL_EFOREIGN for a queue of another domain.
 * Threads: alone with queues.
 */
int doorbell_matcher_create(const doorbell_domain *domain, doorbell_message_queue *const *queues, uint32_t count,
			    const doorbell_matcher_config *config, doorbell_matcher **matcher);

/*
 * Makes a matcher between the ranks `ranks` of a group, by their place in the list; with a `rank_count` of 0 between all
 * ranks. Each of these ranks makes it, with the same ranks and tag. Its queues are those of doorbell_group_message_queues,
 * with its codes, and no other queues may have that tag. Returns DOORBELL_ESTATE if this process is not one of the ranks, or
 * one is there twice.
 */
int doorbell_group_matcher(const doorbell_group *group, const uint32_t *ranks, uint32_t rank_count, uint64_t tag,
			   const doorbell_matcher_config *config, doorbell_matcher **matcher);

/*
 * Destroys a matcher and ends its connections: receives that are not over fail, and their streams have a fault. Call
 * doorbell_matcher_finish first, and agree with the peers after it. NULL is allowed.
 * Threads: alone with matcher.
 */
int doorbell_matcher_destroy(doorbell_matcher *matcher);

/*
 * Queues a message with a tag on a stream, and a wait until its memory may be used again, like doorbell_message_queue_send,
 * with its codes. A message of at most `eager_bytes` of the peer is done when it is there, received or not; a longer one when
 * a receive has taken it. `ticket` may be NULL. Returns DOORBELL_ERANGE if there is no such peer.
 */
int doorbell_matcher_send(doorbell_matcher *matcher, doorbell_stream *stream, uint32_t peer, uint32_t tag,
			  const doorbell_slice *slices, uint32_t slice_count, doorbell_message_ticket **ticket);

/*
 * Queues a message on a stream like doorbell_matcher_send, but no wait. The memory must not be changed until the wait of
 * doorbell_matcher_wait_send is over. The handle can be destroyed with doorbell_pending_send_destroy, too.
 */
int doorbell_matcher_start_send(doorbell_matcher *matcher, doorbell_stream *stream, uint32_t peer, uint32_t tag,
				const doorbell_slice *slices, uint32_t slice_count, doorbell_pending_send **pending);

/*
 * Queues the wait for a message that was started, on the same stream or on another one. `pending` is destroyed like in
 * doorbell_message_queue_wait_send. `ticket` may be NULL. Returns DOORBELL_EFOREIGN for a message of another matcher.
 * Threads: alone with pending.
 */
int doorbell_matcher_wait_send(doorbell_matcher *matcher, doorbell_stream *stream, doorbell_pending_send *pending,
			       doorbell_message_ticket **ticket);

/* Sends a message from this thread, and waits until its memory may be used again: doorbell_message_queue_send_now. */
int doorbell_matcher_send_now(doorbell_matcher *matcher, uint32_t peer, uint32_t tag, const doorbell_slice *slices,
			      uint32_t slice_count, int64_t timeout_ms);

/*
 * Sends a message from this thread, and does not wait until its memory may be used again. After DOORBELL_ETIMEOUT nothing was
 * sent. The handle is destroyed with doorbell_posted_send_destroy.
 */
int doorbell_matcher_start_send_now(doorbell_matcher *matcher, uint32_t peer, uint32_t tag,
				    const doorbell_slice *slices, uint32_t slice_count, doorbell_posted_send **posted,
				    int64_t timeout_ms);

/*
 * Waits in this thread until the memory of a message may be used again. Can be repeated. Returns DOORBELL_EFOREIGN for a
 * message of another matcher.
 */
int doorbell_matcher_wait_send_now(doorbell_matcher *matcher, doorbell_posted_send *posted, int64_t timeout_ms);

/*
 * Queues a receive on a stream: the stream waits until a message from the peer `from`, or from any with DOORBELL_ANY_PEER, is
 * stored in the slices, one after the other. Its tag is equal to `tag` in the bits that `ignored` lacks. Memory behind the
 * end of the message stays as it is. Several slices have room for at most the smallest `eager_bytes` of this side's queues.
 * `ticket` may be NULL. Returns DOORBELL_ERANGE if there is no such peer; DOORBELL_EFULL, or with a room_timeout_ms
 * DOORBELL_ETIMEOUT, if `receives` receives on streams are not over; DOORBELL_EFOREIGN for a region of another domain;
 * DOORBELL_EBOUNDS for a slice outside its region; DOORBELL_ESTATE if the region lacks the access; and what the stream
 * refuses.
 */
int doorbell_matcher_recv(doorbell_matcher *matcher, doorbell_stream *stream, uint32_t from, uint32_t tag,
			  uint32_t ignored, const doorbell_slice *slices, uint32_t slice_count,
			  doorbell_match_ticket **ticket);

/*
 * Receives a message that matches in this thread. `envelope` may be NULL. Returns DOORBELL_ETIMEOUT if no message came, after
 * which the receive is cancelled; DOORBELL_EWORK if a peer has failed whose message it waits for; DOORBELL_EBOUNDS if the
 * message is longer than the memory, and is consumed, or if a slice is outside its region.
 */
int doorbell_matcher_recv_now(doorbell_matcher *matcher, uint32_t from, uint32_t tag, uint32_t ignored,
			      const doorbell_slice *slices, uint32_t slice_count, doorbell_envelope *envelope,
			      int64_t timeout_ms);

/*
 * Returns 1 if a message waits that a receive with these arguments would take, and 0 if none does. Writes the message's peer,
 * tag and length to `envelope`, which may be NULL. The message goes on waiting.
 */
int doorbell_matcher_probe_now(doorbell_matcher *matcher, uint32_t from, uint32_t tag, uint32_t ignored,
			       doorbell_envelope *envelope);

/*
 * Cancels a receive that has no message. Returns 1 if it was cancelled: its ticket says DOORBELL_ESTATE, and its stream has a
 * fault when it comes to it. Returns 0 if it has a message or is over; DOORBELL_EFOREIGN for a receive of another matcher.
 */
int doorbell_matcher_cancel(doorbell_matcher *matcher, const doorbell_match_ticket *ticket);

/*
 * Waits in this thread until streams have executed all sends, the peers have received all messages, and know which messages
 * this side has received. Peers that have failed and are excluded are left out.
 */
int doorbell_matcher_finish(doorbell_matcher *matcher, int64_t timeout_ms);

/*
 * Receives from any peer go on without this one, if its connection has failed or fails later. Returns DOORBELL_ERANGE if
 * there is no such peer.
 */
int doorbell_matcher_exclude(doorbell_matcher *matcher, uint32_t peer);

/*
 * Describes the failure of the connection with a peer, like doorbell_endpoint_failure. Returns DOORBELL_ERANGE if there is no
 * such peer.
 */
int doorbell_matcher_failure(const doorbell_matcher *matcher, uint32_t peer, doorbell_failure *failure, char *text,
			     size_t capacity);

/*
 * Returns 1 if the message is in the memory of its receive, and writes what is known of it to `envelope`, which may be NULL; 0
 * if it is not yet. A receive that has failed says so when its stream has come to it. Returns DOORBELL_EBOUNDS if the message
 * was longer than the memory; DOORBELL_EWORK if a peer has failed whose message it waited for; DOORBELL_ETIMEOUT if no message
 * came within wait_timeout_ms; DOORBELL_ESTATE if it was cancelled, if the stream has discarded it, or if the matcher was
 * destroyed.
 */
int doorbell_match_ticket_check(const doorbell_match_ticket *ticket, doorbell_envelope *envelope);

/* Waits until the message is there. Otherwise like doorbell_match_ticket_check, but returns 0. */
int doorbell_match_ticket_wait(const doorbell_match_ticket *ticket, doorbell_envelope *envelope, int64_t timeout_ms);

/* Adds 1 to an eventfd when the message is there, or the receive has failed, like doorbell_ticket_notify. */
int doorbell_match_ticket_notify(const doorbell_match_ticket *ticket, int eventfd);

/*
 * Destroys the handle. The receive is not affected. NULL is allowed.
 * Threads: alone with ticket.
 */
int doorbell_match_ticket_destroy(doorbell_match_ticket *ticket);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_MATCHER_H */
