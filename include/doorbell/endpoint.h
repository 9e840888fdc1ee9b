/*
 * Part of the interface of doorbell.h: endpoints, work requests, tickets, and posting and polling from the CPU.
 *
 * doorbell.h has the rules for results, handles, threads and text buffers.
 */
#ifndef DOORBELL_ENDPOINT_H
#define DOORBELL_ENDPOINT_H

#include "region.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ----------------------------------------------------------------------------------------------------- endpoints */

/*
 * A queue pair, of a reliable connection or of unreliable datagrams: a send queue and a receive queue, each with its own
 * completions.
 */
typedef struct doorbell_endpoint doorbell_endpoint;

/* The service of a queue pair. */
enum doorbell_transport {
	/* A reliable connection (RC) to one peer. */
	DOORBELL_TRANSPORT_RC = 0,
	/*
	 * Unreliable datagrams (UD). There is no peer: doorbell_endpoint_activate takes the place of
	 * doorbell_endpoint_connect, and doorbell_work_to names the receiver of each send. There are sends only, of at
	 * most `mtu_bytes`, or the MTU of the port if that is smaller. The memory of a receive begins with 40 bytes for a
	 * global route header (GRH), which the length in the completion includes. A datagram is lost if it finds no
	 * receive, or if its queue key is another; a ticket tells only that it was sent. A datagram that is longer than
	 * its receive fails the receiving endpoint.
	 */
	DOORBELL_TRANSPORT_UD = 1
};

/* Configuration of an endpoint. Initialise it with doorbell_endpoint_config_init. */
typedef struct doorbell_endpoint_config {
	uint32_t struct_size;
	uint32_t send_depth;       /* depth of the send queue in work requests, 1 to 16384; default 128 */
	uint32_t recv_depth;       /* depth of the receive queue, 1 to 16384; default 128 */
	uint32_t max_segments;     /* slices per work request, 1 to 16; default 4 */
	uint32_t max_inline_bytes; /* inline bytes per work request, 0 to 476; default 64 */
	uint32_t blueflame;        /* 1: write the WQE to the device with the doorbell; default 0 */
	int64_t wait_timeout_ms;   /* timeout of waits on streams in ms, 1 or more, or DOORBELL_NO_TIMEOUT; default
				      30000. When it passes, the wait is released and the endpoint fails. */
	uint32_t mtu_bytes;        /* 256, 512, 1024, 2048 or 4096; the smaller value of both sides is used; default
				      4096 */
	uint32_t ack_timeout;      /* code of the time to wait for an acknowledgement, `timeout` in verbs:
				      4.096 us * 2^ack_timeout, 0 to 31; 0 is infinite; default 18 */
	uint32_t retry_count;      /* retries without progress, 0 to 7; default 7 */
	uint32_t rnr_retry;        /* retries if the peer has posted no receive, 0 to 6; 7 is infinite; default 7 */
	uint32_t min_rnr_timer;    /* time a peer waits if no receive is posted here, as coded in verbs, 0 to 31;
				      default 12 */
	uint32_t max_reads;        /* reads and atomics in flight at once, 1 to 16; default 16 */
	uint32_t access_flags;     /* what the peer may do, if the region also allows it; default DOORBELL_ACCESS_ALL */
	uint32_t control;          /* what rings the doorbell: DOORBELL_CONTROL_* + 1; default 0: what the device was
				      opened with, or else the best path that is available */
	int64_t room_timeout_ms;   /* how long a call that queues, posts or prepares an operation waits for room in a
				      full queue, in ms, or DOORBELL_NO_TIMEOUT; default 0: it does not wait, and
				      returns DOORBELL_EFULL. When it passes, the call returns DOORBELL_ETIMEOUT. It is
				      for the endpoint's queue: a call that queues on a stream whose own queue is full
				      waits until the stream goes on or is aborted. */
	/* The next three are not used by connections of rdma_cm, nor by softcx. */
	uint32_t traffic_class;    /* of packets with a global route, 0 to 255; on RoCE the TOS byte of IP; default 0 */
	uint32_t service_level;    /* 0 to 15; default 0 */
	uint32_t pkey_index;       /* index into the port's table of partition keys, 0 to 65535; default 0 */
	uint32_t transport;        /* DOORBELL_TRANSPORT_*; default DOORBELL_TRANSPORT_RC */
	uint32_t qkey;             /* of a UD endpoint: the queue key that datagrams to it must have; default 0. With the highest bit set, `ibv_modify_qp` fails
	                              with EPERM in a process without CAP_NET_RAW. */
	uint32_t reserved;         /* 0 */
} doorbell_endpoint_config;

