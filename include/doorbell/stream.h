/* doorbell.h, a part of it: streams, events, and the operations that are queued on streams. */
#ifndef DOORBELL_STREAM_H
#define DOORBELL_STREAM_H

#include "endpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------------- streams */

/* An in-order queue of work with the semantics of a CUDA stream. */
typedef struct doorbell_stream doorbell_stream;

/* A kernel of the processor. It must return: no longjmp, no pthread_exit, no C++ exception out of it. */
typedef void (*doorbell_kernel)(void *argument);

/*
 * Makes a stream that a thread of the library executes. The name, for errors and debuggers, may be NULL. `capacity` is the
 * entries of its queue, 1 to 65536, rounded up to a power of two; 0 is the default, 1024. Calls that queue wait while it is
 * full.
 * Threads: any.
 */
int doorbell_stream_create_host(const char *name, uint32_t capacity, doorbell_stream **stream);

/*
 * Ends the handle. What is queued is still executed, without anybody waiting for it, as with cudaStreamDestroy: arguments of
 * kernels must stay valid until then. NULL is allowed.
 * Threads: alone with stream.
 */
int doorbell_stream_destroy(doorbell_stream *stream);

/*
 * Queues a call of `kernel(argument)` in the stream's thread. What `argument` points to stays the caller's, who keeps it
 * valid until the kernel has run. A kernel whose stream failed or was aborted before its turn is never called. A kernel may
 * queue work, on its own stream too, but not wait for that stream: DOORBELL_ESTATE. On a CUDA stream it runs in a thread of
 * the driver (cuLaunchHostFunc), and may neither call CUDA nor anything that does: no call with a CUDA stream.
 * Threads: any.
 */
int doorbell_stream_launch(doorbell_stream *stream, doorbell_kernel kernel, void *argument);

/*
 * Waits, spinning, until everything queued so far is done. DOORBELL_ETIMEOUT: the stream goes on.
 * DOORBELL_EASYNC: work that was queued earlier failed. Any call with a stream may report this, as in CUDA, and then queues
 * nothing itself. A kernel that failed is reported by every call from then on; a wait that was released, by at most one: who
 * knows for sure is its ticket, and doorbell_endpoint_failure.
 * Threads: any.
 */
int doorbell_stream_synchronize(doorbell_stream *stream, int64_t timeout_ms);

/*
 * 1 if everything queued so far is done, 0 if not. Of a CUDA stream the driver says so, which may be an instant after
 * doorbell_stream_synchronize has come back.
 * Threads: any.
 */
int doorbell_stream_query(doorbell_stream *stream);

/*
 * Discards what is queued at this moment and breaks the wait that the stream is in; a kernel that runs is not stopped.
 * Endpoints whose operations were discarded have failed.
 * Of a CUDA stream, from which nothing is taken back, the stores of what is queued and the work of others on it are executed,
 * but its waits for completions, words and events of host streams end, and its endpoints have failed. A wait for an event of
 * another CUDA or kernel stream ends with DOORBELL_EXECUTION_KERNEL; with DOORBELL_EXECUTION_MEMORY_OPS it goes on until that
 * stream has passed the event, so abort that stream as well. Waits that the program has queued itself (cuStreamWaitEvent,
 * cuStreamWaitValue32) are not this library's to end.
 * Of a kernel stream: ends every wait of its triggers, for events too, of those to come as well, and discards what was not
 * taken; the stream is over.
 * Threads: any.
 */
int doorbell_stream_abort(doorbell_stream *stream);

/* -------------------------------------------------------------------------------------------------------- events */

enum doorbell_event_flags {
	/* doorbell_event_synchronize sleeps instead of spinning, as with cudaEventBlockingSync. */
	DOORBELL_EVENT_BLOCKING = 1,
	/* The event takes no time, as with cudaEventDisableTiming. */
	DOORBELL_EVENT_NO_TIMING = 2
};

/* A mark that streams pass. One that was never recorded counts as passed. */
typedef struct doorbell_event doorbell_event;

/*
 * Makes an event. `flags`: DOORBELL_EVENT_*, or 0.
 * Threads: any.
 */
int doorbell_event_create(uint32_t flags, doorbell_event **event);

/*
 * Ends the handle; records and waits in streams go on. NULL is allowed.
 * Threads: alone with event.
 */
int doorbell_event_destroy(doorbell_event *event);

