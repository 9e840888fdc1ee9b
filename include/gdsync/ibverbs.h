/*
 * Calls of libibverbs, with a second meaning for the objects of a gds_qp. libibverbs itself would take the fields behind
 * these objects for its own. A program that makes none of these calls does not need libibverbs at link time.
 */
#ifndef DOORBELL_GDSYNC_IBVERBS_H
#define DOORBELL_GDSYNC_IBVERBS_H

#ifndef DOORBELL_GDSYNC_H
#error "include <gdsync.h>, which includes this"
#endif

/* Without libibverbs' headers, gdsync/verbs.h declares none of these calls. */
#ifndef DOORBELL_GDSYNC_OWN_VERBS

static inline int doorbell_gds_ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask)
{
	struct gds_qp *own = gds_qp_of(qp);
	return own ? gds_modify_qp(own, attr, attr_mask) : ibv_modify_qp(qp, attr, attr_mask);
}

static inline int doorbell_gds_ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask,
					    struct ibv_qp_init_attr *init_attr)
{
	struct gds_qp *own = gds_qp_of(qp);
	return own ? gds_query_qp(own, attr, attr_mask, init_attr) : ibv_query_qp(qp, attr, attr_mask, init_attr);
}

static inline int doorbell_gds_ibv_destroy_qp(struct ibv_qp *qp)
{
	return gds_qp_of(qp) ? EOPNOTSUPP : ibv_destroy_qp(qp);
}

static inline int doorbell_gds_ibv_destroy_cq(struct ibv_cq *cq)
{
	return gds_owns_cq(cq) ? EBUSY : ibv_destroy_cq(cq);
}

static inline int doorbell_gds_ibv_resize_cq(struct ibv_cq *cq, int cqe)
{
	return gds_owns_cq(cq) ? EOPNOTSUPP : ibv_resize_cq(cq, cqe);
}

/* Creates a queue pair of libibverbs, which cannot use the CQs of a gds_qp. */
static inline struct ibv_qp *doorbell_gds_ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	if (attr && ((attr->send_cq && gds_owns_cq(attr->send_cq)) || (attr->recv_cq && gds_owns_cq(attr->recv_cq)))) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	return ibv_create_qp(pd, attr);
}

/* Registers memory with libibverbs, or, where it cannot, as memory of a GPU, with this library in the same domain. */
static inline struct ibv_mr *doorbell_gds_ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, addr, length, (unsigned)access);
	int error = errno;
	if (!mr)
		mr = gds_reg_mr(pd, addr, length, access);
	if (!mr)
		errno = error;
	return mr;
}

static inline int doorbell_gds_ibv_dereg_mr(struct ibv_mr *mr)
{
	return gds_owns_mr(mr) ? gds_dereg_mr(mr) : ibv_dereg_mr(mr);
}

#undef ibv_reg_mr
#define ibv_reg_mr(pd, addr, length, access) doorbell_gds_ibv_reg_mr(pd, addr, length, access)
#define ibv_dereg_mr(mr) doorbell_gds_ibv_dereg_mr(mr)
#define ibv_modify_qp(qp, attr, attr_mask) doorbell_gds_ibv_modify_qp(qp, attr, attr_mask)
#define ibv_query_qp(qp, attr, attr_mask, init_attr) doorbell_gds_ibv_query_qp(qp, attr, attr_mask, init_attr)
#define ibv_create_qp(pd, attr) doorbell_gds_ibv_create_qp(pd, attr)
#define ibv_destroy_qp(qp) doorbell_gds_ibv_destroy_qp(qp)
#define ibv_destroy_cq(cq) doorbell_gds_ibv_destroy_cq(cq)
#define ibv_resize_cq(cq, cqe) doorbell_gds_ibv_resize_cq(cq, cqe)

#endif

#endif /* DOORBELL_GDSYNC_IBVERBS_H */
