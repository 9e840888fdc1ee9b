/*
 * doorbell: queue a transfer on a stream the way you queue a kernel.
 *
 * The C interface of the library, for C11 and C++17. `examples/loop.c` is a whole program that uses it.
 *
 * Linking
 *   scripts/install-c PREFIX     installs headers, libdoorbell.so, libdoorbell.a and doorbell.pc
 *   shared:   cc program.c $(pkg-config --cflags --libs doorbell)
 *   static:   cc program.c $(pkg-config --cflags --libs --static doorbell | sed s/-ldoorbell/-l:libdoorbell.a/)
 *   CMake:    pkg_check_modules(DOORBELL REQUIRED IMPORTED_TARGET doorbell), and PkgConfig::DOORBELL; see examples/cmake
 *   Or from the build's own folder, where the libraries have no version:
 *   cc -I include program.c target/release/libdoorbell.a -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc
 *   With the feature `verbs`, the static library needs -lrdmacm -lmlx5 -libverbs before these.
 *   Until 1.0 another minor version is another interface: the soname is libdoorbell.so.0.1.
 *
 * Results
 *   A call that returns `int` gives 0 or a positive number when it succeeds, and one of the negative DOORBELL_E* codes when
 *   it does not. doorbell_last_error() then has a text that names the argument and the limit. A call that fails has changed
 *   nothing, unless its comment says otherwise.
 *
 * Handles
 *   Objects are known by pointers to types that are not defined here. A call that makes one writes it through its last
 *   handle argument, and writes NULL there if it fails. Each has one call that destroys it, and that takes NULL, too.
 *   Destroying a handle does not end what other objects and work in flight still need of it: devices, domains, regions,
 *   endpoints, streams, events and tickets may be destroyed in any order, with work queued on them.
 *   A null handle is DOORBELL_EINVAL anywhere else. A handle that was destroyed, is of another type, or is none at all is
 *   DOORBELL_EHANDLE if the library was built with debug assertions, as `cargo build` does; in release builds it is
 *   undefined behaviour, as with free().
 *
 * Threads
 *   The comment of each call has a line `Threads:`.
 *     any                      from any thread at any time, with the same objects in other threads as well.
 *     one at a time for NAME   two threads may not use this object at once; any thread may have its turn. Where two meet,
 *                              the second gets DOORBELL_EBUSY, and nothing happens.
 *     alone with NAME          the call ends the object: no other call with it may be under way, or come later.
 *   No call may be made from a signal handler, or in a child after fork() without exec().
 *
 * Ownership
 *   What a call is given, such as slices, work requests, texts and bytes, it has read when it returns. Texts that are given
 *   are UTF-8. Texts that are returned as `const char *` belong to the library.
 *
 * Text buffers
 *   A call with `char *text, size_t capacity` writes as snprintf() does: at most `capacity` bytes, with a zero at the end,
 *   and returns the length that the whole text has without that zero. With a capacity of 0 the pointer may be NULL.
 *
 * Structs that begin with `struct_size`
 *   They may grow at their end in later versions. The field is the size that your header has; the functions that fill such
 *   a struct set it. What a later library knows beyond that takes its default. Structs without it that the library fills have a field
 *   `reserved`, which later versions may give a meaning.
 *
 * CUDA
 *   Calls with CUDA's own types take them as they are, without CUDA's headers: `struct CUstream_st *` is CUstream and
 *   cudaStream_t, and a `uint64_t` is a CUdeviceptr. They work in the context that is current in the calling thread, which
 *   the runtime API makes with its first call. Every library has them; one that was built without the feature `cuda` gives
 *   DOORBELL_EFEATURE. DOORBELL_ESTATE if there is no driver, or no current context.
 *   Streams of one priority share the device's queues, 8 unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise: a wait, and a kernel
 *   that waits, may hold up a stream that shares its queue. What waits for each other needs queues of its own, or other priorities.
 *   Memory that a GPU has mapped, that of endpoints, kernel queues and regions, is unregistered when they are destroyed; the driver
 *   may wait for the GPU then, as it does where memory is freed. A thread that destroys one should not be the one that a stream
 *   or a kernel waits for.
 *
 * What the Rust interface has beyond this
 *   What a program has given or done itself is not asked back: names, depths, lengths, rights, domains of regions and
 *   endpoints, that a region was deregistered, and which pages the kernel was only asked to make huge.
 *   Memory of a region is read and written through its pointer, that of a GPU by CUDA.
 *   Contexts, streams and memory of a GPU are CUDA's own here, made and ended by CUDA's calls: CudaContext::primary and from_raw
 *   are cudaSetDevice() or cuCtxSetCurrent(), CudaStream::new is cudaStreamCreateWithFlags(), TimingEvent is cudaEvent_t, parts
 *   of a buffer are addresses. The kernels that only take time or make one work request (CudaStream::spin, CudaStream::step,
 *   KernelQueue::put_step) are for measuring from a language that has none of its own. Types of cudarc are Rust's.
 *   A launcher's variables from elsewhere than the environment (Place::from_vars): give rank, size and address.
 *   Executors, copy engines and bytecode of one's own, the formats of mlx5, packets and messages of the software NIC and of
 *   groups, the software NIC by itself and its doors (the command `doorbell softcx run`), and what breaks it for tests (faults,
 *   a NIC that hangs, a proxy that stalls) are for Rust programs: they are tied to the library's own code, and change with it.
 *
 * Panics of the Rust code do not cross this interface: they become DOORBELL_EPANIC.
 */
#ifndef DOORBELL_H
#define DOORBELL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* CUDA's, known by name only. */
struct CUstream_st;
struct CUgraph_st;
struct CUgraphNode_st;
struct CUgraphExec_st;

/* ------------------------------------------------------------------------------------------------------- version */

#define DOORBELL_VERSION_MAJOR 0
#define DOORBELL_VERSION_MINOR 1
#define DOORBELL_VERSION_PATCH 0

/*
 * The version of the library: major << 24 | minor << 12 | patch. Until 1.0, another minor version is another interface.
 * Threads: any.
 */
uint32_t doorbell_version(void);

/*
 * The version of the library as a text, such as "0.1.0".
 * Threads: any.
 */
const char *doorbell_version_text(void);

/* -------------------------------------------------------------------------------------------------------- errors */

