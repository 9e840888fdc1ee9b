/*
 * Part of the interface of doorbell.h: streams, events, and operations that are queued on streams.
 *
 * doorbell.h has the rules for results, handles, threads and text buffers. CUDA streams and trigger streams are created
 * by calls of doorbell/gpu.h.
 */
#ifndef DOORBELL_STREAM_H
#define DOORBELL_STREAM_H

#include "endpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------------- streams */

/* An in-order queue of work with the semantics of a CUDA stream. */
typedef struct doorbell_stream doorbell_stream;

/* A function that a stream calls. It must return: no longjmp, no pthread_exit, no C++ exception that leaves it. */
typedef void (*doorbell_host_fn)(void *argument);

/*
 * Creates a stream that a thread of the library executes. `name` is for errors and debuggers and may be NULL.
 * `capacity` is the number of queue entries, 1 to 65536, rounded up to a power of two; 0 is the default, 1024.
 * Queueing on a full stream blocks the caller.
 */
int doorbell_stream_create_host(const char *name, uint32_t capacity, doorbell_stream **stream);

/*
 * Creates a stream without a thread, with the parameters of doorbell_stream_create_host. Its work is executed by the
 * threads that wait for it, inside these calls: doorbell_stream_query and doorbell_stream_synchronize, the same of an
 * event that is recorded on the stream, the same of another stream that waits for such an event, waits for tickets of
 * work on the stream, a call that finds its queue full, and every call that waits in a thread that has queued work on
 * the stream, until that work is done. A call executes what can be executed at once, in order; the next call goes on
 * where it has stopped. So one thread can drive several such streams. Queueing executes nothing, nothing is executed
 * while no thread makes such a call, and an operation that has not begun has no deadline yet.
 */
int doorbell_stream_create_host_without_thread(const char *name, uint32_t capacity, doorbell_stream **stream);

/*
 * Destroys the handle. Queued work is still executed, as with cudaStreamDestroy; the call does not wait for it.
 * Arguments of doorbell_stream_launch must stay valid until then. NULL is allowed. The work of a stream without a thread
 * is discarded in the call, as by doorbell_stream_abort.
 * Threads: alone with stream.
 */
int doorbell_stream_destroy(doorbell_stream *stream);

/*
 * Queues a call of `function(argument)`. On a host stream, the stream's thread makes the call; if it has none, the
 * thread that waits does, which should hold no lock that the function needs. The caller owns what
 * `argument` points to and keeps it valid until the function has run. The function is never called if the stream fails
 * or is aborted before. It may queue work, also on its own stream, but it must not wait for that stream:
 * calls that synchronise with it return DOORBELL_ESTATE, and waits for tickets, completions or room end at their own time
 * limit. On a CUDA stream a thread of the driver makes the call (cuLaunchHostFunc); the function must then
 * not call CUDA, directly or through a call with a CUDA stream. Trigger streams do not support this call.
 */
int doorbell_stream_launch(doorbell_stream *stream, doorbell_host_fn function, void *argument);

/*
 * Waits, spinning, until all work that was queued so far is done. On DOORBELL_ETIMEOUT the stream continues. Returns
 * DOORBELL_EASYNC if work that was queued earlier failed. As in CUDA, any call with a stream may return this code, and
 * then queues nothing. A failure is reported by every later call until doorbell_stream_take_fault.
 */
int doorbell_stream_synchronize(doorbell_stream *stream, int64_t timeout_ms);

/*
 * Takes the fault of the stream, so that it can be used again. What was queued before this call stays discarded. Writes
 * the failure of the endpoint that was waited for to `failure`, which may be NULL; its cause is DOORBELL_CAUSE_NONE if no
 * endpoint's failure is the reason, as for a function that panicked. Writes a text to a text buffer and returns its
 * length; returns 0 and writes nothing if there is no fault. The fault of a CUDA stream whose context is lost, or of a trigger stream that has ended, cannot be taken:
 * each call writes it again.
 *
 * A stream has a fault when a wait on it ends without success, a function of doorbell_stream_launch fails, or it waits
 * for an event behind work that failed. Then every call with the stream returns DOORBELL_EASYNC. A host stream executes
 * nothing that is queued behind the failure. A CUDA stream executes it, but nothing of it is transmitted.
 */
int doorbell_stream_take_fault(doorbell_stream *stream, doorbell_failure *failure, char *text, size_t capacity);

/*
 * If `continues` is not 0, the stream goes on behind work that fails: what is queued behind is executed and transmitted,
 * and one call returns DOORBELL_EASYNC. The default is 0.
 */