/*
 * Makes the event stand for the work queued on the stream so far. It may be recorded again and again.
 * Threads: any.
 */
int doorbell_stream_record(doorbell_stream *stream, doorbell_event *event);

/*
 * Lets what is queued on the stream later wait for the work that the event stands for at this moment.
 * Threads: any.
 */
int doorbell_stream_wait_event(doorbell_stream *stream, const doorbell_event *event);

/*
 * 1 if the work that the event stands for is done, 0 if not. DOORBELL_EASYNC if that work was discarded.
 * Threads: any.
 */
int doorbell_event_query(const doorbell_event *event);

/*
 * Waits until the work that the event stands for is done. DOORBELL_EASYNC if that work was discarded.
 * Threads: any.
 */
int doorbell_event_synchronize(const doorbell_event *event, int64_t timeout_ms);

/*
 * Nanoseconds between the moments when the streams passed two events, by the processor's clock. A CUDA stream's are those
 * when the library saw it, a millisecond later at most, and known after doorbell_stream_synchronize: for times of the GPU
 * itself there is cudaEventElapsedTime. DOORBELL_ESTATE if one was not passed or takes no time, or if `end` passed first.
 * Threads: any.
 */
int doorbell_event_elapsed_ns(const doorbell_event *start, const doorbell_event *end, uint64_t *elapsed_ns);

/* ----------------------------------------------------------------------------------------- operations on streams */

/* An operation that is ready to be given to a stream. */
typedef struct doorbell_prepared doorbell_prepared;

/*
 * Queues a work request on the stream: it goes out when the stream comes to it, without the caller.
 * DOORBELL_EWORK if the endpoint has failed, DOORBELL_ESTATE if it is not connected, DOORBELL_EFULL, DOORBELL_ERANGE,
 * DOORBELL_EBOUNDS, DOORBELL_EFOREIGN; DOORBELL_EASYNC as in doorbell_stream_synchronize.
 * Threads: one at a time for endpoint.
 */
int doorbell_stream_queue_send(doorbell_stream *stream, doorbell_endpoint *endpoint, const doorbell_work *work,
			       doorbell_ticket **ticket);

/*
 * Queues a write: doorbell_stream_queue_send of a doorbell_work_write.
 * Threads: one at a time for endpoint.
 */
int doorbell_stream_queue_write(doorbell_stream *stream, doorbell_endpoint *endpoint, const doorbell_slice *slices,
				uint32_t slice_count, uint64_t remote_addr, uint32_t rkey, doorbell_ticket **ticket);

/*
 * Queues a read: doorbell_stream_queue_send of a doorbell_work_read.
 * Threads: one at a time for endpoint.
 */
int doorbell_stream_queue_read(doorbell_stream *stream, doorbell_endpoint *endpoint, const doorbell_slice *slices,
			       uint32_t slice_count, uint64_t remote_addr, uint32_t rkey, doorbell_ticket **ticket);

/*
 * Queues a receive: it is posted when the stream comes to it. On the proxy path that is a trigger, and the device has the receive when the
 * proxy has seen it: what the stream does next may be earlier, and a peer that is told of it has to repeat its attempt (rnr_retry).
 * Threads: one at a time for endpoint.
 */
int doorbell_stream_queue_recv(doorbell_stream *stream, doorbell_endpoint *endpoint, uint64_t wr_id,
			       const doorbell_slice *slices, uint32_t slice_count, doorbell_ticket **ticket);

/*
 * Lets what is queued on the stream later wait for the next completion of one of the endpoint's queues (DOORBELL_SIDE_*).
 * When `timeout_ms` have passed since the stream came to it, or the endpoint fails, the wait is released.
 * DOORBELL_ESTATE if there is no further completion to come: every signaled work request and every receive makes one.
 * Threads: one at a time for endpoint.
 */
int doorbell_stream_wait_cq(doorbell_stream *stream, doorbell_endpoint *endpoint, uint32_t queue_side,
			    int64_t timeout_ms, doorbell_ticket **ticket);

/*
 * Makes a work request ready for a stream.
 * Threads: one at a time for endpoint.
 */
int doorbell_prepare_send(doorbell_endpoint *endpoint, const doorbell_work *work, doorbell_prepared **prepared);

/*
 * Makes a receive ready for a stream.
 * Threads: one at a time for endpoint.
 */
