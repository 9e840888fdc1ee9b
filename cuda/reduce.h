/*
 * Copies, and the reduction of numbers in memory, element by element: what src/collective/reduction.rs does for streams of the host. A kernel of many
 * threads executes it, or one thread of a CPU in tests. C11 and CUDA.
 */
#ifndef DOORBELL_REDUCE_H
#define DOORBELL_REDUCE_H

#include <stdint.h>
#include <string.h>

#include <doorbell/detail/access.h>

/* `DataType` of src/collective/reduction.rs. */
enum dbl_data_type {
	DBL_F16 = 0,
	DBL_BF16 = 1,
	DBL_F32 = 2,
	DBL_F64 = 3,
	DBL_I32 = 4,
	DBL_I64 = 5,
	DBL_U8 = 6
};

/* What becomes of the elements. */
enum dbl_reduce_op {
	DBL_SUM = 0,
	DBL_MIN = 1, /* of a number and a NaN the number */
	DBL_MAX = 2, /* the same */
	DBL_DIVIDE = 3, /* `first` by `count`; there is no `second` */
	DBL_COPY = 4	/* `first`, of any type; the same */
};

/* `MemoryWork::Reduce` of src/stream/kernel_step.rs. */
struct dbl_reduce {
	uint64_t into;
	uint64_t first;
	uint64_t second;
	uint64_t len_bytes; /* of whole elements */
	uint32_t data;	    /* enum dbl_data_type */
	uint32_t op;	    /* enum dbl_reduce_op */
	uint32_t count;
	uint32_t reserved;
};

/* What a thread works on at a time. */
#define DBL_REDUCE_BYTES 16

DBL_DEVICE uint32_t dbl_float_bits(float value)
{
	uint32_t bits;
	memcpy(&bits, &value, sizeof(bits));
	return bits;
}

DBL_DEVICE float dbl_float_of_bits(uint32_t bits)
{
	float value;
	memcpy(&value, &bits, sizeof(value));
	return value;
}

/* IEEE 754 binary16. */
DBL_DEVICE float dbl_float_of_half(uint16_t half)
{
#ifdef __CUDACC__
	float value;
	asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
	return value;
#else
	const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;

	if (magnitude >= 0x7c00) /* infinite, or a NaN */
		return dbl_float_of_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
	if (magnitude >= 0x400)
		return dbl_float_of_bits(sign | (magnitude + (112 << 10)) << 13);
	/* A multiple of 2^-24, which is exact. */
	return dbl_float_of_bits(sign | dbl_float_bits((float)magnitude * 0x1p-24f));
#endif
}

/* Rounded to the nearest, to even between two. */
DBL_DEVICE uint16_t dbl_half_of_float(float value)
{
#ifdef __CUDACC__
	uint16_t half;
	asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
	return half;
#else
	const uint32_t bits = dbl_float_bits(value), magnitude = bits & 0x7fffffff;
	const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
	uint32_t half;

	if (magnitude > 0x7f800000)
		return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
	if (magnitude >= 0x477ff000) /* half way to 65536, and more */
		return (uint16_t)(sign | 0x7c00);
	if (magnitude < 0x38800000) {
		/* Below the least normal number: the sum has the multiple of 2^-24 in its last bits, and rounds to it. */
		half = dbl_float_bits(dbl_float_of_bits(magnitude) + 0.5f) - 0x3f000000;
		return (uint16_t)(sign | half);
	}
	half = magnitude - (112u << 23);
	half += 0xfff + (half >> 13 & 1);
	return (uint16_t)(sign | half >> 13);
#endif
}

/* The upper half of a binary32. */
DBL_DEVICE float dbl_float_of_bf16(uint16_t value)
{
	return dbl_float_of_bits((uint32_t)value << 16);
}

