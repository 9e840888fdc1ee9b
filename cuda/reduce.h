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

/*
 * IEEE 754 binary16. By integers on a GPU, too: ptxas 13.0 makes F2I.U8.F16, which converts the number, of a store of the lower byte of what
 * cvt.rn.f16.f32 has made.
 */
DBL_DEVICE float dbl_float_of_half(uint16_t half)
{
	const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;

	if (magnitude >= 0x7c00) /* infinite, or a NaN */
		return dbl_float_of_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
	if (magnitude >= 0x400)
		return dbl_float_of_bits(sign | (magnitude + (112 << 10)) << 13);
	/* A multiple of 2^-24, which is exact. */
	return dbl_float_of_bits(sign | dbl_float_bits((float)magnitude * 5.9604644775390625e-8f));
}

/* Rounded to the nearest, to even between two. */
DBL_DEVICE uint16_t dbl_half_of_float(float value)
{
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

DBL_DEVICE uint64_t dbl_double_bits(double value)
{
	uint64_t bits;
	memcpy(&bits, &value, sizeof(bits));
	return bits;
}

DBL_DEVICE double dbl_double_of_bits(uint64_t bits)
{
	double value;
	memcpy(&value, &bits, sizeof(value));
	return value;
}

#define DBL_IS_NAN(a) ((a) != (a))
#define DBL_INTEGER_MIN(a, b) ((a) < (b) ? (a) : (b))
#define DBL_INTEGER_MAX(a, b) ((a) > (b) ? (a) : (b))
#define DBL_FLOAT_MIN(a, b) (DBL_IS_NAN(b) || (a) < (b) ? (a) : (b))
#define DBL_FLOAT_MAX(a, b) (DBL_IS_NAN(b) || (a) > (b) ? (a) : (b))

/*
 * A function that reduces the elements in two words of eight bytes. `bits` is an unsigned type of an element's size, `wide` what it is computed in,
 * and `divisor` the type of the count. All is in registers: a kernel with a stack makes the driver wait for other kernels.
 */
#define DBL_REDUCE(name, bits, wide, widen, narrow, sum, min, max, divisor)                                            \
	DBL_DEVICE uint64_t name(uint64_t first, uint64_t second, uint32_t op, uint32_t count)                              \
	{                                                                                                                   \
		uint64_t result = 0;                                                                                            \
		uint32_t at;                                                                                                    \
		wide a, b;                                                                                                      \
                                                                                                                        \
		for (at = 0; at < 64; at += 8 * (uint32_t)sizeof(bits)) {                                                       \
			a = widen((bits)(first >> at));                                                                             \
			b = widen((bits)(second >> at));                                                                            \
			switch (op) {                                                                                               \
			case DBL_SUM:                                                                                               \
				a = sum(a, b);                                                                                          \
				break;                                                                                                  \
			case DBL_MIN:                                                                                               \
				a = min(a, b);                                                                                          \
				break;                                                                                                  \
			case DBL_MAX:                                                                                               \
				a = max(a, b);                                                                                          \
				break;                                                                                                  \
			default:                                                                                                    \
				a = (wide)(a / (divisor)count);                                                                         \
				break;                                                                                                  \
			}                                                                                                           \
			result |= (uint64_t)(bits)narrow(a) << at;                                                                  \
		}                                                                                                               \
		return result;                                                                                                  \
	}

#define DBL_PLUS(a, b) ((a) + (b))
/* Integers wrap around, as unsigned ones do. */
#define DBL_PLUS_I32(a, b) ((int32_t)((uint32_t)(a) + (uint32_t)(b)))
#define DBL_PLUS_I64(a, b) ((int64_t)((uint64_t)(a) + (uint64_t)(b)))
#define DBL_I32(a) ((int32_t)(a))
#define DBL_I64(a) ((int64_t)(a))
#define DBL_SAME(a) (a)

DBL_REDUCE(dbl_reduce_f16, uint16_t, float, dbl_float_of_half, dbl_half_of_float, DBL_PLUS, DBL_FLOAT_MIN, DBL_FLOAT_MAX, float)
DBL_REDUCE(dbl_reduce_bf16, uint16_t, float, dbl_float_of_bf16, dbl_bf16_of_float, DBL_PLUS, DBL_FLOAT_MIN, DBL_FLOAT_MAX, float)
DBL_REDUCE(dbl_reduce_f32, uint32_t, float, dbl_float_of_bits, dbl_float_bits, DBL_PLUS, DBL_FLOAT_MIN, DBL_FLOAT_MAX, float)
DBL_REDUCE(dbl_reduce_f64, uint64_t, double, dbl_double_of_bits, dbl_double_bits, DBL_PLUS, DBL_FLOAT_MIN, DBL_FLOAT_MAX, double)
DBL_REDUCE(dbl_reduce_i32, uint32_t, int32_t, DBL_I32, DBL_SAME, DBL_PLUS_I32, DBL_INTEGER_MIN, DBL_INTEGER_MAX, int64_t)
DBL_REDUCE(dbl_reduce_i64, uint64_t, int64_t, DBL_I64, DBL_SAME, DBL_PLUS_I64, DBL_INTEGER_MIN, DBL_INTEGER_MAX, int64_t)
DBL_REDUCE(dbl_reduce_u8, uint8_t, uint32_t, DBL_SAME, DBL_SAME, DBL_PLUS, DBL_INTEGER_MIN, DBL_INTEGER_MAX, uint32_t)

/* Reduces the elements in two words. */
DBL_DEVICE uint64_t dbl_reduce_word(const struct dbl_reduce *reduce, uint64_t first, uint64_t second)
{
	if (reduce->op == DBL_COPY)
		return first;
	switch (reduce->data) {
	case DBL_F16:
		return dbl_reduce_f16(first, second, reduce->op, reduce->count);
	case DBL_BF16:
		return dbl_reduce_bf16(first, second, reduce->op, reduce->count);
	case DBL_F32:
		return dbl_reduce_f32(first, second, reduce->op, reduce->count);
	case DBL_F64:
		return dbl_reduce_f64(first, second, reduce->op, reduce->count);
	case DBL_I32:
		return dbl_reduce_i32(first, second, reduce->op, reduce->count);
	case DBL_I64:
		return dbl_reduce_i64(first, second, reduce->op, reduce->count);
	default:
		return dbl_reduce_u8(first, second, reduce->op, reduce->count);
	}
}

/* A word of `len_bytes` at any address, at most 8. */
DBL_DEVICE uint64_t dbl_reduce_load(uint64_t from, uint32_t len_bytes)
{
	uint64_t word = 0;
	uint32_t byte;

	for (byte = 0; byte < len_bytes; byte++)
		word |= (uint64_t)((const volatile uint8_t *)(uintptr_t)from)[byte] << 8 * byte;
	return word;
}

/*
 * The share of the thread `index` of `threads`: every `threads`th piece of DBL_REDUCE_BYTES. Memory needs no alignment, so that a part of a
 * buffer may begin anywhere; pieces with it are loaded and stored at once.
 */
DBL_DEVICE void dbl_reduce_share(const struct dbl_reduce *reduce, uint64_t index, uint64_t threads)
{
	const int is_aligned = ((reduce->into | reduce->first | reduce->second) & (DBL_REDUCE_BYTES - 1)) == 0;
	const int has_second = reduce->second != 0;
	uint64_t first[2], second[2] = { 0, 0 }, word, at, end;
	uint32_t len_bytes, byte;

	for (at = index * DBL_REDUCE_BYTES; at < reduce->len_bytes; at += threads * DBL_REDUCE_BYTES) {
		end = at + DBL_REDUCE_BYTES;
		if (end > reduce->len_bytes)
			end = reduce->len_bytes;
		if (is_aligned && end - at == DBL_REDUCE_BYTES) {
			dbl_load_16(first, (const void *)(uintptr_t)(reduce->first + at));
			if (has_second)
				dbl_load_16(second, (const void *)(uintptr_t)(reduce->second + at));
			first[0] = dbl_reduce_word(reduce, first[0], second[0]);
			first[1] = dbl_reduce_word(reduce, first[1], second[1]);
			dbl_store_16((void *)(uintptr_t)(reduce->into + at), first);
			continue;
		}
		for (word = at; word < end; word += 8) {
			len_bytes = end - word < 8 ? (uint32_t)(end - word) : 8;
			first[0] = dbl_reduce_load(reduce->first + word, len_bytes);
			second[0] = has_second ? dbl_reduce_load(reduce->second + word, len_bytes) : 0;
			first[0] = dbl_reduce_word(reduce, first[0], second[0]);
			for (byte = 0; byte < len_bytes; byte++)
				((volatile uint8_t *)(uintptr_t)(reduce->into + word))[byte] = (uint8_t)(first[0] >> 8 * byte);
		}
	}
}

#endif
