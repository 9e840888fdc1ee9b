/* What the programs over gdsync.h have in common: checks, a pair of queue pairs, a stream of either kind. C11 and C++17. */
#ifndef GDSYNC_RIG_H
#define GDSYNC_RIG_H

#include <doorbell/gdsync.h>

#include <dlfcn.h>
#include <sched.h>
#include <time.h>

#define SOON_MS 30000
/* Short enough for a test of a wait that does not end, and long for everything else. */
#define WAIT_TIMEOUT_MS 12000

#define EXPECT(condition)                                                                                    \
	do {                                                                                                 \
		if (!(condition)) {                                                                          \
			fprintf(stderr, "%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition,       \
				doorbell_last_error());                                                      \
			exit(1);                                                                             \
		}                                                                                            \
	} while (0)

/* The call gives this errno, or 0. */
#define GIVES(expected, call)                                                                                \
	do {                                                                                                 \
		const int code_ = (call);                                                                    \
		if (code_ != (expected)) {                                                                   \
			fprintf(stderr, "%s:%d: %s gave %d (%s), not %s; last error: %s\n", __FILE__,        \
				__LINE__, #call, code_, strerror(code_), #expected, doorbell_last_error());  \
			exit(1);                                                                             \
		}                                                                                            \
	} while (0)

#define WORKS(call) GIVES(0, call)

/* The call gives NULL and sets errno to this. */
#define REFUSED(expected, call)                                                                              \
	do {                                                                                                 \
		errno = 0;                                                                                   \
		EXPECT((call) == NULL);                                                                      \
		GIVES(expected, errno);                                                                      \
	} while (0)

/* ------------------------------------------------------------------------------------------------------- streams */

/* The driver, by name: this compiles without its header. */
struct driver {
	int (*init)(unsigned);
	int (*retain)(void **, int);
	int (*set_current)(void *);
	int (*stream_create)(CUstream *, unsigned);
	int (*stream_destroy)(CUstream);
	int (*register_host)(void *, size_t, unsigned);
	int (*unregister_host)(void *);
	int (*device_address)(CUdeviceptr *, void *, unsigned);
	void *context;
};

static inline int by_cuda(void)
{
	const char *kind = getenv("DOORBELL_TEST_STREAM");
	return kind && strncmp(kind, "cuda", 4) == 0;
}

/* ISO C has no conversion from an object's address to a function's. */
static inline void find(void *library, const char *name, void *place)
{
	void *found = dlsym(library, name);
	EXPECT(found);
	memcpy(place, &found, sizeof(found));
}

static inline const struct driver *driver(void)
{
	static struct driver found;
	void *library;
	if (found.context)
		return &found;
	library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
	EXPECT(library);
	find(library, "cuInit", &found.init);
	find(library, "cuDevicePrimaryCtxRetain", &found.retain);
	find(library, "cuCtxSetCurrent", &found.set_current);
	find(library, "cuStreamCreate", &found.stream_create);
	find(library, "cuStreamDestroy_v2", &found.stream_destroy);
	find(library, "cuMemHostRegister_v2", &found.register_host);
	find(library, "cuMemHostUnregister", &found.unregister_host);
	find(library, "cuMemHostGetDevicePointer_v2", &found.device_address);
	WORKS(found.init(0));
	WORKS(found.retain(&found.context, 0));
	return &found;
}

/* The address that a kernel uses for memory of the host. The driver has one only for memory that is mapped. */
static inline CUdeviceptr on_device(void *memory)
{
	CUdeviceptr address = (CUdeviceptr)(uintptr_t)memory;
	if (by_cuda())
		WORKS(driver()->device_address(&address, memory, 0));
	return address;
}

static inline CUstream new_stream(void)
{
	CUstream stream = NULL;
	doorbell_stream *handle;
	if (by_cuda()) {
		WORKS(driver()->set_current(driver()->context));
		WORKS(driver()->stream_create(&stream, 1));
		WORKS(gds_stream_handle(stream, &handle));
	} else {
		WORKS(gds_create_host_stream(&stream));
	}
	return stream;
}

static inline void end_stream(CUstream stream)
{
	WORKS(gds_release_stream(stream));
	if (by_cuda())
		WORKS(driver()->stream_destroy(stream));
}

/* Waits for the stream, which may have failed; in this thread's own bound. */
static inline void settle(CUstream stream)
{
	doorbell_stream *handle;
	int code;
	WORKS(gds_stream_handle(stream, &handle));
	code = doorbell_stream_synchronize(handle, SOON_MS);
	if (code == DOORBELL_EASYNC)
		code = doorbell_stream_synchronize(handle, SOON_MS);
	EXPECT(code == 0);
}

static inline void sync_stream(CUstream stream)
{
	doorbell_stream *handle;
	WORKS(gds_stream_handle(stream, &handle));
	WORKS(doorbell_stream_synchronize(handle, SOON_MS));
}

static inline int is_idle(CUstream stream)
{
	doorbell_stream *handle;
	WORKS(gds_stream_handle(stream, &handle));
	return doorbell_stream_query(handle);
}

/* --------------------------------------------------------------------------------------------------- queue pairs */

enum { BYTES = 65536, DEPTH = 16 };

/* One side of a program of libgdsync: a context, memory, a queue pair. */
struct side {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	uint8_t *buffer;
	struct gds_qp *qp;
};

static inline const char *device_name(void)
{
	const char *name = getenv("DOORBELL_TEST_DEVICE");
	return name ? name : "softcx";
}

static inline int is_sync(void)
{
	return strstr(device_name(), "path=sync") != NULL;
}

static inline void attributes(gds_qp_init_attr_t *attr)
{
	memset(attr, 0, sizeof(*attr));
	attr->cap.max_send_wr = DEPTH;
	attr->cap.max_recv_wr = DEPTH;
	attr->cap.max_send_sge = 4;
	attr->cap.max_recv_sge = 2;
	attr->cap.max_inline_data = 64;
	attr->qp_type = IBV_QPT_RC;
}

/* A context and a protection domain: this layer's, or with GDSYNC_LIBIBVERBS those of libibverbs as they are. */
static inline void open_side(struct side *side)
{
#ifdef GDSYNC_LIBIBVERBS
	struct ibv_device **list = ibv_get_device_list(NULL);
	int i;
	EXPECT(list);
	for (i = 0; list[i] && strcmp(ibv_get_device_name(list[i]), device_name()) != 0; i++)
		continue;
	EXPECT(list[i]);
	side->context = ibv_open_device(list[i]);
	ibv_free_device_list(list);
	EXPECT(side->context);
	side->pd = ibv_alloc_pd(side->context);
#else
	side->context = gds_open_device(device_name());
	EXPECT(side->context);
	side->pd = gds_alloc_pd(side->context);
#endif
	EXPECT(side->pd);
}

static inline void close_side(struct side *side)
{
#ifdef GDSYNC_LIBIBVERBS
	WORKS(ibv_dealloc_pd(side->pd));
	WORKS(ibv_close_device(side->context));
#else
	WORKS(gds_dealloc_pd(side->pd));
	WORKS(gds_close_device(side->context));
#endif
}

static inline void make_side(struct side *side)
{
	const int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
	gds_qp_init_attr_t attr;
	void *buffer;
	open_side(side);
	EXPECT(posix_memalign(&buffer, 4096, BYTES) == 0);
	side->buffer = (uint8_t *)buffer;
	memset(side->buffer, 0, BYTES);
	side->mr = gds_reg_mr(side->pd, side->buffer, BYTES, all);
	EXPECT(side->mr && side->mr->lkey && side->mr->addr == side->buffer && side->mr->length == BYTES);
	attributes(&attr);
	side->qp = gds_create_qp(side->pd, side->context, &attr, 0, GDS_CREATE_QP_DEFAULT);
	EXPECT(side->qp && attr.send_cq == side->qp->send_cq.cq && attr.recv_cq == side->qp->recv_cq.cq);
	EXPECT(side->qp->qp->qp_num > 0 && side->qp->qp->send_cq == side->qp->send_cq.cq && side->qp->dev_context == side->context);
}

static inline void connect_sides(struct side *a, struct side *b)
{
	doorbell_address of_a, of_b;
	WORKS(gds_qp_address(a->qp, &of_a));
	WORKS(gds_qp_address(b->qp, &of_b));
	WORKS(gds_qp_connect(a->qp, &of_b));
	WORKS(gds_qp_connect(b->qp, &of_a));
}

static inline void make_pair(struct side *a, struct side *b)
{
	make_side(a);
	make_side(b);
	connect_sides(a, b);
}

static inline void end_side(struct side *side)
{
	if (side->qp)
		WORKS(gds_destroy_qp(side->qp));
	WORKS(gds_dereg_mr(side->mr));
	close_side(side);
	free(side->buffer);
}

/* A slice of a side's memory. */
static inline struct ibv_sge at(const struct side *side, size_t offset, uint32_t length)
{
	struct ibv_sge sge;
	sge.addr = (uint64_t)(uintptr_t)(side->buffer + offset);
	sge.length = length;
	sge.lkey = side->mr->lkey;
	return sge;
}

/* A signaled work request of one slice. */
static inline gds_send_wr request(uint64_t wr_id, enum ibv_wr_opcode opcode, struct ibv_sge *sge)
{
	gds_send_wr wr;
	memset(&wr, 0, sizeof(wr));
	wr.wr_id = wr_id;
	wr.sg_list = sge;
	wr.num_sge = 1;
	wr.opcode = opcode;
	wr.send_flags = IBV_SEND_SIGNALED;
	return wr;
}

static inline gds_send_wr request_to(uint64_t wr_id, enum ibv_wr_opcode opcode, struct ibv_sge *sge, const struct side *peer, size_t offset)
{
	gds_send_wr wr = request(wr_id, opcode, sge);
	wr.wr.rdma.remote_addr = (uint64_t)(uintptr_t)(peer->buffer + offset);
	wr.wr.rdma.rkey = peer->mr->rkey;
	return wr;
}

static inline void post_recv(struct side *side, uint64_t wr_id, size_t offset, uint32_t length)
{
	struct ibv_sge sge = at(side, offset, length);
	struct ibv_recv_wr wr, *bad = NULL;
	memset(&wr, 0, sizeof(wr));
	wr.wr_id = wr_id;
	wr.sg_list = &sge;
	wr.num_sge = 1;
	WORKS(gds_post_recv(side->qp, &wr, &bad));
}

static inline int64_t now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* The next completion, within a bound. */
static inline struct ibv_wc poll_one(struct ibv_cq *cq)
{
	const int64_t end_ms = now_ms() + SOON_MS;
	struct ibv_wc wc;
	int count;
	memset(&wc, 0xff, sizeof(wc));
	while ((count = ibv_poll_cq(cq, 1, &wc)) == 0) {
		EXPECT(now_ms() < end_ms);
		sched_yield();
	}
	EXPECT(count == 1);
	return wc;
}

static inline void expect_wc(struct ibv_cq *cq, uint64_t wr_id, enum ibv_wc_opcode opcode, uint32_t byte_len)
{
	const struct ibv_wc wc = poll_one(cq);
	if (wc.wr_id != wr_id || wc.status != IBV_WC_SUCCESS || wc.opcode != opcode || (opcode >= IBV_WC_RECV && wc.byte_len != byte_len))
		fprintf(stderr, "wr_id %llu status %d opcode %d byte_len %u\n", (unsigned long long)wc.wr_id, (int)wc.status, (int)wc.opcode,
			wc.byte_len);
	EXPECT(wc.wr_id == wr_id && wc.status == IBV_WC_SUCCESS && wc.opcode == opcode);
	EXPECT(opcode < IBV_WC_RECV || wc.byte_len == byte_len);
}

static inline int has_none(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	return ibv_poll_cq(cq, 1, &wc) == 0;
}

static inline uint32_t load(const uint32_t *word)
{
	return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void store(uint32_t *word, uint32_t value)
{
	__atomic_store_n(word, value, __ATOMIC_RELEASE);
}

/* In the other source of the program, by its own copy of the header. */
#ifdef __cplusplus
extern "C"
#endif
struct ibv_mr *register_elsewhere(struct ibv_pd *pd, void *start, size_t len_bytes);

#endif
