/*
 * The declarations of libgdsync's gdsync/mlx5.h: what kernels need to ring and to wait themselves.
 *
 * With libgdsync a kernel makes the stores of an mlx5_send_info itself. With this library it calls
 * doorbell_device_trigger() of doorbell/device.cuh with the `trigger` of the info. That makes the same stores, and
 * those that notify the host. The addresses and values in the info are for inspection only. The infos of a queue
 * pair's sends, and of the waits of each of its CQs, must be executed in the order in which they were obtained, once
 * each, by kernels of the GPU whose context is current when the first of them is obtained.
 */
#ifndef DOORBELL_GDSYNC_MLX5_H
#define DOORBELL_GDSYNC_MLX5_H

#ifndef DOORBELL_GDSYNC_H
#include "../gdsync.h"
#endif

#include "../detail/execute.h"

/* The device address of a word, and the value it is compared with. */
typedef struct gds_mlx5_dword_wait_info {
	uint32_t *ptr;
	uint32_t value;
} gds_mlx5_dword_wait_info_t;

/* Writes the device address of a word of registered memory, and `value`. `flags` is gds_memory_type_t. */
static inline int gds_mlx5_get_dword_wait_info(uint32_t *ptr, uint32_t value, int flags, gds_mlx5_dword_wait_info_t *mlx5_info)
{
	const doorbell_region *region;
	uint64_t offset;
	int error = mlx5_info ? doorbell_gds_check_flags(flags, 0) : EINVAL;
	if (!error)
		error = doorbell_gds_words(ptr, 4, &region, &offset);
	if (error)
		return error;
	/* With unified addressing it is the host's address. */
	mlx5_info->ptr = ptr;
	mlx5_info->value = value;
	return 0;
}

/*
 * A send request: the doorbell record and the doorbell of its last work request. On the proxy path there is no
 * doorbell, and the record is the proxy's trigger word. If the calling thread rings (DOORBELL_CONTROL_SYNC), it has
 * done so, and all fields are 0.
 */
typedef struct gds_mlx5_send_info {
	unsigned membar : 1;
	unsigned membar_full : 1; /* 1: a fence of system scope is between the two stores */
	uint32_t *dbrec_ptr;
	uint32_t dbrec_value;
	uint64_t *db_ptr;
	uint64_t db_value;
	doorbell_trigger trigger; /* for doorbell_device_trigger() and similar calls */
} gds_mlx5_send_info_t;

/* A wait request: the word of the completion, its condition, and the word that is stored afterwards. */
typedef struct gds_mlx5_wait_info {
	gds_wait_cond_flag_t cond;
	uint32_t *cqe_ptr;
	uint32_t cqe_value;
	uint32_t *flag_ptr;
	uint32_t flag_value;
	doorbell_trigger trigger; /* for doorbell_device_trigger() and similar calls */
} gds_mlx5_wait_info_t;

/* A callback for one unit of a trigger's program and the address that it names. */
typedef void (*doorbell_gds_look)(void *info, const struct dbl_unit *unit, void *address);

static inline void doorbell_gds_look_at(const doorbell_trigger *trigger, doorbell_gds_look look, void *info)
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

static inline void doorbell_gds_look_at_send(void *info, const struct dbl_unit *unit, void *address)
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

static inline void doorbell_gds_look_at_wait(void *info, const struct dbl_unit *unit, void *address)
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
static inline int doorbell_gds_take(struct doorbell_gds_qp *qp, uint32_t queue, gds_descriptor_t *desc, doorbell_trigger *trigger)
{
	doorbell_stream **stream = &qp->kernels[queue];
	int code, error = doorbell_gds_check(desc);
	if (error)
		return error;
	/* Locked, so that the trigger is of this request if another thread uses the same queue. */
	pthread_mutex_lock(&qp->posting);
	if (!*stream)
		error = doorbell_gds_errno(doorbell_stream_create_trigger("gdsync", stream));
	if (!error)
		error = doorbell_gds_give_all(*stream, 1, desc);
	if (!error) {
		/* The callers limit the size, so that one trigger is enough. */
		code = doorbell_stream_take_trigger(*stream, trigger);
		/* 0: nothing is left for a kernel, because the calling thread rings. */
		error = doorbell_gds_errno(code);
	}
	pthread_mutex_unlock(&qp->posting);
	return error;
}

/* Most work requests of a chain that fit in a trigger. */
enum { GDS_MLX5_SEND_INFO_MAX_WRS = 2 };

/*
 * Makes the infos of `count` send requests. This posts the requests, although the list is const, as in libgdsync;
 * kernels must execute the triggers. Returns ENOMEM for a chain of more than GDS_MLX5_SEND_INFO_MAX_WRS work requests,
 * EOPNOTSUPP without the feature `cuda`, EINVAL without a current context. On failure, the requests before the failed
 * one have their infos.
 */
static inline int gds_mlx5_get_send_info(int count, const gds_send_request_t *requests, gds_mlx5_send_info_t *mlx5_infos)
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

/*
 * Makes the infos of `count` wait requests, like gds_mlx5_get_send_info. Returns ENOMEM for a request with stores
 * after the wait (gds_append_wait_cq).
 */
static inline int gds_mlx5_get_wait_info(int count, const gds_wait_request_t *requests, gds_mlx5_wait_info_t *mlx5_infos)
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

#endif /* DOORBELL_GDSYNC_MLX5_H */
