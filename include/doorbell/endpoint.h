/* doorbell.h, a part of it: endpoints, work requests, tickets, and posting and polling from the CPU. */
#ifndef DOORBELL_ENDPOINT_H
#define DOORBELL_ENDPOINT_H

#include "region.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ----------------------------------------------------------------------------------------------------- endpoints */

/* One end of a reliable connection: a send and a receive queue, each with its completions. */
typedef struct doorbell_endpoint doorbell_endpoint;

/* How an endpoint is made. Begin with doorbell_endpoint_config_init. */
typedef struct doorbell_endpoint_config {
	uint32_t struct_size;
	uint32_t send_depth;       /* work requests of the send queue, 1 to 16384; default 128 */
	uint32_t recv_depth;       /* of the receive queue, 1 to 16384; default 128 */
	uint32_t max_segments;     /* slices of a work request, 1 to 16; default 4 */
	uint32_t max_inline_bytes; /* inline bytes of a work request, 0 to 476; default 64 */
	uint32_t blueflame;        /* 1: a doorbell carries its WQE to the device; default 0 */
	int64_t wait_timeout_ms;   /* of waits on streams, from 1, or DOORBELL_NO_TIMEOUT; default 30000. When it passes, the
				      wait is released and the endpoint fails. */
	uint32_t mtu_bytes;        /* 256, 512, 1024, 2048 or 4096; the smaller one of both ends counts; default 4096 */
	uint32_t timeout;          /* of an answer, as verbs code it: 4.096 us * 2^timeout, 0 is for ever; default 14 */
	uint32_t retry_count;      /* repetitions without progress, 0 to 7; default 7 */
	uint32_t rnr_retry;        /* the same where the peer has no receive, 0 to 6; 7 is without end; default 7 */
	uint32_t min_rnr_timer;    /* how long a sender waits for a receive of ours, as verbs code it, 0 to 31; default 1 */
	uint32_t max_reads;        /* reads and atomics on their way at once, 1 to 16; default 16 */
	uint32_t access_flags;     /* what the peer may do, if the region allows it; default DOORBELL_ACCESS_ALL */
	uint32_t control;          /* who rings the device: DOORBELL_CONTROL_* + 1; default 0, which is what the device was opened
				      with, or else the best way that is possible */
} doorbell_endpoint_config;

#define DOORBELL_ADDRESS_BYTES 48
#define DOORBELL_ADDRESS_TEXT_BYTES 97

/* What the peer needs to connect: opaque bytes, to be carried there by any means. */
typedef struct doorbell_address {
	uint8_t bytes[DOORBELL_ADDRESS_BYTES];
} doorbell_address;

/* Who rings the device. */
enum doorbell_control {
	/* The stream itself. */
	DOORBELL_CONTROL_DIRECT = 0,
	/* A thread of the library, when the stream says so. */
	DOORBELL_CONTROL_PROXY = 1,
	/* The application's thread, after it has waited for the stream. */
	DOORBELL_CONTROL_SYNC = 2
};

/*
 * Fills a configuration with the defaults: doorbell_endpoint_config_init(&config, sizeof config).
 * Threads: any.
 */
int doorbell_endpoint_config_init(doorbell_endpoint_config *config, uint32_t struct_size);

/*
 * Makes an endpoint. A `config` of NULL is the defaults. Receives can be posted at once, everything else when it is
 * connected.
 * Threads: any.
 */
int doorbell_endpoint_create(const doorbell_domain *domain, const doorbell_endpoint_config *config,
			     doorbell_endpoint **endpoint);

/*
 * Ends an endpoint. Work that has not left it is dropped; what streams still have of it is kept until they are done. NULL is
 * allowed. DOORBELL_EBUSY while another thread is in a call with it, and it is not destroyed then.
 * Threads: alone with endpoint.
 */
int doorbell_endpoint_destroy(doorbell_endpoint *endpoint);

/*
 * The address for the peer. It changes with every reset.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_address(const doorbell_endpoint *endpoint, doorbell_address *address);

/*
 * An address as hexadecimal digits: a text buffer of DOORBELL_ADDRESS_TEXT_BYTES. DOORBELL_EMALFORMED if it is none.
 * Threads: any.
 */
