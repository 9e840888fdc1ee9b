/*
 * The code of gpu_check's kernels: for measured.cu, and for the functions that replace them on the stand-in for the driver.
 */
#ifndef GPU_CHECK_MEASURED_H
#define GPU_CHECK_MEASURED_H

#include <doorbell/queue.h>
#include <doorbell/trigger.h>

/* Longer than any call takes without a failure, also under compute-sanitizer. */
#define MEASURED_BOUND_NS 10000000000u
/* The value read is not the one that was stored or put. */
enum { MEASURED_WRONG = -1000 };

/* Memory of this side, and of the peer, for the NIC. */
DBL_DEVICE struct doorbell_local measured_local(uint64_t addr, uint32_t lkey, uint64_t len_bytes)
{
	struct doorbell_local local;

	local.addr = addr;
	local.len_bytes = len_bytes;
	local.lkey = lkey;
	local.reserved = 0;
	return local;
}

DBL_DEVICE struct doorbell_remote measured_remote(uint64_t addr, uint32_t rkey, uint64_t len_bytes)
{
	struct doorbell_remote remote;

	remote.addr = addr;
	remote.len_bytes = len_bytes;
	remote.rkey = rkey;
	remote.reserved = 0;
	return remote;
}

/* A thread of the host polls for the doorbell: it stores `go`, and measures the time until it reads `flag`. */
struct measured_doorbells {
	uint64_t go;       /* uint32_t: the round that may begin */
	uint64_t data;     /* uint32_t */
	uint64_t flag;     /* uint64_t */
	uint64_t triggers; /* struct doorbell_trigger for each round; 0: `ordered` says what is stored */
	uint64_t code;     /* int32_t: of the last round */
	uint32_t rounds;
	uint32_t ordered; /* 0: the flag alone; 1: data, a fence, the flag; 2: data, the flag with release */
};

DBL_DEVICE int measured_ring(const struct measured_doorbells *doorbells)
{
	const struct doorbell_trigger *triggers = (const struct doorbell_trigger *)(uintptr_t)doorbells->triggers;
	uint32_t round;
	int code = DOORBELL_OK;

	for (round = 1; round <= doorbells->rounds && code == DOORBELL_OK; round++) {
		struct doorbell_trigger trigger;
		trigger.word_count = 0;
		/* As near as a parameter, before the time runs. */
		if (triggers)
			trigger = triggers[round - 1];
		code = doorbell_device_wait_value32((const uint32_t *)(uintptr_t)doorbells->go, DOORBELL_WAIT_GEQ, round, MEASURED_BOUND_NS, NULL);
		if (code != DOORBELL_OK)
			break;
		if (triggers) {
			code = doorbell_device_trigger(&trigger, MEASURED_BOUND_NS);
			continue;
		}
		if (doorbells->ordered)
			dbl_store_dword((void *)(uintptr_t)doorbells->data, round);
		if (doorbells->ordered == 2) {
			/* The low half, which is all that a round has. */
			dbl_store_dword_release((void *)(uintptr_t)doorbells->flag, round);
			continue;
		}
		if (doorbells->ordered)
			dbl_fence_system();
		dbl_store_qword((void *)(uintptr_t)doorbells->flag, round);
	}
	return code;
}

/* How long a look at a word of the host takes, as a wait looks. */
struct measured_looks {
	uint64_t word;    /* uint32_t, which is 0 */
	uint64_t took_ns; /* uint64_t: of all */
	uint32_t count;
	uint32_t reserved;
};

DBL_DEVICE uint64_t measured_looked(const struct measured_looks *looks)
{
	const uint64_t start_ns = dbl_now_ns();
	uint32_t at;

	for (at = 0; at < looks->count; at++)
		if (dbl_load_dword((const void *)(uintptr_t)looks->word) != 0)
			return 0;
	return dbl_now_ns() - start_ns;
}

/* What a kernel's fences, looks and round trips take. */
enum measured_fence_kind { MEASURED_SC_SYS, MEASURED_ALL_SYS, MEASURED_ALL_GPU, MEASURED_FENCES };

struct measured_times {
	uint64_t host;    /* uint32_t of the host */
	uint64_t gpu;     /* uint32_t of the GPU */
	uint64_t ping;    /* uint32_t of the host, which a thread of it */
	uint64_t pong;    /* answers here */
	uint64_t took_ns; /* uint64_t[MEASURED_TIMES]: each kind of fence alone and behind a store to the host, looks at both, round trips */
	uint64_t code;    /* int32_t */
	uint32_t count;   /* of each */
	uint32_t reserved;
};

