/*
 * The calls of libibverbs that reach the objects of a gds_qp and of gds_open_device.
 *
 * ibv_poll_cq, ibv_post_send, ibv_post_recv and ibv_req_notify_cq are inline in verbs.h, and call the operations of the
 * object's context. Other inline calls look for the operations of struct verbs_context, of which the context is the last field; here these
 * are NULL. All others are functions of libibverbs. They find the operations by `priv` of that struct. The layout of what it points to
 * belongs to libibverbs and changes with its versions. So it is an array here, and each word of the array is a function that refuses.
 *
 * A function that makes an object refuses by NULL, and any other one by an error number. Which words are the former is found out by
 * calls of the functions of libibverbs that return objects.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <dlfcn.h>

/* Of any type. */
typedef void (*doorbell_gds_operation)(void);

static int doorbell_gds_refuse(void)
{
	errno = EOPNOTSUPP;
	return EOPNOTSUPP;
}

static void *doorbell_gds_refuse_object(void)
{
	errno = EOPNOTSUPP;
	return NULL;
}

#define DOORBELL_GDS_4(x) x, x, x, x
#define DOORBELL_GDS_64(x) DOORBELL_GDS_4(DOORBELL_GDS_4(DOORBELL_GDS_4(x)))

/* More words than libibverbs has operations. */
enum { DOORBELL_GDS_OPERATION_BITS = 10, DOORBELL_GDS_OPERATIONS = 1 << DOORBELL_GDS_OPERATION_BITS };
static doorbell_gds_operation doorbell_gds_refusals[DOORBELL_GDS_OPERATIONS] = {
	DOORBELL_GDS_4(DOORBELL_GDS_4(DOORBELL_GDS_64((doorbell_gds_operation)doorbell_gds_refuse)))};

/* The functions that return objects, by their parameters. Newer ones are declared here, because older headers do not have them. */
struct doorbell_gds_maker {
	const char *name;
	enum {
		DOORBELL_GDS_OF_CONTEXT,
		DOORBELL_GDS_OF_CONTEXT_HANDLE,
		DOORBELL_GDS_OF_PD_HANDLE,
		DOORBELL_GDS_CQ,
		DOORBELL_GDS_MR,
		DOORBELL_GDS_MR_IOVA,
		DOORBELL_GDS_MR_DMABUF,
		DOORBELL_GDS_OF_PD_ATTRIBUTES
	} parameters;
};

static const struct doorbell_gds_maker doorbell_gds_makers[] = {
	{"ibv_alloc_pd", DOORBELL_GDS_OF_CONTEXT},
	{"ibv_import_pd", DOORBELL_GDS_OF_CONTEXT_HANDLE},
	{"ibv_import_dm", DOORBELL_GDS_OF_CONTEXT_HANDLE},
	{"ibv_import_mr", DOORBELL_GDS_OF_PD_HANDLE},
	{"ibv_create_cq", DOORBELL_GDS_CQ},
	{"ibv_reg_mr", DOORBELL_GDS_MR},
	{"ibv_reg_mr_iova", DOORBELL_GDS_MR_IOVA},
	{"ibv_reg_dmabuf_mr", DOORBELL_GDS_MR_DMABUF},
	{"ibv_create_srq", DOORBELL_GDS_OF_PD_ATTRIBUTES},
	{"ibv_create_qp", DOORBELL_GDS_OF_PD_ATTRIBUTES},
	{"ibv_create_ah", DOORBELL_GDS_OF_PD_ATTRIBUTES},
};

typedef void *(*doorbell_gds_of_context_call)(struct ibv_context *);
typedef void *(*doorbell_gds_of_context_handle_call)(struct ibv_context *, uint32_t);
typedef void *(*doorbell_gds_of_pd_handle_call)(struct ibv_pd *, uint32_t);
typedef void *(*doorbell_gds_cq_call)(struct ibv_context *, int, void *, void *, int);
typedef void *(*doorbell_gds_mr_call)(struct ibv_pd *, void *, size_t, int);
typedef void *(*doorbell_gds_mr_iova_call)(struct ibv_pd *, void *, size_t, uint64_t, int);
typedef void *(*doorbell_gds_mr_dmabuf_call)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int);
typedef void *(*doorbell_gds_of_pd_attributes_call)(struct ibv_pd *, void *);

