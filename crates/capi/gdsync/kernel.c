/*
 * The calls of gdsync/mlx5.h: what kernels need to ring and to wait themselves.
 */
#include "internal.h"

#include <doorbell/detail/execute.h>

int gds_mlx5_get_dword_wait_info(uint32_t *ptr, uint32_t value, int flags, gds_mlx5_dword_wait_info_t *mlx5_info)
{
	const doorbell_region *region;
	CUdeviceptr address;
	uint64_t offset;
	int error = mlx5_info ? doorbell_gds_check_flags(flags, 0) : EINVAL;
	if (!error)
		error = doorbell_gds_words(ptr, 4, &region, &offset);
	if (!error)
		error = doorbell_gds_device_address(region, offset, &address);
	if (error)
		return error;
	mlx5_info->ptr = (uint32_t *)(uintptr_t)address;
	mlx5_info->value = value;
	return 0;
}

/* A callback for one unit of a trigger's program and the address that it names. */
typedef void (*doorbell_gds_look)(void *info, const struct dbl_unit *unit, void *address);

static void doorbell_gds_look_at(const doorbell_trigger *trigger, doorbell_gds_look look, void *info)
{
	const uint64_t *table = trigger->words;
	struct dbl_item_head head;
	struct dbl_unit unit;
	uint32_t at, i, body_words, targets = 0;
	for (at = 0; at < trigger->word_count; at += 1 + body_words) {
		const uint64_t *body = &trigger->words[at + 1];
		memcpy(&head, &trigger->words[at], sizeof(head));
		body_words = head.kind == DBL_ITEM_TABLE     ? head.count
			     : head.kind == DBL_ITEM_PROGRAM ? 1 + DBL_UNIT_WORDS * (uint32_t)head.count
							     : 1;
		if (head.kind == DBL_ITEM_TABLE) {
			table = body;
			targets = head.count;
		}
		for (i = 0; head.kind == DBL_ITEM_PROGRAM && i < head.count; i++) {
			memcpy(&unit, body + 1 + DBL_UNIT_WORDS * i, sizeof(unit));
			if (unit.target < targets)
				look(info, &unit, (void *)(uintptr_t)(table[unit.target] + unit.offset));
		}
	}
}

static void doorbell_gds_look_at_send(void *info, const struct dbl_unit *unit, void *address)
{
	gds_mlx5_send_info_t *found = (gds_mlx5_send_info_t *)info;
	if (unit->kind == DBL_FENCE) {
		found->membar_full = 1;
	} else if (unit->kind == DBL_STORE_QWORD) {
		found->db_ptr = (uint64_t *)address;
		found->db_value = unit->value;
	} else if (unit->kind == DBL_STORE_DWORD && (unit->role == DBL_ROLE_DOORBELL_RECORD || !found->dbrec_ptr)) {
		found->dbrec_ptr = (uint32_t *)address;
		found->dbrec_value = (uint32_t)unit->value;
	}
}

static void doorbell_gds_look_at_wait(void *info, const struct dbl_unit *unit, void *address)
{
	gds_mlx5_wait_info_t *found = (gds_mlx5_wait_info_t *)info;
	if (unit->kind == DBL_STORE_DWORD) {
		found->flag_ptr = (uint32_t *)address;
		found->flag_value = (uint32_t)unit->value;
	} else if (unit->kind == DBL_POLL_GEQ || unit->kind == DBL_POLL_AND || unit->kind == DBL_POLL_NOR) {
		found->cqe_ptr = (uint32_t *)address;
		found->cqe_value = (uint32_t)unit->value;
		found->cond = unit->kind == DBL_POLL_GEQ   ? GDS_WAIT_COND_GEQ
			      : unit->kind == DBL_POLL_AND ? GDS_WAIT_COND_AND
							   : GDS_WAIT_COND_NOR;
	}
}

/* Posts a request to the trigger stream of its queue, which it creates if needed, and takes it from there as a trigger. */
static int doorbell_gds_take(struct doorbell_gds_qp *qp, uint32_t queue, gds_descriptor_t *desc, doorbell_trigger *trigger)
{
	doorbell_stream **stream = &qp->kernels[queue];
	struct doorbell_gds_target target = {NULL, NULL, NULL, 0};
	int code, error = doorbell_gds_check(desc, &target);
	if (error)
		return error;
	/* Locked, so that the trigger is of this request if another thread uses the same queue. */
	pthread_mutex_lock(&qp->posting);
	if (!*stream)
		error = doorbell_gds_errno(doorbell_stream_create_trigger("gdsync", stream));
	target.handle = *stream;
	if (!error)
		error = doorbell_gds_give_all(&target, 1, desc);
	if (!error) {
		/* The callers limit the size, so that one trigger is enough. */
		code = doorbell_stream_take_trigger(*stream, trigger);
		/* 0: nothing is left for a kernel, because the calling thread rings. */
		error = doorbell_gds_errno(code);
	}
	pthread_mutex_unlock(&qp->posting);
	return error;
}

int gds_mlx5_get_send_info(int count, const gds_send_request_t *requests, gds_mlx5_send_info_t *mlx5_infos)
{
	int i, error = count >= 0 && (count == 0 || (requests && mlx5_infos)) ? 0 : EINVAL;
	for (i = 0; i < count && !error; i++) {
		gds_descriptor_t desc;
		desc.tag = GDS_TAG_SEND;
		desc.send = (gds_send_request_t *)(uintptr_t)&requests[i];
		memset(&mlx5_infos[i], 0, sizeof(mlx5_infos[i]));
		if (requests[i].count > GDS_MLX5_SEND_INFO_MAX_WRS)
			error = ENOMEM;
		else if (requests[i].count == 0)
			error = EINVAL;
		else
			error = doorbell_gds_take(requests[i].owner, 0, &desc, &mlx5_infos[i].trigger);
		if (!error)
			doorbell_gds_look_at(&mlx5_infos[i].trigger, doorbell_gds_look_at_send, &mlx5_infos[i]);
	}
	return error;
}

int gds_mlx5_get_wait_info(int count, const gds_wait_request_t *requests, gds_mlx5_wait_info_t *mlx5_infos)
{
	int i, error = count >= 0 && (count == 0 || (requests && mlx5_infos)) ? 0 : EINVAL;
	for (i = 0; i < count && !error; i++) {
		gds_descriptor_t desc;
		desc.tag = GDS_TAG_WAIT;
		desc.wait = (gds_wait_request_t *)(uintptr_t)&requests[i];
		memset(&mlx5_infos[i], 0, sizeof(mlx5_infos[i]));
		if (!requests[i].prepared)
			error = EINVAL;
		else if (requests[i].appended > 0)
			error = ENOMEM;
		else
			error = doorbell_gds_take(requests[i].owner->owner, 1 + requests[i].owner->side, &desc, &mlx5_infos[i].trigger);
		if (!error)
			doorbell_gds_look_at(&mlx5_infos[i].trigger, doorbell_gds_look_at_wait, &mlx5_infos[i]);
	}
	return error;
}

