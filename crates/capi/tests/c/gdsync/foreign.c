/* A source that does not know gdsync.h, and is handed its objects. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <string.h>

#include "foreign.h"

int foreign_modify_qp(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr;
	memset(&attr, 0, sizeof(attr));
	attr.qp_state = IBV_QPS_ERR;
	return ibv_modify_qp(qp, &attr, IBV_QP_STATE);
}

int foreign_query_qp(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	return ibv_query_qp(qp, &attr, IBV_QP_STATE, &init);
}

int foreign_destroy_qp(struct ibv_qp *qp)
{
	return ibv_destroy_qp(qp);
}

int foreign_destroy_cq(struct ibv_cq *cq)
{
	return ibv_destroy_cq(cq);
}

int foreign_resize_cq(struct ibv_cq *cq)
{
	return ibv_resize_cq(cq, 8);
}

int foreign_notify(struct ibv_cq *cq)
{
	return ibv_req_notify_cq(cq, 0);
}

int foreign_query_port(struct ibv_context *context)
{
	struct ibv_port_attr attr;
	union ibv_gid gid;
	uint16_t pkey;
	/* libibverbs itself answers these. */
	(void)(ibv_query_gid)(context, 1, 0, &gid);
	(void)ibv_query_pkey(context, 1, 0, &pkey);
	return ibv_query_port(context, 1, &attr);
}

int foreign_query_device(struct ibv_context *context)
{
	struct ibv_device_attr attr;
	return ibv_query_device(context, &attr);
}

int foreign_close_device(struct ibv_context *context)
{
	return ibv_close_device(context);
}

int foreign_dealloc_pd(struct ibv_pd *pd)
{
	return ibv_dealloc_pd(pd);
}

/* The number of objects that were not refused with EOPNOTSUPP. */
#define REFUSES(call) (errno = 0, (call) == NULL && errno == EOPNOTSUPP ? 0 : (printf("%s: %d\n", #call, errno), 1))

int foreign_objects_of_context(struct ibv_context *context)
{
	int made = REFUSES(ibv_alloc_pd(context)) + REFUSES(ibv_create_cq(context, 4, NULL, NULL, 0));
	/* This one does not ask the context's operations. */
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	return made + (channel != NULL);
}

int foreign_objects_of_pd(struct ibv_pd *pd, void *start)
{
	struct ibv_srq_init_attr srq;
	struct ibv_qp_init_attr qp;
	struct ibv_ah_attr ah;
	memset(&srq, 0, sizeof(srq));
	memset(&qp, 0, sizeof(qp));
	memset(&ah, 0, sizeof(ah));
	return REFUSES((ibv_reg_mr)(pd, start, 4096, IBV_ACCESS_LOCAL_WRITE)) +
	       REFUSES(ibv_reg_mr_iova(pd, start, 4096, 0, IBV_ACCESS_LOCAL_WRITE)) + REFUSES(ibv_create_srq(pd, &srq)) +
	       REFUSES(ibv_create_qp(pd, &qp)) + REFUSES(ibv_create_ah(pd, &ah));
}
