/*
 * The types of verbs.h that libgdsync's calls use. If libibverbs' headers are installed, these are its own. Otherwise
 * this header declares the part that is needed, with the same names, values and layouts, so that programs compile on
 * machines without libibverbs. DOORBELL_GDSYNC_OWN_VERBS, defined before gdsync.h is included, selects these
 * declarations in any case.
 */
#ifndef DOORBELL_GDSYNC_VERBS_H
#define DOORBELL_GDSYNC_VERBS_H

#ifndef DOORBELL_GDSYNC_H
#error "include <gdsync.h>, which includes this"
#endif

#if !defined(DOORBELL_GDSYNC_OWN_VERBS) && !defined(INFINIBAND_VERBS_H)
#ifdef __has_include
#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>
#endif
#endif
#endif

#ifndef INFINIBAND_VERBS_H
#ifndef DOORBELL_GDSYNC_OWN_VERBS
#define DOORBELL_GDSYNC_OWN_VERBS
#endif

/* Values and names are those of libibverbs 1.14 (rdma-core 44). */

enum { IBV_SYSFS_NAME_MAX = 64, IBV_SYSFS_PATH_MAX = 256 };

enum ibv_wc_status {
	IBV_WC_SUCCESS = 0,
	IBV_WC_LOC_LEN_ERR = 1,
	IBV_WC_LOC_QP_OP_ERR = 2,
	IBV_WC_LOC_PROT_ERR = 4,
	IBV_WC_WR_FLUSH_ERR = 5,
	IBV_WC_BAD_RESP_ERR = 7,
	IBV_WC_LOC_ACCESS_ERR = 8,
	IBV_WC_REM_INV_REQ_ERR = 9,
	IBV_WC_REM_ACCESS_ERR = 10,
	IBV_WC_REM_OP_ERR = 11,
	IBV_WC_RETRY_EXC_ERR = 12,
	IBV_WC_RNR_RETRY_EXC_ERR = 13,
	IBV_WC_REM_ABORT_ERR = 16,
	IBV_WC_FATAL_ERR = 19,
	IBV_WC_RESP_TIMEOUT_ERR = 20,
	IBV_WC_GENERAL_ERR = 21
};

enum ibv_wc_opcode {
	IBV_WC_SEND = 0,
	IBV_WC_RDMA_WRITE = 1,
	IBV_WC_RDMA_READ = 2,
	IBV_WC_COMP_SWAP = 3,
	IBV_WC_FETCH_ADD = 4,
	IBV_WC_RECV = 128,
	IBV_WC_RECV_RDMA_WITH_IMM = 129
};

enum ibv_wc_flags { IBV_WC_GRH = 1, IBV_WC_WITH_IMM = 2 };

enum ibv_access_flags {
	IBV_ACCESS_LOCAL_WRITE = 1,
	IBV_ACCESS_REMOTE_WRITE = 2,
	IBV_ACCESS_REMOTE_READ = 4,
	IBV_ACCESS_REMOTE_ATOMIC = 8
};

enum ibv_qp_type { IBV_QPT_RC = 2, IBV_QPT_UC = 3, IBV_QPT_UD = 4 };

enum ibv_qp_state { IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPS_ERR };

enum ibv_wr_opcode {
	IBV_WR_RDMA_WRITE = 0,
	IBV_WR_RDMA_WRITE_WITH_IMM = 1,
	IBV_WR_SEND = 2,
	IBV_WR_SEND_WITH_IMM = 3,
	IBV_WR_RDMA_READ = 4,
	IBV_WR_ATOMIC_CMP_AND_SWP = 5,
	IBV_WR_ATOMIC_FETCH_AND_ADD = 6
};

enum ibv_send_flags {
	IBV_SEND_FENCE = 1,
	IBV_SEND_SIGNALED = 2,
	IBV_SEND_SOLICITED = 4,
	IBV_SEND_INLINE = 8
};

struct ibv_ah;
struct ibv_comp_channel;
struct ibv_cq;
struct ibv_qp;
struct ibv_srq;
struct ibv_wc;
struct ibv_send_wr;
struct ibv_recv_wr;

struct ibv_device {
	void (*private_ops[2])(void);
	int node_type;
	int transport_type;
	char name[IBV_SYSFS_NAME_MAX];
	char dev_name[IBV_SYSFS_NAME_MAX];
	char dev_path[IBV_SYSFS_PATH_MAX];
	char ibdev_path[IBV_SYSFS_PATH_MAX];
};

