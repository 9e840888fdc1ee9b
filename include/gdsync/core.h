/*
 * libgdsync's gdsync/core.h: names, values, parameters and results of its API 2.2, or of 3.0 with GDSYNC_API=3. A part of gdsync.h.
 *
 * A call returns 0 or a positive errno; one that returns a pointer returns NULL and sets errno. doorbell_last_error() has the text.
 *   EINVAL      an argument is invalid, or a key, an address or a queue pair does not belong to this library
 *   EFAULT      a word or a slice is not in registered memory
 *   ENOMEM      the queue is full, or there is no memory
 *   EBUSY       an earlier request must be posted, taken back or completed first
 *   EOPNOTSUPP  not supported (docs/c.md), or libdoorbell was built without the feature `cuda`
 *   ETIMEDOUT   a timeout has passed
 *   EIO         the endpoint, the stream or the driver has failed
 * Any thread may make any call at any time, but an object must not be in use by another call while it is destroyed, released or unregistered.
 */
#ifndef DOORBELL_GDSYNC_H
#error "include <gdsync.h>, which includes this"
#endif
#ifndef DOORBELL_GDSYNC_CORE_H
#define DOORBELL_GDSYNC_CORE_H

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
#define GDS_API_VERSION_COMPATIBLE(v)                                                                                                          \
	(((unsigned)(v) >> 16) == (unsigned)GDS_API_MAJOR_VERSION && ((unsigned)(v)&0xffffU) + 1U > (unsigned)GDS_API_MINOR_VERSION)

typedef enum gds_param { GDS_PARAM_VERSION, GDS_NUM_PARAMS } gds_param_t;
int gds_query_param(gds_param_t param, int *value) DOORBELL_GDS_SYMBOL("gds_query_param");

/* --------------------------------------------------------------------------------------------------- queue pairs */

/* Queues are in host memory; each of the other flags returns EOPNOTSUPP. */
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

/* `curr_offset` is the number of waits that were prepared. */
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

void gds_destroy_qp(struct gds_qp *qp);
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

/* What streams still use is kept until they are done. Prepared requests that were not posted are lost: take them back before. */
int gds_destroy_qp(struct gds_qp *qp);
#endif

/*
 * The type is RC or UD. Depths and slices of 0 are taken as 1, and more slices than DOORBELL_SLICES_MAX as DOORBELL_SLICES_MAX. 0 inline bytes
 * are none. The CQs and the capacities are stored in qp_init_attr. `gpu_id` is ignored: a stream knows its GPU.
 */
struct gds_qp *gds_create_qp(struct ibv_pd *pd, struct ibv_context *context, gds_qp_init_attr_t *qp_init_attr, int gpu_id, int flags)
	DOORBELL_GDS_SYMBOL("gds_create_qp");
/* Does nothing, and sets errno to EBUSY: gds_destroy_qp destroys both CQs. */
void gds_destroy_cq(struct gds_cq *cq);
/*
 * ibv_modify_qp from RESET over INIT and RTR to RTS, to RESET and to ERR. Returns EINVAL for other steps and for "softcx" in the process,
 * EIO if the device refuses the attributes, and EOPNOTSUPP if libdoorbell was built without the feature `verbs`.
 */
int gds_modify_qp(struct gds_qp *qp, struct ibv_qp_attr *attr, int attr_mask);
/* ibv_query_qp: the state, the capacities and what gds_modify_qp was given; the rest is zero. */
int gds_query_qp(struct gds_qp *qp, struct ibv_qp_attr *attr, int attr_mask, struct ibv_qp_init_attr *init_attr);
int gds_poll_cq(struct gds_cq *cq, int num_entries, struct ibv_wc *wc);

/* Post at once, from this thread. What comes before `*bad_wr` was posted. EBUSY while earlier sends are on a stream or prepared. */
int gds_post_send(struct gds_qp *qp, gds_send_wr *wr, gds_send_wr **bad_wr);
int gds_post_recv(struct gds_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);