#define DOORBELL_ADDRESS_BYTES 48
#define DOORBELL_ADDRESS_TEXT_BYTES 97

/* What the peer needs to connect: opaque bytes, which the program sends to the peer. */
typedef struct doorbell_address {
	uint8_t bytes[DOORBELL_ADDRESS_BYTES];
} doorbell_address;

/* The control path: the component that rings the doorbell of the device. */
enum doorbell_control {
	/* The stream itself. */
	DOORBELL_CONTROL_DIRECT = 0,
	/* A thread of the library, triggered by the stream. */
	DOORBELL_CONTROL_PROXY = 1,
	/* The application's thread, after it has waited for the stream. */
	DOORBELL_CONTROL_SYNC = 2
};

/* Fills a configuration with the defaults: doorbell_endpoint_config_init(&config, sizeof config). */
int doorbell_endpoint_config_init(doorbell_endpoint_config *config, uint32_t struct_size);

/*
 * Creates an endpoint. If `config` is NULL, the defaults are used. Receives can be posted at once; other work needs a
 * connection.
 */
int doorbell_endpoint_create(const doorbell_domain *domain, const doorbell_endpoint_config *config,
			     doorbell_endpoint **endpoint);

/*
 * Destroys an endpoint. Work that was not submitted to the device is dropped. What streams still use of the endpoint
 * is kept until they are done. NULL is allowed. Returns DOORBELL_EBUSY, and does not destroy the endpoint, while
 * another thread is in a call with it.
 * Threads: alone with endpoint.
 */
int doorbell_endpoint_destroy(doorbell_endpoint *endpoint);

/*
 * Writes the address that the peer needs to connect. It changes with each doorbell_endpoint_reset.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_address(const doorbell_endpoint *endpoint, doorbell_address *address);

/*
 * Writes an address as hexadecimal digits to a text buffer; DOORBELL_ADDRESS_TEXT_BYTES are enough. Returns
 * DOORBELL_EMALFORMED if the bytes are not an address.
 */
int doorbell_address_to_text(const doorbell_address *address, char *text, size_t capacity);

/* Reads an address from hexadecimal digits. Returns DOORBELL_EMALFORMED if the text is not an address. */
int doorbell_address_from_text(const char *text, doorbell_address *address);

/*
 * Connects to the peer's endpoint. Both sides make this call, in any order. Returns DOORBELL_EMALFORMED if the bytes
 * are not an address or have another version; DOORBELL_ESTATE if the endpoint is already connected or the peer does
 * not exist; DOORBELL_EWORK if the endpoint has failed.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_connect(doorbell_endpoint *endpoint, const doorbell_address *peer);

/*
 * Makes a UD endpoint ready to send and to receive. Returns DOORBELL_ESTATE for an endpoint of a reliable connection and
 * for one that is active already; DOORBELL_EWORK if the endpoint has failed.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_activate(doorbell_endpoint *endpoint);

/*
 * Brings the queue pair one step further, as ibv_modify_qp does, for programs that exchange queue pair numbers, LIDs or
 * GIDs and PSNs themselves, and for peers that do not use this library: to INIT, from INIT to RTR, and from RTR to RTS,
 * which does what doorbell_endpoint_connect does. A new endpoint is in INIT already. `attributes` is a struct ibv_qp_attr
 * of the rdma-core that the library was built with, and `mask` an enum ibv_qp_attr_mask; the device gets both as they
 * are. Returns DOORBELL_ESTATE for another step, if the endpoint is connected or has failed, and on a device that is not
 * one of libibverbs; DOORBELL_ESYSTEM if ibv_modify_qp failed; DOORBELL_EFEATURE without the feature `verbs`.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_modify_qp(doorbell_endpoint *endpoint, const void *attributes, int mask);

/*
 * Returns 1 if the endpoint was connected or activated and has not failed since, else 0.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_is_connected(const doorbell_endpoint *endpoint);

/*
 * Returns the endpoint to the state after its creation, with a new address. The failure is cleared; work in flight and
 * prepared operations are dropped. Waits up to 5 s until streams are done with the endpoint; otherwise returns
 * DOORBELL_ETIMEOUT and changes nothing. If a stream waits for a completion that will not come, call
 * doorbell_endpoint_abort first.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_reset(doorbell_endpoint *endpoint);

/*
 * Fails the endpoint: releases all waits of streams for it and flushes the work in flight. doorbell_endpoint_reset and
 * connect make it usable again. Another thread may be in a call with the endpoint; if that call waits, it returns
 * DOORBELL_EWORK.
 * Threads: any.
 */