enum doorbell_error {
	DOORBELL_OK = 0,
	/* An argument makes no sense: a null pointer, a flag that does not exist, an impossible struct_size. */
	DOORBELL_EINVAL = -1,
	/* A handle was destroyed, is of another type, or is none. Debug builds of the library only. */
	DOORBELL_EHANDLE = -2,
	/* Another thread uses the object at this moment. */
	DOORBELL_EBUSY = -3,
	/* The library panicked, which is a bug of it. What the call was about can only be destroyed. */
	DOORBELL_EPANIC = -4,
	/* A number is outside its limits; the text has them. */
	DOORBELL_ERANGE = -10,
	/* An address or offset has the wrong alignment. */
	DOORBELL_EALIGNMENT = -11,
	/* A span of bytes leaves its region. */
	DOORBELL_EBOUNDS = -12,
	/* A program does not fit its fixed space. */
	DOORBELL_EPROGRAM = -13,
	/* Objects of different devices or protection domains meet. */
	DOORBELL_EFOREIGN = -14,
	/* The send or receive queue is full. */
	DOORBELL_EFULL = -15,
	/* The object is not in a state for this: not connected, deregistered, not in its turn. */
	DOORBELL_ESTATE = -16,
	/* The deadline of the call passed. What was waited for goes on. */
	DOORBELL_ETIMEOUT = -17,
	/* Work that was queued on the stream earlier has failed; see doorbell_stream_synchronize. */
	DOORBELL_EASYNC = -18,
	/* The endpoint has failed; see doorbell_last_failure. */
	DOORBELL_EWORK = -19,
	/* The operating system refused; the text has its reason. */
	DOORBELL_ESYSTEM = -20,
	/* Bytes or a text make no sense: an address, a greeting of a stranger. */
	DOORBELL_EMALFORMED = -21,
	/* A process of the group is no longer there; the text has its rank. */
	DOORBELL_ERANK = -22,
	/* The CUDA driver refused; the text has its function and its code. */
	DOORBELL_ECUDA = -23,
	/* The library was built without the feature that the call needs; the text names it. */
	DOORBELL_EFEATURE = -24,
	/* The peer does not take the connection; the text has what the connection manager says of it. */
	DOORBELL_EREFUSED = -25
};

/* What ended an endpoint: doorbell_failure.cause. */
enum doorbell_cause {
	/* The device completed a work request in error: wc_status, syndrome and vendor_syndrome say how. */
	DOORBELL_CAUSE_COMPLETION = 0,
	/* A wait on a stream took longer than timeout_ms, and was released. */
	DOORBELL_CAUSE_DEADLINE = 1,
	/* The queue pair is in its error state: the peer failed, or its request was refused. */
	DOORBELL_CAUSE_QUEUE_PAIR = 2,
	/* A completion queue overran. */
	DOORBELL_CAUSE_OVERRUN = 3,
	/* A stream failed, or was aborted, before it executed the operation. */
	DOORBELL_CAUSE_DISCARDED = 4,
	/* doorbell_endpoint_abort. */
	DOORBELL_CAUSE_ABORTED = 5,
	/* A trigger word of the proxy path had a value that no operation stores: something else wrote to it. */
	DOORBELL_CAUSE_TRIGGER = 6
};

/* How an operation, and with it its endpoint, failed. */
typedef struct doorbell_failure {
	uint64_t wr_id;           /* the number of the work request to blame, if has_wr_id is 1 */
	uint32_t has_wr_id;       /* 0 or 1 */
	uint32_t qpn;             /* the number of the endpoint's queue pair; 0 for a wait for a value */
	uint32_t cause;           /* DOORBELL_CAUSE_* */
	uint32_t wc_status;       /* enum ibv_wc_status of verbs.h, if cause is DOORBELL_CAUSE_COMPLETION */
	uint32_t syndrome;        /* as in the error CQE */
	uint32_t vendor_syndrome; /* as in the error CQE */
	int64_t timeout_ms;       /* if cause is DOORBELL_CAUSE_DEADLINE */
	uint64_t reserved[3];     /* 0 */
} doorbell_failure;

/*
 * The text of the last failure of a call in this thread; "" if there was none. Successful calls leave it as it is. It is the
 * library's, and stays until the next failure in this thread.
 * Threads: any.
 */
const char *doorbell_last_error(void);

/*
 * Writes the details of the last failure of a call in this thread if that returned DOORBELL_EWORK. 1 if so, 0 if it was
 * another kind of failure, or none.
 * Threads: any.
 */
int doorbell_last_failure(doorbell_failure *failure);

/*
 * The name of a code, such as "DOORBELL_ETIMEOUT"; "unknown" for numbers that are none. It is the library's, for ever.
 * Threads: any.
 */
const char *doorbell_error_name(int code);

/* ------------------------------------------------------------------------------------------------------ timeouts */

/* Timeouts are in milliseconds, from 0, or one of these. */

/* No timeout: wait for ever. */
#define DOORBELL_NO_TIMEOUT (-1)
/* The wait_timeout_ms that the endpoint was made with; 30 s where no endpoint takes part. */
#define DOORBELL_DEFAULT_TIMEOUT (-2)

/* ------------------------------------------------------------------------------------------------------- devices */

/* A NIC, or a software one. */
typedef struct doorbell_device doorbell_device;

/* A protection domain. Regions and endpoints of different ones do not work together; most programs need one. */
typedef struct doorbell_domain doorbell_domain;

/*
 * How many devices there are on this machine. The software ConnectX, "softcx", is always there.
 * Threads: any.
 */
int doorbell_device_count(void);

/*
 * The name of the device of that index, from 0, best first: a text buffer.
 * Threads: any.
 */
int doorbell_device_name(uint32_t index, char *name, size_t capacity);

/*
 * Opens a device by its name. Each call makes a device of its own of "softcx", with an engine thread.
 * Threads: any.
 */
int doorbell_device_open(const char *name, doorbell_device **device);

/*
 * Ends the handle; the device itself is closed when nothing made from it is left. NULL is allowed.
 * Threads: alone with device.
 */
int doorbell_device_close(doorbell_device *device);

/*
 * Lets a device without silicon of its own do some of its work in this thread. 1 if there was some, 0 if not. No program
 * needs this call; a loop that polls memory is quicker with it.
 * Threads: any.
 */
int doorbell_device_progress(const doorbell_device *device);

/* What a software NIC has counted since it was opened. A card counts in files of the system's. */
typedef struct doorbell_device_counters {
	uint32_t struct_size;
	uint32_t reserved;                /* 0 */
	uint64_t doorbells;               /* that it has seen */
	uint64_t doorbells_before_record; /* that came before the doorbell record: a bug of whoever rang */
	uint64_t wqes;                    /* work requests begun */
	uint64_t packets_sent;            /* without what faults added or took */
	uint64_t packets_received;        /* by a queue pair */
	uint64_t packets_dropped;         /* that came for nobody, or for an earlier connection */
	uint64_t retransmissions;         /* times that a sender went back */
	uint64_t rnr_naks;                /* times that a peer was told that there is no receive */
	uint64_t completions;             /* written */
} doorbell_device_counters;

