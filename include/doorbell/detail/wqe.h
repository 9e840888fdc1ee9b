/*
 * Writes mlx5 work queue entries (WQEs), for the host and for kernels. C11, C++17 and CUDA.
 *
 * The functions keep no state and need only memcpy. A WQE is built completely and then copied to the ring once; the
 * ring is never read. Formats and numbers are those of rdma-core's public header <infiniband/mlx5dv.h>, whose names
 * stand beside them. crates/wire/tests/mlx5dv.rs compares the bytes with that header's structs. Multi-byte fields are big-endian;
 * the host must be little-endian.
 */
#ifndef DOORBELL_WQE_H
#define DOORBELL_WQE_H

#include <string.h>

#include "bytecode.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "doorbell/detail/wqe.h is written for little-endian hosts"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Opcodes (mlx5dv.h: MLX5_OPCODE_*). */
enum dbl_opcode {
	DBL_OPCODE_NOP = 0x00,
	DBL_OPCODE_SEND_INVAL = 0x01,
	DBL_OPCODE_RDMA_WRITE = 0x08,
	DBL_OPCODE_RDMA_WRITE_IMM = 0x09,
	DBL_OPCODE_SEND = 0x0a,
	DBL_OPCODE_SEND_IMM = 0x0b,
	DBL_OPCODE_RDMA_READ = 0x10,
	DBL_OPCODE_ATOMIC_CS = 0x11,
	DBL_OPCODE_ATOMIC_FA = 0x12
};

/* Flags of a work request: bits of fm_ce_se in the control segment (mlx5dv.h: MLX5_WQE_CTRL_*). */
enum dbl_wr_flags {
	DBL_WR_SOLICITED = 1 << 1, /* MLX5_WQE_CTRL_SOLICITED */
	DBL_WR_SIGNALED = 2 << 2,  /* MLX5_WQE_CTRL_CQ_UPDATE */
	/* The fence mode, one of two. */
	DBL_WR_ORDERED = 3 << 5, /* strong ordering (mlx5 PRM; in UCX: UCT_IB_MLX5_WQE_CTRL_FLAG_STRONG_ORDER) */
	DBL_WR_FENCE = 4 << 5	 /* MLX5_WQE_CTRL_FENCE */
};

/*
 * Size limits: 63 segments per WQE, because the count has six bits; 64 bytes per send WQEBB (mlx5dv.h:
 * MLX5_SEND_WQE_BB).
 */
#define DBL_WQE_DS_MAX 63u
#define DBL_WQEBB_BYTES 64u
#define DBL_WQE_WORDS_MAX 128u

/*
 * The flag in the first word of an inline segment (mlx5dv.h: MLX5_INLINE_SEG), and the lkey that ends a receive list
 * (MLX5_INVALID_LKEY).
 */
#define DBL_INLINE_SEGMENT 0x80000000u
#define DBL_INVALID_LKEY 0x100u

/* A slice of local memory, in host byte order: the fields of the WQE's data segment. */
struct dbl_sge {
	uint32_t len_bytes;
	uint32_t lkey;
	uint64_t addr;
};

/* A work request, in host byte order. */
struct dbl_wr {
	uint64_t remote_addr;
	uint64_t swap_or_add;
	uint64_t compare;
	const void *payload; /* `count` struct dbl_sge, or `count` bytes if `is_inline` */
	uint32_t count;
	uint32_t rkey;
	uint32_t qpn;
	uint32_t imm;
	uint8_t opcode; /* enum dbl_opcode */
	uint8_t flags;  /* enum dbl_wr_flags */
	uint16_t is_inline;
};

/* Byte order: one instruction each, also on the GPU. Compilers that are neither CUDA nor GNU C get shifts. */
static inline DBL_HD uint32_t dbl_be32(uint32_t value)
{
#if defined(__CUDA_ARCH__)
	return __byte_perm(value, 0, 0x0123);
#elif defined(__GNUC__)
	return __builtin_bswap32(value);
#else
	return value >> 24 | (value >> 8 & 0xff00u) | (value << 8 & 0xff0000u) | value << 24;
#endif
}

