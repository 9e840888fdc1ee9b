/* The declarations of libgdsync's gdsync/tools.h: memory that streams and the CPU share. */
#ifndef DOORBELL_GDSYNC_TOOLS_H
#define DOORBELL_GDSYNC_TOOLS_H

#ifndef DOORBELL_GDSYNC_H
#include "../gdsync.h"
#endif

typedef struct gds_mem_desc {
	CUdeviceptr d_ptr; /* address on the device */
	void *h_ptr;	   /* address on the host */
	void *bar_ptr;	   /* NULL: GDRCopy is not used */
	int flags;
	size_t alloc_size;
} gds_mem_desc_t;

/*
 * Allocates `size` bytes of zeroed host memory, registered for waits and stores of streams. `flags` is
 * GDS_MEMORY_HOST; GDS_MEMORY_GPU returns EOPNOTSUPP. If `size` is 0, nothing is allocated, and the result is 0.
 */
static inline int gds_alloc_mapped_memory(gds_mem_desc_t *desc, size_t size, int flags)
{
	struct doorbell_gds_memory *place;
	int error = 0;
	if (size == 0)
		return 0;
	if (!desc || ((flags & GDS_MEMORY_MASK) != GDS_MEMORY_GPU && (flags & GDS_MEMORY_MASK) != GDS_MEMORY_HOST))
		return EINVAL;
	if ((flags & GDS_MEMORY_MASK) == GDS_MEMORY_GPU)
		return EOPNOTSUPP;
	doorbell_gds_lock();
	error = doorbell_gds_enter(NULL, NULL, size, DOORBELL_ACCESS_ALL, DOORBELL_GDS_OWN, &place);
	if (!error) {
		desc->d_ptr = (CUdeviceptr)place->start;
		desc->h_ptr = (void *)(uintptr_t)place->start;
		desc->bar_ptr = NULL;
		desc->flags = flags;
		desc->alloc_size = size;
	}
	doorbell_gds_unlock();
	return error;
}

/* Frees memory of gds_alloc_mapped_memory as soon as no work in flight uses it. Returns EINVAL for other memory. */
static inline int gds_free_mapped_memory(gds_mem_desc_t *desc)
{
	struct doorbell_gds_memory *place = NULL;
	doorbell_region *region = NULL;
	if (!desc || !desc->h_ptr)
		return EINVAL;
	doorbell_gds_lock();
	place = doorbell_gds_find((uint64_t)(uintptr_t)desc->h_ptr, desc->alloc_size, DOORBELL_GDS_OWN, DOORBELL_GDS_OWN);
	if (place && place->start == (uint64_t)(uintptr_t)desc->h_ptr)
		region = doorbell_gds_leave(place);
	doorbell_gds_unlock();
	if (!region)
		return EINVAL;
	doorbell_region_destroy(region);
	memset(desc, 0, sizeof(*desc));
	return 0;
}

#endif /* DOORBELL_GDSYNC_TOOLS_H */
