/*
 * The declarations of libgdsync's gdsync/core.h: constants, structs and calls. Names, values, parameters and results
 * are those of its API 2.2, or of 3.0 with GDSYNC_API=3. A call returns 0 or a positive errno:
 *
 *   EINVAL      an argument is invalid, or a key, an address or a queue pair does not belong to this library
 *   EFAULT      a word or a slice is not in registered memory
 *   ENOMEM      the queue is full, or there is no memory
 *   EBUSY       an earlier request must be posted, taken back or completed first
 *   EOPNOTSUPP  not supported (see gdsync.h), or libdoorbell was built without the feature `cuda`
 *   ETIMEDOUT   a timeout has passed
 *   EIO         the endpoint, the stream or the driver has failed
 *
 * If libdoorbell refused the call, doorbell_last_error() returns its text.
 *
 * Threads: any thread may make any call at any time; each queue pair has a lock. An object must not be in use by another call while it is
 * destroyed, released or unregistered.
 */
#ifndef DOORBELL_GDSYNC_CORE_H
#define DOORBELL_GDSYNC_CORE_H

#ifndef DOORBELL_GDSYNC_H
#error "include <gdsync.h>, which includes this"
#endif

/* ------------------------------------------------------------------------------------------------------- version */

#if GDSYNC_API == 3
#define GDS_API_MAJOR_VERSION 3
#define GDS_API_MINOR_VERSION 0
/* The calls whose structs or results differ from 2.2 have symbols of their own. */
#define DOORBELL_GDS_SYMBOL(name) __asm__(name "_v3")
#else
#define GDS_API_MAJOR_VERSION 2
#define GDS_API_MINOR_VERSION 2
#define DOORBELL_GDS_SYMBOL(name)
#endif
#define GDS_API_VERSION (((unsigned)GDS_API_MAJOR_VERSION << 16) | (unsigned)GDS_API_MINOR_VERSION)
#define GDS_API_VERSION_COMPATIBLE(v)                                                                        \
	(((unsigned)(v) >> 16) == (unsigned)GDS_API_MAJOR_VERSION &&                                         \
	 ((unsigned)(v)&0xffffU) + 1U > (unsigned)GDS_API_MINOR_VERSION)

typedef enum gds_param { GDS_PARAM_VERSION, GDS_NUM_PARAMS } gds_param_t;

/* `param` is GDS_PARAM_VERSION. Writes GDS_API_VERSION to `value`. */
int gds_query_param(gds_param_t param, int *value) DOORBELL_GDS_SYMBOL("gds_query_param");

/* --------------------------------------------------------------------------------------------------- queue pairs */

/* Where queues are. They are always in host memory; each of these flags returns EOPNOTSUPP. */
enum gds_create_qp_flags {
	GDS_CREATE_QP_DEFAULT = 0,
	GDS_CREATE_QP_WQ_ON_GPU = 1 << 0,
	GDS_CREATE_QP_TX_CQ_ON_GPU = 1 << 1,
	GDS_CREATE_QP_RX_CQ_ON_GPU = 1 << 2,
	GDS_CREATE_QP_WQ_DBREC_ON_GPU = 1 << 5
};

typedef struct ibv_qp_init_attr gds_qp_init_attr_t;

typedef enum gds_cq_type { GDS_CQ_TYPE_SQ, GDS_CQ_TYPE_RQ } gds_cq_type_t;
typedef enum gds_driver_type { GDS_DRIVER_TYPE_UNKNOW = 0, GDS_DRIVER_TYPE_MLX5 } gds_driver_type_t;

/*
 * A queue pair and its two completion queues. `curr_offset` is the number of waits that were prepared. The objects of
 * verbs belong to this library: see "Calls of libibverbs" in gdsync.h.
 */
#if GDSYNC_API == 3
typedef struct ibv_send_wr gds_send_wr;

