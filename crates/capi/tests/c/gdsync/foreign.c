/* A source that does not know gdsync.h, and is handed its objects. */
#include <infiniband/verbs.h>
#include <string.h>

int foreign_modify_qp(struct ibv_qp *qp);
int foreign_query_qp(struct ibv_qp *qp);
int foreign_destroy_qp(struct ibv_qp *qp);
int foreign_destroy_cq(struct ibv_cq *cq);
int foreign_resize_cq(struct ibv_cq *cq);
int foreign_notify(struct ibv_cq *cq);

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