/*
 * What it has counted: doorbell_device_read_counters(device, &counters, sizeof counters). All 0 of a device that is not the
 * software ConnectX of this process.
 * Threads: any.
 */
int doorbell_device_read_counters(const doorbell_device *device, doorbell_device_counters *counters,
				  uint32_t struct_size);

/*
 * What the device is and which ways its doorbells can take, a line each: DOORBELL_CONTROL_* by name, best first, with what
 * speaks for it or why it cannot be. Makes an endpoint for each, and drops it. A text buffer.
 * Threads: any.
 */
int doorbell_device_describe(const doorbell_device *device, char *text, size_t capacity);

/*
 * What this library was built with, which devices there are, and what the GPU of the current context, or else the first one,
 * can do and lacks, with reasons: for people, and for reports of what does not work. A text buffer.
 * Threads: any.
 */
int doorbell_describe(char *text, size_t capacity);

/*
 * Makes a protection domain.
 * Threads: any.
 */
int doorbell_domain_create(const doorbell_device *device, doorbell_domain **domain);

/*
 * The device of a domain, as of one that a group has brought: a handle of its own, to be closed.
 * Threads: any.
 */
int doorbell_domain_device(const doorbell_domain *domain, doorbell_device **device);

/*
 * Ends the handle; the domain ends with the last region and endpoint in it. NULL is allowed.
 * Threads: alone with domain.
 */
int doorbell_domain_destroy(doorbell_domain *domain);

/* ------------------------------------------------------------------------------------------------------- regions */

/* What may be done to a region, and what a peer may do through an endpoint: flags with the values of ibv_access_flags. */
enum doorbell_access {
	/* The device may write for this side: receives, results of reads and atomics. */
	DOORBELL_ACCESS_LOCAL_WRITE = 1,
	DOORBELL_ACCESS_REMOTE_WRITE = 2,
	DOORBELL_ACCESS_REMOTE_READ = 4,
	DOORBELL_ACCESS_REMOTE_ATOMIC = 8,
	DOORBELL_ACCESS_ALL = 15
};

/* Memory that is registered with a device. Work in flight holds what it needs of it. */
typedef struct doorbell_region doorbell_region;

/* What a peer needs to read or write a region: to be sent there as it is. */
typedef struct doorbell_remote {
	uint64_t addr; /* of the first byte, over there; add an offset for others */
	uint64_t len_bytes;
	uint32_t rkey;
	uint32_t reserved; /* 0 */
} doorbell_remote;

/*
 * Allocates `len_bytes` (1 to 1 TiB) of zeroed, page-aligned memory, and registers it. The memory is the region's: it is
 * freed after doorbell_region_destroy, when no work in flight needs it any more.
 * Threads: any.
 */
int doorbell_region_alloc(const doorbell_domain *domain, uint64_t len_bytes, uint32_t access_flags,
			  doorbell_region **region);

/*
 * As doorbell_region_alloc, in huge pages where the system has set some aside, or else with the kernel asked to make huge
 * pages of ordinary ones. That there are none is no error.
 * Threads: any.
 */
int doorbell_region_alloc_huge(const doorbell_domain *domain, uint64_t len_bytes, uint32_t access_flags,
			       doorbell_region **region);

/*
 * Registers memory of the caller's. It must stay valid until the region is destroyed and all work that names it is done,
 * waits for and stores of its words on streams included. Of a CUDA stream that is when doorbell_stream_synchronize or
 * doorbell_stream_query says so: tickets and events may say it a millisecond or more before the library has let go of the memory.
 * Threads: any.
 */
int doorbell_region_register(const doorbell_domain *domain, void *start, uint64_t len_bytes, uint32_t access_flags,
			     doorbell_region **region);

/*
 * Allocates memory of the GPU of the current context (cuMemAlloc), and registers it in the best way there is. What is in it
 * is not known. It is freed after doorbell_region_destroy, when no work in flight needs it any more, by a thread of the
 * library. DOORBELL_ESTATE if the device does not reach such memory; the text has the reason of each way.
 * Threads: any.
 */
int doorbell_region_alloc_device(const doorbell_domain *domain, uint64_t len_bytes, uint32_t access_flags,
				 doorbell_region **region);

/*
 * Registers memory of a GPU that the caller has allocated, of the current context or device. Errors as of
 * doorbell_region_alloc_device; DOORBELL_ESTATE, too, if it is no device memory, or managed memory, or if its allocation ends
 * before. It must stay valid as with doorbell_region_register. To keep order is the caller's: a synchronous copy into memory
 * of a pool (cudaMallocAsync) may return before the bytes are there.
 * Threads: any.
 */
int doorbell_region_register_device(const doorbell_domain *domain, uint64_t device_pointer, uint64_t len_bytes,
				    uint32_t access_flags, doorbell_region **region);

/*
 * Registers a part of a dmabuf of another device's memory, from `offset` on, which work requests and peers name by the
 * address `iova`; not 0. The kernel holds the dmabuf: `fd` may be closed after the call. DOORBELL_ESTATE if the device has
 * none of this, DOORBELL_ESYSTEM if the kernel refuses. The processor does not reach the memory through the region.
 * Threads: any.
 */
int doorbell_region_register_dmabuf(const doorbell_domain *domain, int fd, uint64_t offset, uint64_t len_bytes,
				    uint64_t iova, uint32_t access_flags, doorbell_region **region);

/*
 * Registers memory of another device by its address there, which the kernel finds by a module such as nvidia-peermem. It must
 * stay valid as with doorbell_region_register. DOORBELL_ESTATE if the device has none of this, or if the kernel does not know
 * whose memory it is. For memory of CUDA there is doorbell_region_register_device, which tries all ways.
 * Threads: any.
 */
int doorbell_region_register_peermem(const doorbell_domain *domain, uint64_t address, uint64_t len_bytes,
				     uint32_t access_flags, doorbell_region **region);

/*
 * Takes the region from the device. When this returns, the device does not touch the memory any more; work in flight that
 * names it fails. 1 if the region was registered, 0 if it no longer was. The handle remains, to be destroyed. Before the
 * caller frees the memory, doorbell_stream_wait_value32 and its like must be done with the region, too.
 * Threads: any.
 */
int doorbell_region_deregister(const doorbell_region *region);

/*
 * Ends the handle; the region is deregistered when no work in flight needs it any more: when a ticket, a poll or the library's own look, once a
 * millisecond, has found that such work is done. To be sure of it on return: doorbell_region_deregister first. NULL is allowed.
 * Threads: alone with region.
 */
int doorbell_region_destroy(doorbell_region *region);

/*
 * The first byte; NULL if the call fails. It is the region's, and valid as long as its handle. The device, and through it a
 * peer, may write there at any time. Of a GPU's memory it is the address on the GPU, which the processor does not reach: the
 * words of such a region are DOORBELL_ESTATE to doorbell_stream_wait_value32 and its like.
 * Threads: any.
 */
