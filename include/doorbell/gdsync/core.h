/*
 * What libgdsync's gdsync/core.h declares: constants, structs and calls. Names, values, argument lists and the meaning of what
 * comes back are its API of version 2.2, with the types of upstream verbs. A call gives 0, or a positive errno:
 *
 *   EINVAL      an argument makes no sense, or a key, an address or a queue pair is none of this layer's
 *   EFAULT      a word or a slice is in no memory that is registered
 *   ENOMEM      the queue is full, or memory is
 *   EBUSY       something earlier has to be posted, taken back or done first
 *   EOPNOTSUPP  what cannot be kept (see gdsync.h), or a library that was built without the feature `cuda`
 *   ETIMEDOUT   a bound has passed
 *   EIO         the endpoint, the stream or the driver has failed
 *
 * doorbell_last_error() has the library's text where it was the library that refused.
 *
 * Threads: any call from any thread; a queue pair has a lock of its own. Nothing that is being destroyed, released or
 * unregistered may be in use by another call.
 */
#ifndef DOORBELL_GDSYNC_CORE_H
#define DOORBELL_GDSYNC_CORE_H

#ifndef DOORBELL_GDSYNC_H
#error "include <doorbell/gdsync.h>, which includes this"
#endif

/* ------------------------------------------------------------------------------------------------------- version */

#define GDS_API_MAJOR_VERSION 2
#define GDS_API_MINOR_VERSION 2
#define GDS_API_VERSION (((unsigned)GDS_API_MAJOR_VERSION << 16) | (unsigned)GDS_API_MINOR_VERSION)
#define GDS_API_VERSION_COMPATIBLE(v)                                                                        \
	(((unsigned)(v) >> 16) == (unsigned)GDS_API_MAJOR_VERSION &&                                         \
	 ((unsigned)(v)&0xffffU) >= (unsigned)GDS_API_MINOR_VERSION)

typedef enum gds_param { GDS_PARAM_VERSION, GDS_NUM_PARAMS } gds_param_t;

/* GDS_PARAM_VERSION: GDS_API_VERSION. */
static inline int gds_query_param(gds_param_t param, int *value);

/* --------------------------------------------------------------------------------------------------- queue pairs */

/* Where queues lie. They are in host memory: any flag is EOPNOTSUPP. */
enum gds_create_qp_flags {
	GDS_CREATE_QP_DEFAULT = 0,
	GDS_CREATE_QP_WQ_ON_GPU = 1 << 0,
	GDS_CREATE_QP_TX_CQ_ON_GPU = 1 << 1,
	GDS_CREATE_QP_RX_CQ_ON_GPU = 1 << 2,
	GDS_CREATE_QP_WQ_DBREC_ON_GPU = 1 << 5
};

typedef struct ibv_qp_init_attr gds_qp_init_attr_t;
typedef struct ibv_send_wr gds_send_wr;

/* One of the two completion queues of a queue pair. ibv_poll_cq takes its `cq`. */
struct gds_cq {
	struct ibv_cq *cq;
	uint32_t curr_offset; /* waits that were prepared so far */
};

struct gds_qp {
	struct ibv_qp *qp;
	struct gds_cq send_cq;
	struct gds_cq recv_cq;
	struct ibv_context *dev_context;
};

/*
 * Makes a queue pair, in the library's own protection domain of the device that `pd` belongs to, by its name. RC only; the
 * queues' depths, slices and inline bytes are qp_init_attr's, where a 0 is taken for a 1; the CQs are its own, and
 * qp_init_attr names them afterwards. Every stream knows its GPU, so `gpu_id` is not looked at. NULL with errno set if it
 * fails. To be connected with gds_qp_connect.
 */
static inline struct gds_qp *gds_create_qp(struct ibv_pd *pd, struct ibv_context *context,
					   gds_qp_init_attr_t *qp_init_attr, int gpu_id, int flags);

/*
 * Ends a queue pair, and its completion queues. What streams still have of it is kept until they are done; what was
 * prepared and not posted is lost, some of its memory with it: take it back before (gds_rollback_send, gds_abort_wait_cq).
 */
static inline int gds_destroy_qp(struct gds_qp *qp);

/*
 * Posts work requests now, from this thread: EBUSY while earlier ones are on a stream, or prepared, which these would
 * overtake. Those before *bad_wr were posted.
 */
static inline int gds_post_send(struct gds_qp *qp, gds_send_wr *wr, gds_send_wr **bad_wr);

/* Posts receives now. Those before *bad_wr were posted. */
static inline int gds_post_recv(struct gds_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);