DBL_DEVICE uint16_t dbl_bf16_of_float(float value)
{
	const uint32_t bits = dbl_float_bits(value);

	if ((bits & 0x7fffffff) > 0x7f800000)
		return (uint16_t)(bits >> 16 | 0x40);
	return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define DBL_IS_NAN(a) ((a) != (a))
#define DBL_INTEGER_MIN(a, b) ((a) < (b) ? (a) : (b))
#define DBL_INTEGER_MAX(a, b) ((a) > (b) ? (a) : (b))
#define DBL_FLOAT_MIN(a, b) (DBL_IS_NAN(b) || (a) < (b) ? (a) : (b))
#define DBL_FLOAT_MAX(a, b) (DBL_IS_NAN(b) || (a) > (b) ? (a) : (b))

/*
 * A function that reduces `len_bytes` of aligned memory, at most DBL_REDUCE_BYTES. `type` is what elements are stored as, `wide` what they are
 * computed in, and `divisor` the type of the count.
 */
#define DBL_REDUCE(name, type, wide, widen, narrow, sum, min, max, divisor)                                             \
	DBL_DEVICE void name(uint8_t *into, const uint8_t *first, const uint8_t *second, uint32_t len_bytes,                \
			     uint32_t op, uint32_t count)                                                                   \
	{                                                                                                                    \
		uint32_t at;                                                                                                     \
		type stored[2];                                                                                                  \
		wide a, b;                                                                                                       \
                                                                                                                         \
		for (at = 0; at < len_bytes; at += (uint32_t)sizeof(type)) {                                                     \
			memcpy(&stored[0], first + at, sizeof(type));                                                                \
			memcpy(&stored[1], second + at, sizeof(type));                                                               \
			a = widen(stored[0]);                                                                                        \
			b = widen(stored[1]);                                                                                        \
			switch (op) {                                                                                                \
			case DBL_SUM:                                                                                                \
				a = sum(a, b);                                                                                           \
				break;                                                                                                   \
			case DBL_MIN:                                                                                                \
				a = min(a, b);                                                                                           \
				break;                                                                                                   \
			case DBL_MAX:                                                                                                \
				a = max(a, b);                                                                                           \
				break;                                                                                                   \
			default:                                                                                                     \
				a = (wide)(a / (divisor)count);                                                                          \
				break;                                                                                                   \
			}                                                                                                            \
			stored[0] = narrow(a);                                                                                       \
			memcpy(into + at, &stored[0], sizeof(type));                                                                 \
		}                                                                                                                \
	}

#define DBL_SAME(a) (a)
#define DBL_TO_U8(a) ((uint8_t)(a))
#define DBL_PLUS(a, b) ((a) + (b))
/* Integers wrap around, as unsigned ones do. */
#define DBL_PLUS_I32(a, b) ((int32_t)((uint32_t)(a) + (uint32_t)(b)))
#define DBL_PLUS_I64(a, b) ((int64_t)((uint64_t)(a) + (uint64_t)(b)))

DBL_REDUCE(dbl_reduce_f16, uint16_t, float, dbl_float_of_half, dbl_half_of_float, DBL_PLUS, DBL_FLOAT_MIN, DBL_FLOAT_MAX, float)
DBL_REDUCE(dbl_reduce_bf16, uint16_t, float, dbl_float_of_bf16, dbl_bf16_of_float, DBL_PLUS, DBL_FLOAT_MIN, DBL_FLOAT_MAX, float)
DBL_REDUCE(dbl_reduce_f32, float, float, DBL_SAME, DBL_SAME, DBL_PLUS, DBL_FLOAT_MIN, DBL_FLOAT_MAX, float)
DBL_REDUCE(dbl_reduce_f64, double, double, DBL_SAME, DBL_SAME, DBL_PLUS, DBL_FLOAT_MIN, DBL_FLOAT_MAX, double)
DBL_REDUCE(dbl_reduce_i32, int32_t, int32_t, DBL_SAME, DBL_SAME, DBL_PLUS_I32, DBL_INTEGER_MIN, DBL_INTEGER_MAX, int64_t)
DBL_REDUCE(dbl_reduce_i64, int64_t, int64_t, DBL_SAME, DBL_SAME, DBL_PLUS_I64, DBL_INTEGER_MIN, DBL_INTEGER_MAX, int64_t)
DBL_REDUCE(dbl_reduce_u8, uint8_t, uint32_t, DBL_SAME, DBL_TO_U8, DBL_PLUS, DBL_INTEGER_MIN, DBL_INTEGER_MAX, uint32_t)

/* Reduces at most DBL_REDUCE_BYTES, of whole elements. */
DBL_DEVICE void dbl_reduce_elements(uint32_t data, uint32_t op, uint32_t count, uint8_t *into, const uint8_t *first,
				    const uint8_t *second, uint32_t len_bytes)
{
	if (op == DBL_COPY) {
		memcpy(into, first, len_bytes);
		return;
	}
	switch (data) {
	case DBL_F16:
		dbl_reduce_f16(into, first, second, len_bytes, op, count);
		break;
	case DBL_BF16:
		dbl_reduce_bf16(into, first, second, len_bytes, op, count);
		break;
	case DBL_F32:
		dbl_reduce_f32(into, first, second, len_bytes, op, count);
		break;
	case DBL_F64:
		dbl_reduce_f64(into, first, second, len_bytes, op, count);
		break;
	case DBL_I32:
		dbl_reduce_i32(into, first, second, len_bytes, op, count);
		break;
	case DBL_I64:
		dbl_reduce_i64(into, first, second, len_bytes, op, count);
		break;
	default:
		dbl_reduce_u8(into, first, second, len_bytes, op, count);
		break;
	}
}

/*
 * The share of the thread `index` of `threads`: every `threads`th piece of DBL_REDUCE_BYTES. Pieces need no alignment, so that a part of a
 * buffer may begin anywhere; those with it are loaded and stored at once.
 */
DBL_DEVICE void dbl_reduce_share(const struct dbl_reduce *reduce, uint64_t index, uint64_t threads)
{
	const int is_aligned = ((reduce->into | reduce->first | reduce->second) & (DBL_REDUCE_BYTES - 1)) == 0;
	uint64_t pieces[3][2] = { { 0, 0 }, { 0, 0 }, { 0, 0 } };
	uint8_t *const first = (uint8_t *)pieces[0], *const second = (uint8_t *)pieces[1], *const into = (uint8_t *)pieces[2];
	uint64_t at;
	uint32_t len_bytes, byte;

	for (at = index * DBL_REDUCE_BYTES; at < reduce->len_bytes; at += threads * DBL_REDUCE_BYTES) {
		len_bytes = DBL_REDUCE_BYTES;
		if (len_bytes > reduce->len_bytes - at)
			len_bytes = (uint32_t)(reduce->len_bytes - at);
		if (is_aligned && len_bytes == DBL_REDUCE_BYTES) {
			dbl_load_16(pieces[0], (const void *)(uintptr_t)(reduce->first + at));
			if (reduce->second)
				dbl_load_16(pieces[1], (const void *)(uintptr_t)(reduce->second + at));
			dbl_reduce_elements(reduce->data, reduce->op, reduce->count, into, first, second, DBL_REDUCE_BYTES);
			dbl_store_16((void *)(uintptr_t)(reduce->into + at), pieces[2]);
			continue;
		}
		for (byte = 0; byte < len_bytes; byte++)
			first[byte] = ((const volatile uint8_t *)(uintptr_t)(reduce->first + at))[byte];
		for (byte = 0; byte < len_bytes && reduce->second; byte++)
			second[byte] = ((const volatile uint8_t *)(uintptr_t)(reduce->second + at))[byte];
		dbl_reduce_elements(reduce->data, reduce->op, reduce->count, into, first, second, len_bytes);
		for (byte = 0; byte < len_bytes; byte++)
			((volatile uint8_t *)(uintptr_t)(reduce->into + at))[byte] = into[byte];
	}
}

#endif