int doorbell_address_to_text(const doorbell_address *address, char *text, size_t capacity);

/*
 * An address from hexadecimal digits. DOORBELL_EMALFORMED if they are none.
 * Threads: any.
 */
int doorbell_address_from_text(const char *text, doorbell_address *address);

/*
 * Connects to the peer's endpoint. Both sides do so, in any order. DOORBELL_EMALFORMED for bytes that are no address or one
 * of another version; DOORBELL_ESTATE if it is connected already, or the peer is not there; DOORBELL_EWORK if it has failed.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_connect(doorbell_endpoint *endpoint, const doorbell_address *peer);

/*
 * 1 if doorbell_endpoint_connect was done and nothing has failed since, else 0.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_is_connected(const doorbell_endpoint *endpoint);

/*
 * Brings the endpoint back to where it was when it was made, with a new address: its failure is forgotten, work in flight and
 * prepared operations are dropped. Waits, for up to five seconds, until streams are done with it; DOORBELL_ETIMEOUT if they
 * are not, and nothing has changed then. A wait that is not going to end needs doorbell_endpoint_abort first.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_reset(doorbell_endpoint *endpoint);

/*
 * Fails the endpoint: releases every wait of a stream for it, and flushes what is in flight. reset and connect bring it back.
 * Another thread may be in a call with the endpoint, which then ends with DOORBELL_EWORK if it waits.
 * Threads: any.
 */
int doorbell_endpoint_abort(doorbell_endpoint *endpoint);

/*
 * The number of its queue pair.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_qpn(const doorbell_endpoint *endpoint);

/*
 * How much memory its queues take, in bytes; 0 if the call fails.
 * Threads: one at a time for endpoint.
 */
uint64_t doorbell_endpoint_memory_bytes(const doorbell_endpoint *endpoint);

/*
 * The control path in force: DOORBELL_CONTROL_* to `control`, which may be NULL, and a text buffer with the reasons why it is
 * this one and none that is better.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_path(const doorbell_endpoint *endpoint, uint32_t *control, char *text, size_t capacity);

/*
 * The first failure since the endpoint was made or reset: details to `failure`, which may be NULL, and a text buffer. The
 * length of the text, or 0 if nothing has failed, and then nothing is written.
 * Threads: one at a time for endpoint.
 */
int doorbell_endpoint_failure(const doorbell_endpoint *endpoint, doorbell_failure *failure, char *text,
			      size_t capacity);

/* ------------------------------------------------------------------------------------------------- work requests */

#define DOORBELL_SLICES_MAX 16

/* A part of a region: what a work request sends from, or receives into. */
typedef struct doorbell_slice {
	const doorbell_region *region;
	uint64_t offset;
	uint64_t len_bytes; /* less than 2 GiB */
} doorbell_slice;

/* The two queues of an endpoint, each with its completions. */
enum doorbell_side {
	/* Sends, writes, reads and atomics. */
	DOORBELL_SIDE_SEND = 0,
	/* Receives. */
	DOORBELL_SIDE_RECV = 1
};

enum doorbell_operation {
	/* Nothing, in its turn. */
	DOORBELL_OP_NOP = 0,
	/* Sends to the peer's next receive. */
	DOORBELL_OP_SEND = 1,
	/* Writes to remote_addr of the peer, in the region of rkey. */
	DOORBELL_OP_WRITE = 2,
	/* Reads from there, as much as the slices hold. */
	DOORBELL_OP_READ = 3,
	/* Replaces the 8 bytes there by `operand` if they equal `compare`; what they were goes to the one slice, of 8 bytes. */
	DOORBELL_OP_COMPARE_SWAP = 4,
	/* Adds `operand` to the 8 bytes there; what they were goes to the one slice, of 8 bytes. */
	DOORBELL_OP_FETCH_ADD = 5,
	/* In completions only: a receive that took a send. */
	DOORBELL_OP_RECV = 6,
	/* In completions only: a receive that took the immediate data of a write. */
	DOORBELL_OP_RECV_WRITE = 7
};