/* Queues work requests on a stream: they go out when it comes to them. */
static inline int gds_stream_queue_send(CUstream stream, struct gds_qp *qp, gds_send_wr *wr, gds_send_wr **bad_wr);

/* Lets what is queued on the stream later wait for the next completion that no wait and no poll had yet. `flags`: 0. */
static inline int gds_stream_wait_cq(CUstream stream, struct gds_cq *cq, int flags);

/* ---------------------------------------------------------------------------------------------- prepared requests */

enum { GDS_SEND_INFO_MAX_OPS = 32, GDS_WAIT_INFO_MAX_OPS = 32 };

/* Work requests of one queue pair, up to GDS_SEND_INFO_MAX_OPS, that are ready for a stream. Its fields are private. */
typedef struct gds_send_request {
	struct doorbell_gds_qp *owner;
	doorbell_prepared *prepared[GDS_SEND_INFO_MAX_OPS];
	uint64_t entry[GDS_SEND_INFO_MAX_OPS];
	uint64_t serial;
	uint32_t count; /* 0 once it was posted or taken back */
} gds_send_request_t;

/*
 * Makes a chain of work requests ready: all of them, or none and *bad_wr is the one to blame. Requests of a queue pair are
 * posted in the order in which they were prepared.
 */
static inline int gds_prepare_send(struct gds_qp *qp, gds_send_wr *wr, gds_send_wr **bad_wr,
				   gds_send_request_t *request);

/* Gives a request to a stream, once. */
static inline int gds_stream_post_send(CUstream stream, gds_send_request_t *request);

/* Gives an array of requests to a stream. */
static inline int gds_stream_post_send_all(CUstream stream, int count, gds_send_request_t *request);

/* A wait for a completion that is ready for a stream, and stores that follow it. Its fields are private. */
typedef struct gds_wait_request {
	struct doorbell_gds_cq *owner;
	doorbell_prepared *prepared; /* NULL once it was posted or taken back */
	uint64_t entry;
	uint32_t appended;
	struct {
		uint32_t *ptr;
		uint32_t value;
	} append[GDS_WAIT_INFO_MAX_OPS - 2];
} gds_wait_request_t;

/*
 * Makes a wait for the next completion ready. EINVAL if there is none to come: the work request or receive has to be posted
 * or prepared before. `flags`: 0.
 */
static inline int gds_prepare_wait_cq(struct gds_cq *cq, gds_wait_request_t *request, int flags);

/* Adds a store of a 32-bit word behind the wait. */
static inline int gds_append_wait_cq(gds_wait_request_t *request, uint32_t *dw, uint32_t val);

/* Takes a wait back that was not posted: its completion is for ibv_poll_cq. */
static inline int gds_abort_wait_cq(struct gds_cq *cq, gds_wait_request_t *request);

/* Gives a wait to a stream, once. */
static inline int gds_stream_post_wait_cq(CUstream stream, gds_wait_request_t *request);

/* Gives an array of waits to a stream. */
static inline int gds_stream_post_wait_cq_all(CUstream stream, int count, gds_wait_request_t *request);

/* Leaves the completion to ibv_poll_cq: gds_abort_wait_cq. `flags`: 0. */
static inline int gds_post_wait_cq(struct gds_cq *cq, gds_wait_request_t *request, int flags);

/* -------------------------------------------------------------------------------------------------- descriptors */

/* Kinds of memory. What a word is in is known from its registration: one of these has to be given, and IO is not kept. */
typedef enum gds_memory_type {
	GDS_MEMORY_GPU = 1, /* cuMemAlloc, and cuMemHostAlloc as well */
	GDS_MEMORY_HOST = 2,
	GDS_MEMORY_IO = 4,
	GDS_MEMORY_MASK = 0x7
} gds_memory_type_t;

/* Every wait flushes the writes of NICs where the GPU has to be told to. */
typedef enum gds_wait_flags {
	GDS_WAIT_POST_FLUSH_REMOTE = 1 << 3,
	GDS_WAIT_POST_FLUSH = GDS_WAIT_POST_FLUSH_REMOTE
} gds_wait_flags_t;

/* Every store comes behind a fence of system scope. */
typedef enum gds_write_flags {
	GDS_WRITE_PRE_BARRIER_SYS = 1 << 4,
	GDS_WRITE_PRE_BARRIER = GDS_WRITE_PRE_BARRIER_SYS
} gds_write_flags_t;

/* Both are always so. */
typedef enum gds_write_memory_flags {
	GDS_WRITE_MEMORY_POST_BARRIER_SYS = 1 << 4,
	GDS_WRITE_MEMORY_PRE_BARRIER_SYS = 1 << 5
} gds_write_memory_flags_t;

