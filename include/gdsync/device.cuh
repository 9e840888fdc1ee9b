/*
 * libgdsync's gdsync/device.cuh: semaphores that kernels and streams share, in the namespace gdsync, over
 * doorbell/device.cuh. The types are also for host code; the functions of gdsync::device are for kernels (nvcc, sm_75 or
 * newer). A wait has the time limit GDSYNC_DEVICE_TIMEOUT_NS.
 */
#ifndef DOORBELL_GDSYNC_DEVICE_CUH
#define DOORBELL_GDSYNC_DEVICE_CUH

#include "../gdsync.h"

#ifdef __CUDACC__
#include "../doorbell/device.cuh"
#define DOORBELL_GDS_HOST_DEVICE __host__ __device__
#else
#define DOORBELL_GDS_HOST_DEVICE
#endif

#ifdef __cplusplus

namespace gdsync
{

/* Results of waits. */
enum { ERROR_TIMEOUT = 11, ERROR_INVALID = 22 };

typedef gds_wait_cond_flag_t wait_cond_t;

/* A word, and the value that is stored there or waited for. */
struct sem32 {
	typedef uint32_t T;
	T sem;
	T value;
	DOORBELL_GDS_HOST_DEVICE volatile T *access_once() { return &sem; }
};
typedef struct sem32 sem32_t;

/* The same for a word elsewhere. */
template <typename W> struct isem {
	typedef W T;
	T *ptr;
	T value;
	DOORBELL_GDS_HOST_DEVICE isem() : ptr(NULL), value(0) {}
	DOORBELL_GDS_HOST_DEVICE volatile T *access_once() { return ptr; }
};
struct isem32 : isem<uint32_t> {};
struct isem64 : isem<uint64_t> {};
typedef struct isem32 isem32_t;
typedef struct isem64 isem64_t;

#ifdef __CUDACC__

namespace device
{

#ifndef GDSYNC_DEVICE_TIMEOUT_NS
#define GDSYNC_DEVICE_TIMEOUT_NS 2000000000ull
#endif

/* Stores the value. A fence for earlier stores is the caller's, as in libgdsync. */
template <typename S> __device__ inline void release(S &sem)
{
	*sem.access_once() = sem.value;
}

/*
 * Waits until a 32-bit word meets a condition. Returns 0, ERROR_TIMEOUT, or ERROR_INVALID for an unknown condition. What
 * was stored before the word is visible afterwards.
 */
template <typename S> __device__ inline int wait(S &sem, wait_cond_t cond)
{
	static_assert(sizeof(typename S::T) == 4, "waits are for words of 32 bits");
	const uint32_t *word = (const uint32_t *)sem.access_once();
	uint32_t condition = DOORBELL_WAIT_GEQ;
	switch (cond) {
	case GDS_WAIT_COND_GEQ:
		break;
	case GDS_WAIT_COND_AND:
		condition = DOORBELL_WAIT_AND;
		break;
	case GDS_WAIT_COND_NOR:
		condition = DOORBELL_WAIT_NOR;
		break;
	case GDS_WAIT_COND_EQ: {
		const uint64_t start_ns = dbl_now_ns();
		while (dbl_load_dword(word) != sem.value)
			if (dbl_has_passed(dbl_now_ns(), start_ns, GDSYNC_DEVICE_TIMEOUT_NS))
				return ERROR_TIMEOUT;
		dbl_fence_acquire();
		return 0;
	}
	default:
		return ERROR_INVALID;
	}
	return doorbell_device_wait_value32(word, condition, sem.value, GDSYNC_DEVICE_TIMEOUT_NS, NULL) == DOORBELL_OK ? 0 : ERROR_TIMEOUT;
}

template <typename S> __device__ inline int wait_geq(S &sem) { return wait(sem, GDS_WAIT_COND_GEQ); }
template <typename S> __device__ inline int wait_eq(S &sem) { return wait(sem, GDS_WAIT_COND_EQ); }
template <typename S> __device__ inline int wait_and(S &sem) { return wait(sem, GDS_WAIT_COND_AND); }
template <typename S> __device__ inline int wait_nor(S &sem) { return wait(sem, GDS_WAIT_COND_NOR); }

} // namespace device

#endif

} // namespace gdsync

#endif

#endif /* DOORBELL_GDSYNC_DEVICE_CUH */