/* Submitted when the stream reaches them. */
int gds_stream_queue_send(CUstream stream, struct gds_qp *qp, gds_send_wr *wr, gds_send_wr **bad_wr);
/* Work that is queued later waits for the next completion that no wait and no poll has taken. `flags` is 0 here and below. */
int gds_stream_wait_cq(CUstream stream, struct gds_cq *cq, int flags);

/* ---------------------------------------------------------------------------------------------- prepared requests */

enum { GDS_SEND_INFO_MAX_OPS = 32, GDS_WAIT_INFO_MAX_OPS = 32 };

/* Up to GDS_SEND_INFO_MAX_OPS work requests of one queue pair. The fields are private. */
typedef struct gds_send_request {
	struct doorbell_gds_qp *owner;
	doorbell_prepared *prepared[GDS_SEND_INFO_MAX_OPS];
	uint64_t entry[GDS_SEND_INFO_MAX_OPS];
	uint64_t serial;
	uint32_t count; /* 0 after it was posted or taken back */
} gds_send_request_t;

/* A wait for a completion, with stores that follow it. The fields are private. */
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

/* Prepares all work requests of a chain or none. Requests of a queue pair are posted once, in the order in which they were prepared. */
int gds_prepare_send(struct gds_qp *qp, gds_send_wr *wr, gds_send_wr **bad_wr, gds_send_request_t *request);
int gds_stream_post_send(CUstream stream, gds_send_request_t *request);
int gds_stream_post_send_all(CUstream stream, int count, gds_send_request_t *request);
/*
 * EINVAL if no completion is expected: the work request or receive is posted or prepared before. That of gds_stream_queue_send is expected
 * when that call has returned.
 */
int gds_prepare_wait_cq(struct gds_cq *cq, gds_wait_request_t *request, int flags);
/* Adds a store of a word after the wait. */
int gds_append_wait_cq(gds_wait_request_t *request, uint32_t *dw, uint32_t val);
int gds_stream_post_wait_cq(CUstream stream, gds_wait_request_t *request);
int gds_stream_post_wait_cq_all(CUstream stream, int count, gds_wait_request_t *request);
/* Both leave the completion to ibv_poll_cq. */
int gds_abort_wait_cq(struct gds_cq *cq, gds_wait_request_t *request);
int gds_post_wait_cq(struct gds_cq *cq, gds_wait_request_t *request, int flags);

/* -------------------------------------------------------------------------------------------------- descriptors */

/* One of them is given, but the library knows the kind itself. GDS_MEMORY_IO returns EOPNOTSUPP. */
typedef enum gds_memory_type { GDS_MEMORY_GPU = 1, GDS_MEMORY_HOST = 2, GDS_MEMORY_IO = 4, GDS_MEMORY_MASK = 0x7 } gds_memory_type_t;

/* These flags are accepted and change nothing: waits flush where the GPU needs it, and stores have all barriers. */
typedef enum gds_wait_flags {
	GDS_WAIT_POST_FLUSH_REMOTE = 1 << 3,
	GDS_WAIT_POST_FLUSH = GDS_WAIT_POST_FLUSH_REMOTE
} gds_wait_flags_t;
typedef enum gds_write_flags {
	GDS_WRITE_PRE_BARRIER_SYS = 1 << 4,
	GDS_WRITE_PRE_BARRIER = GDS_WRITE_PRE_BARRIER_SYS
} gds_write_flags_t;
typedef enum gds_write_memory_flags {
	GDS_WRITE_MEMORY_POST_BARRIER_SYS = 1 << 4,
	GDS_WRITE_MEMORY_PRE_BARRIER_SYS = 1 << 5
} gds_write_memory_flags_t;
typedef enum gds_membar_flags {
	GDS_MEMBAR_FLUSH_REMOTE = 1 << 4,
	GDS_MEMBAR_DEFAULT = 1 << 5,
	GDS_MEMBAR_SYS = 1 << 6,
	GDS_MEMBAR_MLX5 = 1 << 7
} gds_membar_flags_t;

/*
 * As in cuStreamWaitValue32. The driver executes a wait on a CUDA stream for a word of GPU memory, and in a library without kernels a wait for
 * equality. These waits have no timeout.
 */
