/*
 * Calls of libibverbs by the names that gdsync.h gives them. libibverbs itself would take the fields behind an object of a gds_qp for its own.
 *
 * libibverbs' own calls are found when they are needed, so that programs that make none of them do not need it. dlsym finds the default
 * version of a call. A weak reference without libibverbs at link time would be bound to the oldest one, of another interface.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <dlfcn.h>

typedef void (*doorbell_gds_call)(void);

static doorbell_gds_call doorbell_gds_find(const char *name)
{
	doorbell_gds_call found;
	*(void **)&found = dlsym(RTLD_DEFAULT, name);
	if (!found)
		errno = ENOSYS;
	return found;
}

/* libibverbs' own call, with its type. */
#define DOORBELL_GDS_OTHER(name) ((__typeof__(&(name)))doorbell_gds_find(#name))

#undef ibv_reg_mr
#undef ibv_modify_qp
#undef ibv_query_qp
#undef ibv_create_qp
#undef ibv_destroy_qp
#undef ibv_destroy_cq
#undef ibv_resize_cq
#undef ibv_dereg_mr

int gds_ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask)
{
	struct gds_qp *own = gds_qp_of(qp);
	if (own)
		return gds_modify_qp(own, attr, attr_mask);
	__typeof__(&ibv_modify_qp) other = DOORBELL_GDS_OTHER(ibv_modify_qp);
	return other ? other(qp, attr, attr_mask) : ENOSYS;
}

int gds_ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask, struct ibv_qp_init_attr *init_attr)
{
	struct gds_qp *own = gds_qp_of(qp);
	if (own)
		return gds_query_qp(own, attr, attr_mask, init_attr);
	__typeof__(&ibv_query_qp) other = DOORBELL_GDS_OTHER(ibv_query_qp);
	return other ? other(qp, attr, attr_mask, init_attr) : ENOSYS;
}

static int doorbell_gds_is_own_pd(const struct ibv_pd *pd)
{
	return pd && pd->context && doorbell_gds_is_own_context(pd->context);
}

/* A queue pair of libibverbs cannot use the CQs of a gds_qp. */
struct ibv_qp *gds_ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	if (attr && ((attr->send_cq && gds_owns_cq(attr->send_cq)) || (attr->recv_cq && gds_owns_cq(attr->recv_cq)))) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	/* Neither can it use a protection domain of gds_alloc_pd. */
	if (doorbell_gds_is_own_pd(pd)) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	__typeof__(&ibv_create_qp) other = DOORBELL_GDS_OTHER(ibv_create_qp);
	return other ? other(pd, attr) : NULL;
}

int gds_ibv_destroy_qp(struct ibv_qp *qp)
{
	if (gds_qp_of(qp))
		return EOPNOTSUPP;
	__typeof__(&ibv_destroy_qp) other = DOORBELL_GDS_OTHER(ibv_destroy_qp);
	return other ? other(qp) : ENOSYS;
}

int gds_ibv_destroy_cq(struct ibv_cq *cq)
{
	if (gds_owns_cq(cq))
		return EBUSY;
	__typeof__(&ibv_destroy_cq) other = DOORBELL_GDS_OTHER(ibv_destroy_cq);
	return other ? other(cq) : ENOSYS;
}

int gds_ibv_resize_cq(struct ibv_cq *cq, int cqe)
{
	if (gds_owns_cq(cq))
		return EOPNOTSUPP;
	__typeof__(&ibv_resize_cq) other = DOORBELL_GDS_OTHER(ibv_resize_cq);
	return other ? other(cq, cqe) : ENOSYS;
}

/*
 * Registers memory with libibverbs. Memory of a GPU that libibverbs refuses is registered with this library in the same domain. A
 * refusal of other memory is libibverbs' own: this library would ignore access rights that are optional.
 */
struct ibv_mr *gds_ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	/* libibverbs knows nothing of a protection domain of gds_alloc_pd. */
	if (doorbell_gds_is_own_pd(pd))
		return gds_reg_mr(pd, addr, length, access);
	__typeof__(&ibv_reg_mr) other = DOORBELL_GDS_OTHER(ibv_reg_mr);
	struct ibv_mr *mr = other ? other(pd, addr, length, access) : NULL;
	int error = errno;
	if (!mr && doorbell_gds_is_gpu_memory(addr))
		mr = gds_reg_mr(pd, addr, length, access);
	if (!mr)
		errno = error;
	return mr;
}

int gds_ibv_dereg_mr(struct ibv_mr *mr)
{
	if (gds_owns_mr(mr))
		return gds_dereg_mr(mr);
	__typeof__(&ibv_dereg_mr) other = DOORBELL_GDS_OTHER(ibv_dereg_mr);
	return other ? other(mr) : ENOSYS;
}
