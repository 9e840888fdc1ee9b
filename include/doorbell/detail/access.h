/*
 * Loads, stores and fences for memory that a GPU shares with CPUs and NICs, for kernels and for threads of a CPU. C11,
 * C++17 and CUDA.
 *
 * Each load and store is one access of its width. The memory orders are those of C11:
 * - acquire: what was stored before the loaded value is visible to everything that follows.
 * - release: what was loaded and stored before is visible to a thread that loads this value with
 *   acquire.
 * - relaxed: neither; a fence between two relaxed accesses orders them.
 *
 * The scope names the other side. System scope is for CPUs and NICs. GPU scope (names with _gpu, and all
 * read-modify-write operations) is for words that only threads of one GPU use. An order is cumulative: what a thread
 * has learnt from a CPU or a NIC at system scope is included when it passes that on at GPU scope.
 */
#ifndef DOORBELL_ACCESS_H
#define DOORBELL_ACCESS_H

#include <stdint.h>

#ifdef __CUDACC__

/* A function for kernels; without CUDA, for the CPU. */
#define DBL_DEVICE static inline __device__

/*
 * The compiler has warps and blocks. Tests that imitate them with threads of a CPU define this and CUDA's names
 * themselves.
 */
#define DBL_HAS_BLOCKS

/* The calling thread's lane in its warp, and the mask of the lanes before it. */
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

/* Relaxed, so that several of these loads can be in flight at once. */
DBL_DEVICE uint32_t dbl_load_dword_relaxed(const void *from)
{
	uint32_t value;
	asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
	return value;
}

DBL_DEVICE uint64_t dbl_load_qword_relaxed(const void *from)
{
	uint64_t value;
	asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
	return value;
}

/* Of a word that no other thread uses at the same time: without any order. */
DBL_DEVICE uint32_t dbl_load_dword_own(const void *from)
{
	uint32_t value;
	asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
	return value;
}

DBL_DEVICE void dbl_store_dword_own(void *to, uint32_t value)
{
	asm volatile("st.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}

/* Two words, each of which is relaxed. `from` is a multiple of 16. */
DBL_DEVICE void dbl_load_16(uint64_t words[2], const void *from)
{
	asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(words[0]), "=l"(words[1]) : "l"(from) : "memory");
}

/* The same. */
DBL_DEVICE void dbl_store_16(void *to, const uint64_t words[2])
{
	asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" : : "l"(to), "l"(words[0]), "l"(words[1]) : "memory");
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

DBL_DEVICE void dbl_store_qword_release(void *to, uint64_t value)
{
	asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(to), "l"(value) : "memory");
}

/* Acquire, of GPU scope. */
DBL_DEVICE uint32_t dbl_load_dword_gpu(const void *from)
{
	uint32_t value;
	asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
	return value;
}

/* Release, of GPU scope. */
DBL_DEVICE void dbl_store_dword_release_gpu(void *to, uint32_t value)
{
	asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}

/* Relaxed. This store also rings a NIC: .mmio stores are neither merged nor split, and are executed exactly once. */
DBL_DEVICE void dbl_store_qword(void *to, uint64_t value)
{
	asm volatile("st.mmio.relaxed.sys.global.u64 [%0], %1;" : : "l"(to), "l"(value) : "memory");
}

/*
 * Read-modify-write operations, of GPU scope. The word is memory of the calling GPU. dbl_claim_dword, dbl_take_dword and
 * dbl_leave_dword store `to` if the word at `at` is `from`. This one returns what it found; the others, whether they did.
 * Relaxed.
 */
DBL_DEVICE uint32_t dbl_claim_dword(uint32_t *at, uint32_t from, uint32_t to)
{
	uint32_t found;
	asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
		     : "=r"(found)
		     : "l"(at), "r"(from), "r"(to)
		     : "memory");
	return found;
}

/* Acquire. */
DBL_DEVICE int dbl_take_dword(uint32_t *at, uint32_t from, uint32_t to)
{
	uint32_t found;
	asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;"
		     : "=r"(found)
		     : "l"(at), "r"(from), "r"(to)
		     : "memory");
	return found == from;
}

/* Release. */
DBL_DEVICE int dbl_leave_dword(uint32_t *at, uint32_t from, uint32_t to)
{
	uint32_t found;
	asm volatile("atom.release.gpu.global.cas.b32 %0, [%1], %2, %3;"
		     : "=r"(found)
		     : "l"(at), "r"(from), "r"(to)
		     : "memory");
	return found == from;
}

/* Adds, and returns the value before. Acquire and release. */
DBL_DEVICE uint32_t dbl_add_dword(uint32_t *at, uint32_t value)
{
	uint32_t found;
	asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(found) : "l"(at), "r"(value) : "memory");
	return found;
}