typedef struct gds_cq {
	union {
		struct ibv_cq *ibcq;
		struct ibv_cq *cq;
	};
	uint32_t curr_offset;
	gds_cq_type_t ctype;
	gds_driver_type_t dtype;
} gds_cq_t;

typedef struct gds_qp {
	union {
		struct ibv_qp *ibqp;
		struct ibv_qp *qp;
	};
	gds_cq_t *send_cq;
	gds_cq_t *recv_cq;
	gds_driver_type_t dtype;
	struct ibv_context *dev_context;
} gds_qp_t;
#else
typedef struct ibv_exp_send_wr gds_send_wr;

typedef struct gds_cq {
	struct ibv_cq *cq;
	uint32_t curr_offset;
} gds_cq_t;

typedef struct gds_qp {
	struct ibv_qp *qp;
	struct gds_cq send_cq;
	struct gds_cq recv_cq;
	void *res_domain; /* NULL */
	struct ibv_context *dev_context;
} gds_qp_t;
#endif

/*
 * Creates a queue pair in `pd`, on its device. `qp_init_attr` gives the type (RC or UD), the depths, slices and inline
 * bytes, where 0 is taken as 1. More slices than DOORBELL_SLICES_MAX are taken as that many: a work request with more
 * returns EINVAL. The CQs are created with the queue pair. They and the capacities are stored in qp_init_attr.
 * `gpu_id` is ignored, because each stream knows its GPU. Returns NULL and sets errno on failure. Connect the queue
 * pair with gds_modify_qp, or with gds_qp_connect.
 */
struct gds_qp *gds_create_qp(struct ibv_pd *pd, struct ibv_context *context, gds_qp_init_attr_t *qp_init_attr,
			     int gpu_id, int flags) DOORBELL_GDS_SYMBOL("gds_create_qp");

/*
 * Destroys a queue pair and its completion queues. What streams still use of it is kept until they are done. Requests
 * that were prepared and not posted are lost, and part of their memory leaks: take them back before
 * (gds_rollback_send, gds_abort_wait_cq).
 */
#if GDSYNC_API == 3
void gds_destroy_qp(struct gds_qp *qp);
#else
int gds_destroy_qp(struct gds_qp *qp);
#endif

/* Does nothing, and sets errno to EBUSY: gds_destroy_qp destroys both CQs of a queue pair. */
void gds_destroy_cq(struct gds_cq *cq);

/*
 * What ibv_modify_qp does, for the way from RESET over INIT and RTR to RTS, to RESET and to ERR. The attributes are passed to the
 * device as they are. Returns EOPNOTSUPP for the software ConnectX in the process ("softcx"), which takes
 * gds_qp_connect, for other states, and if libgdsync was built without libibverbs' headers.
 */
struct ibv_qp_attr;
int gds_modify_qp(struct gds_qp *qp, struct ibv_qp_attr *attr, int attr_mask);

/*
 * What ibv_query_qp does, as far as this library knows it: the state, the capacities, and the attributes that
 * gds_modify_qp was given. The rest is zero.
 */
int gds_query_qp(struct gds_qp *qp, struct ibv_qp_attr *attr, int attr_mask, struct ibv_qp_init_attr *init_attr);

/* ibv_poll_cq for a CQ of a gds_qp. */
int gds_poll_cq(struct gds_cq *cq, int num_entries, struct ibv_wc *wc);

/*
 * Posts work requests from this thread at once. Returns EBUSY while earlier ones are on a stream or prepared, because
 * the new ones would overtake them. On failure, `*bad_wr` is the work request that failed; those before it were
 * posted.
 */
int gds_post_send(struct gds_qp *qp, gds_send_wr *wr, gds_send_wr **bad_wr);

/* Posts receives at once. On failure, `*bad_wr` is the receive that failed; those before it were posted. */
int gds_post_recv(struct gds_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);

