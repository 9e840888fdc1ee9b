/*
 * What the library needs of rdma-core beyond plain verbs: direct access to the memory of queues, and calls that <infiniband/verbs.h>
 * has as inline functions or macros only. bindgen reads this header; the objects of verbs stay opaque in it.
 */
#ifndef DOORBELL_DV_H
#define DOORBELL_DV_H

#include <stdint.h>

struct ibv_context;
struct ibv_cq;
struct ibv_device;
struct ibv_pd;
struct ibv_qp;
struct ibv_td;

/* A port, as far as a connection needs it. The numbers are those of verbs. */
struct doorbell_dv_port {
	uint32_t state;
	uint32_t active_mtu;
	uint32_t link_layer;
	uint32_t gid_count;
	uint16_t lid;
};

struct doorbell_dv_gid {
	uint8_t raw[16];
	uint32_t type; /* enum ibv_gid_type */
};

/* Sizes of a queue pair, as asked for. */
struct doorbell_dv_sizes {
	uint32_t send_wqebbs;
	uint32_t recv_wqes;
	uint32_t recv_segments;
};

/* Where the parts of a queue pair lie, and how long they are. */
struct doorbell_dv_queues {
	uint8_t *send_ring;
	uint8_t *recv_ring;
	uint32_t *record;
	uint8_t *uar;
	uint8_t *send_cq;
	uint8_t *recv_cq;
	uint32_t *send_cq_record;
	uint32_t *recv_cq_record;
	uint32_t send_wqebbs;
	uint32_t send_stride_bytes;
	uint32_t recv_wqes;
	uint32_t recv_stride_bytes;
	uint32_t uar_bytes; /* of each of the two BlueFlame buffers; 0 if the register takes doorbells only */
	uint32_t send_cqes;
	uint32_t recv_cqes;
	uint32_t send_cqe_bytes;
	uint32_t recv_cqe_bytes;
};

/* Whether the mlx5 provider drives that device. */
int doorbell_dv_is_mlx5(struct ibv_device *device);

/* Zero, or the errno of ibv_query_port. */
int doorbell_dv_query_port(struct ibv_context *context, uint8_t port, struct doorbell_dv_port *result);

/* Zero, or the errno of ibv_query_gid_ex: ENODATA where the table has no entry. */
int doorbell_dv_query_gid(struct ibv_context *context, uint8_t port, uint32_t index, struct doorbell_dv_gid *result);

/* ibv_alloc_td, ibv_dealloc_td and ibv_alloc_parent_domain: inline functions that rdma-sys 0.3.0 writes anew, and takes for missing,
 * because it compares the mark of an extended context with 32 bits of it. */
struct ibv_td *doorbell_dv_alloc_td(struct ibv_context *context);
int doorbell_dv_dealloc_td(struct ibv_td *td);
struct ibv_pd *doorbell_dv_alloc_parent_domain(struct ibv_pd *pd, struct ibv_td *td);

/* A reliable-connected queue pair in RESET by mlx5dv_create_qp; NULL and errno if it cannot be had. */
struct ibv_qp *doorbell_dv_create_qp(struct ibv_pd *pd, struct ibv_cq *send_cq, struct ibv_cq *recv_cq,
				     const struct doorbell_dv_sizes *sizes);

/* mlx5dv_init_obj of all three: zero, or its errno. From here on the CQs are not for ibv_poll_cq any more. */
int doorbell_dv_queues(struct ibv_qp *qp, struct ibv_cq *send_cq, struct ibv_cq *recv_cq,
		       struct doorbell_dv_queues *result);

#endif
