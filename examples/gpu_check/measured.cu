/* The kernels of gpu_check; scripts/gpu-bundle compiles them. */
#include <doorbell/device.cuh>

#include "measured.h"

/* Whether a kernel runs at all. */
extern "C" __global__ void gpu_check_mark(uint32_t *word)
{
	*word = 7;
}

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

/* One block. The loop before it has the threads come late, each in another way. */
extern "C" __global__ void gpu_check_group(const __grid_constant__ measured_group group)
{
	const uint64_t late_ns = 500 * (uint64_t)((threadIdx.x * 7 + group.value) % 8), start_ns = dbl_now_ns();
	while (dbl_now_ns() - start_ns < late_ns)
		;
	((uint32_t *)group.data)[threadIdx.x] = group.value + threadIdx.x;
	((int *)group.codes)[threadIdx.x] = group.is_warp ? doorbell_trigger_warp(&group.trigger, MEASURED_BOUND_NS) :
							    doorbell_trigger_block(&group.trigger, MEASURED_BOUND_NS);
}

extern "C" __global__ void gpu_check_emit(const __grid_constant__ measured_emits emits)
{
	measured_emit(&emits, blockIdx.x * blockDim.x + threadIdx.x);
}