void *doorbell_region_pointer(const doorbell_region *region);

/*
 * The address by which kernels of the current context reach the first byte of host memory, as words that they signal or wait for
 * (doorbell/trigger.h: doorbell_kernel_write_value32, doorbell_kernel_wait_value32). It is valid as long as the handle. With the
 * first call in a context the memory is registered with the driver, which unregisters it with the region. DOORBELL_ESTATE if it is
 * no host memory, or if the driver maps its parts apart; DOORBELL_ECUDA if it does not map it.
 * Threads: any.
 */
int doorbell_region_device_pointer(const doorbell_region *region, uint64_t *device_pointer);

/*
 * The length; 0 if the call fails.
 * Threads: any.
 */
uint64_t doorbell_region_len_bytes(const doorbell_region *region);

/* How a device reaches the memory of a region. */
enum doorbell_region_kind {
	/* It is memory of this process. */
	DOORBELL_REGION_HOST = 0,
	/* Another device's, which its driver exported as a dmabuf. */
	DOORBELL_REGION_DMABUF = 1,
	/* Another device's, found by its address. */
	DOORBELL_REGION_PEERMEM = 2,
	/* A GPU's, which the software NIC has the GPU copy. */
	DOORBELL_REGION_COPIED = 3
};

/*
 * How the device reaches the memory: DOORBELL_REGION_*.
 * Threads: any.
 */
int doorbell_region_kind(const doorbell_region *region);

/*
 * Why the device reaches a GPU's memory in no better way: a line for each that was tried before, best first, with its reason. A
 * text buffer; "" where there is none, as of memory of this process, and of regions that doorbell_cache_get has given.
 * Threads: any.
 */
int doorbell_region_reasons(const doorbell_region *region, char *text, size_t capacity);

/*
 * Why the last copy failed that a software NIC had made of memory of the region's GPU, whose work request can only say that
 * memory was not to be had. A text buffer. The length of the text, or 0 if none has failed, as of all regions that are not
 * DOORBELL_REGION_COPIED, and then nothing is written.
 * Threads: any.
 */
int doorbell_region_copy_failure(const doorbell_region *region, char *text, size_t capacity);

/*
 * The size of the huge pages that were set aside for the memory, in bytes; 0 if there are none, or it is not known.
 * Threads: any.
 */
uint64_t doorbell_region_page_bytes(const doorbell_region *region);

/*
 * The key by which work requests of this side name the region, for who writes them himself.
 * Threads: any.
 */
int doorbell_region_lkey(const doorbell_region *region, uint32_t *lkey);

/*
 * What a peer needs to know.
 * Threads: any.
 */
int doorbell_region_remote(const doorbell_region *region, doorbell_remote *remote);

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

/* ---------------------------------------------------------------------------------------------------- rendezvous */

/* A way to exchange addresses and keys for programs that have none of their own: short messages over TCP. */

/* Waits for peers at a TCP address. */
typedef struct doorbell_listener doorbell_listener;

/* A connection with a peer. After a call that failed its state is unknown: destroy it. */
typedef struct doorbell_channel doorbell_channel;

/*
 * Listens at an address such as "127.0.0.1:7471"; port 0 is a free one.
 * Threads: any.
 */
int doorbell_listener_create(const char *address, doorbell_listener **listener);

/*
 * The address at which it listens, with its port: a text buffer.
 * Threads: any.
 */
int doorbell_listener_address(const doorbell_listener *listener, char *text, size_t capacity);

/*
 * Waits for a peer. DOORBELL_EMALFORMED if who comes is none, or one of another version.
 * Threads: any.
 */
int doorbell_listener_accept(const doorbell_listener *listener, int64_t timeout_ms, doorbell_channel **channel);

/*
 * Stops listening. Channels stay. NULL is allowed.
 * Threads: alone with listener.
 */
int doorbell_listener_destroy(doorbell_listener *listener);

/*
 * Goes to the peer that listens at `address`; if none does yet, tries until `timeout_ms` have passed.
 * Threads: any.
 */
int doorbell_channel_connect(const char *address, int64_t timeout_ms, doorbell_channel **channel);

/*
 * Gives the peer a message of up to 1 MiB and takes the peer's, which must fit `capacity`, else DOORBELL_ERANGE. Its length
 * in bytes. Both sides make the call. `message` and `answer` may be the same memory. Messages of no bytes are a barrier.
 * Threads: one at a time for channel.
 */
int doorbell_channel_exchange(doorbell_channel *channel, const void *message, size_t len_bytes, void *answer,
			      size_t capacity, int64_t timeout_ms);

/*
 * Sends the peer a message of up to 1 MiB.
 * Threads: one at a time for channel.
 */
int doorbell_channel_send(doorbell_channel *channel, const void *message, size_t len_bytes, int64_t timeout_ms);

/*
 * Receives a message, which must fit `capacity`, else DOORBELL_ERANGE. Its length in bytes. DOORBELL_ESTATE if the peer is
 * gone.
 * Threads: one at a time for channel.
 */
int doorbell_channel_receive(doorbell_channel *channel, void *message, size_t capacity, int64_t timeout_ms);

/*
 * Ends a connection. NULL is allowed.
 * Threads: alone with channel.
 */
int doorbell_channel_destroy(doorbell_channel *channel);

/* -------------------------------------------------------------------------------------------------------- groups */

/*
 * The processes of a job, of which this is one. A group fails as a whole: when a rank ends that has not left, or its group is
 * destroyed without doorbell_group_leave, every other one is told. Its calls give DOORBELL_ERANK from then on, with that
 * rank in the text, and all endpoints of the group are aborted.
 */
typedef struct doorbell_group doorbell_group;

/* How a group is joined. Begin with doorbell_group_config_init. */
typedef struct doorbell_group_config {
	uint32_t struct_size;
	uint32_t rank;            /* of this process, from 0 */
	uint32_t size;            /* of the group, up to 65536; default 0: the launcher says rank, size, address and token */
	uint32_t token_len_bytes; /* of `token` */
	int64_t timeout_ms;       /* of joining, and of each exchange where DOORBELL_DEFAULT_TIMEOUT is given; default 60000 */
	const char *address;      /* where rank 0 listens, such as "10.0.0.1:7471" */
	const void *token;        /* bytes that all ranks have and strangers do not */
	const doorbell_endpoint_config *endpoint; /* how endpoints are made; NULL, the default, is their defaults */
} doorbell_group_config;

/*
 * Fills a configuration with the defaults: doorbell_group_config_init(&config, sizeof config).
 * Threads: any.
 */
