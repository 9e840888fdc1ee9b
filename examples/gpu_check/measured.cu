/* The kernels of gpu_check; scripts/gpu-bundle compiles them. */
#include "measured.h"

/* One thread. */
extern "C" __global__ void gpu_check_ring(const __grid_constant__ measured_bells bells)
{
	*(int *)bells.code = measured_ring(&bells);
}

extern "C" __global__ void gpu_check_put(const __grid_constant__ measured_puts puts)
{
	const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
	const struct doorbell_queue *queue = (const struct doorbell_queue *)puts.queues + blockIdx.x % puts.queue_count;
	((int *)puts.codes)[thread] = measured_put(&puts, queue, thread);
}

extern "C" __global__ void gpu_check_emit(const __grid_constant__ measured_emits emits)
{
	measured_emit(&emits, blockIdx.x * blockDim.x + threadIdx.x);
}
