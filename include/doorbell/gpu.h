/* doorbell.h, a part of it: CUDA devices and streams, and queues and streams that kernels drive. */
#ifndef DOORBELL_GPU_H
#define DOORBELL_GPU_H

#include "stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* CUDA's, known by name only. */
struct CUstream_st;

/* ---------------------------------------------------------------------------------------------------------- CUDA */

/* In what order a GPU sees the writes of a NIC without a flush, as cuda.h has it of CUGPUDirectRDMAWritesOrdering. */
enum doorbell_ordering {
	DOORBELL_ORDERING_NONE = 0,
	/* In order, for the GPU that owns the memory. */
	DOORBELL_ORDERING_OWNER = 1,
	/* In order, for every GPU of the system. */
	DOORBELL_ORDERING_ALL_DEVICES = 2
};

/* It takes a register of a NIC to find out. */
#define DOORBELL_IOMEMORY_UNKNOWN 2

/*
 * What a GPU and its driver can do of what this library uses: 1 or 0 where nothing else is said. What streams need was tried
 * once; what was promised and failed is 0, and doorbell_describe has the reason.
 */
typedef struct doorbell_cuda_capabilities {
	uint32_t struct_size;
	uint32_t driver_version; /* the newest CUDA that it knows, as CUDA_VERSION: 13000 is 13.0 */
	uint32_t memops;         /* stores and waits of 32 bits in streams */
	uint32_t kernels;        /* this library's own, which take the place of what memory operations lack */
	uint32_t iomemory;       /* a NIC's registers can be mapped: 1, 0, or DOORBELL_IOMEMORY_UNKNOWN */
	uint32_t qwords;         /* stores of 64 bits in streams: without them no stream rings a NIC itself */
	uint32_t nor;            /* waits for a bit that becomes 0 */
	uint32_t flush;          /* waits that flush the writes of NICs which came before */
	uint32_t gpudirect;      /* NICs can reach the GPU's memory at all */
	uint32_t ordering;       /* DOORBELL_ORDERING_* */
	uint32_t dmabuf;         /* the GPU's memory can be exported as dmabuf */
	uint32_t host_addresses; /* registered memory of the host has the same address on the GPU */
} doorbell_cuda_capabilities;

/*
 * What the GPU of the current context can do: doorbell_cuda_read_capabilities(&capabilities, sizeof capabilities). The first
 * call in a context tries it out on a stream of its own.
 * Threads: any.
 */
int doorbell_cuda_read_capabilities(doorbell_cuda_capabilities *capabilities, uint32_t struct_size);

/* --------------------------------------------------------------------------------------------------- CUDA streams */

/* What executes the operations of a CUDA stream. */
enum doorbell_execution {
	/* The driver's memory operations (cuStreamBatchMemOp), and a kernel where the device lacks one that is needed. */
	DOORBELL_EXECUTION_MEMORY_OPS = 0,
	/* A kernel of one thread, which takes a place on the GPU while it waits. DOORBELL_ESTATE without kernels. */
	DOORBELL_EXECUTION_KERNEL = 1
};

/* How a CUDA stream is used. Begin with doorbell_cuda_stream_config_init. */
typedef struct doorbell_cuda_stream_config {
	uint32_t struct_size;
	uint32_t execution; /* DOORBELL_EXECUTION_*; default DOORBELL_EXECUTION_MEMORY_OPS */
	const char *name;   /* for errors; NULL, the default, is "cuda" */
} doorbell_cuda_stream_config;

/*
 * Fills a configuration with the defaults: doorbell_cuda_stream_config_init(&config, sizeof config).
 * Threads: any.
 */
int doorbell_cuda_stream_config_init(doorbell_cuda_stream_config *config, uint32_t struct_size);

/*
 * Makes a stream of a CUstream or cudaStream_t, which stays the caller's: operations have their place in its order, like
 * kernels that anybody launches on it. A `config` of NULL is the defaults. It is not destroyed before the handle is and
 * what was queued is done. NULL as the `cuda_stream` is the legacy default stream of the current context, whose waits hold up
 * every blocking stream; cudaStreamPerThread is DOORBELL_ESTATE. While the stream is captured, calls that queue are
 * DOORBELL_ESTATE.
 * Threads: any.
 */
int doorbell_stream_create_cuda(struct CUstream_st *cuda_stream, const doorbell_cuda_stream_config *config,
				doorbell_stream **stream);

/*
 * The address on the device of a 32-bit word that says whether something before has failed, for kernels to read: 0,
 * DOORBELL_EWORK if an operation of this stream failed or its wait was ended, or DOORBELL_EASYNC if the stream has failed.
 * The first failure stays until doorbell_stream_clear_status, and is there before the wait ends that it ends; from the first
 * call of this function on. The word is there as long as the handle. DOORBELL_ESTATE for a host stream.
 * Threads: any.
 */
int doorbell_stream_status_word(doorbell_stream *stream, uint64_t *device_address);

/*
 * What the status word says at this moment. DOORBELL_ESTATE for a host stream.
 * Threads: any.
 */
int doorbell_stream_status(const doorbell_stream *stream, int *status);

/*
 * Sets the status word to 0, for the next failure. DOORBELL_ESTATE for a host stream.
 * Threads: any.
 */
int doorbell_stream_clear_status(doorbell_stream *stream);

