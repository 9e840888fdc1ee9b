/*
 * Part of the interface of doorbell.h: GPU capabilities, CUDA streams, and queues and streams that GPU kernels use.
 *
 * doorbell.h has the rules for results, handles, threads and text buffers, and for CUDA.
 */
#ifndef DOORBELL_GPU_H
#define DOORBELL_GPU_H

#include "stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Types of CUDA, declared by name only. */
struct CUstream_st;
struct CUevent_st;

/* ---------------------------------------------------------------------------------------------------------- CUDA */

/*
 * The order in which a GPU sees the writes of a NIC without a flush. The meaning is that of
 * CUGPUDirectRDMAWritesOrdering in cuda.h.
 */
enum doorbell_ordering {
	DOORBELL_ORDERING_NONE = 0,
	/* Ordered for the GPU that owns the memory. */
	DOORBELL_ORDERING_OWNER = 1,
	/* Ordered for all GPUs of the system. */
	DOORBELL_ORDERING_ALL_DEVICES = 2
};

/* Not known: it can only be tested with registers of a real NIC. */
#define DOORBELL_IOMEMORY_UNKNOWN 2

/*
 * Capabilities of a GPU and its driver that this library uses: 1 or 0 unless a field says otherwise. What streams need
 * was tested once per context. A capability that the driver claims but that failed the test is 0; doorbell_describe
 * has the reason.
 */
typedef struct doorbell_cuda_capabilities {
	uint32_t struct_size;
	uint32_t driver_version; /* newest CUDA version that the driver supports, as CUDA_VERSION: 13000 is 13.0 */
	uint32_t memops;         /* 32-bit stores and waits in streams */
	uint32_t kernels;        /* kernels of this library, used where memory operations are missing */
	uint32_t iomemory;       /* registers of a NIC can be mapped: 1, 0, or DOORBELL_IOMEMORY_UNKNOWN */
	uint32_t qwords;         /* 64-bit stores in streams; without them a stream cannot ring a NIC itself */
	uint32_t nor;            /* waits for a bit to become 0 */
	uint32_t flush;          /* waits that flush earlier writes of NICs */
	uint32_t gpudirect;      /* NICs can access GPU memory */
	uint32_t ordering;       /* DOORBELL_ORDERING_* */
	uint32_t dmabuf;         /* GPU memory can be exported as a dmabuf */
	uint32_t host_addresses; /* registered host memory has the same address on the GPU */
} doorbell_cuda_capabilities;

/*
 * Reads the capabilities of the GPU of the current context: doorbell_cuda_read_capabilities(&capabilities, sizeof
 * capabilities). The first call in a context tests them on a stream of its own.
 */
int doorbell_cuda_read_capabilities(doorbell_cuda_capabilities *capabilities, uint32_t struct_size);

/* --------------------------------------------------------------------------------------------------- CUDA streams */

/* How the operations of a CUDA stream are executed. */
enum doorbell_execution {
	/* By memory operations of the driver (cuStreamBatchMemOp), and by a kernel where the device lacks a memory
	   operation. */
	DOORBELL_EXECUTION_MEMORY_OPS = 0,
	/* By a kernel of one thread, which occupies a slot of the GPU while it waits. DOORBELL_ESTATE if the library
	   has no kernels. */
	DOORBELL_EXECUTION_KERNEL = 1
};

/* Configuration of a CUDA stream. Initialise it with doorbell_cuda_stream_config_init. */
typedef struct doorbell_cuda_stream_config {
	uint32_t struct_size;
	uint32_t execution; /* DOORBELL_EXECUTION_*; default DOORBELL_EXECUTION_MEMORY_OPS */
	const char *name;   /* for errors; NULL, the default, means "cuda" */
} doorbell_cuda_stream_config;

/* Fills a configuration with the defaults: doorbell_cuda_stream_config_init(&config, sizeof config). */
int doorbell_cuda_stream_config_init(doorbell_cuda_stream_config *config, uint32_t struct_size);

/*
 * Makes a CUstream or cudaStream_t usable by this library. The caller keeps the CUDA stream; operations are ordered
 * with everything else that is queued on it, such as kernels. If `config` is NULL, the defaults are used. The CUDA
 * stream must not be destroyed before the handle is destroyed and the queued work is done. `cuda_stream` = NULL is the
 * legacy default stream of the current context; its waits block all blocking streams. cudaStreamPerThread returns
 * DOORBELL_ESTATE.
 *
 * While the caller captures the CUDA stream, doorbell_stream_queue_send, _queue_write, _queue_read, _queue_recv, _wait_cq,
 * _push_pages, _wait_value32, _write_value32, _wait_value64, _write_value64 and _wait_count64 add a node to the caller's
 * graph, which executes the operation with each launch. doorbell_stream_wait_cuda_event adds a dependency. Both queues of
 * the endpoint belong to such graphs until doorbell_endpoint_reset, which returns DOORBELL_ESTATE before the graphs are
 * destroyed. doorbell_ticket_launches counts. Other calls that queue return DOORBELL_ESTATE. docs/gpu.md has the rules.
 */