static inline DBL_HD uint64_t dbl_be64(uint64_t value)
{
#if !defined(__CUDA_ARCH__) && defined(__GNUC__)
	return __builtin_bswap64(value);
#else
	return (uint64_t)dbl_be32((uint32_t)value) << 32 | dbl_be32((uint32_t)(value >> 32));
#endif
}

/* Two big-endian words; `first` is at the lower address. */
static inline DBL_HD uint64_t dbl_be32x2(uint32_t first, uint32_t second)
{
	return dbl_be64((uint64_t)first << 32 | second);
}

/* Whether `opcode` (below 32) is in a set of bits. */
#define DBL_OPCODE_IN(opcode, set) ((set) >> (opcode) & 1u)
#define DBL_OPCODES_REMOTE                                                                                             \
	(1u << DBL_OPCODE_RDMA_WRITE | 1u << DBL_OPCODE_RDMA_WRITE_IMM | 1u << DBL_OPCODE_RDMA_READ |                  \
	 1u << DBL_OPCODE_ATOMIC_CS | 1u << DBL_OPCODE_ATOMIC_FA)
#define DBL_OPCODES_IMM                                                                                                \
	(1u << DBL_OPCODE_RDMA_WRITE_IMM | 1u << DBL_OPCODE_SEND_IMM | 1u << DBL_OPCODE_SEND_INVAL)

/*
 * Writes the control segment (mlx5dv.h: struct mlx5_wqe_ctrl_seg). Its first 8 bytes, as the host loads them, are also
 * the doorbell.
 */
static inline DBL_HD void dbl_wqe_control(uint64_t *wqe, uint32_t opcode, uint32_t index, uint32_t qpn, uint32_t ds,
					  uint32_t flags, uint32_t imm)
{
	wqe[0] = dbl_be32x2((index & 0xffffu) << 8 | opcode, qpn << 8 | ds);
	wqe[1] = (uint64_t)flags << 24 | (uint64_t)dbl_be32(imm) << 32;
}

/*
 * Writes the payload of `wr` behind the address segments, and then the control segment. `at` is where the payload begins.
 * Returns the number of 16-byte segments of the WQE.
 */
static inline DBL_HD uint32_t dbl_wqe_finish(uint64_t *wqe, uint64_t *at, uint32_t index, const struct dbl_wr *wr,
					     int is_inline)
{
	uint32_t ds;

	if (!is_inline) {
		/* mlx5dv.h: struct mlx5_wqe_data_seg */
		const struct dbl_sge *sge = (const struct dbl_sge *)wr->payload;
		uint32_t left;
		for (left = wr->count; left != 0; left--, sge++) {
			uint64_t len_and_lkey;
			memcpy(&len_and_lkey, sge, sizeof(len_and_lkey));
			if ((uint32_t)len_and_lkey == 0)
				continue;
			at[0] = dbl_be64(len_and_lkey << 32 | len_and_lkey >> 32);
			at[1] = dbl_be64(sge->addr);
			at += 2;
		}
	} else if (wr->count != 0) {
		/* mlx5dv.h: struct mlx5_wqe_inl_data_seg; the bytes follow it, padded to a segment */
		const uint32_t header = dbl_be32(DBL_INLINE_SEGMENT | wr->count);
		uint64_t *end = at + (wr->count + 4 + 15) / 16 * 2;
		end[-2] = 0;
		end[-1] = 0;
		memcpy(at, &header, 4);
		memcpy((uint8_t *)at + 4, wr->payload, wr->count);
		at = end;
	}
	ds = (uint32_t)((size_t)((uint8_t *)at - (uint8_t *)wqe) / 16);
	dbl_wqe_control(wqe, wr->opcode, index, wr->qpn, ds, wr->flags,
			DBL_OPCODE_IN(wr->opcode, DBL_OPCODES_IMM) ? wr->imm : 0);
	return ds;
}

