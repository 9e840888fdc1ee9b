/* The few calls of rdma-core that bindings to <infiniband/verbs.h> do not reach, or not whole: see dv.h. */
#include <errno.h>
#include <string.h>

#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>

#include "dv.h"

int doorbell_dv_is_mlx5(struct ibv_device *device)
{
	return mlx5dv_is_supported(device);
}

int doorbell_dv_query_port(struct ibv_context *context, uint8_t port, struct doorbell_dv_port *result)
{
	/* A macro over a function that asks the provider for the structure of today's length; the symbol of that name does not. */
	struct ibv_port_attr attributes;
	const int error = ibv_query_port(context, port, &attributes);

	if (error)
		return error;
	result->state = attributes.state;
	result->active_mtu = attributes.active_mtu;
	result->link_layer = attributes.link_layer;
	result->gid_count = attributes.gid_tbl_len > 0 ? (uint32_t)attributes.gid_tbl_len : 0;
	result->lid = attributes.lid;
	return 0;
}

int doorbell_dv_query_gid(struct ibv_context *context, uint8_t port, uint32_t index, struct doorbell_dv_gid *result)
{
	struct ibv_gid_entry entry;
	const int error = ibv_query_gid_ex(context, port, index, &entry, 0);

	if (error)
		return error;
	memcpy(result->raw, entry.gid.raw, sizeof(result->raw));
	result->type = entry.gid_type;
	return 0;
}

struct ibv_td *doorbell_dv_alloc_td(struct ibv_context *context)
{
	struct ibv_td_init_attr attributes = {0};

	return ibv_alloc_td(context, &attributes);
}

int doorbell_dv_dealloc_td(struct ibv_td *td)
{
	return ibv_dealloc_td(td);
}

struct ibv_pd *doorbell_dv_alloc_parent_domain(struct ibv_pd *pd, struct ibv_td *td)
{
	struct ibv_parent_domain_init_attr attributes = {.pd = pd, .td = td};

	return ibv_alloc_parent_domain(pd->context, &attributes);
}

struct ibv_qp *doorbell_dv_create_qp(struct ibv_pd *pd, struct ibv_cq *send_cq, struct ibv_cq *recv_cq,
				     const struct doorbell_dv_sizes *sizes)
{
	/* The provider sizes the ring for the longest of the operations named. With these, and one piece of memory, it is a WQEBB: so
	 * the ring gets as many WQEBBs as are asked for, and the library's own queue sees to longer requests. */
	struct ibv_qp_init_attr_ex attributes = {
		.qp_type = IBV_QPT_RC,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = pd,
		.send_cq = send_cq,
		.recv_cq = recv_cq,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_SEND |
				  IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
				  IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD,
		.cap = {
			.max_send_wr = sizes->send_wqebbs,
			.max_recv_wr = sizes->recv_wqes,
			.max_send_sge = 1,
			.max_recv_sge = sizes->recv_segments,
		},
	};
	/* A card would else put short payloads of receives and reads into the CQE instead of their memory, where no stream looks. */
	struct mlx5dv_qp_init_attr direct = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS,
		.create_flags = MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE,
	};

	return mlx5dv_create_qp(pd->context, &attributes, &direct);
}

int doorbell_dv_queues(struct ibv_qp *qp, struct ibv_cq *send_cq, struct ibv_cq *recv_cq,
		       struct doorbell_dv_queues *result)
{
	struct mlx5dv_qp pair = {0};
	struct mlx5dv_cq send = {0}, recv = {0};
	struct mlx5dv_obj objects = {.qp = {.in = qp, .out = &pair}, .cq = {.in = send_cq, .out = &send}};
	int error = mlx5dv_init_obj(&objects, MLX5DV_OBJ_QP | MLX5DV_OBJ_CQ);

	if (error)
		return error;
	objects.cq.in = recv_cq;
	objects.cq.out = &recv;
	error = mlx5dv_init_obj(&objects, MLX5DV_OBJ_CQ);
	if (error)
		return error;
	result->send_ring = pair.sq.buf;
	result->recv_ring = pair.rq.buf;
	result->record = (uint32_t *)pair.dbrec;
	result->uar = pair.bf.reg;
	result->send_cq = send.buf;
	result->recv_cq = recv.buf;
	result->send_cq_record = (uint32_t *)send.dbrec;
	result->recv_cq_record = (uint32_t *)recv.dbrec;
	result->send_wqebbs = pair.sq.wqe_cnt;
	result->send_stride_bytes = pair.sq.stride;
	result->recv_wqes = pair.rq.wqe_cnt;
	result->recv_stride_bytes = pair.rq.stride;
	result->uar_bytes = pair.bf.size;
	result->send_cqes = send.cqe_cnt;
	result->recv_cqes = recv.cqe_cnt;
	result->send_cqe_bytes = send.cqe_size;
	result->recv_cqe_bytes = recv.cqe_size;
	return 0;
}
