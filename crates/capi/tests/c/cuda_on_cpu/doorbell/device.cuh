/* What device.cuh has for processors, and the calls of a block for blocks of one thread. */
#ifndef CUDA_ON_CPU_DEVICE_H
#define CUDA_ON_CPU_DEVICE_H

#include <sched.h>

/* Kernels that wait for one another share the processors with the device. */
#define DBL_TURN() ((void)sched_yield())
#define DBL_PAUSE(turn) ((void)(turn), sched_yield(), 0)

#ifndef WITHOUT_TRIGGERS

#include <dlfcn.h>
#include <stdint.h>

/* What triggers name are addresses of the stand-in's device. */
static inline void *cuda_on_cpu_reach(uint64_t address, uint64_t len_bytes)
{
	typedef void *(*reach)(uint64_t, uint64_t);
	static const reach found = (reach)dlsym(dlopen("libcuda.so.1", RTLD_NOW), "doorbell_cuda_standin_reach");
	return found(address, len_bytes);
}

#define DBL_MAP_ADDRESS(address, len_bytes) cuda_on_cpu_reach(address, len_bytes)

#endif

#include <doorbell/queue.h>
#include <doorbell/signal.h>
#include <doorbell/trigger.h>

#define doorbell_device_put_signal_block doorbell_device_put_signal
#define doorbell_device_quiet_block doorbell_device_quiet
#define doorbell_device_signal_wait_until_block doorbell_device_signal_wait_until

#endif