/* For programs that name them: no call takes them. */
typedef enum gds_membar_flags {
	GDS_MEMBAR_FLUSH_REMOTE = 1 << 4,
	GDS_MEMBAR_DEFAULT = 1 << 5,
	GDS_MEMBAR_SYS = 1 << 6,
	GDS_MEMBAR_MLX5 = 1 << 7
} gds_membar_flags_t;

/* When a word lets a wait go, as with cuStreamWaitValue32. EQ is not kept. */
typedef enum gds_wait_cond_flag {
	GDS_WAIT_COND_GEQ = 0, /* (int32_t)(word - value) >= 0 */
	GDS_WAIT_COND_EQ,
	GDS_WAIT_COND_AND, /* (word & value) != 0 */
	GDS_WAIT_COND_NOR  /* ~(word | value) != 0 */
} gds_wait_cond_flag_t;

/* A wait for a 32-bit word of registered memory. */
typedef struct gds_wait_value32 {
	uint32_t *ptr;
	uint32_t value;
	gds_wait_cond_flag_t cond_flags;
	int flags; /* gds_memory_type_t | gds_wait_flags_t */
} gds_wait_value32_t;

static inline int gds_prepare_wait_value32(gds_wait_value32_t *desc, uint32_t *ptr, uint32_t value,
					   gds_wait_cond_flag_t cond_flags, int flags);

/* A store of a 32-bit word of registered memory. */
typedef struct gds_write_value32 {
	uint32_t *ptr;
	uint32_t value;
	int flags; /* gds_memory_type_t | gds_write_flags_t */
} gds_write_value32_t;

static inline int gds_prepare_write_value32(gds_write_value32_t *desc, uint32_t *ptr, uint32_t value, int flags);

/* The most bytes that one gds_write_memory_t copies. */
enum { GDS_WRITE_MEMORY_MAX_BYTES = 1024 };

/*
 * A copy into registered memory: `dest` and `count` are multiples of 4, for it is made by stores of words, in order. What
 * `src` points to is read when the descriptor is posted.
 */
typedef struct gds_write_memory {
	uint8_t *dest;
	const uint8_t *src;
	size_t count;
	int flags; /* gds_memory_type_t | gds_write_memory_flags_t */
} gds_write_memory_t;

static inline int gds_prepare_write_memory(gds_write_memory_t *desc, uint8_t *dest, const uint8_t *src, size_t count,
					   int flags);

typedef enum gds_tag {
	GDS_TAG_SEND,
	GDS_TAG_WAIT,
	GDS_TAG_WAIT_VALUE32,
	GDS_TAG_WRITE_VALUE32,
	GDS_TAG_WRITE_MEMORY
} gds_tag_t;

typedef struct gds_descriptor {
	gds_tag_t tag; /* which of the union it is */
	union {
		gds_send_request_t *send;
		gds_wait_request_t *wait;
		gds_wait_value32_t wait32;
		gds_write_value32_t write32;
		gds_write_memory_t writemem;
	};
} gds_descriptor_t;

/*
 * Gives descriptors to a stream, in order. All of them are checked first: one that makes no sense leaves all of them as they
 * were. If the stream or an endpoint refuses one later, those before it were given, and have nothing left to post. `flags`: 0.
 */
static inline int gds_stream_post_descriptors(CUstream stream, size_t n_descs, gds_descriptor_t *descs, int flags);

/*
 * Carries descriptors out before it returns, waits included, in a thread of the library. Errors as of
 * gds_stream_post_descriptors; EIO, too, if a wait had to be ended. `flags`: 0.
 */
static inline int gds_post_descriptors(size_t n_descs, gds_descriptor_t *descs, int flags);

/* ------------------------------------------------------------------- what libgdsync's programs took of its inside */

/* gds_stream_post_send_all, and a store of a word behind it if `dw` is not NULL. */
static inline int gds_post_pokes(CUstream stream, int count, gds_send_request_t *info, uint32_t *dw, uint32_t val);

/* The same, carried out before it returns. */
static inline int gds_post_pokes_on_cpu(int count, gds_send_request_t *info, uint32_t *dw, uint32_t val);

/* gds_stream_post_wait_cq_all, and a store of a word behind it if `dw` is not NULL. */
static inline int gds_stream_post_wait_cq_multi(CUstream stream, int count, gds_wait_request_t *request, uint32_t *dw,
						uint32_t val);

/* A wait for a word, on a stream; the name of version 2.1 for a descriptor of GDS_TAG_WAIT_VALUE32. */
static inline int gds_stream_post_poll_dword(CUstream stream, uint32_t *ptr, uint32_t magic,
					     gds_wait_cond_flag_t cond_flag, int flags);