/* Queues work requests on a stream. They are submitted when the stream reaches them. */
int gds_stream_queue_send(CUstream stream, struct gds_qp *qp, gds_send_wr *wr, gds_send_wr **bad_wr);

/*
 * Makes work that is queued on the stream later wait for the next completion that no wait and no poll has taken.
 * `flags` is 0.
 */
int gds_stream_wait_cq(CUstream stream, struct gds_cq *cq, int flags);

/* ---------------------------------------------------------------------------------------------- prepared requests */

enum { GDS_SEND_INFO_MAX_OPS = 32, GDS_WAIT_INFO_MAX_OPS = 32 };

/* Prepared work requests of one queue pair, up to GDS_SEND_INFO_MAX_OPS, for a stream. The fields are private. */
typedef struct gds_send_request {
	struct doorbell_gds_qp *owner;
	doorbell_prepared *prepared[GDS_SEND_INFO_MAX_OPS];
	uint64_t entry[GDS_SEND_INFO_MAX_OPS];
	uint64_t serial;
	uint32_t count; /* 0 after it was posted or taken back */
} gds_send_request_t;

/*
 * Prepares a chain of work requests: either all of them, or none, and `*bad_wr` is the one that failed. Requests of a
 * queue pair must be posted in the order in which they were prepared.
 */
int gds_prepare_send(struct gds_qp *qp, gds_send_wr *wr, gds_send_wr **bad_wr,
				   gds_send_request_t *request);

/* Posts a request to a stream, once. */
int gds_stream_post_send(CUstream stream, gds_send_request_t *request);

/* Posts an array of requests to a stream. */
int gds_stream_post_send_all(CUstream stream, int count, gds_send_request_t *request);

/* A prepared wait for a completion, with stores that follow it. The fields are private. */
typedef struct gds_wait_request {
	struct doorbell_gds_cq *owner;
	doorbell_prepared *prepared; /* NULL after it was posted or taken back */
	uint64_t entry;
	uint32_t appended;
	struct {
		uint32_t *ptr;
		uint32_t value;
	} append[GDS_WAIT_INFO_MAX_OPS - 2];
} gds_wait_request_t;

/*
 * Prepares a wait for the next completion. Returns EINVAL if none is expected: the work request or receive must be
 * posted or prepared before. `flags` is 0.
 */
int gds_prepare_wait_cq(struct gds_cq *cq, gds_wait_request_t *request, int flags);

/* Adds a store of a 32-bit word after the wait. */
int gds_append_wait_cq(gds_wait_request_t *request, uint32_t *dw, uint32_t val);

/* Takes back a wait that was not posted. Its completion is left to ibv_poll_cq. */
int gds_abort_wait_cq(struct gds_cq *cq, gds_wait_request_t *request);

/* Posts a wait to a stream, once. */
int gds_stream_post_wait_cq(CUstream stream, gds_wait_request_t *request);

/* Posts an array of waits to a stream. */
int gds_stream_post_wait_cq_all(CUstream stream, int count, gds_wait_request_t *request);

/* Leaves the completion to ibv_poll_cq, like gds_abort_wait_cq. `flags` is 0. */
int gds_post_wait_cq(struct gds_cq *cq, gds_wait_request_t *request, int flags);

/* -------------------------------------------------------------------------------------------------- descriptors */

/*
 * Kinds of memory. One of them must be given, but the kind is known from the registration or from the driver.
 * GDS_MEMORY_IO is not supported.
 */
typedef enum gds_memory_type {
	GDS_MEMORY_GPU = 1, /* memory of cuMemAlloc or cuMemHostAlloc */
	GDS_MEMORY_HOST = 2,
	GDS_MEMORY_IO = 4,
	GDS_MEMORY_MASK = 0x7
} gds_memory_type_t;

/* Accepted; each wait flushes the writes of NICs where the GPU needs it. */
typedef enum gds_wait_flags {
	GDS_WAIT_POST_FLUSH_REMOTE = 1 << 3,
	GDS_WAIT_POST_FLUSH = GDS_WAIT_POST_FLUSH_REMOTE
} gds_wait_flags_t;