int doorbell_group_config_init(doorbell_group_config *config, uint32_t struct_size);

/*
 * Joins a group, whose endpoints are of `domain`; waits until rank 0 is there, who hosts it. A `config` of NULL is the
 * defaults. What the launcher says is read from the environment: DOORBELL_RANK and DOORBELL_SIZE, or the variables of
 * torchrun, Open MPI, MPICH, Slurm or PMIx; DOORBELL_MASTER_ADDR, DOORBELL_MASTER_PORT and DOORBELL_TOKEN go before theirs.
 * DOORBELL_ESTATE if one is missing or the group has another token or size; DOORBELL_EMALFORMED for one that makes no
 * sense, or if who answers is no group; DOORBELL_ETIMEOUT if nobody answers.
 * Threads: any.
 */
int doorbell_group_join(const doorbell_domain *domain, const doorbell_group_config *config, doorbell_group **group);

/*
 * What the launcher says of this process, read as by doorbell_group_join and with its errors: which rank it is, and of how
 * many. For who must know before, as which GPU to take.
 * Threads: any.
 */
int doorbell_group_place_from_env(uint32_t *rank, uint32_t *size);

/*
 * Joins the launcher's group with the device DOORBELL_DEVICE of the environment, or "softcx" where that is not set.
 * Threads: any.
 */
int doorbell_group_from_env(doorbell_group **group);

/*
 * Leaves the group: the end of this process is no failure from now on. Rank 0 waits until all others have left. The handle is
 * gone, on an error as well: DOORBELL_ERANK if a rank failed before, DOORBELL_ETIMEOUT. A barrier before this makes sure
 * that nothing is under way.
 * Threads: alone with group.
 */
int doorbell_group_leave(doorbell_group *group);

/*
 * Ends the handle of a group that was not left, which is a failure to the others. NULL is allowed.
 * Threads: alone with group.
 */
int doorbell_group_destroy(doorbell_group *group);

/*
 * The number of this process.
 * Threads: any.
 */
int doorbell_group_rank(const doorbell_group *group);

/*
 * How many processes there are.
 * Threads: any.
 */
int doorbell_group_size(const doorbell_group *group);

/*
 * The domain of the group's endpoints, in which regions for them are made: a handle of its own, to be destroyed.
 * Threads: any.
 */
int doorbell_group_domain(const doorbell_group *group, doorbell_domain **domain);

/*
 * The endpoint that is connected with rank `peer`, as the peer's is with it, once; it is the caller's, to be destroyed. Waits
 * until the peer's process has joined: its program need not do anything. DOORBELL_ESTATE if it was given before, or for this process's own rank.
 * Threads: any.
 */
int doorbell_group_endpoint(const doorbell_group *group, uint32_t peer, doorbell_endpoint **endpoint);

/*
 * Waits until every rank has come here. DOORBELL_ETIMEOUT; DOORBELL_ERANK if a rank has ended, or has left;
 * DOORBELL_EBUSY while another thread is in a barrier or gathering of this group.
 * Threads: any.
 */
int doorbell_group_barrier(const doorbell_group *group, int64_t timeout_ms);

/*
 * Remembers up to 64 KiB under a key of up to 256 bytes, in place of what was there.
 * Threads: any.
 */
int doorbell_group_set(const doorbell_group *group, const char *key, const void *value, size_t len_bytes,
		       int64_t timeout_ms);

/*
 * The value under a key, which must fit `capacity`, else DOORBELL_ERANGE; waits until some rank has set it. Its length.
 * Threads: any.
 */
int doorbell_group_get(const doorbell_group *group, const char *key, void *value, size_t capacity,
		       int64_t timeout_ms);

/*
 * Gives every rank the values of all, by rank: `values` has room for as many as there are ranks. All are `len_bytes` long, up
 * to 64 KiB, else DOORBELL_EMALFORMED. DOORBELL_EBUSY while another thread is in a barrier or gathering of this group.
 * Threads: any.
 */
int doorbell_group_gather(const doorbell_group *group, const void *value, size_t len_bytes, void *values,
			  int64_t timeout_ms);

/*
 * 0 if the group is whole, or DOORBELL_ERANK, and the first rank that failed goes to `rank`, which may be NULL. An endpoint
 * may notice before: with a `wait_for_word` of 1, for who has seen an operation fail, this waits for the word, up to two
 * seconds.
 * Threads: any.
 */
int doorbell_group_check(const doorbell_group *group, uint32_t wait_for_word, uint32_t *rank);

/* -------------------------------------------------------------------------------------------------------- stores */

/*
 * What the processes of a job exchange, without a device and without endpoints: for programs that connect theirs themselves. A
 * group has one of its own, which its calls use. It fails as a group does.
 */
typedef struct doorbell_store doorbell_store;

/*
 * Goes to the store of the job, which rank 0 starts in this call; waits until it is there. `config` and errors as of
 * doorbell_group_join, but `endpoint` is NULL.
 * Threads: any.
 */
int doorbell_store_join(const doorbell_group_config *config, doorbell_store **store);

/*
 * As doorbell_group_leave.
 * Threads: alone with store.
 */
int doorbell_store_leave(doorbell_store *store);

/*
 * Ends the handle of a store that was not left, which is a failure to the others. NULL is allowed.
 * Threads: alone with store.
 */
int doorbell_store_destroy(doorbell_store *store);

/*
 * The number of this process.
 * Threads: any.
 */
int doorbell_store_rank(const doorbell_store *store);

/*
 * How many processes there are.
 * Threads: any.
 */
int doorbell_store_size(const doorbell_store *store);

/*
 * As doorbell_group_barrier.
 * Threads: any.
 */
int doorbell_store_barrier(const doorbell_store *store, int64_t timeout_ms);

/*
 * As doorbell_group_set.
 * Threads: any.
 */
int doorbell_store_set(const doorbell_store *store, const char *key, const void *value, size_t len_bytes,
		       int64_t timeout_ms);

/*
 * As doorbell_group_get.
 * Threads: any.
 */
int doorbell_store_get(const doorbell_store *store, const char *key, void *value, size_t capacity, int64_t timeout_ms);

/*
 * As doorbell_group_gather.
 * Threads: any.
 */
int doorbell_store_gather(const doorbell_store *store, const void *value, size_t len_bytes, void *values,
			  int64_t timeout_ms);

/*
 * 0 if all ranks are there, or DOORBELL_ERANK, and the first rank that failed goes to `rank`, which may be NULL.
 * Threads: any.
 */
int doorbell_store_check(const doorbell_store *store, uint32_t *rank);

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

/* ----------------------------------------------------------------------------------------- operations on streams */

/* Tells what became of a queued operation. Every `ticket` below may be NULL: no ticket is made then. */
typedef struct doorbell_ticket doorbell_ticket;

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

