/*
 * The calls of libibverbs that reach the objects of a gds_qp.
 *
 * ibv_poll_cq, ibv_post_send, ibv_post_recv and ibv_req_notify_cq are inline in verbs.h, and call the operations of the
 * object's context. All others are functions of libibverbs. They take the context for the last part of its own, larger
 * struct, and find the operations by a pointer in front of the context. The layout of what it points to belongs to
 * libibverbs and changes with its versions. So all words in front of the context point to one array, and each word of the array is
 * a function that refuses.
 */
#include "internal.h"

static int doorbell_gds_refuse(void)
{
	return EOPNOTSUPP;
}

#define DOORBELL_GDS_4(x) x, x, x, x
#define DOORBELL_GDS_64(x) DOORBELL_GDS_4(DOORBELL_GDS_4(DOORBELL_GDS_4(x)))

/* More words than libibverbs has operations. */
static int (*const doorbell_gds_refusals[1024])(void) = {DOORBELL_GDS_4(DOORBELL_GDS_4(DOORBELL_GDS_64(doorbell_gds_refuse)))};

static int doorbell_gds_refuse_notification(struct ibv_cq *cq, int solicited_only)
{
	(void)cq;
	(void)solicited_only;
	return EOPNOTSUPP;
}

void doorbell_gds_verbs_init(struct doorbell_gds_qp *qp)
{
	size_t i;
	for (i = 0; i < DOORBELL_GDS_FRONT; i++)
		qp->front[i] = (const void *)doorbell_gds_refusals;
	doorbell_gds_context_init(&qp->context);
}

void doorbell_gds_context_init(struct ibv_context *context)
{
	/* `abi_compat` stays 0: for the inline calls of verbs.h, the context has no operations but those in `ops`. */
	context->cmd_fd = context->async_fd = -1;
	context->ops.req_notify_cq = doorbell_gds_refuse_notification;
}

int doorbell_gds_is_own_context(const struct ibv_context *context)
{
	return context->ops.req_notify_cq == doorbell_gds_refuse_notification;
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
