/* The declarations of libgdsync's gdsync/tools.h: memory that streams and the CPU share. */
#ifndef DOORBELL_GDSYNC_TOOLS_H
#define DOORBELL_GDSYNC_TOOLS_H

#ifndef DOORBELL_GDSYNC_H
#include "../gdsync.h"
#endif

#ifdef __cplusplus
extern "C" {
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
int gds_alloc_mapped_memory(gds_mem_desc_t *desc, size_t size, int flags);

/* Frees memory of gds_alloc_mapped_memory as soon as no work in flight uses it. Returns EINVAL for other memory. */
int gds_free_mapped_memory(gds_mem_desc_t *desc);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_GDSYNC_TOOLS_H */
