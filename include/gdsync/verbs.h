/* The names of MLNX_OFED 4 (infiniband/verbs_exp.h) that libgdsync's programs use, as names of libibverbs. */
#ifndef DOORBELL_GDSYNC_VERBS_H
#define DOORBELL_GDSYNC_VERBS_H

#include <infiniband/verbs.h>

union ibv_exp_imm {
	uint32_t imm_data;
	uint32_t invalidate_rkey;
};

/* The fields of ibv_send_wr, laid out as there, with both names. */
struct ibv_exp_send_wr {
	uint64_t wr_id;
	struct ibv_exp_send_wr *next;
	struct ibv_sge *sg_list;
	int num_sge;
	union {
		enum ibv_wr_opcode opcode;
		enum ibv_wr_opcode exp_opcode;
	};
	union {
		unsigned int send_flags;
		unsigned int exp_send_flags;
	};
	union {
		uint32_t imm_data; /* in network byte order */
		union ibv_exp_imm ex;
	};
	union {
		struct {
			uint64_t remote_addr;
			uint32_t rkey;
		} rdma;
		struct {
			uint64_t remote_addr;
			uint64_t compare_add;
			uint64_t swap;
			uint32_t rkey;
		} atomic;
		struct {
			struct ibv_ah *ah;
			uint32_t remote_qpn;
			uint32_t remote_qkey;
		} ud;
	} wr;
	uint32_t comp_mask; /* not used */
};

#ifndef BEGIN_C_DECLS
#ifdef __cplusplus
#define BEGIN_C_DECLS extern "C" {
#define END_C_DECLS }
#else
#define BEGIN_C_DECLS
#define END_C_DECLS
#endif
#endif

#define ibv_exp_qp_init_attr ibv_qp_init_attr
#define ibv_exp_wr_opcode ibv_wr_opcode
#define ibv_exp_wc ibv_wc
#define ibv_exp_poll_cq(cq, count, wc, size) ibv_poll_cq(cq, count, wc)
#define IBV_EXP_WR_SEND IBV_WR_SEND
#define IBV_EXP_WR_SEND_WITH_IMM IBV_WR_SEND_WITH_IMM
#define IBV_EXP_WR_RDMA_WRITE IBV_WR_RDMA_WRITE
#define IBV_EXP_WR_RDMA_WRITE_WITH_IMM IBV_WR_RDMA_WRITE_WITH_IMM
#define IBV_EXP_WR_RDMA_READ IBV_WR_RDMA_READ
#define IBV_EXP_WR_ATOMIC_CMP_AND_SWP IBV_WR_ATOMIC_CMP_AND_SWP
#define IBV_EXP_WR_ATOMIC_FETCH_AND_ADD IBV_WR_ATOMIC_FETCH_AND_ADD
#define IBV_EXP_SEND_FENCE IBV_SEND_FENCE
#define IBV_EXP_SEND_SIGNALED IBV_SEND_SIGNALED
#define IBV_EXP_SEND_SOLICITED IBV_SEND_SOLICITED
#define IBV_EXP_SEND_INLINE IBV_SEND_INLINE
#define IBV_EXP_ACCESS_LOCAL_WRITE IBV_ACCESS_LOCAL_WRITE
#define IBV_EXP_ACCESS_REMOTE_WRITE IBV_ACCESS_REMOTE_WRITE
#define IBV_EXP_ACCESS_REMOTE_READ IBV_ACCESS_REMOTE_READ
#define IBV_EXP_ACCESS_REMOTE_ATOMIC IBV_ACCESS_REMOTE_ATOMIC

#endif /* DOORBELL_GDSYNC_VERBS_H */
