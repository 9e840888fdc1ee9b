/*
 * libgdsync's interface (github.com/gpudirect/libgdsync) on top of libdoorbell, for C11, C++17 and host code of CUDA. Programs that were
 * written for libgdsync include this header, are linked with libgdsync, which lies beside libdoorbell, and change what docs/c.md lists.
 *
 * The declarations are those of API 2.2, with the names of MLNX_OFED 4 (ibv_exp_*, IBV_EXP_*) as names of libibverbs. If GDSYNC_API is
 * defined as 3 before the first inclusion, they are those of API 3.0: CQs are pointers, and gds_send_wr is struct ibv_send_wr.
 *
 * Contexts, protection domains and registered memory of libibverbs are used as they are. Calls of libibverbs with an object of a gds_qp are
 * calls of libgdsync in sources that include this header; in others they return EOPNOTSUPP. The `context` of these objects is for nothing
 * else; use `dev_context`.
 */
#ifndef DOORBELL_GDSYNC_H
#define DOORBELL_GDSYNC_H

#ifndef GDSYNC_API
#define GDSYNC_API 2
#endif
#if GDSYNC_API != 2 && GDSYNC_API != 3
#error "GDSYNC_API is 2 or 3"
#endif

#include "doorbell.h"

#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gdsync/verbs.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The same as in cuda.h, which may be included before or after this header, or not at all. */
typedef struct CUstream_st *CUstream;
typedef unsigned long long CUdeviceptr;

#include "gdsync/core.h"
#include "gdsync/mlx5.h"
#include "gdsync/tools.h"

/* libibverbs' calls of these names. An object of a gds_qp gets what docs/c.md says, each other object libibverbs' own call. */
int gds_ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask);
int gds_ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask, struct ibv_qp_init_attr *init_attr);
struct ibv_qp *gds_ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
int gds_ibv_destroy_qp(struct ibv_qp *qp);
int gds_ibv_destroy_cq(struct ibv_cq *cq);
int gds_ibv_resize_cq(struct ibv_cq *cq, int cqe);
struct ibv_mr *gds_ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access);
int gds_ibv_dereg_mr(struct ibv_mr *mr);

#ifdef __cplusplus
}
#endif

#undef ibv_reg_mr
#define ibv_modify_qp(qp, attr, attr_mask) gds_ibv_modify_qp(qp, attr, attr_mask)
#define ibv_query_qp(qp, attr, attr_mask, init_attr) gds_ibv_query_qp(qp, attr, attr_mask, init_attr)
#define ibv_create_qp(pd, attr) gds_ibv_create_qp(pd, attr)
#define ibv_destroy_qp(qp) gds_ibv_destroy_qp(qp)
#define ibv_destroy_cq(cq) gds_ibv_destroy_cq(cq)
#define ibv_resize_cq(cq, cqe) gds_ibv_resize_cq(cq, cqe)
#define ibv_reg_mr(pd, addr, length, access) gds_ibv_reg_mr(pd, addr, length, access)
#define ibv_dereg_mr(mr) gds_ibv_dereg_mr(mr)

#endif /* DOORBELL_GDSYNC_H */
