/*
 * Words that libdoorbell does not wait for: those of GPU memory, and in a library without kernels waits for equality. On a stream of the driver, these
 * are the driver's own operations on the same stream, which executes them in order with libdoorbell's.
 */
#include "internal.h"

#include <dlfcn.h>

/* Values of cuda.h. */
enum {
	DOORBELL_GDS_ATTRIBUTE_MEMORY_TYPE = 2, /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE */
	DOORBELL_GDS_MEMORY_TYPE_DEVICE = 2,	/* CU_MEMORYTYPE_DEVICE */
	DOORBELL_GDS_WAIT_FLUSH = 1 << 30	/* CU_STREAM_WAIT_VALUE_FLUSH */
};

struct doorbell_gds_driver {
	int (*get_current)(void **context);
	int (*get_attribute)(void *data, int attribute, CUdeviceptr pointer);
	int (*wait_value32)(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags);
	int (*write_value32)(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags);
};

static struct doorbell_gds_driver doorbell_gds_driver;
static pthread_once_t doorbell_gds_driver_once = PTHREAD_ONCE_INIT;

/* ISO C has no conversion from an object's address to a function's. */
static void doorbell_gds_find_symbol(void *library, const char *name, const char *older, void *place)
{
	void *found = dlsym(library, name);
	if (!found)
		found = dlsym(library, older);
	memcpy(place, &found, sizeof(found));
}

static void doorbell_gds_load_driver(void)
{
	struct doorbell_gds_driver *driver = &doorbell_gds_driver;
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!library)
		return;
	doorbell_gds_find_symbol(library, "cuCtxGetCurrent", "cuCtxGetCurrent", &driver->get_current);
	doorbell_gds_find_symbol(library, "cuPointerGetAttribute", "cuPointerGetAttribute", &driver->get_attribute);
	doorbell_gds_find_symbol(library, "cuStreamWaitValue32_v2", "cuStreamWaitValue32", &driver->wait_value32);
	doorbell_gds_find_symbol(library, "cuStreamWriteValue32_v2", "cuStreamWriteValue32", &driver->write_value32);
}

static const struct doorbell_gds_driver *doorbell_gds_get_driver(void)
{
	pthread_once(&doorbell_gds_driver_once, doorbell_gds_load_driver);
	return &doorbell_gds_driver;
}

void *doorbell_gds_current_context(void)
{
	const struct doorbell_gds_driver *driver = doorbell_gds_get_driver();
	void *context = NULL;
	return driver->get_current && driver->get_current(&context) == 0 ? context : NULL;
}

int doorbell_gds_device_address(const doorbell_region *region, uint64_t offset, CUdeviceptr *address)
{
	uint64_t start = (uint64_t)(uintptr_t)doorbell_region_pointer(region);
	int code = 0;
	/* Registration tells only the NIC of host memory. A kernel may access it before the first operation of a stream would
	   map it. */
	if (doorbell_region_kind(region) == DOORBELL_REGION_HOST && doorbell_gds_current_context())
		code = doorbell_region_device_pointer(region, &start);
	/* A library without CUDA has no streams of the driver. Its words are the CPU's. */
	if (code < 0 && code != DOORBELL_EFEATURE)
		return doorbell_gds_errno(code);
	*address = (CUdeviceptr)(start + offset);
	return 0;
}

int doorbell_gds_is_gpu_memory(const void *address)
{
	const struct doorbell_gds_driver *driver = doorbell_gds_get_driver();
	unsigned type = 0;
	return driver->get_attribute &&
	       driver->get_attribute(&type, DOORBELL_GDS_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)address) == 0 &&
	       type == DOORBELL_GDS_MEMORY_TYPE_DEVICE;
}

int doorbell_gds_driver_wait(CUstream stream, CUdeviceptr address, uint32_t value, gds_wait_cond_flag_t cond, int flags)
{
	const struct doorbell_gds_driver *driver = doorbell_gds_get_driver();
	/* The conditions have the driver's numbers. */
	const unsigned flush = flags & GDS_WAIT_POST_FLUSH_REMOTE ? DOORBELL_GDS_WAIT_FLUSH : 0;
	if (!driver->wait_value32)
		return EOPNOTSUPP;
	if (driver->wait_value32(stream, address, value, (unsigned)cond | flush) == 0)
		return 0;
	/* Not every GPU can flush. */
	return flush && driver->wait_value32(stream, address, value, (unsigned)cond) == 0 ? 0 : EIO;
}

int doorbell_gds_driver_write(CUstream stream, void *address, uint32_t value)
{
	const struct doorbell_gds_driver *driver = doorbell_gds_get_driver();
	if (!driver->write_value32)
		return EOPNOTSUPP;
	return driver->write_value32(stream, (CUdeviceptr)(uintptr_t)address, value, 0) == 0 ? 0 : EIO;
}