int doorbell_stream_continue_on_error(doorbell_stream *stream, int continues);

/*
 * Returns 1 if all work that was queued so far is done, else 0. For a CUDA stream the result comes from the driver,
 * which may return 0 for a moment after doorbell_stream_synchronize has returned.
 */
int doorbell_stream_query(doorbell_stream *stream);

/*
 * Discards the work that is queued now and releases the wait that the stream is in. A function that is running is not
 * interrupted. Endpoints whose operations were discarded fail.
 *
 * CUDA stream: queued work cannot be removed. Stores, and work that others queued, are executed; waits for
 * completions, words and events of host streams end, and its endpoints fail. A wait for an event of another CUDA or
 * trigger stream ends if the stream uses DOORBELL_EXECUTION_KERNEL. With DOORBELL_EXECUTION_MEMORY_OPS it lasts until
 * that stream has passed the event, so abort that stream too. The library cannot end waits that the program queued
 * itself (cuStreamWaitEvent, cuStreamWaitValue32), or by doorbell_stream_wait_cuda_event.
 *
 * Trigger stream: ends all waits of its triggers, including waits for events and waits of triggers that are executed
 * later. Operations that were not taken are discarded. The stream cannot be used afterwards.
 */
int doorbell_stream_abort(doorbell_stream *stream);

/* -------------------------------------------------------------------------------------------------------- events */

enum doorbell_event_flags {
	/*
	 * doorbell_event_synchronize sleeps instead of spinning, like cudaEventBlockingSync. doorbell_event_notify needs it.
	 */
	DOORBELL_EVENT_BLOCKING = 1,
	/* The event has no timestamp, like cudaEventDisableTiming. */
	DOORBELL_EVENT_NO_TIMING = 2
};

/* A point in a stream. An event that was never recorded counts as complete. */
typedef struct doorbell_event doorbell_event;

/* Creates an event. `flags` is 0 or a combination of DOORBELL_EVENT_*. */
int doorbell_event_create(uint32_t flags, doorbell_event **event);

/*
 * Destroys the handle. Queued records and waits still take effect. NULL is allowed.
 * Threads: alone with event.
 */
int doorbell_event_destroy(doorbell_event *event);

/*
 * Records the event: it then represents all work that was queued on the stream so far. An event may be recorded
 * repeatedly.
 */
int doorbell_stream_record(doorbell_stream *stream, doorbell_event *event);

/*
 * Makes work that is queued on the stream later wait for the work that the event represents now. For a cudaEvent_t there is
 * doorbell_stream_wait_cuda_event.
 */
int doorbell_stream_wait_event(doorbell_stream *stream, const doorbell_event *event);

/*
 * Returns 1 if the work that the event represents is done, else 0. Returns DOORBELL_EASYNC if that work was discarded.
 */
int doorbell_event_query(const doorbell_event *event);

/* Waits until the work that the event represents is done. Returns DOORBELL_EASYNC if that work was discarded. */
int doorbell_event_synchronize(const doorbell_event *event, int64_t timeout_ms);

/*
 * Adds 1 to an eventfd (eventfd(2)) when the work that the event represents now is done or discarded, or within this call
 * if that is so already; for programs that wait by epoll or poll. doorbell_event_query then tells which of the two it is.
 * The descriptor is duplicated, so the caller may close its own. It should be non-blocking: a write that blocks would block
 * the stream. For a CUDA stream the notification may come some milliseconds late. Returns DOORBELL_ESTATE unless the event
 * has DOORBELL_EVENT_BLOCKING, DOORBELL_EINVAL if `eventfd` is not an open descriptor.
 */
int doorbell_event_notify(const doorbell_event *event, int eventfd);

/*
 * Writes the time between two events in nanoseconds, by the clock of the CPU. For a CUDA stream, an event has the time
 * at which the library saw it, up to a millisecond late; it is known after doorbell_stream_synchronize. For GPU time
 * use cudaEventElapsedTime. Returns DOORBELL_ESTATE if an event has not been passed or has no timestamp, or if `end`
 * was passed before `start`.
 */
int doorbell_event_elapsed_ns(const doorbell_event *start, const doorbell_event *end, uint64_t *elapsed_ns);

/* ----------------------------------------------------------------------------------------- operations on streams */

/* A prepared operation, which can be posted to a stream. */
typedef struct doorbell_prepared doorbell_prepared;