int doorbell_prepare_recv(doorbell_endpoint *endpoint, uint64_t wr_id, const doorbell_slice *slices,
			  uint32_t slice_count, doorbell_prepared **prepared);

/*
 * Makes a wait for the next completion ready for a stream.
 * Threads: one at a time for endpoint.
 */
int doorbell_prepare_wait_cq(doorbell_endpoint *endpoint, uint32_t queue_side, int64_t timeout_ms,
			     doorbell_prepared **prepared);

/*
 * Gives a prepared operation to a stream. Operations of one queue go in the order in which they were prepared, waits in any.
 * On success `prepared` is gone; on an error it remains, to be given again or destroyed.
 * Threads: alone with prepared.
 */
int doorbell_stream_post(doorbell_stream *stream, doorbell_prepared *prepared, doorbell_ticket **ticket);

/*
 * Gives `count` prepared operations, of as many endpoints as one likes, to a stream in one batch, in order. On success all of
 * them are gone, and `tickets`, which may be NULL, has as many tickets; on an error all of them remain.
 * Threads: alone with each of prepared.
 */
int doorbell_stream_post_all(doorbell_stream *stream, doorbell_prepared *const *prepared, size_t count,
			     doorbell_ticket **tickets);

/*
 * Takes a prepared operation of the endpoint back, and ends it. The newest of its queue leaves no trace, another is cancelled
 * as by doorbell_prepared_destroy.
 * Threads: one at a time for endpoint, alone with prepared.
 */
int doorbell_prepared_rollback(doorbell_endpoint *endpoint, doorbell_prepared *prepared);

/*
 * Cancels a prepared operation: a send becomes a no-operation in its place, the completion of a wait passes uncollected, and
 * after a receive those prepared behind it are refused. NULL is allowed.
 * Threads: alone with prepared.
 */
int doorbell_prepared_destroy(doorbell_prepared *prepared);

/*
 * The bytecode of a prepared operation for people: which store is the doorbell record, which the UAR, which poll waits for
 * what. A text buffer.
 * Threads: one at a time for prepared.
 */
int doorbell_prepared_disassemble(const doorbell_prepared *prepared, char *text, size_t capacity);

/*
 * A ticket of a prepared operation, before a stream has it: DOORBELL_STATUS_PREPARED.
 * Threads: one at a time for prepared.
 */
int doorbell_prepared_ticket(const doorbell_prepared *prepared, doorbell_ticket **ticket);

/*
 * The WQE of a prepared work request, in the bytes of the device's format, for people who look: the number of bytes, which
 * must fit `capacity`, else DOORBELL_ERANGE. 0 for receives and waits, and once the endpoint was reset.
 * Threads: one at a time for prepared.
 */
int doorbell_prepared_wqe(const doorbell_prepared *prepared, void *bytes, size_t capacity);

/* ----------------------------------------------------------------------------------------------- words of memory */

/* When a word lets a wait go, as with cuStreamWaitValue32. */
enum doorbell_wait_condition {
	/* (int32_t)(word - value) >= 0 */
	DOORBELL_WAIT_GEQ = 0,
	/* (word & value) != 0 */
	DOORBELL_WAIT_AND = 1,
	/* ~(word | value) != 0 */
	DOORBELL_WAIT_NOR = 2
};

/*
 * Lets what is queued on the stream later wait until the 32-bit word at `offset` of the region, a multiple of 4, meets a
 * condition (DOORBELL_WAIT_*). When `timeout_ms` have passed since the stream came to it, the wait is released, and the
 * ticket has failed.
 * Threads: any.
 */
int doorbell_stream_wait_value32(doorbell_stream *stream, const doorbell_region *region, uint64_t offset,
				 uint32_t wait_condition, uint32_t value, int64_t timeout_ms,
				 doorbell_ticket **ticket);

/*
 * Stores a 32-bit word, after everything that was queued on the stream before.
 * Threads: any.
 */
int doorbell_stream_write_value32(doorbell_stream *stream, const doorbell_region *region, uint64_t offset,
				  uint32_t value, doorbell_ticket **ticket);

/*
 * Waits for a word in the calling thread. What was stored before the word is visible afterwards.
 * Threads: any.
 */
int doorbell_wait_value32(const doorbell_region *region, uint64_t offset, uint32_t wait_condition, uint32_t value,
			  int64_t timeout_ms);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_STREAM_H */
