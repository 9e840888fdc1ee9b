/* What device.cuh has for processors, and the calls of a block for blocks of one thread. */
#ifndef CUDA_ON_CPU_DEVICE_H
#define CUDA_ON_CPU_DEVICE_H

#include <doorbell/queue.h>
#include <doorbell/trigger.h>

#define doorbell_put_signal_block doorbell_put_signal
#define doorbell_wait_block doorbell_wait

#endif
