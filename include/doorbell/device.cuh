/*
 * Device-side interface of doorbell: header-only, for nvcc and sm_75 or newer. All functions are `static inline
 * __device__`, and their names begin with doorbell_device_. Calls that wait have a time limit, and return status codes of
 * doorbell.h.
 *
 *   trigger.h       kernels execute operations that the host has prepared
 *   queue.h         kernels make work requests themselves
 *   signal.h        kernels store words, and wait for signals of peers
 *   collective.cuh  a warp or a block makes such an operation together
 *
 * Kernels are the same on every device (ConnectX, software ConnectX) and on every control path (direct, proxy).
 */
#ifndef DOORBELL_DEVICE_CUH
#define DOORBELL_DEVICE_CUH

#include "collective.cuh"
#include "queue.h"
#include "signal.h"
#include "trigger.h"

#endif