/* Accepted; each store comes after a fence of system scope. */
typedef enum gds_write_flags {
	GDS_WRITE_PRE_BARRIER_SYS = 1 << 4,
	GDS_WRITE_PRE_BARRIER = GDS_WRITE_PRE_BARRIER_SYS
} gds_write_flags_t;

/* Accepted; both barriers are always there. */
typedef enum gds_write_memory_flags {
	GDS_WRITE_MEMORY_POST_BARRIER_SYS = 1 << 4,
	GDS_WRITE_MEMORY_PRE_BARRIER_SYS = 1 << 5
} gds_write_memory_flags_t;

/* Declared for programs that name them; no call uses them. */
typedef enum gds_membar_flags {
	GDS_MEMBAR_FLUSH_REMOTE = 1 << 4,
	GDS_MEMBAR_DEFAULT = 1 << 5,
	GDS_MEMBAR_SYS = 1 << 6,
	GDS_MEMBAR_MLX5 = 1 << 7
} gds_membar_flags_t;

/*
 * The condition of a wait for a word, as in cuStreamWaitValue32. A CUDA stream waits for words of GPU memory by
 * cuStreamWaitValue32 itself, also for equality if the library has no kernels: these waits have no timeout.
 */
typedef enum gds_wait_cond_flag {
	GDS_WAIT_COND_GEQ = 0, /* (int32_t)(word - value) >= 0 */
	GDS_WAIT_COND_EQ,
	GDS_WAIT_COND_AND, /* (word & value) != 0 */
	GDS_WAIT_COND_NOR  /* ~(word | value) != 0 */
} gds_wait_cond_flag_t;

/* A wait for a 32-bit word. */
typedef struct gds_wait_value32 {
	uint32_t *ptr;
	uint32_t value;
	gds_wait_cond_flag_t cond_flags;
	int flags; /* gds_memory_type_t | gds_wait_flags_t */
} gds_wait_value32_t;

int gds_prepare_wait_value32(gds_wait_value32_t *desc, uint32_t *ptr, uint32_t value,
					   gds_wait_cond_flag_t cond_flags, int flags);

/* A store of a 32-bit word. */
typedef struct gds_write_value32 {
	uint32_t *ptr;
	uint32_t value;
	int flags; /* gds_memory_type_t | gds_write_flags_t */
} gds_write_value32_t;

int gds_prepare_write_value32(gds_write_value32_t *desc, uint32_t *ptr, uint32_t value, int flags);

/* Most bytes of a gds_write_memory_t. */
enum { GDS_WRITE_MEMORY_MAX_BYTES = 1024 };

/*
 * A copy, made by 32-bit stores in order: `dest` and `count` (bytes) are multiples of 4. `src` is
 * read when the descriptor is posted.
 */
typedef struct gds_write_memory {
	uint8_t *dest;
	const uint8_t *src;
	size_t count;
	int flags; /* gds_memory_type_t | gds_write_memory_flags_t */
} gds_write_memory_t;

int gds_prepare_write_memory(gds_write_memory_t *desc, uint8_t *dest, const uint8_t *src, size_t count,
					   int flags);

typedef enum gds_tag {
	GDS_TAG_SEND,
	GDS_TAG_WAIT,
	GDS_TAG_WAIT_VALUE32,
	GDS_TAG_WRITE_VALUE32,
	GDS_TAG_WRITE_MEMORY
} gds_tag_t;

typedef struct gds_descriptor {
	gds_tag_t tag; /* selects the member of the union */
	union {
		gds_send_request_t *send;
		gds_wait_request_t *wait;
		gds_wait_value32_t wait32;
		gds_write_value32_t write32;
		gds_write_memory_t writemem;
	};
} gds_descriptor_t;