/*
 * Builds the WQE of `wr` in `wqe`. Returns the number of 16-byte segments, at most 63. The caller has checked that the
 * request fits and that the opcode is one of the above. Slices of length 0 are skipped, as libmlx5 does. `is_inline`
 * equals wr->is_inline; it is a separate parameter so that a constant selects the code at compile time.
 */
static inline DBL_HD uint32_t dbl_wqe_build(uint64_t *wqe, uint32_t index, const struct dbl_wr *wr, int is_inline)
{
	uint64_t *at = wqe + 2;

	if (DBL_OPCODE_IN(wr->opcode, DBL_OPCODES_REMOTE)) {
		/* mlx5dv.h: struct mlx5_wqe_raddr_seg */
		at[0] = dbl_be64(wr->remote_addr);
		at[1] = dbl_be32(wr->rkey);
		at += 2;
		if (wr->opcode == DBL_OPCODE_ATOMIC_CS || wr->opcode == DBL_OPCODE_ATOMIC_FA) {
			/* mlx5dv.h: struct mlx5_wqe_atomic_seg */
			at[0] = dbl_be64(wr->swap_or_add);
			at[1] = dbl_be64(wr->compare);
			at += 2;
		}
	}
	return dbl_wqe_finish(wqe, at, index, wr, is_inline);
}

/* Words of a datagram segment (mlx5dv.h: struct mlx5_wqe_datagram_seg). */
#define DBL_DATAGRAM_WORDS 6u

/*
 * Builds the WQE of a send on a UD queue pair, as dbl_wqe_build. `datagram` is its datagram segment, DBL_DATAGRAM_WORDS
 * words as they are in memory. The opcode is a send, with immediate data or without.
 */
static inline DBL_HD uint32_t dbl_wqe_build_datagram(uint64_t *wqe, uint32_t index, const struct dbl_wr *wr,
						     const uint64_t *datagram, int is_inline)
{
	memcpy(wqe + 2, datagram, DBL_DATAGRAM_WORDS * sizeof(*datagram));
	return dbl_wqe_finish(wqe, wqe + 2 + DBL_DATAGRAM_WORDS, index, wr, is_inline);
}

/*
 * Copies a WQE into the ring, one WQEBB at a time, because it may wrap around the end. `index` is the running WQEBB
 * count. Bytes after the last segment are copied too; the NIC ignores them.
 */
static inline DBL_HD void dbl_wqe_copy(uint8_t *ring, uint32_t wqebb_mask, uint32_t index, const uint64_t *wqe,
				       uint32_t wqebbs)
{
	for (;;) {
#ifdef __CUDA_ARCH__
		/* The ring is aligned, but memcpy in a kernel does not know that and would copy single bytes. */
		ulonglong2 *to = (ulonglong2 *)(ring + (size_t)(index & wqebb_mask) * DBL_WQEBB_BYTES);
		to[0] = make_ulonglong2(wqe[0], wqe[1]);
		to[1] = make_ulonglong2(wqe[2], wqe[3]);
		to[2] = make_ulonglong2(wqe[4], wqe[5]);
		to[3] = make_ulonglong2(wqe[6], wqe[7]);
#else
		memcpy(ring + (size_t)(index & wqebb_mask) * DBL_WQEBB_BYTES, wqe, DBL_WQEBB_BYTES);
#endif
		if (--wqebbs == 0)
			return;
		wqe += DBL_WQEBB_BYTES / 8;
		index++;
	}
}

/*
 * Writes the WQE of `wr` at the running WQEBB count `index` of a ring of `wqebb_mask + 1` WQEBBs (64-byte aligned).
 * `*doorbell` receives the 64 bits to store to the UAR if this is the last WQE to ring for. Returns the number of
 * WQEBBs.
 */
