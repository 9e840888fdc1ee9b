/* The few calls of rdma-core that bindings to <infiniband/verbs.h> do not reach, or not whole: see dv.h. */
#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>

#include "dv.h"

int doorbell_dv_is_mlx5(struct ibv_device *device)
{
	return mlx5dv_is_supported(device);
}

int doorbell_dv_set_allocator(struct ibv_context *context, const struct doorbell_dv_allocator *allocator)
{
	struct mlx5dv_ctx_allocators allocators = {.alloc = allocator->alloc, .free = allocator->release};

	return mlx5dv_set_context_attr(context, MLX5DV_CTX_ATTR_BUF_ALLOCATORS, &allocators);
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
	result->message_bytes = attributes.max_msg_sz;
	result->lid = attributes.lid;
	result->flags = attributes.flags;
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
	result->interface = entry.ndev_ifindex;
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

/* Allocators of a parent domain are asked for an alignment, too: the library's memory begins at a page. */
static void *alloc_in_domain(struct ibv_pd *pd, void *allocator, size_t bytes, size_t alignment, uint64_t resource_type)
{
	(void)pd;
	(void)resource_type;
	if (alignment > (size_t)sysconf(_SC_PAGESIZE))
		return IBV_ALLOCATOR_USE_DEFAULT;
	return ((const struct doorbell_dv_allocator *)allocator)->alloc(bytes, NULL);
}

static void release_in_domain(struct ibv_pd *pd, void *allocator, void *start, uint64_t resource_type)
{
	(void)pd;
	(void)resource_type;
	((const struct doorbell_dv_allocator *)allocator)->release(start, NULL);
}

struct ibv_pd *doorbell_dv_alloc_parent_domain(struct ibv_pd *pd, struct ibv_td *td, const struct doorbell_dv_allocator *allocator)
{
	struct ibv_parent_domain_init_attr attributes = {.pd = pd, .td = td};

	if (allocator) {
		attributes.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
		attributes.alloc = alloc_in_domain;
		attributes.free = release_in_domain;
		/* Only handed back to the functions above. */
		attributes.pd_context = (void *)(uintptr_t)allocator;
	}
	return ibv_alloc_parent_domain(pd->context, &attributes);
}

struct ibv_context *doorbell_dv_pd_context(const struct ibv_pd *pd)
{
	return pd->context;
}

uint32_t doorbell_dv_pd_handle(const struct ibv_pd *pd)
{
	return pd->handle;
}

struct ibv_cq *doorbell_dv_create_cq(struct ibv_context *context, uint32_t cqes, struct ibv_pd *parent)
{
	struct ibv_cq_init_attr_ex attributes = {
		.cqe = cqes,
		.comp_mask = parent ? IBV_CQ_INIT_ATTR_MASK_PD : 0,
		.parent_domain = parent,
	};
	/* The provider takes the size from MLX5_CQE_SIZE of the environment if it is not asked for. */
	struct mlx5dv_cq_init_attr direct = {.comp_mask = MLX5DV_CQ_INIT_ATTR_MASK_CQE_SIZE, .cqe_size = 64};
	struct ibv_cq_ex *const cq = mlx5dv_create_cq(context, &attributes, &direct);

	return cq ? ibv_cq_ex_to_cq(cq) : NULL;
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
				  IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ,
		.cap = {
			.max_send_wr = sizes->send_wqebbs,
			.max_recv_wr = sizes->recv_wqes,
			.max_send_sge = 1,
			.max_recv_sge = sizes->recv_segments,
		},
	};
	/* The provider refuses these on a function without atomics. */
	if (sizes->atomics)
		attributes.send_ops_flags |= IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
	if (sizes->datagrams) {
		/* With the address the provider takes two WQEBBs for each. */
		attributes.qp_type = IBV_QPT_UD;
		attributes.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
		attributes.cap.max_send_wr = (sizes->send_wqebbs + 1) / 2;
	}
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

_Static_assert(sizeof(struct mlx5_wqe_av) == DOORBELL_DV_AV_BYTES && sizeof(struct mlx5_wqe_datagram_seg) == DOORBELL_DV_AV_BYTES,
	       "the datagram segment is the address vector");

int doorbell_dv_address_vector(struct ibv_ah *ah, uint8_t *result)
{
	struct mlx5dv_ah address = {0};
	struct mlx5dv_obj objects = {.ah = {.in = ah, .out = &address}};
	const int error = mlx5dv_init_obj(&objects, MLX5DV_OBJ_AH);

	if (error)
		return error;
	memcpy(result, address.av, DOORBELL_DV_AV_BYTES);
	return 0;
}

struct ibv_context *doorbell_dv_ah_context(const struct ibv_ah *ah)
{
	return ah->context;
}

int doorbell_dv_query_limits(struct ibv_context *context, struct doorbell_dv_limits *result)
{
	struct ibv_device_attr attributes;
	const int error = ibv_query_device(context, &attributes);

	if (error)
		return error;
	/* Numbers that are signed and never negative. */
	result->qp_wrs = attributes.max_qp_wr > 0 ? (uint32_t)attributes.max_qp_wr : 0;
	result->sges = attributes.max_sge > 0 ? (uint32_t)attributes.max_sge : 0;
	result->cqes = attributes.max_cqe > 0 ? (uint32_t)attributes.max_cqe : 0;
	result->reads_out = attributes.max_qp_init_rd_atom > 0 ? (uint32_t)attributes.max_qp_init_rd_atom : 0;
	result->reads_in = attributes.max_qp_rd_atom > 0 ? (uint32_t)attributes.max_qp_rd_atom : 0;
	result->atomics = attributes.atomic_cap;
	return 0;
}

struct ibv_qp *doorbell_dv_create_plain_qp(struct ibv_pd *pd, struct ibv_cq *send_cq, struct ibv_cq *recv_cq,
					   struct doorbell_dv_caps *caps)
{
	struct ibv_qp_init_attr attributes = {
		.qp_type = caps->datagrams ? IBV_QPT_UD : IBV_QPT_RC,
		.send_cq = send_cq,
		.recv_cq = recv_cq,
		.cap = {
			.max_send_wr = caps->send_wrs,
			.max_recv_wr = caps->recv_wrs,
			.max_send_sge = caps->send_sges,
			.max_recv_sge = caps->recv_sges,
			.max_inline_data = caps->inline_bytes,
		},
	};
	struct ibv_qp *const qp = ibv_create_qp(pd, &attributes);

	if (qp) {
		caps->send_wrs = attributes.cap.max_send_wr;
		caps->recv_wrs = attributes.cap.max_recv_wr;
		caps->send_sges = attributes.cap.max_send_sge;
		caps->recv_sges = attributes.cap.max_recv_sge;
		caps->inline_bytes = attributes.cap.max_inline_data;
	}
	return qp;
}

_Static_assert(sizeof(struct doorbell_dv_sge) == sizeof(struct ibv_sge) &&
		       offsetof(struct doorbell_dv_sge, addr) == offsetof(struct ibv_sge, addr) &&
		       offsetof(struct doorbell_dv_sge, len_bytes) == offsetof(struct ibv_sge, length) &&
		       offsetof(struct doorbell_dv_sge, lkey) == offsetof(struct ibv_sge, lkey),
	       "a list of pieces is handed on as it is");

static struct ibv_sge *pieces(const struct doorbell_dv_sge *sges, uint32_t first)
{
	/* verbs takes the list without const and does not change it. */
	return (struct ibv_sge *)(uintptr_t)(sges + first);
}

uint32_t doorbell_dv_post_send(struct ibv_qp *qp, const struct doorbell_dv_send *requests, uint32_t count,
			       const struct doorbell_dv_sge *sges, int *error)
{
	struct ibv_send_wr list[DOORBELL_DV_BATCH];
	struct ibv_send_wr *refused = list;
	uint32_t i;

	*error = 0;
	if (count == 0)
		return 0;
	if (count > DOORBELL_DV_BATCH)
		count = DOORBELL_DV_BATCH;
	for (i = 0; i < count; i++) {
		const struct doorbell_dv_send *const from = &requests[i];
		struct ibv_send_wr *const to = &list[i];

		memset(to, 0, sizeof(*to));
		to->wr_id = from->wr_id;
		to->next = i + 1 < count ? to + 1 : NULL;
		to->sg_list = pieces(sges, from->first_sge);
		to->num_sge = (int)from->sges;
		to->opcode = (enum ibv_wr_opcode)from->opcode;
		to->send_flags = from->flags;
		to->imm_data = from->imm;
		if (from->ah) {
			to->wr.ud.ah = (struct ibv_ah *)(uintptr_t)from->ah;
			to->wr.ud.remote_qpn = from->remote_qpn;
			to->wr.ud.remote_qkey = from->remote_qkey;
		} else if (from->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || from->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
			to->wr.atomic.remote_addr = from->remote_addr;
			to->wr.atomic.compare_add = from->compare_add;
			to->wr.atomic.swap = from->swap;
			to->wr.atomic.rkey = from->rkey;
		} else {
			to->wr.rdma.remote_addr = from->remote_addr;
			to->wr.rdma.rkey = from->rkey;
		}
	}
	*error = ibv_post_send(qp, list, &refused);
	if (*error == 0)
		return count;
	/* Some providers give -1 and errno, some a negative errno. */
	if (*error < 0)
		*error = *error == -1 ? errno : -*error;
	return refused >= list && refused < list + count ? (uint32_t)(refused - list) : 0;
}

uint32_t doorbell_dv_post_recv(struct ibv_qp *qp, const struct doorbell_dv_recv *requests, uint32_t count,
			       const struct doorbell_dv_sge *sges, int *error)
{
	struct ibv_recv_wr list[DOORBELL_DV_BATCH];
	struct ibv_recv_wr *refused = list;
	uint32_t i;

	*error = 0;
	if (count == 0)
		return 0;
	if (count > DOORBELL_DV_BATCH)
		count = DOORBELL_DV_BATCH;
	for (i = 0; i < count; i++) {
		list[i].wr_id = requests[i].wr_id;
		list[i].next = i + 1 < count ? &list[i + 1] : NULL;
		list[i].sg_list = pieces(sges, requests[i].first_sge);
		list[i].num_sge = (int)requests[i].sges;
	}
	*error = ibv_post_recv(qp, list, &refused);
	if (*error == 0)
		return count;
	if (*error < 0)
		*error = *error == -1 ? errno : -*error;
	return refused >= list && refused < list + count ? (uint32_t)(refused - list) : 0;
}

int doorbell_dv_poll_cq(struct ibv_cq *cq, struct doorbell_dv_wc *result, uint32_t count)
{
	struct ibv_wc found[DOORBELL_DV_BATCH];
	const int got = ibv_poll_cq(cq, count < DOORBELL_DV_BATCH ? (int)count : DOORBELL_DV_BATCH, found);
	int i;

	for (i = 0; i < got; i++) {
		result[i].wr_id = found[i].wr_id;
		result[i].status = found[i].status;
		result[i].vendor_err = found[i].vendor_err;
		/* The others of a completion in error are undefined. */
		result[i].opcode = found[i].status == IBV_WC_SUCCESS ? found[i].opcode : 0;
		result[i].byte_len = found[i].status == IBV_WC_SUCCESS ? found[i].byte_len : 0;
		result[i].flags = found[i].status == IBV_WC_SUCCESS ? found[i].wc_flags : 0;
		result[i].imm = found[i].status == IBV_WC_SUCCESS ? found[i].imm_data : 0;
		result[i].source_qpn = found[i].status == IBV_WC_SUCCESS ? found[i].src_qp : 0;
		result[i].source_lid = found[i].status == IBV_WC_SUCCESS ? found[i].slid : 0;
	}
	return got;
}