/* Replaces the value, and returns the one before. Acquire. */
DBL_DEVICE uint32_t dbl_swap_dword_acquire(uint32_t *at, uint32_t value)
{
	uint32_t found;
	asm volatile("atom.acquire.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(found) : "l"(at), "r"(value) : "memory");
	return found;
}

/* The same, relaxed: a thread that then loads it with acquire synchronises with the release before this. */
DBL_DEVICE uint32_t dbl_swap_dword(uint32_t *at, uint32_t value)
{
	uint32_t found;
	asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(found) : "l"(at), "r"(value) : "memory");
	return found;
}

/*
 * One-way fences need sm_90 and PTX 8.6, which nvcc has since 12.7. Without them a fence has both directions; it is
 * never sequentially consistent.
 */
#if __CUDA_ARCH__ >= 900 && (__CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 7))
#define DBL_FENCE_ACQUIRE "fence.acquire"
#define DBL_FENCE_RELEASE "fence.release"
#else
#define DBL_FENCE_ACQUIRE "fence.acq_rel"
#define DBL_FENCE_RELEASE "fence.acq_rel"
#endif

/* Makes earlier relaxed loads acquire, of system scope. */
DBL_DEVICE void dbl_fence_acquire(void)
{
	asm volatile(DBL_FENCE_ACQUIRE ".sys;" : : : "memory");
}

/* The same of GPU scope. */
DBL_DEVICE void dbl_fence_acquire_gpu(void)
{
	asm volatile(DBL_FENCE_ACQUIRE ".gpu;" : : : "memory");
}

/* Makes later relaxed stores release, of system scope. */
DBL_DEVICE void dbl_fence_release(void)
{
	asm volatile(DBL_FENCE_RELEASE ".sys;" : : : "memory");
}

/* The same of GPU scope. */
DBL_DEVICE void dbl_fence_release_gpu(void)
{
	asm volatile(DBL_FENCE_RELEASE ".gpu;" : : : "memory");
}

/* Both, of system scope. Earlier stores are not ordered before later loads. */
DBL_DEVICE void dbl_fence_system(void)
{
	asm volatile("fence.acq_rel.sys;" : : : "memory");
}

/* Release, before a store to a register of a NIC. */
DBL_DEVICE void dbl_fence_register(void)
{
	dbl_fence_release();
}

/* After a store to a register of a NIC, before a release store that lets another thread ring: a GPU orders the two. */
DBL_DEVICE void dbl_flush_registers(void)
{
}

/* The clock of the GPU, the same for all its threads, in nanoseconds. Its steps are up to a microsecond. */
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

DBL_DEVICE uint64_t dbl_load_qword_relaxed(const void *from)
{
	return __atomic_load_n((const uint64_t *)from, __ATOMIC_RELAXED);
}

/* Not atomic: checkers find a thread that uses the word at the same time. */
DBL_DEVICE uint32_t dbl_load_dword_own(const void *from)
{
	return *(const uint32_t *)from;
}

DBL_DEVICE void dbl_store_dword_own(void *to, uint32_t value)
{
	*(uint32_t *)to = value;
}

DBL_DEVICE void dbl_load_16(uint64_t words[2], const void *from)
{
	words[0] = __atomic_load_n((const uint64_t *)from, __ATOMIC_RELAXED);
	words[1] = __atomic_load_n((const uint64_t *)from + 1, __ATOMIC_RELAXED);
}

