/* The calls of a source that does not know gdsync.h: each hands an object of gdsync.h to libibverbs. */
#ifndef FOREIGN_H
#define FOREIGN_H

#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif
int foreign_modify_qp(struct ibv_qp *qp);
int foreign_query_qp(struct ibv_qp *qp);
int foreign_destroy_qp(struct ibv_qp *qp);
int foreign_destroy_cq(struct ibv_cq *cq);
int foreign_resize_cq(struct ibv_cq *cq);
int foreign_notify(struct ibv_cq *cq);
int foreign_query_port(struct ibv_context *context);
int foreign_query_device(struct ibv_context *context);
int foreign_close_device(struct ibv_context *context);
int foreign_dealloc_pd(struct ibv_pd *pd);
int foreign_objects_of_context(struct ibv_context *context);
int foreign_objects_of_pd(struct ibv_pd *pd, void *start);
#ifdef __cplusplus
}
#endif

#endif