typedef enum gds_wait_cond_flag {
	GDS_WAIT_COND_GEQ = 0, /* (int32_t)(word - value) >= 0 */
	GDS_WAIT_COND_EQ,
	GDS_WAIT_COND_AND, /* (word & value) != 0 */
	GDS_WAIT_COND_NOR  /* ~(word | value) != 0 */
} gds_wait_cond_flag_t;

typedef struct gds_wait_value32 {
	uint32_t *ptr;
	uint32_t value;
	gds_wait_cond_flag_t cond_flags;
	int flags; /* gds_memory_type_t | gds_wait_flags_t */
} gds_wait_value32_t;

typedef struct gds_write_value32 {
	uint32_t *ptr;
	uint32_t value;
	int flags; /* gds_memory_type_t | gds_write_flags_t */
} gds_write_value32_t;

/* A copy by 32-bit stores in order: `dest` and `count` (bytes) are multiples of 4. `src` is read when the descriptor is posted. */
enum { GDS_WRITE_MEMORY_MAX_BYTES = 1024 };
typedef struct gds_write_memory {
	uint8_t *dest;
	const uint8_t *src;
	size_t count;
	int flags; /* gds_memory_type_t | gds_write_memory_flags_t */
} gds_write_memory_t;

int gds_prepare_wait_value32(gds_wait_value32_t *desc, uint32_t *ptr, uint32_t value, gds_wait_cond_flag_t cond_flags, int flags);
int gds_prepare_write_value32(gds_write_value32_t *desc, uint32_t *ptr, uint32_t value, int flags);
int gds_prepare_write_memory(gds_write_memory_t *desc, uint8_t *dest, const uint8_t *src, size_t count, int flags);

typedef enum gds_tag { GDS_TAG_SEND, GDS_TAG_WAIT, GDS_TAG_WAIT_VALUE32, GDS_TAG_WRITE_VALUE32, GDS_TAG_WRITE_MEMORY } gds_tag_t;

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

/* In order, none if one is invalid. If the stream or an endpoint refuses one later, those before it were posted and are empty. */
int gds_stream_post_descriptors(CUstream stream, size_t n_descs, gds_descriptor_t *descs, int flags);
/* Executes them in a thread of the library, and returns when they are done; EIO if a wait was released. */
int gds_post_descriptors(size_t n_descs, gds_descriptor_t *descs, int flags);

/* ------------------------------------------------------------------------- internals of libgdsync that programs use */

/* Requests, followed by a store of a word if `dw` is not NULL; _on_cpu executes them before it returns. */
int gds_post_pokes(CUstream stream, int count, gds_send_request_t *info, uint32_t *dw, uint32_t val);
int gds_post_pokes_on_cpu(int count, gds_send_request_t *info, uint32_t *dw, uint32_t val);
int gds_stream_post_wait_cq_multi(CUstream stream, int count, gds_wait_request_t *request, uint32_t *dw, uint32_t val);
/* The calls of version 2.1 for descriptors of one word or one copy. */
int gds_stream_post_poll_dword(CUstream stream, uint32_t *ptr, uint32_t magic, gds_wait_cond_flag_t cond_flag, int flags);
int gds_stream_post_poke_dword(CUstream stream, uint32_t *ptr, uint32_t value, int flags);
int gds_stream_post_inline_copy(CUstream stream, void *ptr, void *src, size_t nbytes, int flags);
/* Waits for words, then stores or copies. */
int gds_stream_post_polls_and_pokes(CUstream stream, size_t n_polls, uint32_t *ptrs[], uint32_t magics[], gds_wait_cond_flag_t cond_flags[],
				    int poll_flags[], size_t n_pokes, uint32_t *poke_ptrs[], uint32_t poke_values[], int poke_flags[]);
int gds_stream_post_polls_and_immediate_copies(CUstream stream, size_t n_polls, uint32_t *ptrs[], uint32_t magics[],
					       gds_wait_cond_flag_t cond_flags[], int poll_flags[], size_t n_imms, void *imm_ptrs[],
					       void *imm_datas[], size_t imm_bytes[], int imm_flags[]);