DBL_DEVICE void dbl_store_16(void *to, const uint64_t words[2])
{
	__atomic_store_n((uint64_t *)to, words[0], __ATOMIC_RELAXED);
	__atomic_store_n((uint64_t *)to + 1, words[1], __ATOMIC_RELAXED);
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

DBL_DEVICE void dbl_store_qword_release(void *to, uint64_t value)
{
	__atomic_store_n((uint64_t *)to, value, __ATOMIC_RELEASE);
}

/* Threads of a CPU have one scope. */
DBL_DEVICE uint32_t dbl_load_dword_gpu(const void *from)
{
	return dbl_load_dword(from);
}

DBL_DEVICE void dbl_store_dword_release_gpu(void *to, uint32_t value)
{
	dbl_store_dword_release(to, value);
}

DBL_DEVICE uint32_t dbl_claim_dword(uint32_t *at, uint32_t from, uint32_t to)
{
	/* `from` receives what was found. */
	__atomic_compare_exchange_n(at, &from, to, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
	return from;
}

DBL_DEVICE int dbl_take_dword(uint32_t *at, uint32_t from, uint32_t to)
{
	return __atomic_compare_exchange_n(at, &from, to, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

DBL_DEVICE int dbl_leave_dword(uint32_t *at, uint32_t from, uint32_t to)
{
	return __atomic_compare_exchange_n(at, &from, to, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}

DBL_DEVICE uint32_t dbl_add_dword(uint32_t *at, uint32_t value)
{
	return __atomic_fetch_add(at, value, __ATOMIC_ACQ_REL);
}

DBL_DEVICE uint32_t dbl_swap_dword_acquire(uint32_t *at, uint32_t value)
{
	return __atomic_exchange_n(at, value, __ATOMIC_ACQUIRE);
}

DBL_DEVICE uint32_t dbl_swap_dword(uint32_t *at, uint32_t value)
{
	return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);
}

/*
 * A fence of C11 may stop at the processors, and on AArch64 does. The other side of system scope may be a NIC: then it
 * takes what rdma-core has in util/udma_barrier.h.
 */
DBL_DEVICE void dbl_fence_acquire(void)
{
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
#if defined(__aarch64__)
	/* udma_from_device_barrier() */
	__asm__ volatile("dmb oshld" : : : "memory");
#endif
}

DBL_DEVICE void dbl_fence_acquire_gpu(void)
{
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
}

DBL_DEVICE void dbl_fence_release(void)
{
	__atomic_thread_fence(__ATOMIC_RELEASE);
#if defined(__aarch64__)
	/* udma_to_device_barrier() */
	__asm__ volatile("dmb oshst" : : : "memory");
#endif
}

DBL_DEVICE void dbl_fence_release_gpu(void)
{
	__atomic_thread_fence(__ATOMIC_RELEASE);
}

DBL_DEVICE void dbl_fence_register(void)
{
	__atomic_thread_fence(__ATOMIC_RELEASE);
	/* The register may be write-combining: rdma-core, util/udma_barrier.h, mmio_wc_start(). */
#if defined(__x86_64__)
	__asm__ volatile("sfence" : : : "memory");
#elif defined(__aarch64__)
	__asm__ volatile("dsb st" : : : "memory");
#endif
}

DBL_DEVICE void dbl_flush_registers(void)
{
	/* The register may be write-combining: rdma-core, util/udma_barrier.h, mmio_flush_writes(). */
#if defined(__x86_64__)
	__asm__ volatile("sfence" : : : "memory");
#elif defined(__aarch64__)
	__asm__ volatile("dsb st" : : : "memory");
#endif
}

/* Between any accesses, stores to registers included. */
DBL_DEVICE void dbl_fence_system(void)
{
	__atomic_thread_fence(__ATOMIC_ACQ_REL);
#if defined(__aarch64__)
	/* udma_from_device_barrier() */
	__asm__ volatile("dmb oshld" : : : "memory");
#endif
	dbl_flush_registers();
}

DBL_DEVICE uint64_t dbl_now_ns(void)
{
	struct timespec now;
#ifdef CLOCK_MONOTONIC
	clock_gettime(CLOCK_MONOTONIC, &now);
#else
	/* C11 without POSIX. */
	timespec_get(&now, TIME_UTC);
#endif
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#endif

/*
 * Relaxed accesses with separate fences. ThreadSanitizer does not support fences, so its builds use acquire and
 * release instead.
 */
#if defined(__CUDACC__) || defined(DBL_FENCES_ORDER)
#define DBL_LOAD_FENCED dbl_load_dword_relaxed
#define DBL_LOAD_QWORD_FENCED dbl_load_qword_relaxed
#define DBL_STORE_FENCED dbl_store_dword
#else
#define DBL_LOAD_FENCED dbl_load_dword
#define DBL_LOAD_QWORD_FENCED dbl_load_qword
#define DBL_STORE_FENCED dbl_store_dword_release
#endif

/* The longest bound of a wait in a kernel: one hour. */
#define DOORBELL_DEVICE_TIMEOUT_MAX_NS 3600000000000u

DBL_DEVICE uint64_t dbl_bounded(uint64_t timeout_ns)
{
	return timeout_ns < DOORBELL_DEVICE_TIMEOUT_MAX_NS ? timeout_ns : DOORBELL_DEVICE_TIMEOUT_MAX_NS;
}

/*
 * Whether more than `bound_ns` have passed since `since_ns`. If `now_ns` is before `since_ns`, nothing has passed:
 * NVIDIA does not guarantee that the GPU's clock never steps back.
 */
DBL_DEVICE int dbl_has_passed(uint64_t now_ns, uint64_t since_ns, uint64_t bound_ns)
{
	const uint64_t passed_ns = now_ns - since_ns;

	return passed_ns > bound_ns && passed_ns < (uint64_t)1 << 63;
}

#endif