int doorbell_stream_create_cuda(struct CUstream_st *cuda_stream, const doorbell_cuda_stream_config *config,
				doorbell_stream **stream);

/*
 * Makes work that is queued on the stream later wait for the work that a CUevent or cudaEvent_t represents. The event may
 * have been recorded on any stream of this process. Does nothing if that work is done, or if the event was never recorded.
 * The library never destroys the event. Events of this library are for doorbell_stream_wait_event.
 *
 * CUDA stream: cuStreamWaitEvent. The call waits for what was recorded last when it is made; the event may be recorded
 * again or destroyed when it returns. If the event was recorded in a stream capture, the stream joins the capture; while the
 * caller captures the stream, the wait is part of the graph.
 *
 * Host stream: the thread that executes the stream asks the driver with pauses (cuEventQuery). The event must not be
 * destroyed or recorded again before the stream has passed the wait, or doorbell_stream_abort has ended it. If the driver
 * reports an error, it is a fault of the stream. The calling thread must have a current context, which must not be
 * destroyed before the stream has passed the wait; it need not be the event's. Returns DOORBELL_ESTATE without one, and
 * DOORBELL_ECUDA for an event that was recorded in a stream capture, which is then invalid.
 *
 * Returns DOORBELL_ESTATE for a trigger stream, and DOORBELL_EINVAL for NULL.
 */
int doorbell_stream_wait_cuda_event(doorbell_stream *stream, struct CUevent_st *cuda_event);

/*
 * Writes the device address of a 32-bit status word, for kernels to read. The word is 0 if nothing has failed,
 * DOORBELL_EWORK if an operation of this stream failed or its wait was released, or DOORBELL_EASYNC if the stream has
 * failed. It keeps the first failure until doorbell_stream_clear_status. Failures are recorded from the first call of
 * this function on. If a wait ends because of a failure, the word is written before. The word is valid as long as the
 * handle. Returns DOORBELL_ESTATE for a host stream.
 */
int doorbell_stream_status_word(doorbell_stream *stream, uint64_t *device_address);

/* Reads the status word. Returns DOORBELL_ESTATE for a host stream. */
int doorbell_stream_status(const doorbell_stream *stream, int *status);

/* Sets the status word to 0, so that it records the next failure. Returns DOORBELL_ESTATE for a host stream. */
int doorbell_stream_clear_status(doorbell_stream *stream);

/*
 * Writes the number of driver calls that have queued operations of this library on the stream so far
 * (cuStreamBatchMemOp and kernel launches), for measurements. Returns DOORBELL_ESTATE for a stream that is not a CUDA
 * stream.
 */
int doorbell_stream_driver_calls(const doorbell_stream *stream, uint64_t *calls);

/* --------------------------------------------------------------------------------------------------- device queues */

/*
 * A device queue: the send queue of an endpoint, used by GPU kernels (or threads of a CPU). They write work requests
 * and ring the device themselves, or a thread of the library rings for them, as the endpoint's control path says. The
 * functions that kernels call are in doorbell/queue.h and doorbell/device.cuh.
 */
typedef struct doorbell_device_queue doorbell_device_queue;

/* The queue as kernels see it; defined in doorbell/queue.h. */
typedef struct doorbell_queue_view doorbell_queue_view;

/* Where the kernels of a device queue run. */
enum doorbell_kernels {
	/* On the CPU: threads of this process. */
	DOORBELL_KERNELS_HOST = 0,
	/* On the GPU whose context is current in the calling thread. */
	DOORBELL_KERNELS_CUDA = 1
};

/* Local memory, as kernels name it; doorbell_remote is the peer's. */
typedef struct doorbell_local {
	uint64_t addr;
	uint64_t len_bytes;
	uint32_t lkey;
	uint32_t reserved; /* 0 */
} doorbell_local;

/*
 * Gives the send queue of a connected endpoint to kernels (DOORBELL_KERNELS_*). Until the endpoint is reset, its own
 * sends return DOORBELL_ESTATE; receives continue. Returns DOORBELL_ESTATE if sends are prepared, in flight or not
 * collected, or if the control path is DOORBELL_CONTROL_SYNC, or if the GPU's ordering is DOORBELL_ORDERING_NONE, because
 * kernels cannot flush writes of NICs, or if the driver does not map the card's doorbell registers to the GPU;
 * DOORBELL_ECUDA if it cannot map the memory of the queue.
 * Threads: one at a time for endpoint.
 */
int doorbell_device_queue_create(doorbell_endpoint *endpoint, uint32_t kernels, doorbell_device_queue **queue);

/*
 * Fills a view of the queue, which is passed to kernels by value. It is valid as long as the device queue.
 * `view_bytes` is sizeof(struct doorbell_queue_view). Returns DOORBELL_EINVAL if the library expects another size, because
 * the headers have another version.
 */
int doorbell_device_queue_view(const doorbell_device_queue *queue, doorbell_queue_view *view, size_t view_bytes);

/*
 * Writes the address and the key by which kernels name a slice. The device queue keeps the slice's region until the
 * device queue is destroyed and the endpoint is reset or destroyed, because work requests of kernels may be in flight
 * until then. Nothing else keeps the region for these work requests.
 */
