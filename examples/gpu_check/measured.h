/*
 * What the kernels of gpu_check do: for measured.cu, and for the functions that stand for them over the stand-in for the driver.
 */
#ifndef GPU_CHECK_MEASURED_H
#define GPU_CHECK_MEASURED_H

#include <doorbell/queue.h>
#include <doorbell/trigger.h>

enum { MEASURED_BOUND_NS = 1000000000 };

/* Who sees a doorbell is a thread of the host: it says go, and takes the time until it sees the flag. */
struct measured_bells {
	uint64_t go;       /* uint32_t: the round that may begin */
	uint64_t data;     /* uint32_t */
	uint64_t flag;     /* uint64_t */
	uint64_t triggers; /* struct doorbell_trigger for each round; 0: `ordered` says what is stored */
	uint64_t code;     /* int32_t: of the last round */
	uint32_t rounds;
	uint32_t ordered; /* 1: data, a fence, the flag; 0: the flag alone */
};

DBL_DEVICE int measured_ring(const struct measured_bells *bells)
{
	const struct doorbell_trigger *triggers = (const struct doorbell_trigger *)(uintptr_t)bells->triggers;
	uint32_t round;
	int code = DOORBELL_OK;

	for (round = 1; round <= bells->rounds && code == DOORBELL_OK; round++) {
		struct doorbell_trigger trigger;
		trigger.word_count = 0;
		/* As near as a parameter, before the time runs. */
		if (triggers)
			trigger = triggers[round - 1];
		code = doorbell_kernel_wait_value32((const uint32_t *)(uintptr_t)bells->go, DOORBELL_WAIT_GEQ, round, MEASURED_BOUND_NS, NULL);
		if (code != DOORBELL_OK)
			break;
		if (triggers) {
			code = doorbell_trigger_thread(&trigger, MEASURED_BOUND_NS);
			continue;
		}
		if (bells->ordered) {
			dbl_store_dword((void *)(uintptr_t)bells->data, round);
			dbl_fence_system();
		}
		dbl_store_qword((void *)(uintptr_t)bells->flag, round);
	}
	return code;
}

/* Threads that post to queues: puts of 8 bytes to a place of their own, and as many additions to one counter. */
struct measured_puts {
	uint64_t queues; /* struct doorbell_queue for each */
	uint64_t codes;  /* int32_t for each thread */
	uint64_t local_addr;
	uint64_t remote_addr; /* the counter; 8 bytes for each thread behind it */
	uint32_t lkey;
	uint32_t rkey;
	uint32_t queue_count;
	uint32_t puts;
};

/* `queue` is that of the thread, or a copy of it. */
DBL_DEVICE int measured_put(const struct measured_puts *puts, const struct doorbell_queue *queue, uint32_t thread)
{
	const uint64_t place = 8 + 8 * (uint64_t)thread;
	uint32_t at, upto = 0;
	int code = DOORBELL_OK;

	for (at = 0; at < puts->puts && code == DOORBELL_OK; at++) {
		code = doorbell_put(queue, puts->local_addr + place, puts->lkey, 8, puts->remote_addr + place, puts->rkey, MEASURED_BOUND_NS,
				    &upto);
		if (code == DOORBELL_OK)
			code = doorbell_add(queue, puts->local_addr, puts->lkey, puts->remote_addr, puts->rkey, 1, MEASURED_BOUND_NS, &upto);
	}
	return code != DOORBELL_OK ? code : doorbell_wait(queue, upto, MEASURED_BOUND_NS);
}

/* A warp or a block whose threads have each stored a word of what its trigger sends. */
struct measured_group {
	struct doorbell_trigger trigger;
	uint64_t data;  /* uint32_t for each thread */
	uint64_t codes; /* int32_t for each thread */
	uint32_t value;
	uint32_t is_warp;
};

/* Work requests that nobody consumes: what the emitter alone can do. */
struct measured_emits {
	uint64_t ring; /* 64 bytes for each thread */
	uint32_t count;
	uint32_t reserved;
};

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
