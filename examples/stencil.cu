/*
 * A two-dimensional halo exchange, four ways: what each costs, and that all of them compute the same, bit for bit.
 *
 *   scripts/install-c --features cuda PREFIX
 *   nvcc -O2 -std=c++17 -IPREFIX/include examples/stencil.cu -LPREFIX/lib -ldoorbell -Xlinker -rpath=PREFIX/lib -o stencil
 *   ./stencil [--steps STEPS] [--rounds ROUNDS] [--device DEVICE] [COLUMNSxROWS...]
 *
 * A grid relaxes to the mean of its neighbours, its border fixed. The upper and the lower half belong to two ranks, each with an endpoint,
 * memory and a stream of its own; both are in this process, so one GPU is enough. After each step a rank writes its edge row into the halo
 * row of the other one, and goes on when it has the other's.
 *   sync       the host waits for the kernels, posts the writes, and waits for them and for the other rank's
 *   stream     kernels, writes and waits are queued on the ranks' streams, batches of steps ahead
 *   triggered  writes and waits are executed by the kernel: its last block rings when all have computed, and waits for the halo
 *              (WITHOUT_TRIGGERS, defined, leaves it out: for tests on a processor)
 *   device     the kernel writes the work requests itself: its last block puts the edge with a signal behind it, and waits for the
 *              other rank's signal. The host only launches kernels
 * A fifth one computes the grid in one piece, without an exchange. The last line begins with PASS or FAIL; without a GPU it is WAIVED, and
 * the status 77.
 */
#include <doorbell/device.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

static constexpr int64_t timeout_ms = 30000;
static constexpr uint64_t timeout_ns = 20000000000u;
/* Steps that are queued between two looks of the host, and such batches in flight: receives are posted as far ahead. */
static constexpr uint64_t steps_of_batch = 16, batches_in_flight = 4;

#define TRY(call) try_((call), #call)
#define CUDA(call) cuda_((call), #call)

static int try_(int code, const char *call)
{
	if (code < 0) {
		fprintf(stderr, "%s: %s: %s\n", call, doorbell_error_name(code), doorbell_last_error());
		printf("FAIL: %s\n", call);
		exit(1);
	}
	return code;
}

static void cuda_(cudaError_t code, const char *call)
{
	if (code != cudaSuccess) {
		printf("FAIL: %s: %s\n", call, cudaGetErrorString(code));
		exit(1);
	}
}

/* ------------------------------------------------------------------------------------------------------- kernels */

/* Rows of a rank, and one more above and below: the halo, or the fixed border. */
struct shape {
	uint32_t columns;
	uint32_t rows;
};

__device__ static void relax(const shape s, const float *from, float *to)
{
	const uint64_t cells = (uint64_t)s.columns * s.rows, stride = (uint64_t)gridDim.x * blockDim.x;
	for (uint64_t cell = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; cell < cells; cell += stride) {
		const uint64_t column = cell % s.columns, at = cell + s.columns;
		if (column == 0 || column == s.columns - 1)
			to[at] = from[at];
		else
			to[at] = 0.25f * (from[at - s.columns] + from[at + s.columns] + (from[at - 1] + from[at + 1]));
	}
}

__global__ void step_of(const shape s, const float *from, float *to)
{
	relax(s, from, to);
}

/* A step whose last block executes what the host has prepared: the edge goes out, and the kernel ends when the halo is there. */
#ifndef WITHOUT_TRIGGERS
struct triggers {
	doorbell_trigger parts[2];
	uint32_t count;
};

__global__ void step_and_ring(const __grid_constant__ triggers prepared, const shape s, const float *from, float *to, unsigned *done, int *status)
{
	relax(s, from, to);
	__syncthreads();
	if (threadIdx.x == 0) {
		/* This block's cells before its count; with the fence, all that were counted before the last one's doorbell. */
		__threadfence();
		if (atomicAdd(done, 1) == gridDim.x - 1) {
			int code = DOORBELL_OK;
			__threadfence();
			*done = 0;
			for (uint32_t i = 0; i < prepared.count && code == DOORBELL_OK; i++)
				code = doorbell_device_trigger(&prepared.parts[i], timeout_ns);
			if (code != DOORBELL_OK)
				atomicCAS(status, DOORBELL_OK, code);
		}
	}
}
#endif