/* ------------------------------------------------------------------------------------------------------- tickets */

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

/* -------------------------------------------------------------------------------------------------------- graphs */

/*
 * CUDA graphs with operations in them, launched again and again. What is recorded is not the stores, but the operations: each
 * launch prepares them anew and changes what the nodes store and poll. So such a graph is launched by these calls only.
 */

/* Records operations, one after the other. It stays in the thread that made it: elsewhere its calls are DOORBELL_ESTATE. */
typedef struct doorbell_graph_builder doorbell_graph_builder;

/* A graph that can be launched. */
typedef struct doorbell_graph doorbell_graph;

/*
 * Begins to capture a CUDA stream (cuStreamBeginCapture): what anybody queues on it from now on is in the graph. Until it is
 * instantiated, other calls of this library that queue on the stream are DOORBELL_ESTATE.
 * Threads: any.
 */
int doorbell_graph_builder_capture(doorbell_stream *stream, doorbell_graph_builder **builder);

/*
 * Adds nodes to a CUgraph that the caller makes and keeps, with what is added, until builder and graph are destroyed and the
 * last launch is done. `stream` is one of the context that the nodes will run in.
 * Threads: any.
 */
int doorbell_graph_builder_over(doorbell_stream *stream, struct CUgraph_st *graph, doorbell_graph_builder **builder);

/*
 * Lets the next operation come after these nodes as well. DOORBELL_ESTATE if a stream is captured: its order counts.
 * Threads: one at a time for builder.
 */
int doorbell_graph_builder_after(doorbell_graph_builder *builder, struct CUgraphNode_st *const *nodes, size_t count);

/*
 * The node of the last operation, for others to come after: 1, or 0 if there is none. The next operation has a new node.
 * Threads: one at a time for builder.
 */
int doorbell_graph_builder_last_node(doorbell_graph_builder *builder, struct CUgraphNode_st **node);

/*
 * Adds a work request, with the same slices, address and immediate data in each launch; inline bytes are copied now. Errors
 * as of doorbell_prepare_send, and nothing was recorded then.
 * Threads: one at a time for builder, one at a time for endpoint.
 */
int doorbell_graph_builder_send(doorbell_graph_builder *builder, doorbell_endpoint *endpoint,
				const doorbell_work *work);

/*
 * Adds a receive.
 * Threads: one at a time for builder, one at a time for endpoint.
 */
int doorbell_graph_builder_recv(doorbell_graph_builder *builder, doorbell_endpoint *endpoint, uint64_t wr_id,
				const doorbell_slice *slices, uint32_t slice_count);

/*
 * Adds a wait for the next completion of a queue at the time of each launch.
 * Threads: one at a time for builder, one at a time for endpoint.
 */
int doorbell_graph_builder_wait_cq(doorbell_graph_builder *builder, doorbell_endpoint *endpoint, uint32_t queue_side,
				   int64_t timeout_ms);

/*
 * Adds a wait for a word, as doorbell_stream_wait_value32; the value is the same in each launch.
 * Threads: one at a time for builder.
 */
int doorbell_graph_builder_wait_value32(doorbell_graph_builder *builder, const doorbell_region *region, uint64_t offset,
					uint32_t wait_condition, uint32_t value, int64_t timeout_ms);

/*
 * Adds a store to a word, as doorbell_stream_write_value32.
 * Threads: one at a time for builder.
 */
int doorbell_graph_builder_write_value32(doorbell_graph_builder *builder, const doorbell_region *region,
					 uint64_t offset, uint32_t value);

/*
 * Ends the recording; the graph is armed for its first launch. The builder is gone, on an error of CUDA's as well.
 * Threads: alone with builder.
 */
int doorbell_graph_builder_instantiate(doorbell_graph_builder *builder, doorbell_graph **graph);

/*
 * Ends a recording without a graph; what it has prepared is cancelled. NULL is allowed.
 * Threads: alone with builder.
 */
int doorbell_graph_builder_destroy(doorbell_graph_builder *builder);

/*
 * Arms the graph, if it is not, and launches it. `endpoints` are those that were recorded, in any order; others among them are
 * not minded. If the launch is refused, the graph is armed; if it could not be armed, it is as it was.
 * Threads: one at a time for graph, one at a time for endpoints.
 */
int doorbell_graph_launch(doorbell_graph *graph, doorbell_stream *stream, doorbell_endpoint *const *endpoints,
			  size_t count);

/*
 * Launches what is armed, once. DOORBELL_ESTATE if it is not, or the stream is of another context; DOORBELL_EWORK if an
 * endpoint has failed. It is armed as before then.
 * Threads: one at a time for graph.
 */
int doorbell_graph_launch_armed(doorbell_graph *graph, doorbell_stream *stream);

/*
 * Prepares the operations of the next launch, while earlier ones may still be running. DOORBELL_ESTATE if that is done,
 * DOORBELL_EFOREIGN if an endpoint is missing, DOORBELL_EFULL: nothing is prepared then.
 * Threads: one at a time for graph, one at a time for endpoints.
 */
int doorbell_graph_arm(doorbell_graph *graph, doorbell_endpoint *const *endpoints, size_t count);

/*
 * Takes the preparation back, so that other work can be posted before the next launch. DOORBELL_EFOREIGN if an endpoint is
 * missing.
 * Threads: one at a time for graph, one at a time for endpoints.
 */
int doorbell_graph_disarm(doorbell_graph *graph, doorbell_endpoint *const *endpoints, size_t count);

/*
 * 1 if the next launch is prepared, 0 if not.
 * Threads: one at a time for graph.
 */
int doorbell_graph_is_armed(const doorbell_graph *graph);

/*
 * A ticket of the last launch, by the place of its operation in the recording, from 0: 1, or 0 and NULL if there is none.
 * Threads: one at a time for graph.
 */
int doorbell_graph_ticket(const doorbell_graph *graph, size_t index, doorbell_ticket **ticket);

/*
 * The CUgraphExec, for tools that show it. To launch it by other means is to ring for work that is done.
 * Threads: one at a time for graph.
 */
int doorbell_graph_raw(const doorbell_graph *graph, struct CUgraphExec_st **raw);

/*
 * Ends the handle; launches that are queued or running go on. What was armed is cancelled. NULL is allowed.
 * Threads: alone with graph.
 */
int doorbell_graph_destroy(doorbell_graph *graph);

/* -------------------------------------------------------------------------------------------------------- caches */

/*
 * Registrations that outlive their use, so that the next one of the same memory costs nothing. Entries that nobody uses make
 * room for others, the one used longest ago first. In a child of fork() the calls are DOORBELL_ESTATE.
 */
typedef struct doorbell_cache doorbell_cache;

