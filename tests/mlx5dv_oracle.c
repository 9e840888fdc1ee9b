/*
 * Builds what tests/mlx5dv.rs asks for out of the structs and helpers of <infiniband/mlx5dv.h>, and prints it. It shares no line with
 * the shim. A request a line on stdin, words in hexadecimal:
 *
 *   wqe OPCODE FLAGS IMM RADDR RKEY SWAP COMPARE QPN INDEX list N (LEN LKEY ADDR)*     flags: 1 signaled, 2 solicited, 4 fence
 *   wqe ...                                                inline N BYTES
 *   recv STRIDE N (LEN LKEY ADDR)*
 *   cqe BYTES                                              a CQE to be read with struct mlx5_cqe64 and struct mlx5_err_cqe
 *   constants
 */
#include <infiniband/mlx5dv.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t word(void)
{
	uint64_t value;
	if (scanf("%" SCNx64, &value) != 1)
		exit(2);
	return value;
}

static void bytes(uint8_t *to, size_t length)
{
	unsigned value;
	for (; length; length--) {
		if (scanf(" %2x", &value) != 1)
			exit(2);
		*to++ = (uint8_t)value;
	}
}

static void print(const void *from, size_t length)
{
	const uint8_t *at = from;
	for (; length; length--)
		printf("%02x", *at++);
	putchar('\n');
}

static size_t list(uint8_t *to)
{
	uint64_t count = word();
	size_t length = 0;
	for (; count; count--) {
		uint32_t len = (uint32_t)word(), lkey = (uint32_t)word();
		uint64_t addr = word();
		if (len == 0)
			continue;
		mlx5dv_set_data_seg((struct mlx5_wqe_data_seg *)(to + length), len, lkey, (uintptr_t)addr);
		length += sizeof(struct mlx5_wqe_data_seg);
	}
	return length;
}

static void wqe(void)
{
	static uint8_t buffer[2048] __attribute__((aligned(64)));
	uint8_t opcode = (uint8_t)word(), fm_ce_se = 0;
	uint64_t flags = word();
	uint32_t imm = (uint32_t)word();
	uint64_t raddr = word();
	uint32_t rkey = (uint32_t)word();
	uint64_t swap = word(), compare = word();
	uint32_t qpn = (uint32_t)word();
	uint16_t index = (uint16_t)word();
	struct mlx5_wqe_ctrl_seg *ctrl = (struct mlx5_wqe_ctrl_seg *)buffer;
	size_t at = sizeof(*ctrl);
	char form[8];

	memset(buffer, 0, sizeof(buffer));
	switch (opcode) {
	case MLX5_OPCODE_RDMA_WRITE:
	case MLX5_OPCODE_RDMA_WRITE_IMM:
	case MLX5_OPCODE_RDMA_READ:
	case MLX5_OPCODE_ATOMIC_CS:
	case MLX5_OPCODE_ATOMIC_FA: {
		struct mlx5_wqe_raddr_seg *remote = (struct mlx5_wqe_raddr_seg *)(buffer + at);
		remote->raddr = htobe64(raddr);
		remote->rkey = htobe32(rkey);
		at += sizeof(*remote);
	}
	}
	if (opcode == MLX5_OPCODE_ATOMIC_CS || opcode == MLX5_OPCODE_ATOMIC_FA) {
		struct mlx5_wqe_atomic_seg *atomic = (struct mlx5_wqe_atomic_seg *)(buffer + at);
		atomic->swap_add = htobe64(swap);
		atomic->compare = htobe64(compare);
		at += sizeof(*atomic);
	}
	if (scanf("%7s", form) != 1)
		exit(2);
	if (strcmp(form, "inline") == 0) {
		struct mlx5_wqe_inl_data_seg *header = (struct mlx5_wqe_inl_data_seg *)(buffer + at);
		size_t length = word();
		if (length) {
			header->byte_count = htobe32((uint32_t)length | MLX5_INLINE_SEG);
			bytes(buffer + at + sizeof(*header), length);
			at += (sizeof(*header) + length + 15) & ~(size_t)15;
		}
	} else {
		at += list(buffer + at);
	}
	if (flags & 1)
		fm_ce_se |= MLX5_WQE_CTRL_CQ_UPDATE;
	if (flags & 2)
		fm_ce_se |= MLX5_WQE_CTRL_SOLICITED;
	if (flags & 4)
		fm_ce_se |= MLX5_WQE_CTRL_FENCE;
	if (opcode != MLX5_OPCODE_RDMA_WRITE_IMM && opcode != MLX5_OPCODE_SEND_IMM)
		imm = 0;
	mlx5dv_set_ctrl_seg(ctrl, index, opcode, 0, qpn, fm_ce_se, (uint8_t)(at / 16), 0, htobe32(imm));
	print(buffer, at);
}

static void receive(void)
{
	static uint8_t buffer[4096] __attribute__((aligned(64)));
	size_t stride = word(), length;
	memset(buffer, 0, sizeof(buffer));
	length = list(buffer);
	if (length < stride) {
		struct mlx5_wqe_data_seg *last = (struct mlx5_wqe_data_seg *)(buffer + length);
		last->byte_count = 0;
		last->lkey = htobe32(MLX5_INVALID_LKEY);
		last->addr = 0;
		length += sizeof(*last);
	}
	print(buffer, length);
}

