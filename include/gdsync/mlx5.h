/*
 * libgdsync's gdsync/mlx5.h: what kernels need to ring and to wait themselves. A part of gdsync.h.
 *
 * A kernel passes the `trigger` of an info to doorbell_device_trigger() of doorbell/device.cuh, which makes the stores of the info and those
 * that notify the host. The other fields are for inspection. The infos of a queue pair's sends, and of the waits of each CQ, are executed once
 * each, in the order in which they were obtained, by kernels of the GPU whose context is current when the first of them is obtained.
 */
#ifndef DOORBELL_GDSYNC_H
#include "../gdsync.h"
#elif !defined(DOORBELL_GDSYNC_MLX5_H)
#define DOORBELL_GDSYNC_MLX5_H

typedef struct gds_mlx5_dword_wait_info {
	uint32_t *ptr; /* address on the device of the current context, which maps the memory at first, or on the CPU without one */
	uint32_t value;
} gds_mlx5_dword_wait_info_t;

/* For a word of registered memory. `flags` is gds_memory_type_t. */
int gds_mlx5_get_dword_wait_info(uint32_t *ptr, uint32_t value, int flags, gds_mlx5_dword_wait_info_t *mlx5_info);

/*
 * The doorbell record and the doorbell of the last work request. On the proxy path there is no doorbell, and the record is the proxy's trigger
 * word. On the sync path the calling thread has rung, and all fields are 0.
 */
typedef struct gds_mlx5_send_info {
	unsigned membar : 1;
	unsigned membar_full : 1; /* 1: a fence of system scope is between the two stores */
	uint32_t *dbrec_ptr;
	uint32_t dbrec_value;
	uint64_t *db_ptr;
	uint64_t db_value;
	doorbell_trigger trigger;
} gds_mlx5_send_info_t;

/* The word of the completion, its condition, and the word that is stored afterwards. */
typedef struct gds_mlx5_wait_info {
	gds_wait_cond_flag_t cond;
	uint32_t *cqe_ptr;
	uint32_t cqe_value;
	uint32_t *flag_ptr;
	uint32_t flag_value;
	doorbell_trigger trigger;
} gds_mlx5_wait_info_t;

/* Most work requests of a chain that fit in a trigger. */
enum { GDS_MLX5_SEND_INFO_MAX_WRS = 2 };

/*
 * Post `count` requests, as in libgdsync although the list is const, for kernels that execute the triggers. Return ENOMEM for a longer chain or
 * for a wait with stores (gds_append_wait_cq), EINVAL without a current context. On failure, the requests before the failed one have their infos.
 */
int gds_mlx5_get_send_info(int count, const gds_send_request_t *requests, gds_mlx5_send_info_t *mlx5_infos);
int gds_mlx5_get_wait_info(int count, const gds_wait_request_t *requests, gds_mlx5_wait_info_t *mlx5_infos);

#endif /* DOORBELL_GDSYNC_MLX5_H */