int doorbell_endpoint_abort(doorbell_endpoint *endpoint);

/*
 * Returns the number of the queue pair.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_qpn(const doorbell_endpoint *endpoint);

/* Returns the number of the queue pair of an address. Returns DOORBELL_EMALFORMED if the bytes are not an address. */
int doorbell_address_qpn(const doorbell_address *address);

/*
 * A port that sends of UD endpoints go to. All UD endpoints of its protection domain can use it. Work in flight keeps what
 * it needs of it. doorbell_address_handle_adopt (doorbell/adopt.h) makes one of an ibv_ah.
 */
typedef struct doorbell_address_handle doorbell_address_handle;

/*
 * Creates the handle of the port of a peer's endpoint. Datagrams to it have the traffic class and the service level of
 * `endpoint`. Returns DOORBELL_EFOREIGN if the address is of another kind of device, and DOORBELL_ESTATE if the device of
 * the peer is gone or on another host.
 * Threads: one at a time for endpoint.
 */
int doorbell_address_handle_create(const doorbell_endpoint *endpoint, const doorbell_address *peer,
				   doorbell_address_handle **handle);

/*
 * Creates the handle of the port of that LID, for peers that do not use this library. `gid` is NULL or the 16 bytes of the
 * port's GID, for a global route. On Ethernet the LID is 0, and a GID is needed. Returns DOORBELL_ESTATE on a device that
 * is not one of libibverbs.
 * Threads: one at a time for endpoint.
 */
int doorbell_address_handle_create_for_port(const doorbell_endpoint *endpoint, uint32_t lid, const uint8_t *gid,
					    doorbell_address_handle **handle);

/*
 * Destroys an address handle. NULL is allowed.
 * Threads: alone with handle.
 */
int doorbell_address_handle_destroy(doorbell_address_handle *handle);

/*
 * Returns the size of the queues' memory in bytes, or 0 on failure.
 * Threads: one at a time for endpoint.
 */
uint64_t doorbell_endpoint_memory_bytes(const doorbell_endpoint *endpoint);

/*
 * Writes the control path in use (DOORBELL_CONTROL_*) to `control`, which may be NULL, and the reasons why no better
 * path is used to a text buffer.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_path(const doorbell_endpoint *endpoint, uint32_t *control, char *text, size_t capacity);

/*
 * Describes the first failure since the endpoint was created or reset. Writes the details to `failure`, which may be
 * NULL, and a text to a text buffer. Returns the length of the text. Returns 0 and writes nothing if the endpoint has
 * not failed.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_failure(const doorbell_endpoint *endpoint, doorbell_failure *failure, char *text,
			      size_t capacity);

/* -------------------------------------------------------------------------------------------------- flow control */

/*
 * An operation takes a slot of its queue when it is queued or prepared, not when the stream executes it. The slot is
 * free when the completion of the operation, or of a later signaled one of the same queue, has arrived. A completion
 * then stays in the completion queue, which holds at least twice the depth, until a wait on a stream, doorbell_poll_cq or
 * doorbell_wait_cq has taken it. Completions that are not taken fill the queue.
 */