/*
 * Registers memory for waits and stores of streams. `*dev_ptr` is its address on the device of the current context, or without one on the CPU. If
 * it is asked for, the first call in a context maps the memory, and so may wait for work of the GPU that runs. Other calls take addresses of the CPU.
 * Registering a part of registered memory increments its count; a partial overlap returns EINVAL. The last gds_unregister_mem needs that waits and
 * stores that use the memory are done.
 */
int gds_register_mem(void *ptr, size_t size, gds_memory_type_t type, CUdeviceptr *dev_ptr);
int gds_unregister_mem(void *ptr, size_t size);

/* ---------------------------------------------------------------------------------------- additions of this library */

/* Settings of the process. GDS_WAIT_TIMEOUT_MS and GDS_REGISTER_ON_USE in the environment give other initial values. */
enum gds_option {
	/* Timeout of a wait in ms, or DOORBELL_NO_TIMEOUT; initially DOORBELL_DEFAULT_TIMEOUT (30 s). */
	GDS_OPTION_WAIT_TIMEOUT_MS,
	/*
	 * 1, initially: the pages of a word are registered when a wait or a store uses it, and are not freed before
	 * gds_unregister_mem. The first gds_register_mem within them takes them over and counts as the first. 0: EFAULT.
	 */
	GDS_OPTION_REGISTER_ON_USE
};
int gds_set_option(enum gds_option option, int64_t value);

/* The gds_qp of an object of verbs, or NULL; whether a CQ is of a gds_qp; whether memory is of gds_reg_mr. */
struct gds_qp *gds_qp_of(const struct ibv_qp *qp) DOORBELL_GDS_SYMBOL("gds_qp_of");
int gds_owns_cq(const struct ibv_cq *cq);
int gds_owns_mr(const struct ibv_mr *mr);

/*
 * Devices by name, such as "softcx", and their domains. What is still in use returns EBUSY, and objects of libibverbs return EINVAL. libibverbs'
 * own calls with these objects fail with EOPNOTSUPP, apart from ibv_close_device, which does nothing.
 */
struct ibv_context *gds_open_device(const char *name);
int gds_close_device(struct ibv_context *context);
struct ibv_pd *gds_alloc_pd(struct ibv_context *context);
int gds_dealloc_pd(struct ibv_pd *pd);
/* ibv_reg_mr for queue pairs of this library, also for memory of the GPU of the current context. */
struct ibv_mr *gds_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access);
int gds_dereg_mr(struct ibv_mr *mr);

/* In place of gds_modify_qp: each side gives its address to the other by any means, and connects. */
int gds_qp_address(struct gds_qp *qp, doorbell_address *address);
int gds_qp_connect(struct gds_qp *qp, const doorbell_address *peer);
/* Back to the state after the creation, with a new address; see doorbell_endpoint_reset. */
int gds_qp_reset(struct gds_qp *qp);
/*
 * For calls of doorbell.h. Work that is queued with the endpoint directly does not appear in ibv_poll_cq. A doorbell_failure of this endpoint
 * names a work request by twice its number in its queue, from 0 on, plus 1 in the receive queue, because programs may use one wr_id for
 * several; ibv_poll_cq returns the program's wr_id.
 */
doorbell_endpoint *gds_qp_endpoint(struct gds_qp *qp);
/* Takes back a request that was not posted; EBUSY if a later one is still prepared. */
int gds_rollback_send(struct gds_qp *qp, gds_send_request_t *request);

/* A stream that a thread of the library executes, for hosts without a GPU. */
int gds_create_host_stream(CUstream *stream);
/*
 * This library's object for a stream, which the first call with the stream creates in the current context. NULL and CU_STREAM_LEGACY are the
 * default stream of the current context, so that each context has another object for them.
 */
int gds_stream_handle(CUstream stream, doorbell_stream **handle);
/* Releases it, before cuStreamDestroy: a later stream may have the same address. For a default stream, that of the current context. */
int gds_release_stream(CUstream stream);

#endif /* DOORBELL_GDSYNC_CORE_H */
