/*
 * What nvcc has of its own, for clang, which compiles cuda/kernels.cu where there is no nvcc: the words of the language, and the functions that the
 * headers and the kernels use. Nothing of a CUDA toolkit is needed. build.rs includes it before everything else.
 */
#ifndef DOORBELL_CLANG_H
#define DOORBELL_CLANG_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
/* clang knows it from version 20 on. Without it a kernel may copy its parameter to its stack. */
#define __grid_constant__

/* That of the C library is the host's. */
#define memcpy(to, from, count) __builtin_memcpy(to, from, count)
#define memset(to, value, count) __builtin_memset(to, value, count)

struct uint3 {
	unsigned x, y, z;
};
struct dim3 {
	unsigned x, y, z;
};
/* threadIdx and the like. */
#include <__clang_cuda_builtin_vars.h>

struct __attribute__((aligned(16))) ulonglong2 {
	unsigned long long x, y;
};

static inline __device__ ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y)
{
	return ulonglong2{x, y};
}

static inline __device__ unsigned __byte_perm(unsigned a, unsigned b, unsigned selector)
{
	return __nvvm_prmt(a, b, selector);
}

static inline __device__ int __popc(unsigned word)
{
	return __builtin_popcount(word);
}

static inline __device__ int __ffs(int word)
{
	return __builtin_ffs(word);
}

static inline __device__ void __syncwarp(unsigned lanes = 0xffffffff)
{
	__nvvm_bar_warp_sync(lanes);
}

static inline __device__ int __any_sync(unsigned lanes, int predicate)
{
	return __nvvm_vote_any_sync(lanes, predicate);
}

static inline __device__ unsigned __activemask(void)
{
	unsigned lanes;
	asm volatile("activemask.b32 %0;" : "=r"(lanes));
	return lanes;
}

static inline __device__ unsigned __shfl_sync(unsigned lanes, unsigned value, int from)
{
	return (unsigned)__nvvm_shfl_sync_idx_i32(lanes, (int)value, from, 0x1f);
}

static inline __device__ int __shfl_sync(unsigned lanes, int value, int from)
{
	return __nvvm_shfl_sync_idx_i32(lanes, value, from, 0x1f);
}

#endif