/*
 * Returns how many further work requests can be posted to a queue (DOORBELL_QUEUE_*) without DOORBELL_EFULL. Looks at
 * new completions first. Returns 0 if the endpoint has failed.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_room(doorbell_endpoint *endpoint, uint32_t queue_kind);

/*
 * Waits until `count` further work requests can be posted to a queue. It spins, with increasing pauses. Returns
 * DOORBELL_ETIMEOUT if the timeout passes, DOORBELL_EWORK if the endpoint fails, and DOORBELL_EFULL, without waiting, if
 * the room cannot come: the slots are those of completions that no wait was queued for, or of unsignaled work requests
 * without a signaled one behind them.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_wait_room(doorbell_endpoint *endpoint, uint32_t queue_kind, uint32_t count, int64_t timeout_ms);

/* ------------------------------------------------------------------------------------------------- work requests */

#define DOORBELL_SLICES_MAX 16

/* A part of a region: the local memory of a work request. */
typedef struct doorbell_slice {
	const doorbell_region *region;
	uint64_t offset;
	uint64_t len_bytes; /* less than 2 GiB */
} doorbell_slice;

/* The two queues of an endpoint. */
enum doorbell_queue_kind {
	/* Sends, writes, reads and atomics. */
	DOORBELL_QUEUE_SEND = 0,
	/* Receives. */
	DOORBELL_QUEUE_RECV = 1
};

enum doorbell_operation {
	/* No operation; completes in its order. */
	DOORBELL_OP_NOP = 0,
	/* Sends to the peer's next receive. */
	DOORBELL_OP_SEND = 1,
	/* Writes to the peer's memory at remote_addr, in the region of rkey. */
	DOORBELL_OP_WRITE = 2,
	/* Reads from the peer's memory at remote_addr; the slices give the length. */
	DOORBELL_OP_READ = 3,
	/* Replaces the 8 bytes at remote_addr by `operand` if they equal `compare`. The old value is written to the
	   one slice, of 8 bytes. */
	DOORBELL_OP_COMPARE_SWAP = 4,
	/* Adds `operand` to the 8 bytes at remote_addr. The old value is written to the one slice, of 8 bytes. */
	DOORBELL_OP_FETCH_ADD = 5,
	/* In completions only: a receive that a send has filled. */
	DOORBELL_OP_RECV = 6,
	/* In completions only: a receive that was used by a write with immediate data. */
	DOORBELL_OP_RECV_WRITE = 7
};

enum doorbell_work_flags {
	/* Success makes no completion. It is known when a later signaled work request completes. Failure always
	   makes a completion. */
	DOORBELL_WORK_UNSIGNALED = 1,
	/* The peer's completion is a solicited one. For sends, and for writes with immediate data. */
	DOORBELL_WORK_SOLICITED = 2,
	/* The device starts after earlier reads and atomics are complete. */
	DOORBELL_WORK_FENCE = 4,
	/* For sends and writes: delivers `imm` in the peer's completion. Such a write uses one of the peer's
	   receives. */
	DOORBELL_WORK_IMM = 8,
	/* For sends and writes: the data are `inline_bytes`, which are copied by the call; there are no slices. */
	DOORBELL_WORK_INLINE = 16,
	/* The peer sees this after all that earlier work requests of the endpoint wrote. A write that signals an earlier
	   write needs it: a network with adaptive routing, or a ConnectX-8, may place the bytes of two writes in any
	   order. Sends, immediate data and atomics come in order without it. The device waits for earlier work
	   requests. Includes DOORBELL_WORK_FENCE. */
	DOORBELL_WORK_ORDERED = 32
};

/* A work request for the send queue. Make it with one of the functions below; they set all other fields to 0. */
typedef struct doorbell_work {
	uint32_t struct_size;
	uint32_t opcode; /* DOORBELL_OP_NOP to DOORBELL_OP_FETCH_ADD */
	uint32_t flags;  /* DOORBELL_WORK_* */
	uint32_t imm;    /* in host byte order */
	uint64_t wr_id;  /* returned in the completion */
	const doorbell_slice *slices;
	const void *inline_bytes;
	uint32_t slice_count; /* 0 to max_segments of the endpoint */
	uint32_t inline_len_bytes;
	uint64_t remote_addr; /* a multiple of 8 for atomics */
	uint32_t rkey;
	uint32_t remote_qpn; /* this, remote_qkey and address_handle: see doorbell_work_to */
	uint64_t compare;
	uint64_t operand;
	const doorbell_address_handle *address_handle;
	uint32_t remote_qkey;
	uint32_t reserved; /* 0 */
} doorbell_work;

