/*
 * What the sources of libgdsync share.
 *
 * libgdsync is written over doorbell.h alone. A queue pair of libgdsync is an endpoint with a list of the work requests
 * that make completions (queue.c); keys, words and protection domains are found in a table of regions (memory.c);
 * streams, prepared requests and descriptors are in stream.c; words that libdoorbell does not wait for are in words.c;
 * the calls of libibverbs that reach these objects are in verbs.c.
 */
#ifndef GDSYNC_INTERNAL_H
#define GDSYNC_INTERNAL_H

#include <gdsync.h>

/*
 * libdoorbell's device and domain for a protection domain of verbs. `pd` is NULL for words. Contexts and protection
 * domains of libibverbs are adopted; those of gds_open_device have a device of that name.
 */
struct doorbell_gds_domain {
	struct doorbell_gds_domain *next;
	const struct ibv_pd *pd;
	struct ibv_context *adopted; /* NULL for a device by its name */
	uint32_t unreleased;	     /* atomic: adopted objects that libdoorbell uses */
	char name[IBV_SYSFS_NAME_MAX];
	doorbell_device *device;
	doorbell_domain *domain;
	uint32_t users; /* number of regions and queue pairs */
};

/* Words in front of a context, for the other fields of struct verbs_context, and behind a device, for libibverbs' own. */
enum { DOORBELL_GDS_FRONT = 64, DOORBELL_GDS_BEHIND = 64 };

/* A context of gds_open_device. The program has a pointer to `context`. */
struct doorbell_gds_context {
	uint64_t front[DOORBELL_GDS_FRONT]; /* directly before `context`; see verbs.c */
	struct ibv_context context;
	struct ibv_device device;
	uint64_t behind[DOORBELL_GDS_BEHIND]; /* 0 */
	uint32_t domains;
};

_Static_assert(offsetof(struct doorbell_gds_context, context) == DOORBELL_GDS_FRONT * sizeof(uint64_t), "nothing is between");

/* What a place in the table contains. */
enum doorbell_gds_kind {
	DOORBELL_GDS_FREE = 0,
	DOORBELL_GDS_SLICES = 1, /* gds_reg_mr */
	DOORBELL_GDS_WORDS = 2,	 /* gds_register_mem */
	DOORBELL_GDS_OWN = 3	 /* gds_alloc_mapped_memory */
};

struct doorbell_gds_memory {
	uint32_t key; /* atomic; 0 if the place is free */
	uint32_t kind;
	uint32_t uses; /* number of times the place was used, so that an old key does not match a new region */
	uint32_t count;
	uint64_t start;
	uint64_t len_bytes;
	doorbell_region *region;
	struct doorbell_gds_domain *domain;
	const struct ibv_mr *mr; /* of gds_reg_mr, or NULL */
};

/*
 * Memory behind a key of an adopted protection domain: DOORBELL_GDS_WINDOW bytes from a multiple of half as many. The
 * device checks the key, the range and the rights, as it does for work requests of libibverbs.
 */
struct doorbell_gds_key {
	doorbell_region *region; /* NULL: free */
	uint64_t start;
	uint32_t lkey;
};

enum { DOORBELL_GDS_KEYS = 256 /* 8 bits of the hash in memory.c */ };
#define DOORBELL_GDS_WINDOW ((uint64_t)1 << 40)

enum {
	DOORBELL_GDS_CHUNKS = 64,
	DOORBELL_GDS_CHUNK = 1024 /* places; a key has 16 bits for the number of the place */
};

/* A stream: `name` is the program's, `handle` libdoorbell's. */
struct doorbell_gds_target {
	CUstream name;
	void *context; /* current CUDA context of a default stream, which exists once for each context; otherwise NULL */
	doorbell_stream *handle;
	int is_cuda; /* `name` is a stream of the driver */
};

struct doorbell_gds_stream {
	struct doorbell_gds_stream *next;
	struct doorbell_gds_target target;
};