enum doorbell_work_flags {
	/* Success makes no completion; it is known when a later, signaled one is there. Failure always makes one. */
	DOORBELL_WORK_UNSIGNALED = 1,
	/* The peer's completion is a solicited one. */
	DOORBELL_WORK_SOLICITED = 2,
	/* The device waits for earlier reads and atomics first. */
	DOORBELL_WORK_FENCE = 4,
	/* Sends and writes: carries `imm` to the peer's completion. A write then takes one of the peer's receives. */
	DOORBELL_WORK_IMM = 8,
	/* Sends and writes: `inline_bytes` are copied now, and go; there are no slices. */
	DOORBELL_WORK_INLINE = 16
};

/* A work request for the send queue. The functions below make them; what they do not set is 0. */
typedef struct doorbell_work {
	uint32_t struct_size;
	uint32_t opcode; /* DOORBELL_OP_NOP to DOORBELL_OP_FETCH_ADD */
	uint32_t flags;  /* DOORBELL_WORK_* */
	uint32_t imm;    /* in host order */
	uint64_t wr_id;  /* comes back with the completion */
	const doorbell_slice *slices;
	const void *inline_bytes;
	uint32_t slice_count; /* up to max_segments of the endpoint */
	uint32_t inline_len_bytes;
	uint64_t remote_addr; /* a multiple of 8 for the atomics */
	uint32_t rkey;
	uint32_t reserved; /* 0 */
	uint64_t compare;
	uint64_t operand;
} doorbell_work;

/* What a completion says. */
typedef struct doorbell_completion {
	uint64_t wr_id;
	uint32_t operation; /* DOORBELL_OP_* */
	uint32_t len_bytes; /* received, read, or sent */
	uint32_t imm;       /* if has_imm is 1 */
	uint32_t has_imm;
	uint64_t reserved; /* 0 */
} doorbell_completion;

/* A work request of that operation, and no more. The slices must stay until it was queued, posted or prepared. */
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
	work.reserved = 0;
	work.compare = 0;
	work.operand = 0;
	return work;
}

/* A send of the slices, one after the other. */
static inline doorbell_work doorbell_work_send(const doorbell_slice *slices, uint32_t slice_count)
{
	return doorbell_work_init(DOORBELL_OP_SEND, slices, slice_count);
}

/* A send of bytes that are copied when it is queued, posted or prepared. */
static inline doorbell_work doorbell_work_send_inline(const void *bytes, uint32_t len_bytes)
{
	doorbell_work work = doorbell_work_init(DOORBELL_OP_SEND, NULL, 0);
	work.flags = DOORBELL_WORK_INLINE;
	work.inline_bytes = bytes;
	work.inline_len_bytes = len_bytes;
	return work;
}

/* A write of the slices, one after the other. */
static inline doorbell_work doorbell_work_write(const doorbell_slice *slices, uint32_t slice_count,
						uint64_t remote_addr, uint32_t rkey)
{
	doorbell_work work = doorbell_work_init(DOORBELL_OP_WRITE, slices, slice_count);
	work.remote_addr = remote_addr;
	work.rkey = rkey;
	return work;
}

/* A write of bytes that are copied when it is queued, posted or prepared. */
static inline doorbell_work doorbell_work_write_inline(const void *bytes, uint32_t len_bytes, uint64_t remote_addr,
						       uint32_t rkey)
{
	doorbell_work work = doorbell_work_send_inline(bytes, len_bytes);
	work.opcode = DOORBELL_OP_WRITE;
	work.remote_addr = remote_addr;
	work.rkey = rkey;
	return work;
}

/* A read that fills the slices in turn. */
static inline doorbell_work doorbell_work_read(const doorbell_slice *slices, uint32_t slice_count,
					       uint64_t remote_addr, uint32_t rkey)
{
	doorbell_work work = doorbell_work_write(slices, slice_count, remote_addr, rkey);
	work.opcode = DOORBELL_OP_READ;
	return work;
}

/* A compare and swap; `result` is one slice of 8 bytes. Words are in host order. */
static inline doorbell_work doorbell_work_compare_swap(const doorbell_slice *result, uint64_t remote_addr,
						       uint32_t rkey, uint64_t compare, uint64_t swap)
{
	doorbell_work work = doorbell_work_write(result, 1, remote_addr, rkey);
	work.opcode = DOORBELL_OP_COMPARE_SWAP;
	work.compare = compare;
	work.operand = swap;
	return work;
}

