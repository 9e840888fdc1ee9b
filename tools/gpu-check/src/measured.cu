/* The kernels of gpu_check; scripts/gpu-bundle compiles them. */
#include <doorbell/device.cuh>

#include "measured.h"

/* Whether a kernel runs at all. */
extern "C" __global__ void gpu_check_mark(uint32_t *word)
{
	*word = 7;
}

/* One thread. */
extern "C" __global__ void gpu_check_ring(const __grid_constant__ measured_doorbells doorbells)
{
	*(int *)doorbells.code = measured_ring(&doorbells);
}

extern "C" __global__ void gpu_check_look(const __grid_constant__ measured_looks looks)
{
	*(uint64_t *)looks.took_ns = measured_looked(&looks);
}

extern "C" __global__ void gpu_check_time(const __grid_constant__ measured_times times)
{
	*(int *)times.code = measured_time(&times);
}

extern "C" __global__ void gpu_check_put(const __grid_constant__ measured_puts puts)
{
	const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
	const struct doorbell_queue_view *queue = (const struct doorbell_queue_view *)puts.queues + blockIdx.x % puts.queue_count;
	((int *)puts.codes)[thread] = measured_put(&puts, queue, thread);
}

/* A put and an addition of each of these lanes: all of them have the code. */
__device__ static int post_of_lanes(const measured_posts *posts, const doorbell_queue_view *queue, uint32_t lanes, uint32_t round, uint32_t thread)
{
	const uint64_t place = 8 * (uint64_t)thread;
	uint32_t upto, slot;
	int code = doorbell_device_put_lanes(queue, lanes, measured_local(posts->local_addr + place, posts->lkey, 8),
					     measured_remote(posts->remote_addr + place, posts->rkey, 8), MEASURED_BOUND_NS, &upto);
	if (code != DOORBELL_OK)
		return code;
	code = doorbell_device_reserve_lanes(queue, lanes, MEASURED_BOUND_NS, &slot);
	if (code != DOORBELL_OK)
		return code;
	(void)doorbell_device_write_signal(queue, slot, 0, measured_remote(measured_counter(posts), posts->rkey, 8), DOORBELL_SIGNAL_ADD, 1);
	code = doorbell_device_submit_lanes(queue, lanes, slot);
	if (code == DOORBELL_OK)
		code = doorbell_device_wait(queue, upto, MEASURED_BOUND_NS);
	if (code == DOORBELL_OK)
		code = doorbell_device_wait(queue, slot + 1, MEASURED_BOUND_NS);
	return code == DOORBELL_OK ? measured_look(posts, round, thread) : code;
}

/* By turns the whole warp, and its halves apart. A failing thread ends the whole warp. */
__device__ static int post_of_warp(const measured_posts *posts, const doorbell_queue_view *queue, uint32_t thread)
{
	int code = DOORBELL_OK;
	for (uint32_t round = 0; round < posts->rounds && !__any_sync(0xffffffff, code != DOORBELL_OK); round++) {
		measured_store(posts, round, thread);
		if (round % 2 == 0)
			code = post_of_lanes(posts, queue, 0xffffffff, round, thread);
		else if (threadIdx.x % 2 == 0)
			code = post_of_lanes(posts, queue, 0x55555555, round, thread);
		else
			code = post_of_lanes(posts, queue, 0xaaaaaaaa, round, thread);
	}
	return code;
}

/* What all threads of the block have stored, and a signal behind it. */
__device__ static int post_of_block(const measured_posts *posts, const doorbell_queue_view *queue, uint32_t thread)
{
	const uint64_t place = 8 * (uint64_t)blockIdx.x * blockDim.x, signal_addr = measured_counter(posts) + 8 + 8 * (uint64_t)blockIdx.x;
	int code = DOORBELL_OK;
	for (uint32_t round = 0; round < posts->rounds && !__syncthreads_or(code != DOORBELL_OK); round++) {
		uint32_t upto;
		measured_store(posts, round, thread);
		code = doorbell_device_put_signal_block(queue, measured_local(posts->local_addr + place, posts->lkey, 8 * blockDim.x),
							measured_remote(posts->remote_addr + place, posts->rkey, 8 * blockDim.x),
							measured_remote(signal_addr, posts->rkey, 8), DOORBELL_SIGNAL_SET, round + 1,
							MEASURED_BOUND_NS, &upto);
		/* The same for all. */
		if (code == DOORBELL_OK)
			code = doorbell_device_wait_block(queue, upto, MEASURED_BOUND_NS);
		if (code == DOORBELL_OK)
			code = measured_look(posts, round, thread);
	}
	return code;
}

extern "C" __global__ void gpu_check_post(const __grid_constant__ measured_posts posts)
{
	const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
	const struct doorbell_queue_view *queue = (const struct doorbell_queue_view *)posts.queues + blockIdx.x % posts.queue_count;
	int code;
	if (posts.how == MEASURED_BLOCKS)
		code = post_of_block(&posts, queue, thread);
	else if (posts.how == MEASURED_WARPS)
		code = post_of_warp(&posts, queue, thread);
	else
		code = measured_post_lane(&posts, queue, thread);
	((int *)posts.codes)[thread] = code;
}

/* One warp. */
extern "C" __global__ void gpu_check_full(const __grid_constant__ measured_full full)
{
	const struct doorbell_queue_view *queue = (const struct doorbell_queue_view *)full.queue;
	uint32_t first = 0, slot;
	if (threadIdx.x == 0)
		measured_fill(&full, queue, &first);
	__syncwarp();
	const int code = doorbell_device_reserve_lanes(queue, 0xffffffff, full.bound_ns, &slot);
	const bool is_one = __all_sync(0xffffffff, code == __shfl_sync(0xffffffff, code, 0));
	if (threadIdx.x == 0) {
		((int *)full.codes)[3] = is_one ? code : MEASURED_WRONG;
		measured_drain(&full, queue, first);
	}
}

/* One block. The loop before it has the threads come late, each in another way. */
extern "C" __global__ void gpu_check_group(const __grid_constant__ measured_group group)
{
	const uint64_t late_ns = 500 * (uint64_t)((threadIdx.x * 7 + group.value) % 8), start_ns = dbl_now_ns();
	while (dbl_now_ns() - start_ns < late_ns)
		;
	((uint32_t *)group.data)[threadIdx.x] = group.value + threadIdx.x;
	((int *)group.codes)[threadIdx.x] = group.is_warp ? doorbell_device_trigger_warp(&group.trigger, 0xffffffff, MEASURED_BOUND_NS) :
							    doorbell_device_trigger_block(&group.trigger, MEASURED_BOUND_NS);
}

extern "C" __global__ void gpu_check_emit(const __grid_constant__ measured_emits emits)
{
	measured_emit(&emits, blockIdx.x * blockDim.x + threadIdx.x);
}

extern "C" __global__ void gpu_check_flood(const __grid_constant__ measured_flood flood)
{
	const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
	const struct doorbell_queue_view *queue = (const struct doorbell_queue_view *)flood.queues + blockIdx.x % flood.queue_count;
	int code = DOORBELL_OK;
	if (flood.by_warps) {
		/* The same code for all of a warp. */
		for (uint32_t at = 0; at < flood.count && code == DOORBELL_OK; at++)
			code = doorbell_device_put_lanes(queue, 0xffffffff, measured_local(64 + at, 1, 8), measured_remote(64 + at, 2, 8), 0,
							 nullptr);
	} else {
		code = measured_flooded(&flood, queue);
	}
	((int *)flood.codes)[thread] = code;
}
