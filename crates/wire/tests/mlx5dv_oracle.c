/*
 * Builds what tests/mlx5dv.rs asks for out of the structs and helpers of <infiniband/mlx5dv.h>, and prints it. It shares no line with
 * the shim. A request a line on stdin, words in hexadecimal:
 *
 *   wqe OPCODE FLAGS IMM RADDR RKEY SWAP COMPARE QPN INDEX list N (LEN LKEY ADDR)*     flags: 1 signaled, 2 solicited, 4 fence
 *   wqe ...                                                inline N BYTES
 *   recv STRIDE N (LEN LKEY ADDR)*
 *   cqe BYTES                                              a CQE to be read with struct mlx5_cqe64 and struct mlx5_err_cqe
 *   ud QKEY QPN RATE SL PATH LID MAC TCLASS HOP GRH SGID FLOW GID GID     a send of 8 bytes to an address
 *   umr TYPE KEY NEW QPN REGION ADDR LENGTH ACCESS ZERO    binds a window; closes it where LENGTH is 0
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
	if (opcode != MLX5_OPCODE_RDMA_WRITE_IMM && opcode != MLX5_OPCODE_SEND_IMM && opcode != MLX5_OPCODE_SEND_INVAL)
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
	printf("%x %x %x %x %x %x %x %x %" PRIx64 " %x %x %x %x %x %x %x %x\n", mlx5dv_get_cqe_opcode(&cqe),
	       (failed ? be32toh(error->s_wqe_opcode_qpn) : be32toh(cqe.sop_drop_qpn)) & 0xffffff,
	       be16toh(failed ? error->wqe_counter : cqe.wqe_counter), be32toh(cqe.byte_cnt), be32toh(cqe.imm_inval_pkey),
	       be32toh(failed ? error->srqn : cqe.srqn_uidx), failed ? error->syndrome : 0,
	       failed ? error->vendor_err_synd : 0, failed ? (uint64_t)0 : (uint64_t)be64toh(cqe.timestamp),
	       (failed ? be32toh(error->s_wqe_opcode_qpn) : be32toh(cqe.sop_drop_qpn)) >> 24,
	       failed ? error->signature : cqe.signature, mlx5dv_get_cqe_se(&cqe), mlx5dv_get_cqe_owner(&cqe),
	       failed ? 0 : be16toh(cqe.slid), failed ? 0 : be32toh(cqe.flags_rqpn) & 0xffffff,
	       failed ? 0 : (be32toh(cqe.flags_rqpn) >> 24) & 0xf, failed ? 0 : (be32toh(cqe.flags_rqpn) >> 28) & 3);
}

static void datagram(void)
{
	static uint8_t buffer[80] __attribute__((aligned(64)));
	struct mlx5_wqe_av *av = &((struct mlx5_wqe_datagram_seg *)(buffer + sizeof(struct mlx5_wqe_ctrl_seg)))->av;
	uint32_t rate, grh, sgid;
	uint64_t mac;
	unsigned i;

	av->key.qkey.qkey = htobe32((uint32_t)word());
	av->dqp_dct = htobe32((uint32_t)word() | MLX5_EXTENDED_UD_AV);
	rate = (uint32_t)word();
	av->stat_rate_sl = (uint8_t)(rate << 4 | word());
	av->fl_mlid = (uint8_t)word();
	av->rlid = htobe16((uint16_t)word());
	mac = word();
	for (i = 0; i < 6; i++)
		av->rmac[i] = (uint8_t)(mac >> (40 - 8 * i));
	av->tclass = (uint8_t)word();
	av->hop_limit = (uint8_t)word();
	grh = (uint32_t)word();
	sgid = (uint32_t)word();
	av->grh_gid_fl = htobe32(grh << 30 | sgid << 20 | (uint32_t)word());
	for (i = 0; i < 2; i++) {
		uint64_t half = htobe64(word());
		memcpy(av->rgid + 8 * i, &half, 8);
	}
	mlx5dv_set_data_seg((struct mlx5_wqe_data_seg *)(buffer + 64), 8, 5, 0x1000);
	mlx5dv_set_ctrl_seg((struct mlx5_wqe_ctrl_seg *)buffer, 3, MLX5_OPCODE_SEND, 0, 9, 0, 5, 0, 0);
	print(buffer, sizeof(buffer));
}

static void umr(void)
{
	static uint8_t buffer[192] __attribute__((aligned(64)));
	struct mlx5_wqe_umr_ctrl_seg *control = (struct mlx5_wqe_umr_ctrl_seg *)(buffer + 16);
	struct mlx5_wqe_mkey_context_seg *context = (struct mlx5_wqe_mkey_context_seg *)(control + 1);
	struct mlx5_wqe_umr_klm_seg *klm = (struct mlx5_wqe_umr_klm_seg *)(context + 1);
	uint64_t type = word(), mask = MLX5_WQE_UMR_CTRL_MKEY_MASK_FREE | MLX5_WQE_UMR_CTRL_MKEY_MASK_MKEY;
	uint32_t key = (uint32_t)word(), new = (uint32_t)word() & 0xff, qpn = (uint32_t)word(), region = (uint32_t)word();
	uint64_t addr = word(), length = word(), access = word(), zero = word();
	size_t size = 128;

	memset(buffer, 0, sizeof(buffer));
	control->flags = MLX5_WQE_UMR_CTRL_FLAG_TRNSLATION_OFFSET | MLX5_WQE_UMR_CTRL_FLAG_INLINE;
	if (type == 2)
		mask |= MLX5_WQE_UMR_CTRL_MKEY_MASK_QPN;
	if (length) {
		mask |= MLX5_WQE_UMR_CTRL_MKEY_MASK_LEN | MLX5_WQE_UMR_CTRL_MKEY_MASK_START_ADDR |
			MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_LOCAL_WRITE | MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_REMOTE_READ |
			MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_REMOTE_WRITE | MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_ATOMIC;
		control->klm_octowords = htobe16(2);
		control->flags |= type == 2 ? MLX5_WQE_UMR_CTRL_FLAG_CHECK_FREE : 0;
		context->access_flags =
			(access & IBV_ACCESS_LOCAL_WRITE ? MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_LOCAL_WRITE : 0) |
			(access & IBV_ACCESS_REMOTE_WRITE ? MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_REMOTE_WRITE : 0) |
			(access & IBV_ACCESS_REMOTE_READ ? MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_REMOTE_READ : 0) |
			(access & IBV_ACCESS_REMOTE_ATOMIC ? MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_ATOMIC : 0);
		context->start_addr = htobe64(zero ? 0 : addr);
		context->len = htobe64(length);
		klm->byte_count = htobe32((uint32_t)length);
		klm->mkey = htobe32(region);
		klm->address = htobe64(addr);
		size += 64;
	} else {
		context->free = MLX5_WQE_MKEY_CONTEXT_FREE;
		control->flags |= type == 2 ? MLX5_WQE_UMR_CTRL_FLAG_CHECK_QPN : 0;
	}
	context->qpn_mkey = htobe32(new | (type == 1 || !length ? 0xffffff00 : qpn << 8));
	control->mkey_mask = htobe64(mask);
	mlx5dv_set_ctrl_seg((struct mlx5_wqe_ctrl_seg *)buffer, 0, MLX5_OPCODE_UMR, 0, qpn, 0, (uint8_t)(size / 16), 0, htobe32(key));
	print(buffer, size);
}

#define CONSTANT(name) printf("%s=%" PRIx64 "\n", #name, (uint64_t)(name))

static void constants(void)
{
	CONSTANT(MLX5_OPCODE_NOP);
	CONSTANT(MLX5_OPCODE_SEND_INVAL);
	CONSTANT(MLX5_OPCODE_UMR);
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
		else if (strcmp(what, "ud") == 0)
			datagram();
		else if (strcmp(what, "umr") == 0)
			umr();
		else if (strcmp(what, "constants") == 0)
			constants();
		else
			return 2;
	}
	return 0;
}