/* Calls one of the functions. Each calls one operation of the context, which returns NULL, and then does no more. */
static void doorbell_gds_make(const struct doorbell_gds_maker *maker, void *found, struct ibv_context *context)
{
	union {
		void *found;
		doorbell_gds_of_context_call of_context;
		doorbell_gds_of_context_handle_call of_context_handle;
		doorbell_gds_of_pd_handle_call of_pd_handle;
		doorbell_gds_cq_call cq;
		doorbell_gds_mr_call mr;
		doorbell_gds_mr_iova_call mr_iova;
		doorbell_gds_mr_dmabuf_call mr_dmabuf;
		doorbell_gds_of_pd_attributes_call of_pd_attributes;
	} call;
	uint64_t attributes[64] = {0};
	struct ibv_pd pd;
	memset(&pd, 0, sizeof(pd));
	pd.context = context;
	call.found = found;
	switch (maker->parameters) {
	case DOORBELL_GDS_OF_CONTEXT:
		(void)call.of_context(context);
		break;
	case DOORBELL_GDS_OF_CONTEXT_HANDLE:
		(void)call.of_context_handle(context, 0);
		break;
	case DOORBELL_GDS_OF_PD_HANDLE:
		(void)call.of_pd_handle(&pd, 0);
		break;
	case DOORBELL_GDS_CQ:
		(void)call.cq(context, 1, NULL, NULL, 0);
		break;
	case DOORBELL_GDS_MR:
		(void)call.mr(&pd, NULL, 0, 0);
		break;
	case DOORBELL_GDS_MR_IOVA:
		(void)call.mr_iova(&pd, NULL, 0, 0, 0);
		break;
	case DOORBELL_GDS_MR_DMABUF:
		(void)call.mr_dmabuf(&pd, 0, 0, 0, -1, 0);
		break;
	case DOORBELL_GDS_OF_PD_ATTRIBUTES:
		(void)call.of_pd_attributes(&pd, attributes);
		break;
	}
}

/* How often each of two operations was called. */
static unsigned doorbell_gds_seen[2];

static void *doorbell_gds_see_0(void)
{
	doorbell_gds_seen[0]++;
	return NULL;
}

static void *doorbell_gds_see_1(void)
{
	doorbell_gds_seen[1]++;
	return NULL;
}

/* Whether a function calls one operation, and that is one of those whose `bits` are `value`. */
static int doorbell_gds_sees(const struct doorbell_gds_maker *maker, void *found, struct doorbell_gds_context *probe,
			     doorbell_gds_operation *operations, unsigned bits, unsigned value)
{
	unsigned i;
	for (i = 0; i < DOORBELL_GDS_OPERATIONS; i++)
		operations[i] = (doorbell_gds_operation)((i & bits) == value ? doorbell_gds_see_1 : doorbell_gds_see_0);
	doorbell_gds_seen[0] = doorbell_gds_seen[1] = 0;
	doorbell_gds_make(maker, found, &probe->context);
	return doorbell_gds_seen[0] == 0 && doorbell_gds_seen[1] == 1;
}

_Static_assert(offsetof(struct verbs_context, context) <= DOORBELL_GDS_FRONT * sizeof(uint64_t), "room in front of a context");
_Static_assert(offsetof(struct verbs_context, context) + sizeof(struct ibv_context) == sizeof(struct verbs_context), "the last field");

/* Makes a context the last field of a struct verbs_context with these operations. */
static void doorbell_gds_enclose(struct ibv_context *context, const doorbell_gds_operation *operations)
{
	struct verbs_context *whole =
		(struct verbs_context *)(void *)((char *)context - offsetof(struct verbs_context, context));
	whole->priv = (struct verbs_ex_private *)(void *)(uintptr_t)operations;
	whole->sz = sizeof(*whole);
	context->abi_compat = __VERBS_ABI_IS_EXTENDED;
	context->cmd_fd = context->async_fd = -1;
}