static void cqe(void)
{
	static struct mlx5_cqe64 cqe;
	const struct mlx5_err_cqe *error = (const struct mlx5_err_cqe *)&cqe;
	int failed;
	bytes((uint8_t *)&cqe, sizeof(cqe));
	failed = mlx5dv_get_cqe_opcode(&cqe) == MLX5_CQE_REQ_ERR || mlx5dv_get_cqe_opcode(&cqe) == MLX5_CQE_RESP_ERR;
	printf("%x %x %x %x %x %x %x %x %" PRIx64 " %x %x %x %x\n", mlx5dv_get_cqe_opcode(&cqe),
	       (failed ? be32toh(error->s_wqe_opcode_qpn) : be32toh(cqe.sop_drop_qpn)) & 0xffffff,
	       be16toh(failed ? error->wqe_counter : cqe.wqe_counter), be32toh(cqe.byte_cnt), be32toh(cqe.imm_inval_pkey),
	       be32toh(failed ? error->srqn : cqe.srqn_uidx), failed ? error->syndrome : 0,
	       failed ? error->vendor_err_synd : 0, failed ? (uint64_t)0 : (uint64_t)be64toh(cqe.timestamp),
	       (failed ? be32toh(error->s_wqe_opcode_qpn) : be32toh(cqe.sop_drop_qpn)) >> 24,
	       failed ? error->signature : cqe.signature, mlx5dv_get_cqe_se(&cqe), mlx5dv_get_cqe_owner(&cqe));
}

#define CONSTANT(name) printf("%s=%" PRIx64 "\n", #name, (uint64_t)(name))

static void constants(void)
{
	CONSTANT(MLX5_OPCODE_NOP);
	CONSTANT(MLX5_OPCODE_RDMA_WRITE);
	CONSTANT(MLX5_OPCODE_RDMA_WRITE_IMM);
	CONSTANT(MLX5_OPCODE_SEND);
	CONSTANT(MLX5_OPCODE_SEND_IMM);
	CONSTANT(MLX5_OPCODE_RDMA_READ);
	CONSTANT(MLX5_OPCODE_ATOMIC_CS);
	CONSTANT(MLX5_OPCODE_ATOMIC_FA);
	CONSTANT(MLX5_CQE_REQ);
	CONSTANT(MLX5_CQE_RESP_WR_IMM);
	CONSTANT(MLX5_CQE_RESP_SEND);
	CONSTANT(MLX5_CQE_RESP_SEND_IMM);
	CONSTANT(MLX5_CQE_RESP_SEND_INV);
	CONSTANT(MLX5_CQE_REQ_ERR);
	CONSTANT(MLX5_CQE_RESP_ERR);
	CONSTANT(MLX5_CQE_INVALID);
	CONSTANT(MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR);
	CONSTANT(MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR);
	CONSTANT(MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
	CONSTANT(MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
	CONSTANT(MLX5_CQE_SYNDROME_MW_BIND_ERR);
	CONSTANT(MLX5_CQE_SYNDROME_BAD_RESP_ERR);
	CONSTANT(MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR);
	CONSTANT(MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR);
	CONSTANT(MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
	CONSTANT(MLX5_CQE_SYNDROME_REMOTE_OP_ERR);
	CONSTANT(MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR);
	CONSTANT(MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR);
	CONSTANT(MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR);
	CONSTANT(MLX5_SEND_WQE_BB);
	CONSTANT(MLX5_INLINE_SEG);
	CONSTANT(MLX5_INVALID_LKEY);
	CONSTANT(MLX5_RCV_DBR);
	CONSTANT(MLX5_SND_DBR);
	CONSTANT(sizeof(struct mlx5_cqe64));
	CONSTANT(IBV_WC_SUCCESS);
	CONSTANT(IBV_WC_LOC_LEN_ERR);
	CONSTANT(IBV_WC_LOC_QP_OP_ERR);
	CONSTANT(IBV_WC_LOC_EEC_OP_ERR);
	CONSTANT(IBV_WC_LOC_PROT_ERR);
	CONSTANT(IBV_WC_WR_FLUSH_ERR);
	CONSTANT(IBV_WC_MW_BIND_ERR);
	CONSTANT(IBV_WC_BAD_RESP_ERR);
	CONSTANT(IBV_WC_LOC_ACCESS_ERR);
	CONSTANT(IBV_WC_REM_INV_REQ_ERR);
	CONSTANT(IBV_WC_REM_ACCESS_ERR);
	CONSTANT(IBV_WC_REM_OP_ERR);
	CONSTANT(IBV_WC_RETRY_EXC_ERR);
	CONSTANT(IBV_WC_RNR_RETRY_EXC_ERR);
	CONSTANT(IBV_WC_LOC_RDD_VIOL_ERR);
	CONSTANT(IBV_WC_REM_INV_RD_REQ_ERR);
	CONSTANT(IBV_WC_REM_ABORT_ERR);
	CONSTANT(IBV_WC_INV_EECN_ERR);
	CONSTANT(IBV_WC_INV_EEC_STATE_ERR);
	CONSTANT(IBV_WC_FATAL_ERR);
	CONSTANT(IBV_WC_RESP_TIMEOUT_ERR);
	CONSTANT(IBV_WC_GENERAL_ERR);
	CONSTANT(IBV_WC_TM_ERR);
	CONSTANT(IBV_WC_TM_RNDV_INCOMPLETE);
}

int main(void)
{
	char what[16];
	while (scanf("%15s", what) == 1) {
		if (strcmp(what, "wqe") == 0)
			wqe();
		else if (strcmp(what, "recv") == 0)
			receive();
		else if (strcmp(what, "cqe") == 0)
			cqe();
		else if (strcmp(what, "constants") == 0)
			constants();
		else
			return 2;
	}
	return 0;
}
