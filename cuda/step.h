/*
 * A step of a benchmark whose kernel makes the work request itself: for the kernel, and for the function that stands for it in tests.
 */
#ifndef DOORBELL_STEP_H
#define DOORBELL_STEP_H

#include <doorbell/queue.h>

/* `Parameters` of src/device_queue/step.rs. */
struct dbl_step {
	uint64_t work_ns;
	uint64_t timeout_ns;
	uint64_t local_addr;
	uint64_t remote_addr;
	uint64_t code; /* address of an int32_t */
	uint32_t lkey;
	uint32_t rkey;
	uint32_t len_bytes;
	uint32_t imm;
	uint32_t has_imm;
	uint32_t reserved;
};

DBL_STATIC_ASSERT(sizeof(struct dbl_step) == 64, "a step is 64 bytes");

DBL_DEVICE int dbl_step_put(const struct doorbell_queue_view *queue, const struct dbl_step *step)
{
	struct doorbell_local local;
	struct doorbell_remote remote;
	uint32_t upto;
	int code;

	local.addr = step->local_addr;
	local.lkey = step->lkey;
	remote.addr = step->remote_addr;
	remote.rkey = step->rkey;
	local.len_bytes = remote.len_bytes = step->len_bytes;
	local.reserved = remote.reserved = 0;
	code = step->has_imm ? doorbell_device_put_imm(queue, local, remote, step->imm, step->timeout_ns, &upto) :
			       doorbell_device_put(queue, local, remote, step->timeout_ns, &upto);
	return code != DOORBELL_OK ? code : doorbell_device_wait(queue, upto, step->timeout_ns);
}

#endif