static inline DBL_HD uint32_t dbl_wqe_emit(uint8_t *ring, uint32_t wqebb_mask, uint32_t index, const struct dbl_wr *wr,
					   uint64_t *doorbell)
{
	uint64_t wqe[DBL_WQE_WORDS_MAX];
	const uint32_t ds = dbl_wqe_build(wqe, index, wr, wr->is_inline);
	const uint32_t wqebbs = (ds + 3) / 4;
	uint32_t word;
	for (word = 2 * ds; word < 8 * wqebbs; word++)
		wqe[word] = 0; /* do not send bytes of the stack */
	dbl_wqe_copy(ring, wqebb_mask, index, wqe, wqebbs);
	*doorbell = wqe[0];
	return wqebbs;
}

/*
 * Replaces a WQE that has not been rung for by a NOP of the same number of WQEBBs, which makes a CQE if `signaled`.
 * Only the control segment is written, because a NOP has no other. Returns the NOP's doorbell.
 */
static inline DBL_HD uint64_t dbl_wqe_overwrite_with_nop(uint8_t *ring, uint32_t wqebb_mask, uint32_t index, uint32_t qpn,
					       uint32_t wqebbs, int signaled)
{
	uint64_t control[2];
	const uint32_t ds = wqebbs * 4 < DBL_WQE_DS_MAX ? wqebbs * 4 : DBL_WQE_DS_MAX;
	dbl_wqe_control(control, DBL_OPCODE_NOP, index, qpn, ds, signaled ? (uint32_t)DBL_WR_SIGNALED : 0u, 0);
	memcpy(ring + (size_t)(index & wqebb_mask) * DBL_WQEBB_BYTES, control, sizeof(control));
	return control[0];
}

/*
 * Makes an RDMA read of a NOP that was written over one, of a single slice and not rung for: sets what it reads and how
 * many bytes, 1 to 0x7fffffff. The key and the address of the slice are still there. It makes a CQE. Returns its doorbell.
 */
static inline DBL_HD uint64_t dbl_wqe_read_over_nop(uint8_t *ring, uint32_t wqebb_mask, uint32_t index, uint32_t qpn,
						    uint64_t remote_addr, uint32_t rkey, uint32_t len_bytes)
{
	uint8_t *wqe = ring + (size_t)(index & wqebb_mask) * DBL_WQEBB_BYTES;
	const uint32_t byte_count = dbl_be32(len_bytes);
	uint64_t words[4];

	dbl_wqe_control(words, DBL_OPCODE_RDMA_READ, index, qpn, 3, DBL_WR_SIGNALED, 0);
	words[2] = dbl_be64(remote_addr);
	words[3] = dbl_be32(rkey);
	memcpy(wqe + 32, &byte_count, sizeof(byte_count));
	memcpy(wqe, words, sizeof(words));
	return words[0];
}

/*
 * Writes a receive WQE of 1 << `stride_shift` bytes at the running WQE count `index`. The `count` slices fit in the
 * stride. Slices of length 0 are skipped. A list that is shorter than the stride ends with the invalid key.
 */
static inline DBL_HD void dbl_recv_wqe_emit(uint8_t *ring, uint32_t wqe_mask, uint32_t stride_shift, uint32_t index,
					    const struct dbl_sge *sges, uint32_t count)
{
	uint8_t *at = ring + ((size_t)(index & wqe_mask) << stride_shift);
	const uint8_t *end = at + ((size_t)1 << stride_shift);
	uint64_t segment[2];
	uint32_t i;

	for (i = 0; i < count; i++) {
		if (sges[i].len_bytes == 0)
			continue;
		segment[0] = dbl_be32x2(sges[i].len_bytes, sges[i].lkey);
		segment[1] = dbl_be64(sges[i].addr);
		memcpy(at, segment, sizeof(segment));
		at += sizeof(segment);
	}
	if (at != end) {
		segment[0] = dbl_be32x2(0, DBL_INVALID_LKEY);
		segment[1] = 0;
		memcpy(at, segment, sizeof(segment));
	}
}

#ifdef __cplusplus
}
#endif

#endif
