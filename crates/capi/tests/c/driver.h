/* The CUDA driver as a program without CUDA's headers calls it: what these tests need of it, found where the library finds it. */
#ifndef DRIVER_H
#define DRIVER_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
struct CUgraph_st;
struct CUgraphExec_st;

struct driver {
	void *library;
	int (*init)(unsigned flags);
	int (*device_get)(int *device, int ordinal);
	int (*ctx_retain)(struct CUctx_st **context, int device);
	int (*ctx_release)(int device);
	int (*ctx_set)(struct CUctx_st *context);
	int (*stream_create)(struct CUstream_st **stream, unsigned flags);
	int (*stream_destroy)(struct CUstream_st *stream);
	int (*alloc)(uint64_t *pointer, size_t len_bytes);
	int (*free)(uint64_t pointer);
	int (*to_device)(uint64_t to, const void *from, size_t len_bytes);
	int (*graph_create)(struct CUgraph_st **graph, unsigned flags);
	int (*graph_destroy)(struct CUgraph_st *graph);
	int (*graph_instantiate)(struct CUgraphExec_st **exec, struct CUgraph_st *graph, unsigned long long flags);
	int (*graph_launch)(struct CUgraphExec_st *exec, struct CUstream_st *stream);
	int (*graph_exec_destroy)(struct CUgraphExec_st *exec);
	int (*begin_capture)(struct CUstream_st *stream, int mode);
	int (*end_capture)(struct CUstream_st *stream, struct CUgraph_st **graph);
	int (*stream_synchronize)(struct CUstream_st *stream);
	int (*to_host)(void *to, uint64_t from, size_t len_bytes);
	int (*event_create)(struct CUevent_st **event, unsigned flags);
	int (*event_record)(struct CUevent_st *event, struct CUstream_st *stream);
	int (*event_query)(struct CUevent_st *event);
	int (*event_destroy)(struct CUevent_st *event);
};

#define DRIVER(call)                                                                                         \
	do {                                                                                                 \
		const int driver_code_ = (call);                                                             \
		if (driver_code_ != 0) {                                                                     \
			fprintf(stderr, "%s:%d: %s gave %d\n", __FILE__, __LINE__, #call, driver_code_);     \
			exit(1);                                                                             \
		}                                                                                            \
	} while (0)

static inline void driver_find(const struct driver *driver, const char *name, void *function)
{
	/* An object pointer becomes one to a function, which POSIX has and ISO C has not. */
	*(void **)function = dlsym(driver->library, name);
	if (!*(void **)function) {
		fprintf(stderr, "the driver has no %s\n", name);
		exit(1);
	}
}

/* 1, or 0 and a text if there is none. */
static inline int driver_load(struct driver *driver)
{
	int count, (*device_count)(int *);

	driver->library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!driver->library) {
		printf("no driver: %s\n", dlerror());
		return 0;
	}
	driver_find(driver, "cuInit", &driver->init);
	driver_find(driver, "cuDeviceGetCount", &device_count);
	driver_find(driver, "cuDeviceGet", &driver->device_get);
	driver_find(driver, "cuDevicePrimaryCtxRetain", &driver->ctx_retain);
	driver_find(driver, "cuDevicePrimaryCtxRelease_v2", &driver->ctx_release);
	driver_find(driver, "cuCtxSetCurrent", &driver->ctx_set);
	driver_find(driver, "cuStreamCreate", &driver->stream_create);
	driver_find(driver, "cuStreamDestroy_v2", &driver->stream_destroy);
	driver_find(driver, "cuMemAlloc_v2", &driver->alloc);
	driver_find(driver, "cuMemFree_v2", &driver->free);
	driver_find(driver, "cuMemcpyHtoD_v2", &driver->to_device);
	driver_find(driver, "cuMemcpyDtoH_v2", &driver->to_host);
	driver_find(driver, "cuGraphCreate", &driver->graph_create);
	driver_find(driver, "cuGraphDestroy", &driver->graph_destroy);
	driver_find(driver, "cuGraphInstantiateWithFlags", &driver->graph_instantiate);
	driver_find(driver, "cuGraphLaunch", &driver->graph_launch);
	driver_find(driver, "cuGraphExecDestroy", &driver->graph_exec_destroy);
	driver_find(driver, "cuStreamBeginCapture_v2", &driver->begin_capture);
	driver_find(driver, "cuStreamEndCapture", &driver->end_capture);
	driver_find(driver, "cuStreamSynchronize", &driver->stream_synchronize);
	driver_find(driver, "cuEventCreate", &driver->event_create);
	driver_find(driver, "cuEventRecord", &driver->event_record);
	driver_find(driver, "cuEventQuery", &driver->event_query);
	driver_find(driver, "cuEventDestroy_v2", &driver->event_destroy);
	if (driver->init(0) != 0 || device_count(&count) != 0 || count == 0) {
		printf("no driver: it has no device\n");
		return 0;
	}
	return 1;
}

#endif
