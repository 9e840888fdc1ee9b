/*
 * Device-side interface of doorbell: header-only, for nvcc and sm_75 or newer. All functions are `static inline
 * __device__`. Calls that wait have a time limit, and return status codes of doorbell.h.
 *
 *   trigger.h       kernels execute operations that the host has prepared
 *   queue.h         kernels make work requests themselves
 *   collective.cuh  a warp or a block makes work requests together
 *
 * Kernels are the same on every device (ConnectX, software ConnectX) and on every control path (direct, proxy).
 */
#ifndef DOORBELL_DEVICE_CUH
#define DOORBELL_DEVICE_CUH

#include "collective.cuh"
#include "queue.h"
#include "trigger.h"

#endif