/* The state of the library, one per process. */
struct doorbell_gds_state {
	pthread_mutex_t lock;
	struct doorbell_gds_memory *chunks[DOORBELL_GDS_CHUNKS]; /* atomic; never freed */
	uint32_t chunk_count;
	struct doorbell_gds_domain *domains;
	struct doorbell_gds_stream *streams;
	struct doorbell_gds_stream *idle; /* host streams that execute descriptors at once */
	int64_t wait_timeout_ms;	  /* atomic */
	int64_t registers_on_use;	  /* atomic */
};

extern struct doorbell_gds_state doorbell_gds_state;

/* The entry number of a work request that makes no completion. */
#define DOORBELL_GDS_NO_ENTRY UINT64_MAX

/* What consumes the completion of an entry. */
enum doorbell_gds_claim {
	DOORBELL_GDS_UNCLAIMED = 0,
	DOORBELL_GDS_WAITED = 1, /* a wait of a stream, prepared or queued */
	DOORBELL_GDS_LEFT = 2	 /* a wait that was taken back; the ticket of the work request has the result */
};

struct doorbell_gds_entry {
	uint64_t wr_id;
	uint64_t number; /* running number of the work request in its queue, unsignaled ones included */
	uint32_t opcode; /* enum ibv_wc_opcode */
	uint32_t claim;
	doorbell_ticket *work; /* NULL until it is posted */
	doorbell_ticket *wait; /* NULL until it is queued */
	doorbell_details details; /* valid before `kept`; 0 if the device has reported none */
};

/*
 * Running numbers of entries: `head` is the oldest, `next` the first unclaimed one, `tail` the next one to be added. The details of
 * those before `kept` are stored. No wait may claim those from `held` on.
 */
struct doorbell_gds_cq {
	struct ibv_cq cq; /* first field: the program has a pointer to it */
	struct doorbell_gds_qp *owner;
	struct doorbell_gds_entry *entries;
	uint64_t *wr_ids; /* of the newest work requests, by `number` modulo `capacity` */
	uint64_t head;
	uint64_t next;
	uint64_t tail;
	uint64_t kept;
	uint64_t held;
	uint64_t capacity;
	uint64_t posted; /* number of work requests so far, unsignaled ones included */
	uint32_t depth;
	uint32_t side;
};

/* The structs of API 3.0, as gdsync/core.h declares them for GDSYNC_API=3. */
struct doorbell_gds_cq_v3 {
	struct ibv_cq *ibcq;
	uint32_t curr_offset;
	gds_cq_type_t ctype;
	gds_driver_type_t dtype;
};

struct doorbell_gds_qp_v3 {
	struct ibv_qp *ibqp;
	struct doorbell_gds_cq_v3 *send_cq;
	struct doorbell_gds_cq_v3 *recv_cq;
	gds_driver_type_t dtype;
	struct ibv_context *dev_context;
};

/* The calls of both versions reach the queue pair and the CQ by the first field of the struct they are given. */
_Static_assert(offsetof(struct gds_qp, qp) == 0 && offsetof(struct doorbell_gds_qp_v3, ibqp) == 0, "first fields");
_Static_assert(offsetof(struct gds_cq, cq) == 0 && offsetof(struct doorbell_gds_cq_v3, ibcq) == 0, "first fields");
_Static_assert(offsetof(struct gds_cq, curr_offset) == offsetof(struct doorbell_gds_cq_v3, curr_offset), "one offset");
/* Work requests of both versions, too. */
_Static_assert(offsetof(struct ibv_exp_send_wr, next) == offsetof(struct ibv_send_wr, next), "one layout");
_Static_assert(offsetof(struct ibv_exp_send_wr, sg_list) == offsetof(struct ibv_send_wr, sg_list), "one layout");
_Static_assert(offsetof(struct ibv_exp_send_wr, num_sge) == offsetof(struct ibv_send_wr, num_sge), "one layout");
_Static_assert(offsetof(struct ibv_exp_send_wr, opcode) == offsetof(struct ibv_send_wr, opcode), "one layout");
_Static_assert(offsetof(struct ibv_exp_send_wr, send_flags) == offsetof(struct ibv_send_wr, send_flags), "one layout");
_Static_assert(offsetof(struct ibv_exp_send_wr, imm_data) == offsetof(struct ibv_send_wr, imm_data), "one layout");
_Static_assert(offsetof(struct ibv_exp_send_wr, wr) == offsetof(struct ibv_send_wr, wr), "one layout");