/*
 * Queues a work request. It is submitted to the device when the stream reaches it, without the CPU. Returns
 * DOORBELL_EWORK if the endpoint has failed, DOORBELL_ESTATE if it is not connected, DOORBELL_EFULL if the send queue
 * is full, DOORBELL_EBOUNDS or DOORBELL_EFOREIGN for wrong slices; DOORBELL_EASYNC as in doorbell_stream_synchronize.
 * Threads: one at a time for endpoint.
 */
int doorbell_stream_queue_send(doorbell_stream *stream, doorbell_endpoint *endpoint, const doorbell_work *work,
			       doorbell_ticket **ticket);

/*
 * Queues a write: doorbell_stream_queue_send with doorbell_work_write.
 * Threads: one at a time for endpoint.
 */
int doorbell_stream_queue_write(doorbell_stream *stream, doorbell_endpoint *endpoint, const doorbell_slice *slices,
				uint32_t slice_count, uint64_t remote_addr, uint32_t rkey, doorbell_ticket **ticket);

/*
 * Queues a read: doorbell_stream_queue_send with doorbell_work_read.
 * Threads: one at a time for endpoint.
 */
int doorbell_stream_queue_read(doorbell_stream *stream, doorbell_endpoint *endpoint, const doorbell_slice *slices,
			       uint32_t slice_count, uint64_t remote_addr, uint32_t rkey, doorbell_ticket **ticket);

/*
 * Queues a receive. It is posted when the stream reaches it. On the proxy path the stream only triggers the proxy, which
 * posts the receive later: work that follows on the stream may run before, and a peer that is told to send may have to
 * retry (rnr_retry). Returns the codes of doorbell_stream_queue_send, but needs no connection.
 * Threads: one at a time for endpoint.
 */
int doorbell_stream_queue_recv(doorbell_stream *stream, doorbell_endpoint *endpoint, uint64_t wr_id,
			       const doorbell_slice *slices, uint32_t slice_count, doorbell_ticket **ticket);

/*
 * Makes work that is queued on the stream later wait for the next completion of one of the endpoint's queues
 * (DOORBELL_QUEUE_*). The wait is released when `timeout_ms` have passed since the stream reached it, or when the
 * endpoint fails. Returns DOORBELL_ESTATE if no further completion is expected: each signaled work request and each
 * receive makes one.
 * Threads: one at a time for endpoint.
 */
int doorbell_stream_wait_cq(doorbell_stream *stream, doorbell_endpoint *endpoint, uint32_t queue_kind,
			    int64_t timeout_ms, doorbell_ticket **ticket);

/*
 * Prepares a work request for a stream. Returns the codes of doorbell_stream_queue_send.
 * Threads: one at a time for endpoint.
 */
int doorbell_prepare_send(doorbell_endpoint *endpoint, const doorbell_work *work, doorbell_prepared **prepared);

/*
 * Prepares a receive for a stream. Returns the codes of doorbell_stream_queue_recv.
 * Threads: one at a time for endpoint.
 */
int doorbell_prepare_recv(doorbell_endpoint *endpoint, uint64_t wr_id, const doorbell_slice *slices,
			  uint32_t slice_count, doorbell_prepared **prepared);

/*
 * Prepares a wait for the next completion. Returns the codes of doorbell_stream_wait_cq.
 * Threads: one at a time for endpoint.
 */
int doorbell_prepare_wait_cq(doorbell_endpoint *endpoint, uint32_t queue_kind, int64_t timeout_ms,
			     doorbell_prepared **prepared);

/*
 * Posts a prepared operation to a stream. Operations of one queue must be posted in the order in which they were
 * prepared; waits may be posted in any order. On success the handle `prepared` is gone. On failure it remains, to be
 * posted again or destroyed.
 * Threads: alone with prepared.
 */
int doorbell_stream_post(doorbell_stream *stream, doorbell_prepared *prepared, doorbell_ticket **ticket);

/*
 * Posts `count` prepared operations, of any endpoints, to a stream in one batch and in order. On success all of them
 * are gone, and `tickets`, which may be NULL, receives `count` tickets. On failure all of them remain.
 * Threads: alone with each of prepared.
 */
int doorbell_stream_post_all(doorbell_stream *stream, doorbell_prepared *const *prepared, size_t count,
			     doorbell_ticket **tickets);

/*
 * Cancels a prepared operation of the endpoint and destroys its handle. The newest operation of its queue is removed
 * from the queue. Another one is cancelled as by doorbell_prepared_destroy.
 * Threads: one at a time for endpoint, alone with prepared.
 */
int doorbell_prepared_rollback(doorbell_endpoint *endpoint, doorbell_prepared *prepared);