/* What a kernel needs to exchange its edge with the other rank by itself. */
struct exchange {
	doorbell_queue_view queue;
	doorbell_local edge;
	doorbell_remote halo;
	doorbell_remote signal; /* of the other rank */
	uint64_t *word;		/* of this one: the steps of which the halo is there */
};

__global__ void step_and_put(const __grid_constant__ exchange e, const shape s, const float *from, float *to, uint64_t step, unsigned *done,
			     int *status)
{
	relax(s, from, to);
	__syncthreads();
	if (threadIdx.x == 0) {
		__threadfence();
		if (atomicAdd(done, 1) == gridDim.x - 1) {
			/* Only the last block uses the queue, and the next kernel comes behind this one: no lock is needed. */
			const doorbell_queue_view queue = doorbell_device_exclusive(&e.queue);
			int code = atomicCAS(status, DOORBELL_OK, DOORBELL_OK);
			__threadfence();
			*done = 0;
			if (code == DOORBELL_OK)
				code = doorbell_device_put_signal(&queue, e.edge, e.halo, e.signal, DOORBELL_SIGNAL_SET, step + 1, timeout_ns,
								  nullptr);
			if (code == DOORBELL_OK)
				code = doorbell_device_signal_wait_until(e.word, DOORBELL_CMP_GE, step + 1, timeout_ns,
									 doorbell_device_status_word(&queue));
			/* The edge is computed anew in two steps. */
			if (code == DOORBELL_OK)
				code = doorbell_device_flush(&queue, timeout_ns);
			if (code != DOORBELL_OK)
				atomicCAS(status, DOORBELL_OK, code);
		}
	}
}

/* ---------------------------------------------------------------------------------------------------------- ranks */

struct rank {
	shape s;
	/* Two grids that take turns, in one allocation. */
	float *grids;
	uint64_t bytes; /* of one */
	unsigned *done;
	int *status;
	cudaStream_t cuda;
	doorbell_stream *stream;
	doorbell_stream *kernels;
	doorbell_region *region;
	doorbell_endpoint *endpoint;
	doorbell_remote peer;
	/* Of the variant in which kernels have the send queue. */
	doorbell_endpoint *lent;
	doorbell_device_queue *queue;
	doorbell_region *signals;
	uint64_t *word;
	doorbell_local local;
	doorbell_remote peer_signal;
	doorbell_queue_view view;
	uint32_t edge; /* the row that the other rank needs */
	uint32_t halo; /* the row over there that it goes to */
	unsigned blocks;

	float *grid(uint64_t step) const
	{
		return grids + (step % 2) * (bytes / sizeof(float));
	}

	uint64_t offset(uint64_t step, uint32_t row) const
	{
		return (step % 2) * bytes + (uint64_t)row * s.columns * sizeof(float);
	}

	/* The edge of what step `step` has computed. The receiver needs no address: a completed receive shows that it has arrived. */
	doorbell_slice edge_of(uint64_t step) const
	{
		return {region, offset(step, edge), s.columns * sizeof(float)};
	}

	doorbell_work write_of(const doorbell_slice *slice, uint64_t step) const
	{
		doorbell_work work = doorbell_work_write(slice, 1, peer.addr + offset(step, halo), peer.rkey);
		work.flags = DOORBELL_WORK_IMM;
		return work;
	}
};