/* What was given to gds_modify_qp, for gds_query_qp; see verbs.c. */
struct doorbell_gds_attributes;

struct doorbell_gds_qp {
	struct gds_qp qp;
	struct doorbell_gds_qp_v3 qp_v3;
	struct doorbell_gds_cq_v3 cq_v3[2];
	struct ibv_qp ib;
	uint64_t front[DOORBELL_GDS_FRONT]; /* directly before `context`; see verbs.c */
	struct ibv_context context;
	struct doorbell_gds_cq cq[2]; /* by DOORBELL_QUEUE_* */
	struct doorbell_gds_key keys[DOORBELL_GDS_KEYS]; /* those used last, by a hash */
	doorbell_region *evicted[DOORBELL_SLICES_MAX];   /* taken from `keys`, and may be in use by the work request that is being made */
	uint32_t evicted_count;
	struct ibv_qp_cap cap;
	struct doorbell_gds_attributes *attributes; /* NULL until there are some */
	doorbell_endpoint *endpoint;
	struct doorbell_gds_domain *domain;
	pthread_mutex_t lock;
	pthread_mutex_t posting; /* taken before `lock`; held while one call prepares and posts, so that nothing else
				    is prepared between */
	doorbell_stream *kernels[3]; /* streams of triggers: sends, waits for sends, waits for receives; NULL until
					needed */
	uint32_t signals_all;
	uint32_t told; /* 1: a failure that belongs to no entry was polled */
};


_Static_assert(offsetof(struct doorbell_gds_qp, context) - offsetof(struct doorbell_gds_qp, front) ==
		       DOORBELL_GDS_FRONT * sizeof(uint64_t),
	       "nothing is between");

static inline struct doorbell_gds_context *doorbell_gds_of_context(struct ibv_context *context)
{
	return (struct doorbell_gds_context *)(void *)((char *)context - offsetof(struct doorbell_gds_context, context));
}

static inline struct doorbell_gds_qp *doorbell_gds_of_verbs(const struct ibv_qp *ib)
{
	return (struct doorbell_gds_qp *)(void *)((char *)(uintptr_t)ib - offsetof(struct doorbell_gds_qp, ib));
}

static inline struct doorbell_gds_qp *doorbell_gds_of(const struct gds_qp *qp)
{
	return doorbell_gds_of_verbs(qp->qp);
}

static inline struct doorbell_gds_entry *doorbell_gds_at(const struct doorbell_gds_cq *cq, uint64_t number)
{
	return cq->entries + number % cq->capacity;
}

/* Returns an entry, or NULL if it was dropped. */
static inline struct doorbell_gds_entry *doorbell_gds_entry_of(const struct doorbell_gds_cq *cq, uint64_t number)
{
	return number >= cq->head && number < cq->tail ? doorbell_gds_at(cq, number) : NULL;
}

/* A work request in the form of libdoorbell. Its pointers point into this struct. */
struct doorbell_gds_work {
	doorbell_work work;
	doorbell_slice slices[DOORBELL_SLICES_MAX];
	uint8_t inline_bytes[512];
	uint32_t opcode; /* opcode of its completion */
	doorbell_address_handle *handle; /* of a UD queue pair; otherwise NULL */
};