/* A fetch and add; `result` is one slice of 8 bytes. Words are in host order. */
static inline doorbell_work doorbell_work_fetch_add(const doorbell_slice *result, uint64_t remote_addr, uint32_t rkey,
						    uint64_t add)
{
	doorbell_work work = doorbell_work_write(result, 1, remote_addr, rkey);
	work.opcode = DOORBELL_OP_FETCH_ADD;
	work.operand = add;
	return work;
}

/* ------------------------------------------------------------------------------------------------------- tickets */

/* Tells what became of a queued operation. Every `ticket` below may be NULL: no ticket is made then. */
typedef struct doorbell_ticket doorbell_ticket;

/* The state of a queued operation. */
enum doorbell_status {
	/* Prepared, and not yet given to a stream. */
	DOORBELL_STATUS_PREPARED = 0,
	/* In a stream's queue. */
	DOORBELL_STATUS_QUEUED = 1,
	/* The stream has rung the doorbell; of a wait: the stream waits now. */
	DOORBELL_STATUS_RUNG = 2,
	/* Done. */
	DOORBELL_STATUS_COMPLETE = 3,
	/* It failed, or its endpoint failed first, or its wait was released. */
	DOORBELL_STATUS_FAILED = 4,
	/* Destroyed or rolled back before a stream had it. */
	DOORBELL_STATUS_CANCELLED = 5
};

/* What is known of an operation that is complete. */
typedef struct doorbell_details {
	uint32_t len_bytes; /* received, read, or sent */
	uint32_t imm;       /* if has_imm is 1 */
	uint32_t has_imm;
	uint32_t reserved; /* 0 */
} doorbell_details;

/*
 * The state of the operation, DOORBELL_STATUS_*. If it is DOORBELL_STATUS_FAILED, the reason goes to `failure`, which may be
 * NULL. What is over stays as it is told, and the NIC is not at its memory any more: where the endpoint has failed just now, the NIC is brought
 * to flush first what it was at, which takes 20 ms at most.
 * Threads: any.
 */
int doorbell_ticket_status(const doorbell_ticket *ticket, doorbell_failure *failure);

/*
 * Bytes and immediate data of a work request or receive that is complete: 1. Before that, for waits, and when its queue has
 * used the place again: 0.
 * Threads: any.
 */
int doorbell_ticket_details(const doorbell_ticket *ticket, doorbell_details *details);

/*
 * Ends a ticket; the operation goes on. A ticket keeps queue memory of its endpoint, so do not collect them. NULL is allowed.
 * Threads: alone with ticket.
 */
int doorbell_ticket_destroy(doorbell_ticket *ticket);

/* ------------------------------------------------------------------------------------- the CPU-synchronous twins */

/*
 * Posts a work request now, from this thread. Errors as of doorbell_stream_queue_send; DOORBELL_ESTATE if operations of this
 * queue are still on a stream, or prepared: this one would overtake them.
 * Threads: one at a time for endpoint.
 */
int doorbell_post_send(doorbell_endpoint *endpoint, const doorbell_work *work, doorbell_ticket **ticket);

/*
 * Posts a receive now, from this thread. The NIC has it when this returns: whoever learns of that may send. Errors as of doorbell_post_send,
 * but it needs no connection.
 * Threads: one at a time for endpoint.
 */
int doorbell_post_recv(doorbell_endpoint *endpoint, uint64_t wr_id, const doorbell_slice *slices,
		       uint32_t slice_count, doorbell_ticket **ticket);

/*
 * Takes the next completion of a queue (DOORBELL_SIDE_*), if it is there: 1 and the completion, or 0. Each goes once to
 * whoever asks first, a wait on a stream or this call. DOORBELL_EWORK for one in error; doorbell_last_failure has its wr_id.
 * Threads: one at a time for endpoint.
 */
int doorbell_poll_cq(doorbell_endpoint *endpoint, uint32_t queue_side, doorbell_completion *completion);

/*
 * Waits, spinning with back-off, for the next completion of a queue. DOORBELL_ETIMEOUT: the endpoint is as it was.
 * Threads: one at a time for endpoint.
 */
int doorbell_wait_cq(doorbell_endpoint *endpoint, uint32_t queue_side, int64_t timeout_ms,
		     doorbell_completion *completion);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_ENDPOINT_H */