static void make_rank(rank &r, doorbell_domain *domain, shape whole, uint32_t number)
{
	doorbell_endpoint_config config;
	r = {};
	r.s = {whole.columns, whole.rows / 2};
	r.bytes = (uint64_t)(r.s.rows + 2) * r.s.columns * sizeof(float);
	r.blocks = (unsigned)std::min<uint64_t>(((uint64_t)r.s.columns * r.s.rows + 255) / 256, 1024);
	/* The upper one gives its last row to the row above the lower one's first. */
	r.edge = number == 0 ? r.s.rows : 1;
	r.halo = number == 0 ? 0 : r.s.rows + 1;
	CUDA(cudaMalloc(&r.grids, 2 * r.bytes));
	CUDA(cudaMalloc(&r.done, sizeof(*r.done)));
	CUDA(cudaMalloc(&r.status, sizeof(*r.status)));
	CUDA(cudaStreamCreateWithFlags(&r.cuda, cudaStreamNonBlocking));
	TRY(doorbell_stream_create_cuda(r.cuda, nullptr, &r.stream));
#ifndef WITHOUT_TRIGGERS
	TRY(doorbell_stream_create_trigger("stencil", &r.kernels));
#endif
	TRY(doorbell_region_register_device(domain, (uint64_t)(uintptr_t)r.grids, 2 * r.bytes,
					    DOORBELL_ACCESS_LOCAL_WRITE | DOORBELL_ACCESS_REMOTE_WRITE, &r.region));
	TRY(doorbell_endpoint_config_init(&config, sizeof(config)));
	TRY(doorbell_endpoint_create(domain, &config, &r.endpoint));
	TRY(doorbell_endpoint_create(domain, &config, &r.lent));
	CUDA(cudaMalloc(&r.word, sizeof(*r.word)));
	TRY(doorbell_region_register_device(domain, (uint64_t)(uintptr_t)r.word, sizeof(*r.word),
					    DOORBELL_ACCESS_LOCAL_WRITE | DOORBELL_ACCESS_REMOTE_WRITE, &r.signals));
}

static void end_rank(rank &r)
{
	doorbell_device_queue_destroy(r.queue);
	doorbell_endpoint_destroy(r.lent);
	doorbell_endpoint_destroy(r.endpoint);
	doorbell_stream_destroy(r.kernels);
	doorbell_stream_destroy(r.stream);
	/* Nothing is in flight: when it is deregistered, only the program uses the memory. */
	TRY(doorbell_region_deregister(r.region));
	doorbell_region_destroy(r.region);
	TRY(doorbell_region_deregister(r.signals));
	doorbell_region_destroy(r.signals);
	CUDA(cudaFree(r.word));
	CUDA(cudaFree(r.status));
	CUDA(cudaFree(r.done));
	CUDA(cudaFree(r.grids));
	CUDA(cudaStreamDestroy(r.cuda));
}

/* The value that a cell begins with: anything but smooth. */
static float initial(uint64_t at)
{
	return (float)((at * 2654435761u >> 7) % 1000);
}

static std::vector<float> whole_grid(shape whole)
{
	std::vector<float> grid((uint64_t)(whole.rows + 2) * whole.columns);
	for (uint64_t at = 0; at < grid.size(); at++)
		grid[at] = initial(at);
	return grid;
}

/* Both grids of both ranks as at the beginning, halo and border with them. */
static void begin(rank (&ranks)[2], const std::vector<float> &grid)
{
	for (uint32_t i = 0; i < 2; i++) {
		const float *first = grid.data() + (uint64_t)i * ranks[i].s.rows * ranks[i].s.columns;
		for (uint64_t step = 0; step < 2; step++)
			CUDA(cudaMemcpy(ranks[i].grid(step), first, ranks[i].bytes, cudaMemcpyHostToDevice));
		CUDA(cudaMemset(ranks[i].done, 0, sizeof(*ranks[i].done)));
		CUDA(cudaMemset(ranks[i].status, 0, sizeof(*ranks[i].status)));
		CUDA(cudaMemset(ranks[i].word, 0, sizeof(*ranks[i].word)));
	}
	CUDA(cudaDeviceSynchronize());
}

static std::vector<float> result(const rank (&ranks)[2], uint64_t steps)
{
	std::vector<float> grid;
	for (const rank &r : ranks) {
		std::vector<float> rows((uint64_t)r.s.rows * r.s.columns);
		CUDA(cudaMemcpy(rows.data(), r.grid(steps) + r.s.columns, rows.size() * sizeof(float), cudaMemcpyDeviceToHost));
		grid.insert(grid.end(), rows.begin(), rows.end());
	}
	return grid;
}

/* ------------------------------------------------------------------------------------------------------- variants */

static void run_sync(rank (&ranks)[2], uint64_t steps)
{
	for (uint64_t step = 0; step < steps; step++) {
		doorbell_completion completion;
		for (rank &r : ranks) {
			TRY(doorbell_post_recv(r.endpoint, step, nullptr, 0, nullptr));
			step_of<<<r.blocks, 256, 0, r.cuda>>>(r.s, r.grid(step), r.grid(step + 1));
		}
		for (rank &r : ranks) {
			const doorbell_slice edge = r.edge_of(step + 1);
			const doorbell_work write = r.write_of(&edge, step + 1);
			CUDA(cudaStreamSynchronize(r.cuda));
			TRY(doorbell_post_send(r.endpoint, &write, nullptr));
		}
		for (rank &r : ranks) {
			TRY(doorbell_wait_cq(r.endpoint, DOORBELL_QUEUE_SEND, timeout_ms, &completion));
			TRY(doorbell_wait_cq(r.endpoint, DOORBELL_QUEUE_RECV, timeout_ms, &completion));
		}
	}
}