/*
 * How many calls of the driver have queued operations of this library on the stream so far (cuStreamBatchMemOp, and launches of
 * kernels in its place), for who measures. DOORBELL_ESTATE for a stream that is not a GPU's.
 * Threads: any.
 */
int doorbell_stream_driver_calls(const doorbell_stream *stream, uint64_t *calls);

/* --------------------------------------------------------------------------------------------------- kernel queues */

/*
 * The send queue of an endpoint, lent to kernels, which make work requests and ring the device themselves, or have it rung by a
 * thread of the library, as the endpoint's path says. What they call is in doorbell/queue.h and doorbell/device.cuh.
 */
typedef struct doorbell_kernel_queue doorbell_kernel_queue;

/* The queue as kernels see it: defined in doorbell/queue.h. */
typedef struct doorbell_queue doorbell_queue;

/* Whose kernels. */
enum doorbell_kernels {
	/* Threads of this process. */
	DOORBELL_KERNELS_HOST = 0,
	/* Kernels of the GPU whose context is current in the calling thread. */
	DOORBELL_KERNELS_CUDA = 1
};

/* Local memory, as kernels name it. */
typedef struct doorbell_local {
	uint64_t addr;
	uint64_t len_bytes;
	uint32_t lkey;
	uint32_t reserved; /* 0 */
} doorbell_local;

/*
 * Lends the send queue of a connected endpoint to kernels (DOORBELL_KERNELS_*). Until it is reset, sends of the endpoint itself are
 * DOORBELL_ESTATE; receives go on. DOORBELL_ESTATE if sends are prepared, in flight or not collected, or if its path is
 * DOORBELL_CONTROL_SYNC; DOORBELL_ECUDA if the driver does not map the queue to the GPU.
 * Threads: one at a time for endpoint.
 */
int doorbell_kernel_queue_create(doorbell_endpoint *endpoint, uint32_t kernels, doorbell_kernel_queue **queue);

/*
 * Writes what kernels need, to be passed to them by value; it is good as long as the queue. `view_bytes` is
 * sizeof(struct doorbell_queue); DOORBELL_EINVAL if the library's differs: its headers are of another version.
 * Threads: any.
 */
int doorbell_kernel_queue_view(const doorbell_kernel_queue *queue, doorbell_queue *view, size_t view_bytes);

/*
 * The address and key by which kernels name a slice. Its region is held as long as the queue, and then until the endpoint is reset
 * or destroyed, since what kernels have submitted may be in flight. Nothing else holds it for work requests of kernels.
 * Threads: any.
 */
int doorbell_kernel_queue_local(const doorbell_kernel_queue *queue, const doorbell_slice *slice, doorbell_local *local);

/*
 * Ends the loan; the caller sees to it that no kernel uses the queue any more. What kernels have submitted goes out and on, while
 * the endpoint is there. doorbell_endpoint_reset then gives it its send queue back. NULL is allowed.
 * Threads: alone with queue.
 */
int doorbell_kernel_queue_destroy(doorbell_kernel_queue *queue);

/* -------------------------------------------------------------------------------------------------- kernel streams */

/*
 * Kernels of the application ring, without going back to a stream. <doorbell/device.cuh> is what they include; this section is the
 * host's side.
 *
 * A kernel stream is a stream whose work is executed by such kernels: operations, waits and events are queued on it by the calls
 * that every stream has, and are taken as triggers. doorbell_stream_launch does not go with it.
 */

/* 64-bit words of a trigger. */
#define DOORBELL_TRIGGER_WORDS 60

/*
 * What was queued on a kernel stream: a plain value of 512 bytes, to be passed to the kernel as its parameter, or to be copied to
 * where it finds it. What is in it means nothing to anybody else.
 */
typedef struct doorbell_trigger {
	uint64_t control; /* device addresses, of what the stream shares with kernels */
	uint64_t turn;
	uint64_t number;     /* from 0 on, in the order in which they are executed */
	uint32_t word_count; /* 0: there is nothing to execute */
	uint32_t failures;   /* that the host had found when it was taken */
	uint64_t words[DOORBELL_TRIGGER_WORDS];
} doorbell_trigger;

/*
 * Makes a kernel stream for kernels of the current context. `name` is for people; NULL: "kernels".
 * Threads: any.
 */
int doorbell_stream_create_kernel(const char *name, doorbell_stream **stream);

/*
 * Takes what was queued since the last call: 1, and the trigger is to be executed; or 0 and an empty one, if nothing was. If it is
 * more than a trigger has room for (a send and its wait take about 40 words), it is the first part: take until there is nothing,
 * and have all of them executed in that order, by one kernel or by several.
 *
 * Every trigger that was taken is to be executed, once, by a kernel of the stream's device, or given up by
 * doorbell_stream_discard_triggers: until then its operations are in flight, with all that they keep. It may be executed after
 * the handle was destroyed. DOORBELL_EASYNC if the stream is over, after an abort or a wait that a kernel has given up;
 * DOORBELL_ESTATE if it is no kernel stream.
 * Threads: any.
 */
int doorbell_stream_take_trigger(doorbell_stream *stream, doorbell_trigger *trigger);

/*
 * Gives up the triggers that no kernel will execute, and what was not taken: their operations end as discarded, and the stream is
 * over. No kernel may execute a trigger of the stream at this moment, nor later: what is in it names memory that is let go.
 * Threads: any.
 */
int doorbell_stream_discard_triggers(doorbell_stream *stream);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_GPU_H */