int doorbell_device_queue_local(const doorbell_device_queue *queue, const doorbell_slice *slice, doorbell_local *local);

/*
 * Destroys the handle. The caller must make sure that no kernel uses the queue any more. Work requests that kernels
 * have submitted are still executed while the endpoint exists. Call doorbell_endpoint_reset to use the endpoint's send
 * queue from the host again. NULL is allowed.
 * Threads: alone with queue.
 */
int doorbell_device_queue_destroy(doorbell_device_queue *queue);

/* -------------------------------------------------------------------------------------------------- trigger streams */

/*
 * A trigger stream is a stream whose work is executed by kernels of the application. Operations, waits and events are
 * queued on it by the calls of doorbell/stream.h (not doorbell_stream_launch). The host takes them as triggers and
 * passes these to kernels, which execute them by the functions of <doorbell/device.cuh>. This section is the host's
 * part.
 */

/* Number of 64-bit words of a trigger. */
#define DOORBELL_TRIGGER_WORDS 60

/*
 * Operations of a trigger stream: a plain value of 512 bytes, to be passed to the kernel as a parameter or copied to
 * device memory. The fields are private.
 */
typedef struct doorbell_trigger {
	uint64_t control; /* device addresses of data that the stream shares with kernels */
	uint64_t turn;
	uint64_t number;     /* 0, 1, 2, ... in the order of execution */
	uint32_t word_count; /* 0: nothing to execute */
	uint32_t failures;   /* that the host had found when the trigger was taken */
	uint64_t words[DOORBELL_TRIGGER_WORDS];
} doorbell_trigger;

/* Creates a trigger stream for kernels of the current context. `name` is for errors; NULL means "trigger". */
int doorbell_stream_create_trigger(const char *name, doorbell_stream **stream);

/*
 * Takes the operations that were queued since the last call. Returns 1 and a trigger to execute, or 0 and an empty
 * trigger if nothing was queued. A trigger has limited room (a send and its wait need about 40 words). If more was
 * queued, the trigger has the first part: repeat the call until it returns 0, and execute all triggers in this order,
 * in one kernel or in several.
 *
 * Each trigger must either be executed exactly once by a kernel on the stream's device, or be discarded by
 * doorbell_stream_discard_triggers. Until then its operations are in flight and keep their memory. A trigger may be
 * executed after the stream's handle was destroyed. Returns DOORBELL_EASYNC if the stream has ended, because of an
 * abort or of a wait that a kernel gave up; DOORBELL_ESTATE if it is not a trigger stream.
 */
int doorbell_stream_take_trigger(doorbell_stream *stream, doorbell_trigger *trigger);

/*
 * Discards all triggers that no kernel has executed, and all operations that were not taken. The operations fail as
 * discarded, and the stream cannot be used afterwards. No kernel may execute a trigger of the stream during this call
 * or later, because the call releases memory that triggers name.
 */
int doorbell_stream_discard_triggers(doorbell_stream *stream);

/* ------------------------------------------------------------------------------------------------- pages of a table */

/*
 * Pages to be written to the peer; which ones is found in memory when the stream comes to it. The table has an entry of 8
 * bytes for each page: the number of a page of `local`, a uint32_t, and the number of the page of `remote` that it is
 * written to. Table and count are memory of the stream's GPU or of the host.
 */
typedef struct doorbell_page_push {
	uint32_t struct_size;
	uint32_t page_bytes;		     /* 1 to 2^30 */
	doorbell_slice local;		     /* the pages; here its length may be more than that of other slices */
	doorbell_slice table;		     /* room for the entries; its offset is a multiple of 8 */
	const doorbell_region *count_region; /* where the number of entries is, a uint32_t */
	uint64_t count_offset;		     /* a multiple of 4 */
	doorbell_remote remote;		     /* the pages of the peer; addr and len_bytes may name a part of its region */
	doorbell_remote signal;		     /* 8 bytes of the peer, at a multiple of 8 */
} doorbell_page_push;

/* Fills in what is pushed with zeros: doorbell_page_push_init(&push, sizeof push). */
int doorbell_page_push_init(doorbell_page_push *push, uint32_t struct_size);

/*
 * Queues a push of pages on a CUDA stream: a kernel reads the table, writes the pages, and then makes the signal the number
 * of times that this operation was executed, the first time 1. doorbell_stream_wait_count64(..., 1, 1, ...) waits for it at
 * the peer. On a CUDA stream that the caller captures, each launch of the graph does so, with the table of then. From this
 * call on, the endpoint's queues belong to kernels, as those of an operation of a captured graph (doorbell_stream_create_cuda).
 * An entry that names no page, or more entries than the table has room for, fails the endpoint, and nothing is written.
 * Returns DOORBELL_ESTATE for another kind of stream.
 * Threads: one at a time for endpoint.
 */
int doorbell_stream_push_pages(doorbell_stream *stream, doorbell_endpoint *endpoint, const doorbell_page_push *push,
			       doorbell_ticket **ticket);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_GPU_H */