enum { MEASURED_TIMES = 2 * MEASURED_FENCES + 3 };

DBL_DEVICE void measured_fence(uint32_t kind)
{
#ifdef __CUDA_ARCH__
	if (kind == MEASURED_SC_SYS)
		asm volatile("fence.sc.sys;" ::: "memory");
	else if (kind == MEASURED_ALL_SYS)
		asm volatile("fence.acq_rel.sys;" ::: "memory");
	else
		asm volatile("fence.acq_rel.gpu;" ::: "memory");
#else
	if (kind == MEASURED_SC_SYS)
		dbl_fence_system();
	else
		dbl_fence_release();
#endif
}

DBL_DEVICE int measured_time(const struct measured_times *times)
{
	uint64_t *took_ns = (uint64_t *)(uintptr_t)times->took_ns;
	uint64_t start_ns;
	uint32_t way, at;
	int code = DOORBELL_OK;

	for (way = 0; way < 2 * MEASURED_FENCES; way++) {
		start_ns = dbl_now_ns();
		for (at = 0; at < times->count; at++) {
			if (way % 2 != 0)
				dbl_store_dword((void *)(uintptr_t)times->host, 0);
			measured_fence(way / 2);
		}
		*took_ns++ = dbl_now_ns() - start_ns;
	}
	for (way = 0; way < 2; way++) {
		const uint64_t word = way == 0 ? times->host : times->gpu;
		start_ns = dbl_now_ns();
		for (at = 0; at < times->count; at++)
			if (dbl_load_dword((const void *)(uintptr_t)word) != 0)
				return MEASURED_WRONG;
		*took_ns++ = dbl_now_ns() - start_ns;
	}
	start_ns = dbl_now_ns();
	for (at = 1; at <= times->count && code == DOORBELL_OK; at++) {
		dbl_store_dword((void *)(uintptr_t)times->ping, at);
		code = doorbell_device_wait_value32((const uint32_t *)(uintptr_t)times->pong, DOORBELL_WAIT_GEQ, at, MEASURED_BOUND_NS, NULL);
	}
	*took_ns = dbl_now_ns() - start_ns;
	return code;
}

/* Threads that post to queues: puts of 8 bytes to a place of their own, and as many additions to one counter. */
struct measured_puts {
	uint64_t queues; /* struct doorbell_queue_view for each */
	uint64_t codes;  /* int32_t for each thread */
	uint64_t local_addr;
	uint64_t remote_addr; /* the counter; 8 bytes for each thread behind it */
	uint32_t lkey;
	uint32_t rkey;
	uint32_t queue_count;
	uint32_t puts;
	uint32_t adds; /* 0: puts alone */
	uint32_t reserved;
};

/* `queue` is that of the thread, or a copy of it. */
DBL_DEVICE int measured_put(const struct measured_puts *puts, const struct doorbell_queue_view *queue, uint32_t thread)
{
	const uint64_t place = 8 + 8 * (uint64_t)thread;
	const struct doorbell_local local = measured_local(puts->local_addr + place, puts->lkey, 8);
	const struct doorbell_remote remote = measured_remote(puts->remote_addr + place, puts->rkey, 8);
	uint32_t at, upto = 0;
	int code = DOORBELL_OK;

	for (at = 0; at < puts->puts && code == DOORBELL_OK; at++) {
		code = doorbell_device_put(queue, local, remote, MEASURED_BOUND_NS, &upto);
		if (code == DOORBELL_OK && puts->adds)
			code = doorbell_device_signal(queue, measured_remote(puts->remote_addr, puts->rkey, 8), DOORBELL_SIGNAL_ADD, 1,
						      MEASURED_BOUND_NS, &upto);
	}
	return code != DOORBELL_OK ? code : doorbell_device_wait(queue, upto, MEASURED_BOUND_NS);
}

/* Threads that post on their own, or as warps, or as blocks, round by round: each puts a word of its own, and looks whether it has arrived. */
enum measured_how { MEASURED_LANES, MEASURED_WARPS, MEASURED_BLOCKS };