/* A store of a word, on a stream; the name of version 2.1 for a descriptor of GDS_TAG_WRITE_VALUE32. */
static inline int gds_stream_post_poke_dword(CUstream stream, uint32_t *ptr, uint32_t value, int flags);

/* A copy, on a stream; the name of version 2.1 for a descriptor of GDS_TAG_WRITE_MEMORY. */
static inline int gds_stream_post_inline_copy(CUstream stream, void *ptr, void *src, size_t nbytes, int flags);

/* Waits for words, then stores, on a stream. */
static inline int gds_stream_post_polls_and_pokes(CUstream stream, size_t n_polls, uint32_t *ptrs[], uint32_t magics[],
						  gds_wait_cond_flag_t cond_flags[], int poll_flags[], size_t n_pokes,
						  uint32_t *poke_ptrs[], uint32_t poke_values[], int poke_flags[]);

/* Waits for words, then copies, on a stream. */
static inline int gds_stream_post_polls_and_immediate_copies(CUstream stream, size_t n_polls, uint32_t *ptrs[],
							     uint32_t magics[], gds_wait_cond_flag_t cond_flags[],
							     int poll_flags[], size_t n_imms, void *imm_ptrs[],
							     void *imm_datas[], size_t imm_bytes[], int imm_flags[]);

/*
 * Registers memory for waits and stores of streams: `*dev_ptr` is its address on the device, which under unified addressing
 * is its own. Memory that lies within memory that is registered counts once more there; EINVAL if it overlaps with some.
 */
static inline int gds_register_mem(void *ptr, size_t size, gds_memory_type_t type, CUdeviceptr *dev_ptr);

/*
 * Takes back one gds_register_mem of that memory; the last one unregisters it: neither device nor driver keep it. EINVAL if it is
 * not registered. Waits and stores on streams must be done with it.
 */
static inline int gds_unregister_mem(void *ptr, size_t size);

/* -------------------------------------------------------------------------------- what this layer has beside them */

/* A device by its name, such as "softcx", for programs that do not open one by libibverbs. NULL with errno set if it fails. */
static inline struct ibv_context *gds_open_device(const char *name);

/* Ends a context of gds_open_device. EBUSY while it has protection domains. */
static inline int gds_close_device(struct ibv_context *context);

/* A protection domain of a context of gds_open_device. NULL with errno set if it fails. */
static inline struct ibv_pd *gds_alloc_pd(struct ibv_context *context);

/* Ends a protection domain of gds_alloc_pd. EBUSY while it has memory or queue pairs. */
static inline int gds_dealloc_pd(struct ibv_pd *pd);

/*
 * Registers host memory, or that of the GPU of the current context, with a device: ibv_reg_mr for queue pairs of this layer,
 * with its IBV_ACCESS_* of local write and remote access. `lkey` is for slices; a peer takes `addr` and `rkey`. NULL with errno
 * set if it fails.
 */
static inline struct ibv_mr *gds_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access);

/* Unregisters it: ibv_dereg_mr. */
static inline int gds_dereg_mr(struct ibv_mr *mr);

/* The address for the peer, by any means; of as many bytes as it is long. */
static inline int gds_qp_address(struct gds_qp *qp, doorbell_address *address);

/* Connects to the peer, which does the same: in place of ibv_modify_qp to INIT, RTR and RTS. */
static inline int gds_qp_connect(struct gds_qp *qp, const doorbell_address *peer);

/* Brings a queue pair back to where it was when it was made, with a new address: doorbell_endpoint_reset. */
static inline int gds_qp_reset(struct gds_qp *qp);

/* The endpoint, for the rest of doorbell.h: its path, its failure, abort. Work that is queued with it is not for ibv_poll_cq. */
static inline doorbell_endpoint *gds_qp_endpoint(struct gds_qp *qp);

/*
 * Takes back a request that was not posted. EBUSY if another was prepared after it, which has to be taken back before.
 */
static inline int gds_rollback_send(struct gds_qp *qp, gds_send_request_t *request);

/* A stream that a thread of the library executes, for hosts without a GPU; gds_release_stream ends it. */
static inline int gds_create_host_stream(CUstream *stream);

/*
 * The library's stream of a CUDA stream, to synchronise with a bound. It is this layer's. The first call with a stream makes it, in
 * the current context.
 */
static inline int gds_stream_handle(CUstream stream, doorbell_stream **handle);

/* Forgets a stream: to be called before cuStreamDestroy, because a later stream may have the same address. EINVAL if it is not known. */
static inline int gds_release_stream(CUstream stream);

#endif /* DOORBELL_GDSYNC_CORE_H */
