/* What Rust calls of the headers of include/doorbell. The declarations on the other side are in src/mlx5/shim.rs. */
#include <doorbell/detail/wqe.h>

/* Out of line, so that the WQE of a single WQEBB need not save registers for the loop. */
static __attribute__((noinline)) uint32_t copy(uint8_t *ring, uint32_t wqebb_mask, uint32_t index, const uint64_t *wqe,
					       uint32_t wqebbs)
{
	dbl_wqe_copy(ring, wqebb_mask, index, wqe, wqebbs);
	return wqebbs;
}

/* As dbl_wqe_emit, and leaves the WQE in `kept` (DBL_WQE_WORDS_MAX words): for BlueFlame, and its first word is the doorbell. */
static inline __attribute__((always_inline)) uint32_t emit(uint8_t *ring, uint32_t wqebb_mask, uint32_t index, const struct dbl_wr *wr, uint64_t *kept,
			    int is_inline)
{
	const uint32_t ds = dbl_wqe_build(kept, index, wr, is_inline);
	if (ds > 4)
		return copy(ring, wqebb_mask, index, kept, (ds + 3) / 4);
	dbl_wqe_copy(ring, wqebb_mask, index, kept, 1);
	return 1;
}

/* Two functions, because the call of memcpy in the second would cost the first its registers. */
uint32_t doorbell_shim_wqe_emit_segments(uint8_t *ring, uint32_t wqebb_mask, uint32_t index, const struct dbl_wr *wr,
					 uint64_t *kept)
{
	return emit(ring, wqebb_mask, index, wr, kept, 0);
}

uint32_t doorbell_shim_wqe_emit_inline(uint8_t *ring, uint32_t wqebb_mask, uint32_t index, const struct dbl_wr *wr,
				       uint64_t *kept)
{
	return emit(ring, wqebb_mask, index, wr, kept, 1);
}

/* A send on a UD queue pair: emits as the two above. `datagram` has DBL_DATAGRAM_WORDS words. */
uint32_t doorbell_shim_wqe_emit_datagram(uint8_t *ring, uint32_t wqebb_mask, uint32_t index, const struct dbl_wr *wr,
					 const uint64_t *datagram, uint64_t *kept)
{
	return copy(ring, wqebb_mask, index, kept,
		    (dbl_wqe_build_datagram(kept, index, wr, datagram, wr->is_inline) + 3) / 4);
}

uint64_t doorbell_shim_wqe_overwrite_with_nop(uint8_t *ring, uint32_t wqebb_mask, uint32_t index, uint32_t qpn, uint32_t wqebbs,
				    uint32_t signaled)
{
	return dbl_wqe_overwrite_with_nop(ring, wqebb_mask, index, qpn, wqebbs, signaled != 0);
}

uint64_t doorbell_shim_wqe_read_over_nop(uint8_t *ring, uint32_t wqebb_mask, uint32_t index, uint32_t qpn, uint64_t remote_addr,
					 uint32_t rkey, uint32_t len_bytes)
{
	return dbl_wqe_read_over_nop(ring, wqebb_mask, index, qpn, remote_addr, rkey, len_bytes);
}

void doorbell_shim_recv_wqe_emit(uint8_t *ring, uint32_t wqe_mask, uint32_t stride_shift, uint32_t index,
				 const struct dbl_sge *sges, uint32_t count)
{
	dbl_recv_wqe_emit(ring, wqe_mask, stride_shift, index, sges, count);
}

/* Sizes, offsets and constants, for the tests that compare them with the Rust side. */
struct layout_entry {
	const char *name;
	uint64_t value;
};

#define SIZE(type) {#type, sizeof(struct type)}
#define FIELD(type, field) {#type "." #field, offsetof(struct type, field)}

static const struct layout_entry layout[] = {
	SIZE(dbl_unit),
	FIELD(dbl_unit, kind),
	FIELD(dbl_unit, role),
	FIELD(dbl_unit, len_bytes),
	FIELD(dbl_unit, target),
	FIELD(dbl_unit, offset),
	FIELD(dbl_unit, value),
	{"unit:LIMIT", DBL_UNIT_LIMIT},
	{"unit:BLOCK_BYTES_MAX", DBL_BLOCK_BYTES_MAX},
	{"kind:STORE_DWORD", DBL_STORE_DWORD},
	{"kind:STORE_QWORD", DBL_STORE_QWORD},
	{"kind:COPY_BLOCK", DBL_COPY_BLOCK},
	{"kind:POLL_GEQ", DBL_POLL_GEQ},
	{"kind:POLL_AND", DBL_POLL_AND},
	{"kind:POLL_NOR", DBL_POLL_NOR},
	{"kind:FENCE", DBL_FENCE},
	{"role:DOORBELL_RECORD", DBL_ROLE_DOORBELL_RECORD},
	{"role:UAR", DBL_ROLE_UAR},
	{"role:COMPLETIONS", DBL_ROLE_COMPLETIONS},
	{"role:MARKS", DBL_ROLE_MARKS},
	{"role:MEMORY", DBL_ROLE_MEMORY},
	{"fence:READ", DBL_FENCE_READ},
	{"fence:WRITE", DBL_FENCE_WRITE},
	{"fence:FROM_CPU", DBL_FENCE_FROM_CPU},
	{"fence:FROM_HCA", DBL_FENCE_FROM_HCA},
	{"fence:SYSTEM", DBL_FENCE_SYSTEM},
	{"fence:PEER", DBL_FENCE_PEER},
	SIZE(dbl_sge),
	FIELD(dbl_sge, len_bytes),
	FIELD(dbl_sge, lkey),
	FIELD(dbl_sge, addr),
	{"opcode:NOP", DBL_OPCODE_NOP},
	{"opcode:SEND_INVAL", DBL_OPCODE_SEND_INVAL},
	{"opcode:RDMA_WRITE", DBL_OPCODE_RDMA_WRITE},
	{"opcode:RDMA_WRITE_IMM", DBL_OPCODE_RDMA_WRITE_IMM},
	{"opcode:SEND", DBL_OPCODE_SEND},
	{"opcode:SEND_IMM", DBL_OPCODE_SEND_IMM},
	{"opcode:RDMA_READ", DBL_OPCODE_RDMA_READ},
	{"opcode:ATOMIC_CS", DBL_OPCODE_ATOMIC_CS},
	{"opcode:ATOMIC_FA", DBL_OPCODE_ATOMIC_FA},
	SIZE(dbl_wr),
	FIELD(dbl_wr, remote_addr),
	FIELD(dbl_wr, swap_or_add),
	FIELD(dbl_wr, compare),
	FIELD(dbl_wr, payload),
	FIELD(dbl_wr, count),
	FIELD(dbl_wr, rkey),
	FIELD(dbl_wr, qpn),
	FIELD(dbl_wr, imm),
	FIELD(dbl_wr, opcode),
	FIELD(dbl_wr, flags),
	FIELD(dbl_wr, is_inline),
	{"dbl_wr:SOLICITED", DBL_WR_SOLICITED},
	{"dbl_wr:SIGNALED", DBL_WR_SIGNALED},
	{"dbl_wr:FENCE", DBL_WR_FENCE},
	{"dbl_wr:ORDERED", DBL_WR_ORDERED},
	{"dbl_wr:WORDS_MAX", DBL_WQE_WORDS_MAX},
	{"dbl_wr:DATAGRAM_WORDS", DBL_DATAGRAM_WORDS},
};

const struct layout_entry *doorbell_shim_layout(uint32_t *count)
{
	*count = sizeof(layout) / sizeof(layout[0]);
	return layout;
}