/* Finds the word of each function that returns an object, bit by bit. */
static void doorbell_gds_find_makers(void *library)
{
	struct doorbell_gds_context *probe = (struct doorbell_gds_context *)calloc(1, sizeof(*probe));
	doorbell_gds_operation *operations = (doorbell_gds_operation *)calloc(DOORBELL_GDS_OPERATIONS, sizeof(*operations));
	const int error = errno;
	size_t at;
	for (at = 0; probe && operations && at < sizeof(doorbell_gds_makers) / sizeof(doorbell_gds_makers[0]); at++) {
		const struct doorbell_gds_maker *maker = &doorbell_gds_makers[at];
		void *found = dlsym(library, maker->name);
		unsigned bit, index = 0;
		if (!found)
			continue;
		doorbell_gds_enclose(&probe->context, operations);
		probe->context.device = &probe->device;
		for (bit = 1; bit < DOORBELL_GDS_OPERATIONS; bit <<= 1)
			if (doorbell_gds_sees(maker, found, probe, operations, bit, bit))
				index |= bit;
		if (doorbell_gds_sees(maker, found, probe, operations, DOORBELL_GDS_OPERATIONS - 1, index))
			doorbell_gds_refusals[index] = (doorbell_gds_operation)doorbell_gds_refuse_object;
	}
	free(operations);
	free(probe);
	errno = error;
}

/*
 * Before the first object of this library exists that libibverbs can be given. The functions are taken from libibverbs itself: a program
 * may have functions of these names in front of it, which are not made for this. If it is not loaded yet, the next object tries again.
 */
static void doorbell_gds_prepare_refusals(void)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	static int is_done;
	void *library;
	pthread_mutex_lock(&lock);
	if (!is_done && (library = dlopen("libibverbs.so.1", RTLD_LAZY | RTLD_NOLOAD)) != NULL) {
		doorbell_gds_find_makers(library);
		dlclose(library);
		is_done = 1;
	}
	pthread_mutex_unlock(&lock);
}

static int doorbell_gds_refuse_notification(struct ibv_cq *cq, int solicited_only)
{
	(void)cq;
	(void)solicited_only;
	return EOPNOTSUPP;
}

void doorbell_gds_context_init(struct ibv_context *context)
{
	doorbell_gds_prepare_refusals();
	doorbell_gds_enclose(context, doorbell_gds_refusals);
	context->ops.req_notify_cq = doorbell_gds_refuse_notification;
}

int doorbell_gds_is_own_context(const struct ibv_context *context)
{
	/* The context of a queue pair polls. */
	return context->ops.req_notify_cq == doorbell_gds_refuse_notification && !context->ops.poll_cq;
}

int gds_owns_cq(const struct ibv_cq *cq)
{
	return cq && cq->context && cq->context->ops.poll_cq == doorbell_gds_poll_cq;
}

static struct doorbell_gds_qp *doorbell_gds_own(const struct ibv_qp *qp)
{
	return qp && qp->context && qp->context->ops.poll_cq == doorbell_gds_poll_cq ? doorbell_gds_of_verbs(qp) : NULL;
}

struct gds_qp *gds_qp_of(const struct ibv_qp *qp)
{
	struct doorbell_gds_qp *own = doorbell_gds_own(qp);
	return own ? &own->qp : NULL;
}

struct doorbell_gds_qp_v3 *gds_qp_of_v3(const struct ibv_qp *qp);

struct doorbell_gds_qp_v3 *gds_qp_of_v3(const struct ibv_qp *qp)
{
	struct doorbell_gds_qp *own = doorbell_gds_own(qp);
	return own ? &own->qp_v3 : NULL;
}

struct doorbell_gds_attributes {
	struct ibv_qp_attr attr;
};

