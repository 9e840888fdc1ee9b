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

#ifdef __cplusplus
extern "C" {
#endif

/* The device address of a word, and the value it is compared with. */
typedef struct gds_mlx5_dword_wait_info {
	uint32_t *ptr;
	uint32_t value;
} gds_mlx5_dword_wait_info_t;

/* Writes the device address of a word of registered memory, and `value`. `flags` is gds_memory_type_t. */
int gds_mlx5_get_dword_wait_info(uint32_t *ptr, uint32_t value, int flags, gds_mlx5_dword_wait_info_t *mlx5_info);

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

/* Most work requests of a chain that fit in a trigger. */
enum { GDS_MLX5_SEND_INFO_MAX_WRS = 2 };

/*
 * Makes the infos of `count` send requests. This posts the requests, although the list is const, as in libgdsync;
 * kernels must execute the triggers. Returns ENOMEM for a chain of more than GDS_MLX5_SEND_INFO_MAX_WRS work requests,
 * EOPNOTSUPP without the feature `cuda`, EINVAL without a current context. On failure, the requests before the failed
 * one have their infos.
 */
int gds_mlx5_get_send_info(int count, const gds_send_request_t *requests, gds_mlx5_send_info_t *mlx5_infos);

/*
 * Makes the infos of `count` wait requests, like gds_mlx5_get_send_info. Returns ENOMEM for a request with stores
 * after the wait (gds_append_wait_cq).
 */
int gds_mlx5_get_wait_info(int count, const gds_wait_request_t *requests, gds_mlx5_wait_info_t *mlx5_infos);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_GDSYNC_MLX5_H */
