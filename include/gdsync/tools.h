/* libgdsync's gdsync/tools.h: memory that streams and the CPU share. A part of gdsync.h. */
#ifndef DOORBELL_GDSYNC_H
#include "../gdsync.h"
#elif !defined(DOORBELL_GDSYNC_TOOLS_H)
#define DOORBELL_GDSYNC_TOOLS_H

typedef struct gds_mem_desc {
	CUdeviceptr d_ptr; /* address on the device of the context that was current, or on the CPU without one */
	void *h_ptr;	   /* address on the host */
	void *bar_ptr;	   /* NULL: GDRCopy is not used */
	int flags;
	size_t alloc_size;
	CUdeviceptr original_d_ptr; /* as d_ptr */
} gds_mem_desc_t;

/* Zeroed host memory for waits and stores of streams, none if `size` is 0. `flags` is GDS_MEMORY_HOST; GDS_MEMORY_GPU returns EOPNOTSUPP. */
int gds_alloc_mapped_memory(gds_mem_desc_t *desc, size_t size, int flags);
/* Frees it as soon as no work in flight uses it. Returns EINVAL for other memory. */
int gds_free_mapped_memory(gds_mem_desc_t *desc);

#endif /* DOORBELL_GDSYNC_TOOLS_H */
