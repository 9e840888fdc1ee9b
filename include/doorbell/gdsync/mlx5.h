/*
 * What libgdsync's gdsync/mlx5.h declares: what kernels need to wait and ring by themselves.
 */
#ifndef DOORBELL_GDSYNC_MLX5_H
#define DOORBELL_GDSYNC_MLX5_H

#ifndef DOORBELL_GDSYNC_H
#include "../gdsync.h"
#endif

/* A word, by its address on the device, and what it is compared with. */
typedef struct gds_mlx5_dword_wait_info {
	uint32_t *ptr;
	uint32_t value;
} gds_mlx5_dword_wait_info_t;

/* The address on the device of a word of registered memory. `flags`: gds_memory_type_t. */
static inline int gds_mlx5_get_dword_wait_info(uint32_t *ptr, uint32_t value, int flags, gds_mlx5_dword_wait_info_t *mlx5_info)
{
	const doorbell_region *region;
	uint64_t offset;
	int error = mlx5_info ? doorbell_gds_check_flags(flags, 0) : EINVAL;
	if (!error)
		error = doorbell_gds_words(ptr, 4, &region, &offset);
	if (error)
		return error;
	/* Under unified addressing it is the host's. */
	mlx5_info->ptr = ptr;
	mlx5_info->value = value;
	return 0;
}

#endif /* DOORBELL_GDSYNC_MLX5_H */