/*
 * Posts descriptors to a stream, in order. `flags` is 0. All of them are checked first; if one is invalid, none is
 * posted. If the stream or an endpoint refuses one later, those before it were posted and are empty.
 */
int gds_stream_post_descriptors(CUstream stream, size_t n_descs, gds_descriptor_t *descs, int flags);

/*
 * Executes descriptors, including their waits, in a thread of the library, and returns when they are done. Returns the
 * codes of gds_stream_post_descriptors, and EIO if a wait was released. `flags` is 0.
 */
int gds_post_descriptors(size_t n_descs, gds_descriptor_t *descs, int flags);

/* ------------------------------------------------------------------------- internals of libgdsync that programs use */

/* gds_stream_post_send_all, followed by a store of a word if `dw` is not NULL. */
int gds_post_pokes(CUstream stream, int count, gds_send_request_t *info, uint32_t *dw, uint32_t val);

/* The same, but executed before the call returns. */
int gds_post_pokes_on_cpu(int count, gds_send_request_t *info, uint32_t *dw, uint32_t val);

/* gds_stream_post_wait_cq_all, followed by a store of a word if `dw` is not NULL. */
int gds_stream_post_wait_cq_multi(CUstream stream, int count, gds_wait_request_t *request, uint32_t *dw,
						uint32_t val);

/* Queues a wait for a word: the call of version 2.1 for a descriptor GDS_TAG_WAIT_VALUE32. */
int gds_stream_post_poll_dword(CUstream stream, uint32_t *ptr, uint32_t magic,
					     gds_wait_cond_flag_t cond_flag, int flags);

/* Queues a store of a word: the call of version 2.1 for a descriptor GDS_TAG_WRITE_VALUE32. */
int gds_stream_post_poke_dword(CUstream stream, uint32_t *ptr, uint32_t value, int flags);

/* Queues a copy: the call of version 2.1 for a descriptor GDS_TAG_WRITE_MEMORY. */
int gds_stream_post_inline_copy(CUstream stream, void *ptr, void *src, size_t nbytes, int flags);

/* Queues waits for words, then stores. */
int gds_stream_post_polls_and_pokes(CUstream stream, size_t n_polls, uint32_t *ptrs[], uint32_t magics[],
						  gds_wait_cond_flag_t cond_flags[], int poll_flags[], size_t n_pokes,
						  uint32_t *poke_ptrs[], uint32_t poke_values[], int poke_flags[]);

/* Queues waits for words, then copies. */
int gds_stream_post_polls_and_immediate_copies(CUstream stream, size_t n_polls, uint32_t *ptrs[],
							     uint32_t magics[], gds_wait_cond_flag_t cond_flags[],
							     int poll_flags[], size_t n_imms, void *imm_ptrs[],
							     void *imm_datas[], size_t imm_bytes[], int imm_flags[]);

/*
 * Registers `size` bytes of memory for waits and stores of streams. `*dev_ptr` is its address on the device; with
 * unified addressing it equals `ptr`. Registering a part of registered memory increments its count. Returns EINVAL if
 * the memory partly overlaps registered memory.
 */
int gds_register_mem(void *ptr, size_t size, gds_memory_type_t type, CUdeviceptr *dev_ptr);

/*
 * Reverts one gds_register_mem. The last one unregisters the memory from device and driver. Waits and stores on
 * streams that use it must be done. Returns EINVAL if the memory is not registered.
 */
int gds_unregister_mem(void *ptr, size_t size);

/* ---------------------------------------------------------------------------------------- additions of this library */

/*
 * Settings of the process. The environment variables GDS_WAIT_TIMEOUT_MS and GDS_REGISTER_ON_USE give other initial values.
 * GDS_DEVICE_SETTINGS has settings for the contexts of libibverbs, as doorbell_device_adopt takes them, such as
 * "path=proxy" or "verbs,events=library".
 */