/* The exchange after a step, on a stream of either kind. */
static void queue_exchange(rank &r, doorbell_stream *stream, uint64_t step)
{
	const doorbell_slice edge = r.edge_of(step + 1);
	const doorbell_work write = r.write_of(&edge, step + 1);
	TRY(doorbell_stream_queue_send(stream, r.endpoint, &write, nullptr));
	TRY(doorbell_stream_wait_cq(stream, r.endpoint, DOORBELL_QUEUE_SEND, DOORBELL_DEFAULT_TIMEOUT, nullptr));
	TRY(doorbell_stream_wait_cq(stream, r.endpoint, DOORBELL_QUEUE_RECV, DOORBELL_DEFAULT_TIMEOUT, nullptr));
}

static void queue_step(rank &r, uint64_t step)
{
	step_of<<<r.blocks, 256, 0, r.cuda>>>(r.s, r.grid(step), r.grid(step + 1));
	queue_exchange(r, r.stream, step);
}

#ifndef WITHOUT_TRIGGERS
static void trigger_step(rank &r, uint64_t step)
{
	triggers prepared;
	doorbell_trigger rest;
	queue_exchange(r, r.kernels, step);
	for (prepared.count = 0; prepared.count < 2; prepared.count++)
		if (TRY(doorbell_stream_take_trigger(r.kernels, &prepared.parts[prepared.count])) == 0)
			break;
	if (prepared.count == 2 && TRY(doorbell_stream_take_trigger(r.kernels, &rest)) != 0) {
		printf("FAIL: an exchange is more than two triggers\n");
		exit(1);
	}
	step_and_ring<<<r.blocks, 256, 0, r.cuda>>>(prepared, r.s, r.grid(step), r.grid(step + 1), r.done, r.status);
}
#endif

/* Steps that are queued ahead, with what the host has to do for them: receives, and to be no further ahead than those last. */
static void run_ahead(rank (&ranks)[2], uint64_t steps, void (*queue)(rank &, uint64_t))
{
	cudaEvent_t passed[batches_in_flight][2];
	for (auto &slot : passed)
		for (cudaEvent_t &event : slot)
			CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
	for (uint64_t first = 0, batch = 0; first < steps; first += steps_of_batch, batch++) {
		cudaEvent_t(&slot)[2] = passed[batch % batches_in_flight];
		for (uint32_t i = 0; i < 2; i++)
			CUDA(cudaEventSynchronize(slot[i]));
		/* All receives of the batch before the first write that takes one. */
		for (uint64_t step = first; step < std::min(first + steps_of_batch, steps); step++)
			for (rank &r : ranks)
				TRY(doorbell_post_recv(r.endpoint, step, nullptr, 0, nullptr));
		for (uint64_t step = first; step < std::min(first + steps_of_batch, steps); step++)
			for (rank &r : ranks)
				queue(r, step);
		for (uint32_t i = 0; i < 2; i++)
			CUDA(cudaEventRecord(slot[i], ranks[i].cuda));
	}
	for (rank &r : ranks) {
		/* With a bound of its own, and it reports what failed on the stream, if something did. */
		TRY(doorbell_stream_synchronize(r.stream, timeout_ms));
		CUDA(cudaStreamSynchronize(r.cuda));
	}
	for (auto &slot : passed)
		for (cudaEvent_t &event : slot)
			CUDA(cudaEventDestroy(event));
}

static void run_stream(rank (&ranks)[2], uint64_t steps)
{
	run_ahead(ranks, steps, queue_step);
}

/* What kernels have noted. */
static void check_status(const rank (&ranks)[2], const char *what)
{
	for (const rank &r : ranks) {
		int status;
		CUDA(cudaMemcpy(&status, r.status, sizeof(status), cudaMemcpyDeviceToHost));
		if (status != DOORBELL_OK) {
			printf("FAIL: a kernel's %s: %s\n", what, doorbell_error_name(status));
			exit(1);
		}
	}
}