struct measured_posts {
	uint64_t queues;      /* struct doorbell_queue_view for each */
	uint64_t codes;       /* int32_t for each thread */
	uint64_t data;        /* as kernels reach it: uint64_t for each thread */
	uint64_t arrived;     /* the same where it goes; then a counter; then a signal's word for each block */
	uint64_t local_addr;  /* `data` for the NIC, and 8 bytes behind it for what additions bring */
	uint64_t remote_addr; /* `arrived` for the NIC */
	uint32_t lkey;
	uint32_t rkey;
	uint32_t queue_count;
	uint32_t rounds;
	uint32_t how; /* enum measured_how */
	uint32_t blocks;
	uint32_t threads; /* of a block */
	uint32_t reserved;
};

DBL_DEVICE uint64_t measured_word(uint32_t round, uint32_t thread)
{
	return (uint64_t)(round + 1) << 32 | thread;
}

DBL_DEVICE void measured_store(const struct measured_posts *posts, uint32_t round, uint32_t thread)
{
	((volatile uint64_t *)(uintptr_t)posts->data)[thread] = measured_word(round, thread);
}

/* Behind the wait for it. */
DBL_DEVICE int measured_look(const struct measured_posts *posts, uint32_t round, uint32_t thread)
{
	const uint64_t *arrived = (const uint64_t *)(uintptr_t)posts->arrived + thread;
	return dbl_load_qword(arrived) == measured_word(round, thread) ? DOORBELL_OK : MEASURED_WRONG;
}

/* Where additions go, and where what they find does. */
DBL_DEVICE uint64_t measured_counter(const struct measured_posts *posts)
{
	return posts->remote_addr + 8 * (uint64_t)posts->blocks * posts->threads;
}

DBL_DEVICE uint64_t measured_brought(const struct measured_posts *posts)
{
	return posts->local_addr + 8 * (uint64_t)posts->blocks * posts->threads;
}

/* A thread by itself: a put and an addition, and its neighbours do it in other ways. */
DBL_DEVICE int measured_post_lane(const struct measured_posts *posts, const struct doorbell_queue_view *queue, uint32_t thread)
{
	const uint64_t place = 8 * (uint64_t)thread;
	const struct doorbell_local local = measured_local(posts->local_addr + place, posts->lkey, 8);
	const struct doorbell_local brought = measured_local(measured_brought(posts), posts->lkey, 8);
	const struct doorbell_remote remote = measured_remote(posts->remote_addr + place, posts->rkey, 8);
	const struct doorbell_remote counter = measured_remote(measured_counter(posts), posts->rkey, 8);
	uint32_t round, upto = 0, slot;
	int code = DOORBELL_OK;

	for (round = 0; round < posts->rounds && code == DOORBELL_OK; round++) {
		measured_store(posts, round, thread);
		switch (thread % 3) {
		case 0:
			code = doorbell_device_put_signal(queue, local, remote, counter, DOORBELL_SIGNAL_ADD, 1, MEASURED_BOUND_NS, &upto);
			break;
		case 1:
			code = doorbell_device_fetch_add(queue, brought, counter, 1, MEASURED_BOUND_NS, &upto);
			if (code == DOORBELL_OK)
				code = doorbell_device_put(queue, local, remote, MEASURED_BOUND_NS, &upto);
			break;
		default:
			code = doorbell_device_reserve(queue, 2, MEASURED_BOUND_NS, &slot);
			if (code != DOORBELL_OK)
				break;
			(void)doorbell_device_write_put(queue, slot, DOORBELL_WORK_UNSIGNALED, local, remote);
			(void)doorbell_device_write_fetch_add(queue, slot + 1, 0, brought, counter, 1);
			upto = slot + 2;
			code = doorbell_device_submit(queue, slot, 2);
		}
		if (code == DOORBELL_OK)
			code = doorbell_device_wait(queue, upto, MEASURED_BOUND_NS);
		if (code == DOORBELL_OK)
			code = measured_look(posts, round, thread);
	}
	return code;
}

/* A queue of which every slot is reserved, and none is submitted: `codes` of what is asked of it, and how long the bound took. */
struct measured_full {
	uint64_t queue; /* struct doorbell_queue_view */
	uint64_t codes; /* int32_t: of filling it; of one more; of one more at once; of a warp; of submitting all; of one more then */
	uint64_t took_ns; /* uint64_t: of the second */
	uint64_t bound_ns;
};