/* Takes over what `mask` names. The attributes of a path are one. */
static void doorbell_gds_note(struct ibv_qp_attr *noted, const struct ibv_qp_attr *attr, int mask)
{
#define DOORBELL_GDS_NOTE(bit, field)                                                                        \
	if (mask & (bit))                                                                                    \
	noted->field = attr->field
	DOORBELL_GDS_NOTE(IBV_QP_STATE, qp_state);
	DOORBELL_GDS_NOTE(IBV_QP_ACCESS_FLAGS, qp_access_flags);
	DOORBELL_GDS_NOTE(IBV_QP_PKEY_INDEX, pkey_index);
	DOORBELL_GDS_NOTE(IBV_QP_PORT, port_num);
	DOORBELL_GDS_NOTE(IBV_QP_QKEY, qkey);
	DOORBELL_GDS_NOTE(IBV_QP_AV, ah_attr);
	DOORBELL_GDS_NOTE(IBV_QP_PATH_MTU, path_mtu);
	DOORBELL_GDS_NOTE(IBV_QP_TIMEOUT, timeout);
	DOORBELL_GDS_NOTE(IBV_QP_RETRY_CNT, retry_cnt);
	DOORBELL_GDS_NOTE(IBV_QP_RNR_RETRY, rnr_retry);
	DOORBELL_GDS_NOTE(IBV_QP_RQ_PSN, rq_psn);
	DOORBELL_GDS_NOTE(IBV_QP_MAX_QP_RD_ATOMIC, max_rd_atomic);
	DOORBELL_GDS_NOTE(IBV_QP_MIN_RNR_TIMER, min_rnr_timer);
	DOORBELL_GDS_NOTE(IBV_QP_SQ_PSN, sq_psn);
	DOORBELL_GDS_NOTE(IBV_QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic);
	DOORBELL_GDS_NOTE(IBV_QP_DEST_QPN, dest_qp_num);
#undef DOORBELL_GDS_NOTE
}

/* The caller holds the lock. */
static struct doorbell_gds_attributes *doorbell_gds_noted(struct doorbell_gds_qp *qp)
{
	if (!qp->attributes) {
		qp->attributes = (struct doorbell_gds_attributes *)calloc(1, sizeof(*qp->attributes));
		if (qp->attributes)
			qp->attributes->attr.qp_state = IBV_QPS_RESET;
	}
	return qp->attributes;
}

int gds_modify_qp(struct gds_qp *gds, struct ibv_qp_attr *attr, int attr_mask)
{
	struct doorbell_gds_attributes *noted;
	struct doorbell_gds_qp *qp;
	int error;
	if (!gds || !attr)
		return EINVAL;
	qp = doorbell_gds_of(gds);
	if ((attr_mask & IBV_QP_STATE) && attr->qp_state == IBV_QPS_RESET) {
		error = gds_qp_reset(gds);
	} else if ((attr_mask & IBV_QP_STATE) && attr->qp_state == IBV_QPS_ERR) {
		error = doorbell_gds_errno(doorbell_endpoint_abort(qp->endpoint));
	} else {
		pthread_mutex_lock(&qp->lock);
		error = doorbell_gds_errno(doorbell_endpoint_modify_qp(qp->endpoint, attr, attr_mask));
		pthread_mutex_unlock(&qp->lock);
	}
	if (error)
		return error;
	pthread_mutex_lock(&qp->lock);
	noted = doorbell_gds_noted(qp);
	if (noted)
		doorbell_gds_note(&noted->attr, attr, attr_mask);
	pthread_mutex_unlock(&qp->lock);
	return 0;
}

int gds_query_qp(struct gds_qp *gds, struct ibv_qp_attr *attr, int attr_mask, struct ibv_qp_init_attr *init_attr)
{
	struct doorbell_gds_qp *qp;
	doorbell_failure failure;
	(void)attr_mask;
	if (!gds || !attr)
		return EINVAL;
	qp = doorbell_gds_of(gds);
	pthread_mutex_lock(&qp->lock);
	memset(attr, 0, sizeof(*attr));
	if (qp->attributes)
		*attr = qp->attributes->attr;
	if (doorbell_endpoint_failure(qp->endpoint, &failure, NULL, 0) > 0)
		attr->qp_state = IBV_QPS_ERR;
	else if (doorbell_endpoint_is_connected(qp->endpoint) == 1)
		attr->qp_state = IBV_QPS_RTS;
	attr->cur_qp_state = attr->qp_state;
	attr->cap = qp->cap;
	if (init_attr) {
		memset(init_attr, 0, sizeof(*init_attr));
		init_attr->qp_context = qp->ib.qp_context;
		init_attr->send_cq = qp->ib.send_cq;
		init_attr->recv_cq = qp->ib.recv_cq;
		init_attr->cap = qp->cap;
		init_attr->qp_type = qp->ib.qp_type;
		init_attr->sq_sig_all = (int)qp->signals_all;
	}
	pthread_mutex_unlock(&qp->lock);
	return 0;
}
