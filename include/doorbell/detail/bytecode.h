/*
 * Bytecode: the programs that a queue prepares and a stream executes. C11, C++17 and CUDA.
 *
 * The Rust definition of this layout is bytecode/unit.rs; crates/wire/tests/layout.rs compares the two.
 */
#ifndef DOORBELL_BYTECODE_H
#define DOORBELL_BYTECODE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define DBL_HD __host__ __device__
#else
#define DBL_HD
#endif

#ifdef __cplusplus
#define DBL_STATIC_ASSERT(condition, text) static_assert(condition, text)
#else
#define DBL_STATIC_ASSERT(condition, text) _Static_assert(condition, text)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Most units of a program, and most bytes of a COPY_BLOCK: one BlueFlame buffer. */
#define DBL_UNIT_LIMIT 16
#define DBL_BLOCK_BYTES_MAX 256

/* What a unit does. */
enum dbl_kind {
	DBL_STORE_DWORD = 1, /* one 32-bit store */
	DBL_STORE_QWORD = 2, /* one 64-bit store, never split */
	DBL_COPY_BLOCK = 3,  /* 64-bit stores; the data are in the next ceil(len_bytes / 24) units */
	DBL_POLL_GEQ = 4,    /* wait until (int32_t)(memory - value) >= 0 */
	DBL_POLL_AND = 5,    /* wait until (memory & value) != 0 */
	DBL_POLL_NOR = 6,    /* wait until ~(memory | value) != 0 */
	DBL_FENCE = 7        /* order earlier accesses before later ones; `value` has the bits of enum dbl_fence */
};

/* What a target is. Only the disassembly and error detection use it. */
enum dbl_role {
	DBL_ROLE_DOORBELL_RECORD = 1,
	DBL_ROLE_UAR = 2,
	DBL_ROLE_COMPLETIONS = 3,
	DBL_ROLE_MARKS = 4,
	DBL_ROLE_MEMORY = 5
};

/*
 * Bits of a fence: which accesses before the fence (reads, writes), by whom (CPU, HCA), must be visible to whom (the
 * whole system, the peer) before any access after it.
 */
enum dbl_fence {
	DBL_FENCE_READ = 1 << 0,
	DBL_FENCE_WRITE = 1 << 1,
	DBL_FENCE_FROM_CPU = 1 << 4,
	DBL_FENCE_FROM_HCA = 1 << 5,
	DBL_FENCE_SYSTEM = 1 << 8,
	DBL_FENCE_PEER = 1 << 9
};

/* One unit. Values are in host byte order. */
struct dbl_unit {
	uint8_t kind;       /* enum dbl_kind */
	uint8_t role;       /* enum dbl_role; 0 for a fence */
	uint16_t len_bytes; /* 4, 8, or the length of the block; 0 for a fence */
	uint32_t target;    /* index in the table of targets */
	uint64_t offset;    /* offset in the target, in bytes */
	uint64_t value;
};

DBL_STATIC_ASSERT(sizeof(struct dbl_unit) == 24, "a unit is 24 bytes");
DBL_STATIC_ASSERT(offsetof(struct dbl_unit, role) == 1, "role");
DBL_STATIC_ASSERT(offsetof(struct dbl_unit, len_bytes) == 2, "len_bytes");
DBL_STATIC_ASSERT(offsetof(struct dbl_unit, target) == 4, "target");
DBL_STATIC_ASSERT(offsetof(struct dbl_unit, offset) == 8, "offset");
DBL_STATIC_ASSERT(offsetof(struct dbl_unit, value) == 16, "value");

/* Whether the word `memory` satisfies a poll of that kind. Other kinds do not wait: the result is 1. */
static inline DBL_HD int dbl_poll_satisfied(uint8_t kind, uint32_t memory, uint32_t value)
{
	switch (kind) {
	case DBL_POLL_GEQ:
		return (uint32_t)(memory - value) < 0x80000000u;
	case DBL_POLL_AND:
		return (memory & value) != 0;
	case DBL_POLL_NOR:
		return ~(memory | value) != 0;
	default:
		return 1;
	}
}

#ifdef __cplusplus
}
#endif

#endif