/* A completion. */
typedef struct doorbell_completion {
	uint64_t wr_id;
	uint32_t operation; /* DOORBELL_OP_* */
	uint32_t len_bytes; /* brought by a receive, a read or an atomic; 0 for sends and writes */
	uint32_t imm;       /* valid if has_imm is 1; in host byte order */
	uint32_t has_imm;
	/* The next three are of receives of UD endpoints, and otherwise 0. */
	uint32_t source_qpn; /* the number of the queue pair that has sent */
	uint16_t source_lid; /* the LID of its port, on InfiniBand */
	uint16_t has_grh;    /* 1: the first 40 bytes of the receive are a global route header */
} doorbell_completion;

/*
 * Makes a work request with an opcode and slices; all other fields are 0. The slices must stay valid until the work
 * request was queued, posted or prepared.
 */
static inline doorbell_work doorbell_work_init(uint32_t opcode, const doorbell_slice *slices, uint32_t slice_count)
{
	doorbell_work work;
	work.struct_size = (uint32_t)sizeof(work);
	work.opcode = opcode;
	work.flags = 0;
	work.imm = 0;
	work.wr_id = 0;
	work.slices = slices;
	work.inline_bytes = NULL;
	work.slice_count = slice_count;
	work.inline_len_bytes = 0;
	work.remote_addr = 0;
	work.rkey = 0;
	work.remote_qpn = 0;
	work.compare = 0;
	work.operand = 0;
	work.address_handle = NULL;
	work.remote_qkey = 0;
	work.reserved = 0;
	return work;
}

/* Makes a send of the slices, concatenated. */
static inline doorbell_work doorbell_work_send(const doorbell_slice *slices, uint32_t slice_count)
{
	return doorbell_work_init(DOORBELL_OP_SEND, slices, slice_count);
}

/* Makes a send of `len_bytes` bytes, which are copied when the work request is queued, posted or prepared. */
static inline doorbell_work doorbell_work_send_inline(const void *bytes, uint32_t len_bytes)
{
	doorbell_work work = doorbell_work_init(DOORBELL_OP_SEND, NULL, 0);
	work.flags = DOORBELL_WORK_INLINE;
	work.inline_bytes = bytes;
	work.inline_len_bytes = len_bytes;
	return work;
}

/* Makes a write of the slices, concatenated. */
static inline doorbell_work doorbell_work_write(const doorbell_slice *slices, uint32_t slice_count,
						uint64_t remote_addr, uint32_t rkey)
{
	doorbell_work work = doorbell_work_init(DOORBELL_OP_WRITE, slices, slice_count);
	work.remote_addr = remote_addr;
	work.rkey = rkey;
	return work;
}

/* Makes a write of `len_bytes` bytes, which are copied when the work request is queued, posted or prepared. */
static inline doorbell_work doorbell_work_write_inline(const void *bytes, uint32_t len_bytes, uint64_t remote_addr,
						       uint32_t rkey)
{
	doorbell_work work = doorbell_work_send_inline(bytes, len_bytes);
	work.opcode = DOORBELL_OP_WRITE;
	work.remote_addr = remote_addr;
	work.rkey = rkey;
	return work;
}

/* Makes a read that fills the slices in order. */
static inline doorbell_work doorbell_work_read(const doorbell_slice *slices, uint32_t slice_count,
					       uint64_t remote_addr, uint32_t rkey)
{
	doorbell_work work = doorbell_work_write(slices, slice_count, remote_addr, rkey);
	work.opcode = DOORBELL_OP_READ;
	return work;
}

/* Makes a compare-and-swap. `result` is one slice of 8 bytes. Values are in host byte order. */
static inline doorbell_work doorbell_work_compare_swap(const doorbell_slice *result, uint64_t remote_addr,
						       uint32_t rkey, uint64_t compare, uint64_t swap)
{
	doorbell_work work = doorbell_work_write(result, 1, remote_addr, rkey);
	work.opcode = DOORBELL_OP_COMPARE_SWAP;
	work.compare = compare;
	work.operand = swap;
	return work;
}