/* How large a cache may become. Begin with doorbell_cache_config_init. */
typedef struct doorbell_cache_config {
	uint32_t struct_size;
	uint32_t max_entries; /* 1 to 65536; default 1024 */
	uint64_t max_bytes;   /* of all entries together, from 1; default 64 GiB */
	uint32_t is_explicit; /* 1: the program calls doorbell_cache_invalidate before memory that was given to the cache is
				 unmapped, moved or discarded, by free() too, and gets all kinds of memory kept and hits
				 without a system call for it; default 0 */
	uint32_t reserved;    /* 0 */
} doorbell_cache_config;

/* What a cache has, and has done so far. */
typedef struct doorbell_cache_counters {
	uint32_t struct_size;
	uint32_t entries;
	uint64_t bytes;         /* of the entries */
	uint64_t hits;          /* requests that an entry answered */
	uint64_t misses;        /* requests that took a registration */
	uint64_t unkept;        /* of these, registrations that the cache did not keep */
	uint64_t evictions;     /* entries that made room */
	uint64_t invalidations; /* entries whose memory went, or was named to doorbell_cache_invalidate */
} doorbell_cache_counters;

/* Who tells a cache of memory that goes. */
enum doorbell_invalidation {
	/* The kernel, by userfaultfd: Linux 5.19 or later. Only private anonymous memory is kept. */
	DOORBELL_INVALIDATION_KERNEL = 0,
	/* The program. */
	DOORBELL_INVALIDATION_EXPLICIT = 1,
	/* Nobody; so nothing is kept. */
	DOORBELL_INVALIDATION_NONE = 2
};

/*
 * Fills a configuration with the defaults: doorbell_cache_config_init(&config, sizeof config).
 * Threads: any.
 */
int doorbell_cache_config_init(doorbell_cache_config *config, uint32_t struct_size);

/*
 * Makes a cache for memory of this process. A `config` of NULL is the defaults.
 * Threads: any.
 */
int doorbell_cache_create(const doorbell_domain *domain, const doorbell_cache_config *config, doorbell_cache **cache);

/*
 * Makes a cache for memory of GPUs, by whole allocations, which the driver numbers: memory that was freed and allocated anew
 * is registered anew. A `config` of NULL is the defaults; is_explicit means nothing here.
 * Threads: any.
 */
int doorbell_cache_create_device(const doorbell_domain *domain, const doorbell_cache_config *config,
				 doorbell_cache **cache);

/*
 * Registered memory: an entry with these rights that has all of these bytes, or newly registered. The region may begin before
 * them: they are at `offset` in it. Its handle is the caller's, to be destroyed; until then the bytes stay mapped as they
 * are. `address` is a pointer as a number, or of a GPU's memory its CUdeviceptr.
 * Threads: any.
 */
int doorbell_cache_get(const doorbell_cache *cache, uint64_t address, uint64_t len_bytes, uint32_t access_flags,
		       doorbell_region **region, uint64_t *offset);

/*
 * Registered memory of just these bytes, of which the caller says that it stays as it is until the handle is destroyed: until
 * then doorbell_cache_get of any part asks the kernel nothing. Not of a GPU's memory: DOORBELL_EINVAL.
 * Threads: any.
 */
int doorbell_cache_hold(const doorbell_cache *cache, uint64_t address, uint64_t len_bytes, uint32_t access_flags,
			doorbell_region **region);

/*
 * Takes out every entry that has any of these bytes, because they are about to go. How many there were.
 * Threads: any.
 */
int doorbell_cache_invalidate(const doorbell_cache *cache, uint64_t address, uint64_t len_bytes);

/*
 * Who tells the cache of memory that goes: DOORBELL_INVALIDATION_* to `by`, which may be NULL, and how or why in a text
 * buffer.
 * Threads: any.
 */
int doorbell_cache_invalidation(const doorbell_cache *cache, uint32_t *by, char *text, size_t capacity);

/*
 * What it has and has done: doorbell_cache_count(cache, &counters, sizeof counters).
 * Threads: any.
 */
int doorbell_cache_count(const doorbell_cache *cache, doorbell_cache_counters *counters, uint32_t struct_size);

/*
 * Ends the handle. Regions that came of it stay. NULL is allowed.
 * Threads: alone with cache.
 */
int doorbell_cache_destroy(doorbell_cache *cache);

/* -------------------------------------------------------------------------------------------------------- bounce */

/*
 * Pinned memory between memory that no NIC reaches and the NIC: transfers of any length in chunks, of which one is copied while
 * another is on the wire. Each call returns when all is done. The endpoint that a call is given has no completions that were
 * not taken. When a transfer fails the foreign memory is the caller's again, and how much has arrived is not known; after a
 * timeout with chunks on the wire, and after any failure of a send or recv, the endpoint is aborted.
 */
typedef struct doorbell_bounce doorbell_bounce;

/* What copies. */
enum doorbell_engine {
	/* The processor: addresses are this process's. */
	DOORBELL_ENGINE_MEMCPY = 0,
	/* The copy engines of the current context's GPU, on a stream of their own, which waits for no other: addresses are
	   those of the GPU. */
	DOORBELL_ENGINE_CUDA = 1
};

/* How much memory is pinned, and how it is divided. Begin with doorbell_bounce_config_init. */
typedef struct doorbell_bounce_config {
	uint32_t struct_size;
	uint32_t chunk_bytes; /* 1 to 2^30, the same on both sides of send and recv; default 256 KiB */
	uint32_t slots;       /* chunks under way at once, 1 to 256; default 4 */
	uint32_t engine;      /* DOORBELL_ENGINE_*; default DOORBELL_ENGINE_MEMCPY */
} doorbell_bounce_config;

/*
 * Fills a configuration with the defaults: doorbell_bounce_config_init(&config, sizeof config).
 * Threads: any.
 */
int doorbell_bounce_config_init(doorbell_bounce_config *config, uint32_t struct_size);

/*
 * Pins memory. A `config` of NULL is the defaults.
 * Threads: any.
 */
int doorbell_bounce_create(const doorbell_domain *domain, const doorbell_bounce_config *config,
			   doorbell_bounce **bounce);

/*
 * Writes `len_bytes` at `address` to the peer's region, from `offset` on.
 * Threads: one at a time for bounce, one at a time for endpoint.
 */
int doorbell_bounce_write(doorbell_bounce *bounce, doorbell_endpoint *endpoint, uint64_t address, uint64_t len_bytes,
			  const doorbell_remote *remote, uint64_t offset, int64_t timeout_ms);

/*
 * Reads `len_bytes` of the peer's region, from `offset` on, to `address`.
 * Threads: one at a time for bounce, one at a time for endpoint.
 */
