/*
 * What the library needs of rdma-core beyond plain verbs: direct access to the memory of queues, and calls that <infiniband/verbs.h>
 * has as inline functions or macros only. bindgen reads this header; the objects of verbs stay opaque in it.
 */
#ifndef DOORBELL_DV_H
#define DOORBELL_DV_H

#include <stddef.h>
#include <stdint.h>

struct ibv_ah;
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
	uint32_t message_bytes; /* the longest message */
	uint16_t lid;
	uint8_t flags; /* IBV_QPF_* */
};

struct doorbell_dv_gid {
	uint8_t raw[16];
	uint32_t type; /* enum ibv_gid_type */
	uint32_t interface; /* of the network, 0 without one */
};

/* Sizes of a queue pair, as asked for. */
struct doorbell_dv_sizes {
	uint32_t send_wqebbs;
	uint32_t recv_wqes;
	uint32_t recv_segments;
	uint32_t atomics; /* 0: the queue pair is to have none, because the device has none */
	uint32_t datagrams; /* 1: a UD queue pair; 0: an RC one */
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

/* What a device says that it can do at most (ibv_query_device). */
struct doorbell_dv_limits {
	uint32_t qp_wrs;
	uint32_t sges;
	uint32_t cqes;
	uint32_t reads_out; /* reads and atomics that a queue pair may have under way */
	uint32_t reads_in; /* and those of its peer that it can serve */
	uint32_t atomics; /* 0: none that even the device itself keeps whole */
};

/* Sizes of a queue pair of plain verbs: as asked for, and then as they were made. */
struct doorbell_dv_caps {
	uint32_t send_wrs;
	uint32_t recv_wrs;
	uint32_t send_sges;
	uint32_t recv_sges;
	uint32_t inline_bytes;
	uint32_t datagrams; /* 1: a UD queue pair; 0: an RC one */
};

/* Bytes of an address vector: struct mlx5_wqe_av. */
#define DOORBELL_DV_AV_BYTES 48

/* A piece of memory: struct ibv_sge. */
struct doorbell_dv_sge {
	uint64_t addr;
	uint32_t len_bytes;
	uint32_t lkey;
};

/* A send request: struct ibv_send_wr without its pointers. */
struct doorbell_dv_send {
	uint64_t wr_id;
	uint64_t remote_addr;
	uint64_t compare_add;
	uint64_t swap;
	uint32_t rkey;
	uint32_t imm; /* network order */
	uint32_t opcode; /* enum ibv_wr_opcode */
	uint32_t flags; /* enum ibv_send_flags */
	uint32_t first_sge;
	uint32_t sges;
	uint64_t ah; /* the address of a struct ibv_ah, of a request of a UD queue pair; else 0 */
	uint32_t remote_qpn; /* with `ah` */
	uint32_t remote_qkey;
};

/* A receive: struct ibv_recv_wr. */
struct doorbell_dv_recv {
	uint64_t wr_id;
	uint32_t first_sge;
	uint32_t sges;
};

/* A completion: struct ibv_wc. */
struct doorbell_dv_wc {
	uint64_t wr_id;
	uint32_t status; /* enum ibv_wc_status */
	uint32_t opcode; /* enum ibv_wc_opcode; means something after success */
	uint32_t vendor_err;
	uint32_t byte_len;
	uint32_t imm; /* network order */
	uint32_t flags; /* enum ibv_wc_flags */
	uint32_t source_qpn; /* this and the next: of a receive of a UD queue pair */
	uint32_t source_lid;
};

/* Where the memory of queues and records comes from. The last arguments are NULL. */
struct doorbell_dv_allocator {
	void *(*alloc)(size_t bytes, void *nothing);
	void (*release)(void *start, void *nothing);
};

/* Whether the mlx5 provider drives that device. */
int doorbell_dv_is_mlx5(struct ibv_device *device);

/* Has the mlx5 provider ask these for the memory of the context's queues and records. Zero, or an errno. */
int doorbell_dv_set_allocator(struct ibv_context *context, const struct doorbell_dv_allocator *allocator);

/* Zero, or the errno of ibv_query_port. */
int doorbell_dv_query_port(struct ibv_context *context, uint8_t port, struct doorbell_dv_port *result);

/* Zero, or the errno of ibv_query_gid_ex: ENODATA where the table has no entry. */
int doorbell_dv_query_gid(struct ibv_context *context, uint8_t port, uint32_t index, struct doorbell_dv_gid *result);

/* ibv_alloc_td, ibv_dealloc_td and ibv_alloc_parent_domain: inline functions that rdma-sys 0.3.0 writes anew, and takes for missing,
 * because it compares the mark of an extended context with 32 bits of it. */
struct ibv_td *doorbell_dv_alloc_td(struct ibv_context *context);
int doorbell_dv_dealloc_td(struct ibv_td *td);
/* `td` may be NULL. If `allocator` is not NULL, it must outlive the domain, and the provider asks it for the memory of queues and records that are
 * made with the domain. */
struct ibv_pd *doorbell_dv_alloc_parent_domain(struct ibv_pd *pd, struct ibv_td *td, const struct doorbell_dv_allocator *allocator);

/* A completion queue with entries of 64 bytes by mlx5dv_create_cq, in the parent domain `parent` if that is not NULL; NULL and errno if it cannot
 * be had. */
struct ibv_cq *doorbell_dv_create_cq(struct ibv_context *context, uint32_t cqes, struct ibv_pd *parent);

/* The context of a protection domain, and the number that the kernel has for the domain: a parent domain has that of its own domain. */
struct ibv_context *doorbell_dv_pd_context(const struct ibv_pd *pd);
uint32_t doorbell_dv_pd_handle(const struct ibv_pd *pd);

/* A queue pair in RESET by mlx5dv_create_qp; NULL and errno if it cannot be had. */
struct ibv_qp *doorbell_dv_create_qp(struct ibv_pd *pd, struct ibv_cq *send_cq, struct ibv_cq *recv_cq,
				     const struct doorbell_dv_sizes *sizes);

/* mlx5dv_init_obj of all three: zero, or its errno. From here on the CQs are not for ibv_poll_cq any more. */
int doorbell_dv_queues(struct ibv_qp *qp, struct ibv_cq *send_cq, struct ibv_cq *recv_cq,
		       struct doorbell_dv_queues *result);

/* mlx5dv_init_obj of an address handle of the mlx5 provider: writes its address vector, DOORBELL_DV_AV_BYTES bytes. Zero, or its errno. */
int doorbell_dv_address_vector(struct ibv_ah *ah, uint8_t *result);
/* The context of an address handle. */
struct ibv_context *doorbell_dv_ah_context(const struct ibv_ah *ah);

/* Zero, or the errno of ibv_query_device. */
int doorbell_dv_query_limits(struct ibv_context *context, struct doorbell_dv_limits *result);

/* A queue pair in RESET by plain verbs; NULL and errno if it cannot be had. */
struct ibv_qp *doorbell_dv_create_plain_qp(struct ibv_pd *pd, struct ibv_cq *send_cq, struct ibv_cq *recv_cq,
					   struct doorbell_dv_caps *caps);

/* ibv_post_send, ibv_post_recv and ibv_poll_cq, which are inline functions over the operations of a context. The first two give how many
 * of the requests were posted, in order, and in *error the errno of the first that was not. Requests name `sges` by their places. */
uint32_t doorbell_dv_post_send(struct ibv_qp *qp, const struct doorbell_dv_send *requests, uint32_t count,
			       const struct doorbell_dv_sge *sges, int *error);
uint32_t doorbell_dv_post_recv(struct ibv_qp *qp, const struct doorbell_dv_recv *requests, uint32_t count,
			       const struct doorbell_dv_sge *sges, int *error);
/* How many completions there were, or a negative number if the queue is broken. */
int doorbell_dv_poll_cq(struct ibv_cq *cq, struct doorbell_dv_wc *result, uint32_t count);

/* Requests that one call takes. */
#define DOORBELL_DV_BATCH 16

#endif