/* Makes a fetch-and-add. `result` is one slice of 8 bytes. Values are in host byte order. */
static inline doorbell_work doorbell_work_fetch_add(const doorbell_slice *result, uint64_t remote_addr, uint32_t rkey,
						    uint64_t add)
{
	doorbell_work work = doorbell_work_write(result, 1, remote_addr, rkey);
	work.opcode = DOORBELL_OP_FETCH_ADD;
	work.operand = add;
	return work;
}

/*
 * Names the receiver of a send of a UD endpoint: the port, the number of the queue pair there, and its queue key. If the
 * highest bit of `qkey` is set, the datagram has the queue key of the endpoint that sends it. Each send of a UD endpoint
 * needs this, and no other work request may have it.
 */
static inline doorbell_work doorbell_work_to(doorbell_work work, const doorbell_address_handle *handle, uint32_t qpn,
					     uint32_t qkey)
{
	work.address_handle = handle;
	work.remote_qpn = qpn;
	work.remote_qkey = qkey;
	return work;
}

/* ------------------------------------------------------------------------------------------------------- tickets */

/*
 * Reports the status of one operation. Calls that queue an operation accept NULL for `ticket`; they then create no
 * ticket.
 */
typedef struct doorbell_ticket doorbell_ticket;

/* The status of a queued operation. */
enum doorbell_status {
	/* Prepared, not yet posted to a stream. */
	DOORBELL_STATUS_PREPARED = 0,
	/* In the queue of a stream. */
	DOORBELL_STATUS_QUEUED = 1,
	/* The stream has rung the doorbell; for a wait, the stream is waiting. */
	DOORBELL_STATUS_RUNG = 2,
	/* Complete. */
	DOORBELL_STATUS_COMPLETE = 3,
	/* The operation failed, its endpoint failed before its doorbell was rung, or its wait was released. */
	DOORBELL_STATUS_FAILED = 4,
	/* Destroyed or rolled back before it was posted to a stream. */
	DOORBELL_STATUS_CANCELLED = 5,
	/*
	 * The doorbell was rung, the endpoint failed, and no completion tells whether the operation was carried out. It may
	 * have been carried out wholly or in part.
	 */
	DOORBELL_STATUS_UNKNOWN = 6,
	/* Its stream had failed or was aborted. The doorbell was not rung and never will be. */
	DOORBELL_STATUS_DISCARDED = 7
};

/* What a receive, a read or an atomic has brought. */
typedef struct doorbell_details {
	uint32_t len_bytes;
	uint32_t imm;       /* valid if has_imm is 1; in host byte order */
	uint32_t has_imm;
	uint32_t is_write;  /* 1: a write with immediate data took the receive; 0 for operations of a captured graph */
} doorbell_details;

/*
 * Returns the status of the operation, DOORBELL_STATUS_*. For DOORBELL_STATUS_FAILED and DOORBELL_STATUS_UNKNOWN the
 * reason is written to `failure`, which may be NULL. A final status (DOORBELL_STATUS_COMPLETE and higher) never changes,
 * and the NIC no longer accesses the memory of that operation. If the endpoint has just failed, the call first makes
 * the NIC flush its work, which takes at most 20 ms. If the NIC does not stop within half a second of the failure, the
 * status is not final yet.
 */
int doorbell_ticket_status(const doorbell_ticket *ticket, doorbell_failure *failure);

/*
 * As doorbell_ticket_status, but never waits for the NIC: for a thread that looks at many operations, or holds a lock.
 * While the NIC of an endpoint that has failed is being stopped, the status is not final yet; call again later.
 */
int doorbell_ticket_status_now(const doorbell_ticket *ticket, doorbell_failure *failure);

/*
 * Waits until the operation is complete. It spins, with increasing pauses. Returns DOORBELL_EWORK if the operation failed
 * or its outcome is unknown, DOORBELL_ESTATE if it was cancelled or discarded, and DOORBELL_ETIMEOUT if the timeout
 * passes; the operation then continues. Returns DOORBELL_ESTATE at once for an operation that is never complete
 * (doorbell_ticket_launches).
 */
