/*
 * Loads, stores and fences of memory that a GPU shares with CPUs and NICs: those of a kernel, or of a thread of a CPU. C11, C++17 and CUDA.
 *
 * All but exchanges, which are of the GPU's, are of system scope, and of one access of their width. `acquire`: what was stored before what is loaded is seen by all that follows.
 * `release`: what was stored or loaded before is seen by who loads this with acquire. `relaxed`: neither; the fence between two of them
 * orders them.
 */
#ifndef DOORBELL_ACCESS_H
#define DOORBELL_ACCESS_H

#include <stdint.h>

#ifdef __CUDACC__

/* What only kernels can call, where there are kernels. */
#define DBL_DEVICE static inline __device__

/* There are warps and blocks. Tests that have them of threads of a CPU define this themselves, and what CUDA has for them. */
#define DBL_HAS_BLOCKS

/* The calling thread's place in its warp; the mask of the lanes before it. */
DBL_DEVICE uint32_t dbl_lane(void)
{
	uint32_t lane;
	asm("mov.u32 %0, %%laneid;" : "=r"(lane));
	return lane;
}

DBL_DEVICE uint32_t dbl_lanes_before(void)
{
	uint32_t before;
	asm("mov.u32 %0, %%lanemask_lt;" : "=r"(before));
	return before;
}

DBL_DEVICE uint32_t dbl_load_dword(const void *from)
{
	uint32_t value;
	asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
	return value;
}

DBL_DEVICE uint64_t dbl_load_qword(const void *from)
{
	uint64_t value;
	asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
	return value;
}

/* Relaxed: several of them may be under way at once. */
DBL_DEVICE uint32_t dbl_load_dword_relaxed(const void *from)
{
	uint32_t value;
	asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
	return value;
}

/* Relaxed. */
DBL_DEVICE void dbl_store_dword(void *to, uint32_t value)
{
	asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}

/* Release. */
DBL_DEVICE void dbl_store_dword_release(void *to, uint32_t value)
{
	asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}

/* Relaxed. Also what rings a NIC: .mmio is neither merged with its neighbours nor split, and is done exactly once. */
DBL_DEVICE void dbl_store_qword(void *to, uint64_t value)
{
	asm volatile("st.mmio.relaxed.sys.global.u64 [%0], %1;" : : "l"(to), "l"(value) : "memory");
}

/* Stores `to` if the word at `at`, which is memory of the same GPU, is `from`; acquire if so. Whether it was. */
DBL_DEVICE int dbl_exchange_dword(uint32_t *at, uint32_t from, uint32_t to)
{
	uint32_t found;
	asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;"
		     : "=r"(found)
		     : "l"(at), "r"(from), "r"(to)
		     : "memory");
	return found == from;
}

/* Sequentially consistent: stores before loads as well. */
DBL_DEVICE void dbl_fence_system(void)
{
	__threadfence_system();
}

/* Nanoseconds of the clock that all of a GPU have. It steps by up to a microsecond. */
DBL_DEVICE uint64_t dbl_now_ns(void)
{
	uint64_t now;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
	return now;
}

#else

#include <time.h>

#define DBL_DEVICE static inline

DBL_DEVICE uint32_t dbl_load_dword(const void *from)
{
	return __atomic_load_n((const uint32_t *)from, __ATOMIC_ACQUIRE);
}

DBL_DEVICE uint64_t dbl_load_qword(const void *from)
{
	return __atomic_load_n((const uint64_t *)from, __ATOMIC_ACQUIRE);
}

DBL_DEVICE uint32_t dbl_load_dword_relaxed(const void *from)
{
	return __atomic_load_n((const uint32_t *)from, __ATOMIC_RELAXED);
}

DBL_DEVICE void dbl_store_dword(void *to, uint32_t value)
{
	__atomic_store_n((uint32_t *)to, value, __ATOMIC_RELAXED);
}

DBL_DEVICE void dbl_store_dword_release(void *to, uint32_t value)
{
	__atomic_store_n((uint32_t *)to, value, __ATOMIC_RELEASE);
}

DBL_DEVICE void dbl_store_qword(void *to, uint64_t value)
{
	__atomic_store_n((uint64_t *)to, value, __ATOMIC_RELAXED);
}

DBL_DEVICE int dbl_exchange_dword(uint32_t *at, uint32_t from, uint32_t to)
{
	return __atomic_compare_exchange_n(at, &from, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

DBL_DEVICE void dbl_fence_system(void)
{
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
}

DBL_DEVICE uint64_t dbl_now_ns(void)
{
	struct timespec now;
#ifdef CLOCK_MONOTONIC
	clock_gettime(CLOCK_MONOTONIC, &now);
#else
	/* C11 alone. */
	timespec_get(&now, TIME_UTC);
#endif
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#endif

/* One hour: no kernel waits for ever, whatever it was told. */
#define DOORBELL_KERNEL_TIMEOUT_MAX_NS 3600000000000u

DBL_DEVICE uint64_t dbl_bounded(uint64_t timeout_ns)
{
	return timeout_ns < DOORBELL_KERNEL_TIMEOUT_MAX_NS ? timeout_ns : DOORBELL_KERNEL_TIMEOUT_MAX_NS;
}

/* Whether more than that has passed. A clock that has gone back a step has passed nothing: that a GPU's never does, NVIDIA does not say. */
DBL_DEVICE int dbl_has_passed(uint64_t now_ns, uint64_t since_ns, uint64_t bound_ns)
{
	const uint64_t passed_ns = now_ns - since_ns;

	return passed_ns > bound_ns && passed_ns < (uint64_t)1 << 63;
}

#endif
