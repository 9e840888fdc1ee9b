/*
 * Doorbell for kernels: header-only, for nvcc and sm_75 or newer. All functions are `static inline __device__`; each wait is bounded, and
 * has a status code of doorbell.h.
 *
 *   trigger.h       kernels that ring operations which the host has prepared
 *   queue.h         kernels that make work requests themselves
 *   collective.cuh  the same by warps and blocks at once
 *
 * No kernel's code says which path is in force: over a ConnectX, the software ConnectX and the proxy it is the same.
 */
#ifndef DOORBELL_DEVICE_CUH
#define DOORBELL_DEVICE_CUH

#include "collective.cuh"
#include "queue.h"
#include "trigger.h"

#endif