int doorbell_bounce_read(doorbell_bounce *bounce, doorbell_endpoint *endpoint, const doorbell_remote *remote,
			 uint64_t offset, uint64_t address, uint64_t len_bytes, int64_t timeout_ms);

/*
 * Sends to a peer that calls doorbell_bounce_recv for as many bytes.
 * Threads: one at a time for bounce, one at a time for endpoint.
 */
int doorbell_bounce_send(doorbell_bounce *bounce, doorbell_endpoint *endpoint, uint64_t address, uint64_t len_bytes,
			 int64_t timeout_ms);

/*
 * Receives what the peer's doorbell_bounce_send sends. DOORBELL_EMALFORMED if that has another length or other chunks.
 * Threads: one at a time for bounce, one at a time for endpoint.
 */
int doorbell_bounce_recv(doorbell_bounce *bounce, doorbell_endpoint *endpoint, uint64_t address, uint64_t len_bytes,
			 int64_t timeout_ms);

/*
 * Ends the handle. NULL is allowed.
 * Threads: alone with bounce.
 */
int doorbell_bounce_destroy(doorbell_bounce *bounce);

/* ------------------------------------------------------------------------------------------------------- rdma_cm */

/*
 * Endpoints connected by rdma_cm, with peers that need not know this library, such as rping. Every library has these calls; one
 * that was built without the feature `verbs` gives DOORBELL_EFEATURE. Private data are bytes that the messages carry; who
 * gets them finds zeros behind, because the messages have a fixed length.
 */

/* Waits for peers. */
typedef struct doorbell_cm_listener doorbell_cm_listener;

/* A peer that wants a connection. */
typedef struct doorbell_cm_request doorbell_cm_request;

/* The connection of an endpoint. The two belong together: without its connection the endpoint fails. */
typedef struct doorbell_cm_connection doorbell_cm_connection;

/*
 * Connects the endpoint to who listens at `address`, such as "10.9.0.1:7174"; if nobody does yet, tries until `timeout_ms` have
 * passed. Up to 56 bytes of private data go with the request. DOORBELL_EREFUSED if the peer does not want to or nobody
 * listened; DOORBELL_EFOREIGN if the way there begins at another device than the endpoint's; DOORBELL_ETIMEOUT if nothing
 * answers; DOORBELL_ESTATE if the endpoint is connected or has failed; DOORBELL_EMALFORMED for no address; DOORBELL_ESYSTEM,
 * also where there is no rdma_cm.
 * Threads: one at a time for endpoint.
 */
int doorbell_cm_connect(doorbell_endpoint *endpoint, const char *address, const void *private_data, size_t len_bytes,
			int64_t timeout_ms, doorbell_cm_connection **connection);

/*
 * The peer's address: a text buffer.
 * Threads: one at a time for connection.
 */
int doorbell_cm_connection_peer(const doorbell_cm_connection *connection, char *text, size_t capacity);

/*
 * What the peer gave with its request or answer, which must fit `capacity`, else DOORBELL_ERANGE. The number of bytes.
 * Threads: one at a time for connection.
 */
int doorbell_cm_connection_private_data(const doorbell_cm_connection *connection, void *bytes, size_t capacity);

/*
 * 0 if the connection still is, or DOORBELL_ESTATE once the peer has disconnected or died, or the device is gone: the endpoint
 * has failed then. Does not wait.
 * Threads: one at a time for connection.
 */
int doorbell_cm_connection_check(doorbell_cm_connection *connection);

/*
 * Waits until the peer disconnects.
 * Threads: one at a time for connection.
 */
int doorbell_cm_connection_wait_disconnected(doorbell_cm_connection *connection, int64_t timeout_ms);

/*
 * Disconnects, and waits until the peer agrees; the endpoint fails. The handle is gone, on DOORBELL_ETIMEOUT as well.
 * Threads: alone with connection.
 */
int doorbell_cm_connection_disconnect(doorbell_cm_connection *connection, int64_t timeout_ms);

/*
 * Disconnects without waiting. NULL is allowed.
 * Threads: alone with connection.
 */
int doorbell_cm_connection_destroy(doorbell_cm_connection *connection);

/*
 * Listens at an address such as "10.9.0.1:7174", or "0.0.0.0:7174" for all devices; port 0 is a free one.
 * Threads: any.
 */
int doorbell_cm_listener_create(const char *address, doorbell_cm_listener **listener);

/*
 * The address at which it listens: a text buffer.
 * Threads: any.
 */
int doorbell_cm_listener_address(const doorbell_cm_listener *listener, char *text, size_t capacity);

/*
 * Waits for a request.
 * Threads: any.
 */
int doorbell_cm_listener_accept(const doorbell_cm_listener *listener, int64_t timeout_ms,
				doorbell_cm_request **request);

/*
 * Stops listening. Connections stay. NULL is allowed.
 * Threads: alone with listener.
 */
int doorbell_cm_listener_destroy(doorbell_cm_listener *listener);

/*
 * The address of the peer: a text buffer.
 * Threads: one at a time for request.
 */
int doorbell_cm_request_peer(const doorbell_cm_request *request, char *text, size_t capacity);

/*
 * The name of the device that it came in by, on which the endpoint must be; "" if it is not known. A text buffer.
 * Threads: one at a time for request.
 */
int doorbell_cm_request_device(const doorbell_cm_request *request, char *text, size_t capacity);

/*
 * What the peer gave with it, which must fit `capacity`, else DOORBELL_ERANGE. The number of bytes.
 * Threads: one at a time for request.
 */
int doorbell_cm_request_private_data(const doorbell_cm_request *request, void *bytes, size_t capacity);

/*
 * Takes the request: the endpoint is connected with the peer's, and up to 196 bytes of private data go with the answer. Post
 * receives before: the peer may send at once. The handle of the request is gone, on an error as well, but for those of the
 * arguments themselves (DOORBELL_EINVAL, DOORBELL_EHANDLE, DOORBELL_EBUSY).
 * Threads: alone with request, one at a time for endpoint.
 */
int doorbell_cm_request_accept(doorbell_cm_request *request, doorbell_endpoint *endpoint, const void *private_data,
			       size_t len_bytes, int64_t timeout_ms, doorbell_cm_connection **connection);

/*
 * Refuses the request, with up to 148 bytes of private data. The handle is gone, on an error as well, but for those of the
 * arguments themselves (DOORBELL_EINVAL, DOORBELL_EHANDLE, DOORBELL_EBUSY).
 * Threads: alone with request.
 */
int doorbell_cm_request_reject(doorbell_cm_request *request, const void *private_data, size_t len_bytes);

/*
 * Refuses the request without a word. NULL is allowed.
 * Threads: alone with request.
 */
int doorbell_cm_request_destroy(doorbell_cm_request *request);

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

#endif /* DOORBELL_H */