#ifndef WITHOUT_TRIGGERS
static void run_triggered(rank (&ranks)[2], uint64_t steps)
{
	run_ahead(ranks, steps, trigger_step);
	check_status(ranks, "trigger");
}
#endif

/* The host posts nothing, and waits for nothing but the end. */
static void run_device(rank (&ranks)[2], uint64_t steps)
{
	const uint64_t row_bytes = ranks[0].s.columns * sizeof(float);
	for (uint64_t step = 0; step < steps; step++) {
		for (rank &r : ranks) {
			exchange e = {};
			e.queue = r.view;
			e.edge = doorbell_device_local_at(r.local, r.offset(step + 1, r.edge), row_bytes);
			e.halo = doorbell_device_remote_at(r.peer, r.offset(step + 1, r.halo), row_bytes);
			e.signal = r.peer_signal;
			e.word = r.word;
			step_and_put<<<r.blocks, 256, 0, r.cuda>>>(e, r.s, r.grid(step), r.grid(step + 1), step, r.done, r.status);
		}
	}
	for (rank &r : ranks)
		CUDA(cudaStreamSynchronize(r.cuda));
	check_status(ranks, "exchange");
}

/* The grid in one piece. */
static std::vector<float> run_whole(shape whole, const std::vector<float> &grid, uint64_t steps)
{
	float *grids[2];
	std::vector<float> rows((uint64_t)whole.rows * whole.columns);
	cudaStream_t cuda;
	const unsigned blocks = (unsigned)std::min<uint64_t>((rows.size() + 255) / 256, 1024);
	CUDA(cudaStreamCreateWithFlags(&cuda, cudaStreamNonBlocking));
	for (float *&one : grids) {
		CUDA(cudaMalloc(&one, grid.size() * sizeof(float)));
		CUDA(cudaMemcpy(one, grid.data(), grid.size() * sizeof(float), cudaMemcpyHostToDevice));
	}
	CUDA(cudaDeviceSynchronize());
	for (uint64_t step = 0; step < steps; step++)
		step_of<<<blocks, 256, 0, cuda>>>(whole, grids[step % 2], grids[(step + 1) % 2]);
	CUDA(cudaStreamSynchronize(cuda));
	CUDA(cudaMemcpy(rows.data(), grids[steps % 2] + whole.columns, rows.size() * sizeof(float), cudaMemcpyDeviceToHost));
	for (float *one : grids)
		CUDA(cudaFree(one));
	CUDA(cudaStreamDestroy(cuda));
	return rows;
}

struct variant {
	const char *name;
	void (*run)(rank (&)[2], uint64_t);
};

static const variant variants[] = {
	{"sync", run_sync},
	{"stream", run_stream},
#ifndef WITHOUT_TRIGGERS
	{"triggered", run_triggered},
#endif
	{"device", run_device},
};