struct ibv_context_ops {
	void (*private_first[11])(void);
	int (*poll_cq)(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);
	int (*req_notify_cq)(struct ibv_cq *cq, int solicited_only);
	void (*private_middle[12])(void);
	int (*post_send)(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);
	int (*post_recv)(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
	void (*private_last[5])(void);
};

struct ibv_context {
	struct ibv_device *device;
	struct ibv_context_ops ops;
	int cmd_fd;
	int async_fd;
	int num_comp_vectors;
	pthread_mutex_t mutex;
	void *abi_compat;
};

struct ibv_pd {
	struct ibv_context *context;
	uint32_t handle;
};

struct ibv_mr {
	struct ibv_context *context;
	struct ibv_pd *pd;
	void *addr;
	size_t length;
	uint32_t handle;
	uint32_t lkey;
	uint32_t rkey;
};

struct ibv_sge {
	uint64_t addr;
	uint32_t length;
	uint32_t lkey;
};

struct ibv_send_wr {
	uint64_t wr_id;
	struct ibv_send_wr *next;
	struct ibv_sge *sg_list;
	int num_sge;
	enum ibv_wr_opcode opcode;
	unsigned int send_flags;
	uint32_t imm_data; /* in network byte order */
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
	uint64_t private_fields[7];
};

struct ibv_recv_wr {
	uint64_t wr_id;
	struct ibv_recv_wr *next;
	struct ibv_sge *sg_list;
	int num_sge;
};

struct ibv_wc {
	uint64_t wr_id;
	enum ibv_wc_status status;
	enum ibv_wc_opcode opcode;
	uint32_t vendor_err;
	uint32_t byte_len;
	uint32_t imm_data; /* in network byte order */
	uint32_t qp_num;
	uint32_t src_qp;
	unsigned int wc_flags;
	uint16_t pkey_index;
	uint16_t slid;
	uint8_t sl;
	uint8_t dlid_path_bits;
};

struct ibv_cq {
	struct ibv_context *context;
	struct ibv_comp_channel *channel;
	void *cq_context;
	uint32_t handle;
	int cqe;
	pthread_mutex_t mutex;
	pthread_cond_t cond;
	uint32_t comp_events_completed;
	uint32_t async_events_completed;
};

struct ibv_qp {
	struct ibv_context *context;
	void *qp_context;
	struct ibv_pd *pd;
	struct ibv_cq *send_cq;
	struct ibv_cq *recv_cq;
	struct ibv_srq *srq;
	uint32_t handle;
	uint32_t qp_num;
	enum ibv_qp_state state;
	enum ibv_qp_type qp_type;
	pthread_mutex_t mutex;
	pthread_cond_t cond;
	uint32_t events_completed;
};

struct ibv_qp_cap {
	uint32_t max_send_wr;
	uint32_t max_recv_wr;
	uint32_t max_send_sge;
	uint32_t max_recv_sge;
	uint32_t max_inline_data;
};

struct ibv_qp_init_attr {
	void *qp_context;
	struct ibv_cq *send_cq;
	struct ibv_cq *recv_cq;
	struct ibv_srq *srq;
	struct ibv_qp_cap cap;
	enum ibv_qp_type qp_type;
	int sq_sig_all;
};

static inline int ibv_poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc)
{
	return cq->context->ops.poll_cq(cq, num_entries, wc);
}

static inline int ibv_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr)
{
	return qp->context->ops.post_send(qp, wr, bad_wr);
}

static inline int ibv_req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
	return cq->context->ops.req_notify_cq(cq, solicited_only);
}

static inline int ibv_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	return qp->context->ops.post_recv(qp, wr, bad_wr);
}

#endif /* INFINIBAND_VERBS_H */

/* ------------------------------------------------------------------- names of MLNX_OFED 4 (infiniband/verbs_exp.h) */

/*
 * Its work request: the fields of ibv_send_wr with both names, and fields that are not used. The part that both have is
 * laid out as in ibv_send_wr.
 */
union ibv_exp_imm {
	uint32_t imm_data;
	uint32_t invalidate_rkey;
};

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
	uint32_t comp_mask;
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