int doorbell_ticket_wait(const doorbell_ticket *ticket, int64_t timeout_ms);

/*
 * Adds 1 to an eventfd (eventfd(2)) when the operation is over, with success or not, or within this call if that is so
 * already; for programs that wait by epoll or poll. doorbell_ticket_status then tells how it ended. The descriptor is
 * duplicated, so the caller may close its own. It should be non-blocking: a write that blocks would block the notices of
 * others. A thread of the library looks at the operation and writes up to 0.2 ms after it is over. For an operation on a
 * host stream without a thread a thread must also wait in this library. Returns DOORBELL_EINVAL if `eventfd` is not an
 * open descriptor, and DOORBELL_ESTATE, without a notice, for an operation that is never complete
 * (doorbell_ticket_launches).
 */
int doorbell_ticket_notify(const doorbell_ticket *ticket, int eventfd);

/*
 * Writes the byte count of a complete receive, read or atomic, and the immediate data of a receive, and returns 1.
 * Returns 0 and writes nothing if the operation is not complete, if its queue has reused the slot since, and for sends,
 * writes, unsignaled work requests and waits, of which the NIC reports nothing.
 */
int doorbell_ticket_details(const doorbell_ticket *ticket, doorbell_details *details);

/*
 * Writes how many launches have executed an operation of a graph that the caller captured, and returns 1: how often a
 * work request was rung, or a wait has ended. The status of such an operation is DOORBELL_STATUS_PREPARED before the first
 * launch has executed it, DOORBELL_STATUS_RUNG after that, and DOORBELL_STATUS_FAILED if a launch has not executed it or its
 * endpoint has failed. It is never DOORBELL_STATUS_COMPLETE, because the next launch executes the operation again, so
 * doorbell_ticket_wait and doorbell_ticket_notify return DOORBELL_ESTATE for it. This is also so for a send, a receive and a
 * push of pages that a kernel executes outside of a capture: the ticket of their wait reports the completion. Returns 0 and
 * writes nothing for other operations.
 */
int doorbell_ticket_launches(const doorbell_ticket *ticket, uint64_t *launches);

/*
 * Destroys a ticket; the operation continues. A ticket keeps queue memory of its endpoint, so do not collect tickets.
 * NULL is allowed.
 * Threads: alone with ticket.
 */
int doorbell_ticket_destroy(doorbell_ticket *ticket);

/* --------------------------------------------------------------------------------- posting and polling by the CPU */

/*
 * Posts a work request from this thread at once. Returns the codes of doorbell_stream_queue_send, and DOORBELL_ESTATE
 * if operations of this queue are still on a stream or prepared, because this work request would overtake them.
 * Threads: one at a time for endpoint.
 */
int doorbell_post_send(doorbell_endpoint *endpoint, const doorbell_work *work, doorbell_ticket **ticket);

/*
 * Posts a receive from this thread at once. When the call returns, the NIC has the receive, and the peer may send.
 * Returns the codes of doorbell_post_send, but needs no connection.
 * Threads: one at a time for endpoint.
 */
int doorbell_post_recv(doorbell_endpoint *endpoint, uint64_t wr_id, const doorbell_slice *slices,
		       uint32_t slice_count, doorbell_ticket **ticket);

/*
 * Takes the next completion of a queue (DOORBELL_QUEUE_*). Returns 1 and writes the completion if there is one, else
 * returns 0. Each completion is consumed once, either by a wait on a stream or by this call. Returns DOORBELL_EWORK
 * for a completion with an error; doorbell_last_failure then has its wr_id.
 * Threads: one at a time for endpoint.
 */
int doorbell_poll_cq(doorbell_endpoint *endpoint, uint32_t queue_kind, doorbell_completion *completion);

/*
 * Waits for the next completion of a queue, and takes it. It spins, with increasing pauses. On DOORBELL_ETIMEOUT the
 * endpoint is unchanged.
 * Threads: one at a time for endpoint.
 */
int doorbell_wait_cq(doorbell_endpoint *endpoint, uint32_t queue_kind, int64_t timeout_ms,
		     doorbell_completion *completion);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_ENDPOINT_H */