/* One size: whether all variants agree with the grid in one piece, every time. Each has its turn in each round; times are the middle ones. */
static bool run_size(doorbell_domain *domain, shape whole, uint64_t steps, uint64_t rounds)
{
	const std::vector<float> grid = whole_grid(whole), expected = run_whole(whole, grid, steps);
	rank ranks[2];
	doorbell_address addresses[2], lent[2];
	bool agree = true;
	constexpr size_t count = sizeof(variants) / sizeof(*variants);
	bool same[count];
	std::vector<double> times[count];
	for (uint32_t i = 0; i < 2; i++) {
		make_rank(ranks[i], domain, whole, i);
		TRY(doorbell_endpoint_address(ranks[i].endpoint, &addresses[i]));
		TRY(doorbell_endpoint_address(ranks[i].lent, &lent[i]));
	}
	for (uint32_t i = 0; i < 2; i++) {
		TRY(doorbell_endpoint_connect(ranks[i].endpoint, &addresses[1 - i]));
		TRY(doorbell_endpoint_connect(ranks[i].lent, &lent[1 - i]));
		TRY(doorbell_region_remote(ranks[1 - i].region, &ranks[i].peer));
		TRY(doorbell_region_remote(ranks[1 - i].signals, &ranks[i].peer_signal));
	}
	for (rank &r : ranks) {
		const doorbell_slice all = {r.region, 0, 2 * r.bytes};
		TRY(doorbell_device_queue_create(r.lent, DOORBELL_KERNELS_CUDA, &r.queue));
		TRY(doorbell_device_queue_view(r.queue, &r.view, sizeof(r.view)));
		TRY(doorbell_device_queue_local(r.queue, &all, &r.local));
	}
	printf("stencil %ux%u steps %llu", whole.columns, whole.rows, (unsigned long long)steps);
	for (size_t i = 0; i < count; i++) {
		/* The first of everything is slower: kernels are loaded, memory is mapped. */
		begin(ranks, grid);
		variants[i].run(ranks, 2);
		same[i] = true;
	}
	for (uint64_t round = 0; round < rounds; round++) {
		for (size_t i = 0; i < count; i++) {
			begin(ranks, grid);
			const auto start = std::chrono::steady_clock::now();
			variants[i].run(ranks, steps);
			times[i].push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() /
					   (double)steps);
			const std::vector<float> found = result(ranks, steps);
			same[i] &= memcmp(found.data(), expected.data(), expected.size() * sizeof(float)) == 0;
		}
	}
	for (size_t i = 0; i < count; i++) {
		std::sort(times[i].begin(), times[i].end());
		/* sync is the first. */
		const double us = times[i][rounds / 2], sync_us = times[0][rounds / 2];
		printf(" %s %.2f us ratio %.3f%s", variants[i].name, us, us / sync_us, same[i] ? "" : " WRONG");
		agree &= same[i];
	}
	printf("\n");
	for (rank &r : ranks)
		end_rank(r);
	return agree;
}

int main(int argc, char **argv)
{
	std::vector<shape> sizes;
	const char *name = "softcx";
	long long steps = 500, rounds = 5;
	for (int i = 1; i < argc; i++) {
		const std::string word = argv[i];
		shape size;
		char rest;
		if (word == "--steps" && i + 1 < argc) {
			steps = atoll(argv[++i]);
		} else if (word == "--rounds" && i + 1 < argc) {
			rounds = atoll(argv[++i]);
		} else if (word == "--device" && i + 1 < argc) {
			name = argv[++i];
		} else if (sscanf(argv[i], "%ux%u%c", &size.columns, &size.rows, &rest) == 2 && size.columns >= 3 && size.columns <= 1 << 16 &&
			   size.rows >= 2 && size.rows <= 1 << 16 && size.rows % 2 == 0) {
			sizes.push_back(size);
		} else {
			steps = 0;
			break;
		}
	}
	if (steps <= 0 || rounds <= 0) {
		fprintf(stderr, "usage: %s [--steps STEPS] [--rounds ROUNDS] [--device DEVICE] [COLUMNSxROWS...], from 3x2 to 65536x65536, rows even\n", argv[0]);
		return 2;
	}
	if (sizes.empty())
		sizes = {{64, 64}, {256, 256}, {1024, 1024}, {4096, 4096}};

	int gpus = 0;
	const cudaError_t none = cudaGetDeviceCount(&gpus);
	if (none != cudaSuccess || gpus == 0) {
		printf("WAIVED: no GPU: %s\n", cudaGetErrorString(none));
		return 77;
	}
	doorbell_device *device;
	doorbell_domain *domain;
	bool agree = true;
	/* Kernels are loaded by their first launch, which may wait for those that run; these wait for one another. Makes the context, too. */
	cudaFuncAttributes attributes;
	CUDA(cudaFuncGetAttributes(&attributes, step_of));
	CUDA(cudaFuncGetAttributes(&attributes, step_and_put));
#ifndef WITHOUT_TRIGGERS
	CUDA(cudaFuncGetAttributes(&attributes, step_and_ring));
#endif
	TRY(doorbell_device_open(name, &device));
	TRY(doorbell_domain_create(device, &domain));
	for (const shape &size : sizes)
		agree &= run_size(domain, size, (uint64_t)steps, (uint64_t)rounds);
	doorbell_domain_destroy(domain);
	doorbell_device_close(device);
	CUDA(cudaGetLastError());
	printf(agree ? "PASS: all variants agree with the grid in one piece, bit for bit\n" : "FAIL: variants differ from the grid in one piece\n");
	return agree ? 0 : 1;
}