/*
 * Cancels a prepared operation and destroys its handle. A send becomes a no-operation in the queue. The completion of
 * a wait is not collected. Receives that were prepared after a cancelled receive cannot be posted. NULL is allowed.
 * Threads: alone with prepared.
 */
int doorbell_prepared_destroy(doorbell_prepared *prepared);

/*
 * Writes the bytecode of a prepared operation in readable form to a text buffer: which store is the doorbell record,
 * which is the UAR, and what each poll waits for.
 * Threads: one at a time for prepared.
 */
int doorbell_prepared_disassemble(const doorbell_prepared *prepared, char *text, size_t capacity);

/*
 * Creates a ticket of a prepared operation. Its status is DOORBELL_STATUS_PREPARED until the operation is posted.
 * Threads: one at a time for prepared.
 */
int doorbell_prepared_ticket(const doorbell_prepared *prepared, doorbell_ticket **ticket);

/*
 * Writes the WQE of a prepared work request in the format of the device, for debugging. Returns the number of bytes,
 * or DOORBELL_ERANGE if they do not fit in `capacity`. Returns 0 for receives and waits, and after a reset of the
 * endpoint.
 * Threads: one at a time for prepared.
 */
int doorbell_prepared_wqe(const doorbell_prepared *prepared, void *bytes, size_t capacity);

/* ----------------------------------------------------------------------------------------------- words of memory */

/* The condition of a wait for a word, as in cuStreamWaitValue32. */
enum doorbell_wait_condition {
	/* (int32_t)(word - value) >= 0 */
	DOORBELL_WAIT_GEQ = 0,
	/* (word & value) != 0 */
	DOORBELL_WAIT_AND = 1,
	/* ~(word | value) != 0 */
	DOORBELL_WAIT_NOR = 2,
	/* word == value. Not in a graph of a doorbell_graph_builder */
	DOORBELL_WAIT_EQ = 3
};

/*
 * Makes work that is queued on the stream later wait until the 32-bit word at `offset` of the region, a multiple of 4
 * bytes, meets a condition (DOORBELL_WAIT_*). When `timeout_ms` have passed since the stream reached it, the wait is
 * released and its ticket fails.
 */
int doorbell_stream_wait_value32(doorbell_stream *stream, const doorbell_region *region, uint64_t offset,
				 uint32_t wait_condition, uint32_t value, int64_t timeout_ms,
				 doorbell_ticket **ticket);

/*
 * Queues a store of `value` to the 32-bit word at `offset` of the region, a multiple of 4 bytes. It takes place after
 * all work that was queued on the stream before.
 */
int doorbell_stream_write_value32(doorbell_stream *stream, const doorbell_region *region, uint64_t offset,
				  uint32_t value, doorbell_ticket **ticket);

/*
 * Waits in the calling thread until the 32-bit word at `offset` of the region meets a condition (DOORBELL_WAIT_*).
 * What was stored before the word is visible to the caller afterwards.
 */
int doorbell_wait_value32(const doorbell_region *region, uint64_t offset, uint32_t wait_condition, uint32_t value,
			  int64_t timeout_ms);

/*
 * The same calls for a 64-bit word at `offset`, a multiple of 8 bytes. GEQ compares as int64_t. On a CUDA stream a kernel of one
 * thread waits, also for 32 bits if the condition is DOORBELL_WAIT_EQ or the word is in a GPU's memory. The region may be
 * memory of the stream's GPU. Such a wait has a time limit of an hour at most; if it passes, that is a fault of the stream.
 * doorbell_stream_abort ends a wait that the GPU is executing, and that is a fault of the stream, too. Streams of
 * doorbell_stream_create_trigger return DOORBELL_ESTATE for these waits.
 */
int doorbell_stream_wait_value64(doorbell_stream *stream, const doorbell_region *region, uint64_t offset,
				 uint32_t wait_condition, uint64_t value, int64_t timeout_ms,
				 doorbell_ticket **ticket);
int doorbell_stream_write_value64(doorbell_stream *stream, const doorbell_region *region, uint64_t offset,
				  uint64_t value, doorbell_ticket **ticket);
int doorbell_wait_value64(const doorbell_region *region, uint64_t offset, uint32_t wait_condition, uint64_t value,
			  int64_t timeout_ms);

/*
 * Makes work that is queued later wait until the 64-bit count at `offset` has reached `first`. In a graph that the caller
 * captures, the launch n, counted from 0, waits for `first` + n * `step`.
 */
int doorbell_stream_wait_count64(doorbell_stream *stream, const doorbell_region *region, uint64_t offset, uint64_t first,
				 uint64_t step, int64_t timeout_ms, doorbell_ticket **ticket);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_STREAM_H */