/* memory.c */
void doorbell_gds_lock(void);
void doorbell_gds_unlock(void);
/* The errno of a result of libdoorbell; 0 for success. */
int doorbell_gds_errno(int code);
int64_t doorbell_gds_wait_timeout_ms(void);
/* Finds or creates the domain of a protection domain, and adds one user. The caller holds the lock. */
int doorbell_gds_domain_get(const struct ibv_pd *pd, struct doorbell_gds_domain **found);
/* Removes one user. The caller holds the lock. Returns NULL, or for the last user a domain for doorbell_gds_domain_end. */
struct doorbell_gds_domain *doorbell_gds_domain_put(struct doorbell_gds_domain *domain);
/* Destroys a domain. The caller does not hold the lock. `domain` may be NULL. */
void doorbell_gds_domain_end(struct doorbell_gds_domain *domain);
/*
 * Converts an address and a key to a slice. The caller holds the queue pair's lock, and calls doorbell_gds_slices_end before it releases
 * the lock: the regions of the slices may not exist after that.
 */
int doorbell_gds_slice(struct doorbell_gds_qp *qp, const struct ibv_sge *sge, doorbell_slice *slice);
/* Ends the use of slices, after their work request was posted or prepared, or was not. */
void doorbell_gds_slices_end(struct doorbell_gds_qp *qp);
/* Finds the region that contains `len_bytes` bytes for stores and waits. */
int doorbell_gds_words(const void *start, size_t len_bytes, const doorbell_region **region, uint64_t *offset);

/* queue.c */
/*
 * Counts a work request that was posted or prepared, and adds an entry if it makes a completion. Returns the entry's number or
 * DOORBELL_GDS_NO_ENTRY. `work` may be NULL until it is posted.
 */
uint64_t doorbell_gds_posted(struct doorbell_gds_cq *cq, uint64_t wr_id, uint32_t opcode, int is_signaled, doorbell_ticket *work);
/* Takes back the newest work request, with its entry or DOORBELL_GDS_NO_ENTRY. */
void doorbell_gds_unposted(struct doorbell_gds_cq *cq, uint64_t entry);
/* Makes room for one more work request and its entry. */
int doorbell_gds_make_room(struct doorbell_gds_cq *cq);
int doorbell_gds_translate(struct doorbell_gds_qp *qp, const gds_send_wr *wr, struct doorbell_gds_work *made);
/* Ends what doorbell_gds_translate has made, after the work request was posted or prepared, or was not. */
void doorbell_gds_work_end(struct doorbell_gds_qp *qp, struct doorbell_gds_work *made);
int doorbell_gds_poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);

/* stream.c */
int doorbell_gds_check_flags(int flags, int allowed);
int doorbell_gds_check(const gds_descriptor_t *desc, const struct doorbell_gds_target *target);
int doorbell_gds_give_all(const struct doorbell_gds_target *target, size_t n_descs, gds_descriptor_t *descs);

/* words.c */
/* The CUDA context of the calling thread; NULL if there is none. */
void *doorbell_gds_current_context(void);
/* The address of a region's byte on the GPU of the current context, or without a context on the CPU. The caller must not hold
   the lock: the driver may wait for its GPU. */
int doorbell_gds_device_address(const doorbell_region *region, uint64_t offset, CUdeviceptr *address);
/* Whether the driver knows an address as memory of a GPU. */
int doorbell_gds_is_gpu_memory(const void *address);
/* A wait or a store by the driver's own call on a stream of the driver. */
int doorbell_gds_driver_wait(CUstream stream, CUdeviceptr address, uint32_t value, gds_wait_cond_flag_t cond, int flags);
int doorbell_gds_driver_write(CUstream stream, void *address, uint32_t value);

/* verbs.c */
/* Fills a context that is not one of libibverbs, and the words in front of it. All of them are 0. */
void doorbell_gds_context_init(struct ibv_context *context);
/* Whether a context is one of gds_open_device. */
int doorbell_gds_is_own_context(const struct ibv_context *context);

#endif