enum gds_option {
	/* Timeout of a wait in ms, or DOORBELL_NO_TIMEOUT; initially DOORBELL_DEFAULT_TIMEOUT (30 s). */
	GDS_OPTION_WAIT_TIMEOUT_MS,
	/*
	 * 1, initially: words of unregistered memory are registered by page when a wait or a store uses them, as in
	 * libgdsync, until gds_unregister_mem. Such memory must not be freed before. 0: they return EFAULT.
	 */
	GDS_OPTION_REGISTER_ON_USE
};

int gds_set_option(enum gds_option option, int64_t value);

/* Returns the gds_qp that an object of verbs is the queue pair of, or NULL if it is none of this library's. */
struct gds_qp *gds_qp_of(const struct ibv_qp *qp) DOORBELL_GDS_SYMBOL("gds_qp_of");

/* Whether a CQ is one of a gds_qp, and whether memory was registered with gds_reg_mr. */
int gds_owns_cq(const struct ibv_cq *cq);
int gds_owns_mr(const struct ibv_mr *mr);


/*
 * Opens a device by its name, such as "softcx", for programs that do not use libibverbs for it. Returns NULL and sets
 * errno on failure.
 */
struct ibv_context *gds_open_device(const char *name);

/* Closes a context of gds_open_device. Returns EBUSY while it has protection domains. */
int gds_close_device(struct ibv_context *context);

/* Creates a protection domain in a context of gds_open_device. Returns NULL and sets errno on failure. */
struct ibv_pd *gds_alloc_pd(struct ibv_context *context);

/* Destroys a protection domain of gds_alloc_pd. Returns EBUSY while it has memory or queue pairs. */
int gds_dealloc_pd(struct ibv_pd *pd);

/*
 * ibv_reg_mr for queue pairs of this library: registers `length` bytes of host memory, or of memory of the GPU
 * of the current context. `access` may have IBV_ACCESS_LOCAL_WRITE and IBV_ACCESS_REMOTE_*. `lkey` is for slices; a
 * peer uses `addr` and `rkey`. Returns NULL and sets errno on failure.
 */
struct ibv_mr *gds_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access);

/* ibv_dereg_mr for memory of gds_reg_mr. */
int gds_dereg_mr(struct ibv_mr *mr);

/* Writes the address that the peer needs. The program sends its DOORBELL_ADDRESS_BYTES bytes to the peer by any means. */
int gds_qp_address(struct gds_qp *qp, doorbell_address *address);

/* Connects to the peer's queue pair; the peer does the same. Does what gds_modify_qp to INIT, RTR and RTS does. */
int gds_qp_connect(struct gds_qp *qp, const doorbell_address *peer);

/* Returns a queue pair to the state after its creation, with a new address; see doorbell_endpoint_reset. */
int gds_qp_reset(struct gds_qp *qp);

/*
 * Returns the endpoint, for calls of doorbell.h such as doorbell_endpoint_path, _failure and _abort. Work that is
 * queued with the endpoint directly does not appear in ibv_poll_cq.
 */
doorbell_endpoint *gds_qp_endpoint(struct gds_qp *qp);

/*
 * Takes back a request that was not posted. Returns EBUSY if a later request is still prepared; take that one back
 * first.
 */
int gds_rollback_send(struct gds_qp *qp, gds_send_request_t *request);

/* Creates a stream that a thread of the library executes, for hosts without a GPU. gds_release_stream destroys it. */
int gds_create_host_stream(CUstream *stream);

/*
 * Writes this library's stream of a CUDA stream, for example to synchronise with a timeout. It belongs to this library.
 * The first call with a stream creates it, in the current context.
 */
int gds_stream_handle(CUstream stream, doorbell_stream **handle);

/*
 * Releases this library's object for a stream. Call it before cuStreamDestroy, because a later stream may have the
 * same address. Returns EINVAL if the stream is unknown.
 */
int gds_release_stream(CUstream stream);

#endif /* DOORBELL_GDSYNC_CORE_H */
