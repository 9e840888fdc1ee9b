/*
 * How the interpreter of programs reaches memory, on a GPU and on a CPU. C11 and CUDA.
 */
#ifndef DOORBELL_EXECUTOR_H
#define DOORBELL_EXECUTOR_H

#include <stdint.h>

#ifdef __CUDACC__

/* Inline, so that unused functions cause no warning. */
#define DBL_EXECUTOR static inline __device__
/* Called, so that a kernel without such a step has no more than the call. */
#define DBL_EXECUTOR_CALLED static inline __noinline__ __device__

/* A wrong address of a GPU ends the context, so it is not checked. */
#define DBL_MAP_ADDRESS(address, len_bytes) ((void *)(address))
/* Nothing ends a kernel from outside. */
#define DBL_PAUSE(turn) 0

#else

#define DBL_EXECUTOR static inline
#define DBL_EXECUTOR_CALLED static inline
/* Programs may define this to translate addresses; NULL if there is no memory at an address. */
#ifndef DBL_MAP_ADDRESS
#define DBL_MAP_ADDRESS(address, len_bytes) ((void *)(uintptr_t)(address))
#endif
/* Called once in each turn of a wait; if not 0, the batch ends there. */
#ifndef DBL_PAUSE
#define DBL_PAUSE(turn) 0
#endif

#endif

#endif