DBL_DEVICE void measured_fill(const struct measured_full *full, const struct doorbell_queue_view *queue, uint32_t *first)
{
	int32_t *codes = (int32_t *)(uintptr_t)full->codes;
	uint32_t slot, at;
	uint64_t start_ns;

	codes[0] = doorbell_device_reserve(queue, 1, 0, first);
	for (at = 1; at < queue->capacity && codes[0] == DOORBELL_OK; at++)
		codes[0] = doorbell_device_reserve(queue, 1, 0, &slot);
	start_ns = dbl_now_ns();
	codes[1] = doorbell_device_reserve(queue, 1, full->bound_ns, &slot);
	*(uint64_t *)(uintptr_t)full->took_ns = dbl_now_ns() - start_ns;
	codes[2] = doorbell_device_put(queue, measured_local(0, 0, 8), measured_remote(0, 0, 8), 0, NULL);
}

DBL_DEVICE void measured_drain(const struct measured_full *full, const struct doorbell_queue_view *queue, uint32_t first)
{
	int32_t *codes = (int32_t *)(uintptr_t)full->codes;
	uint32_t at, slot;

	for (at = 0; at < queue->capacity; at++)
		doorbell_device_write_nop(queue, first + at, 0);
	codes[4] = doorbell_device_submit(queue, first, queue->capacity);
	if (codes[4] == DOORBELL_OK)
		codes[4] = doorbell_device_wait(queue, first + queue->capacity, MEASURED_BOUND_NS);
	codes[5] = doorbell_device_reserve(queue, 1, 0, &slot);
	if (codes[5] != DOORBELL_OK)
		return;
	doorbell_device_write_nop(queue, slot, 0);
	codes[5] = doorbell_device_submit(queue, slot, 1);
	if (codes[5] == DOORBELL_OK)
		codes[5] = doorbell_device_wait(queue, slot + 1, MEASURED_BOUND_NS);
}

/* A warp or a block whose threads have each stored a word of what its trigger sends. */
struct measured_group {
	struct doorbell_trigger trigger;
	uint64_t data;  /* uint32_t for each thread */
	uint64_t codes; /* int32_t for each thread */
	uint32_t value;
	uint32_t is_warp;
};

/* Work requests that no NIC consumes: the rate of the emitter alone. */
struct measured_emits {
	uint64_t ring; /* 64 bytes for each thread */
	uint32_t count;
	uint32_t reserved;
};

/* Puts that are reserved, written, submitted and rung in queues that no NIC looks at. */
struct measured_flood {
	uint64_t queues; /* struct doorbell_queue_view for each */
	uint64_t codes;  /* int32_t for each thread */
	uint32_t queue_count;
	uint32_t count; /* of each thread */
	uint32_t by_warps;
	uint32_t threads; /* of a block */
};

DBL_DEVICE int measured_flooded(const struct measured_flood *flood, const struct doorbell_queue_view *queue)
{
	uint32_t at;
	int code = DOORBELL_OK;

	for (at = 0; at < flood->count && code == DOORBELL_OK; at++)
		code = doorbell_device_put(queue, measured_local(64 + at, 1, 8), measured_remote(64 + at, 2, 8), 0, NULL);
	return code;
}

DBL_DEVICE uint64_t measured_emit(const struct measured_emits *emits, uint32_t thread)
{
	uint8_t *ring = (uint8_t *)(uintptr_t)emits->ring + 64 * (uint64_t)thread;
	struct dbl_sge sge;
	struct dbl_wr wr;
	uint64_t doorbell = 0;
	uint32_t at;

	sge.len_bytes = 8;
	sge.lkey = 1;
	sge.addr = emits->ring;
	wr.remote_addr = emits->ring;
	wr.swap_or_add = wr.compare = 0;
	wr.payload = &sge;
	wr.count = 1;
	wr.rkey = 2;
	wr.qpn = 3;
	wr.imm = 0;
	wr.opcode = DBL_OPCODE_RDMA_WRITE;
	wr.flags = DBL_WR_SIGNALED;
	wr.is_inline = 0;
	for (at = 0; at < emits->count; at++) {
		wr.remote_addr += 8;
		(void)dbl_wqe_emit(ring, 0, at, &wr, &doorbell);
		/* Each of them is stored. */
		__asm__ volatile("" : : : "memory");
	}
	return doorbell;
}

#endif
