/*
 * Part of the interface of doorbell.h: objects of libibverbs that another part of the program has made, such as MPI, UCX
 * or NCCL's plugin: open devices, protection domains, registered memory and address handles.
 *
 * doorbell.h has the rules for results, handles, threads and text buffers.
 *
 * Nothing is opened, allocated or registered a second time, and the library ends nothing that it has not made. Each call
 * takes a function `release`, which may be NULL. The library calls it once, with `argument`, when it is done with the
 * object: after the last handle and all work in flight that uses the object. The object must exist until then. The call
 * may come from any thread, within a call of this library or not. The function must not call this library; it may end
 * the object, as by ibv_dereg_mr. Memory is released before its domain, and a domain before its device. If an adopt
 * call fails, `release` is not called.
 *
 * CUDA's objects are adopted without calls of their own: doorbell_stream_create_cuda takes a CUstream,
 * doorbell_region_register_device a device pointer, and doorbell_stream_wait_cuda_event a CUevent. They use the context of
 * the caller. See doorbell/gpu.h.
 *
 * All calls return DOORBELL_EFEATURE if the library was built without the feature `verbs`.
 */
#ifndef DOORBELL_ADOPT_H
#define DOORBELL_ADOPT_H

#include "endpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Types of libibverbs, declared by name only. */
struct ibv_context;
struct ibv_pd;
struct ibv_mr;
struct ibv_ah;

typedef void (*doorbell_release)(void *argument);

/*
 * Uses an open device. The library changes nothing of the context that its other users see, except, with
 * "events=library", that the event descriptor (async_fd) does not block until the library is done with the context.
 *
 * `settings` is NULL, or what may stand behind a name in doorbell_device_open: "port=2,gid=3,path=proxy". The word
 * "verbs" before it uses the device by plain verbs. The word "mlx5" refuses a device that the mlx5 provider does not
 * drive. Without either word an mlx5 device is used directly, and any other one by plain verbs. Direct use needs nothing
 * of how the context was opened.
 *
 * A context has one queue of asynchronous events (ibv_get_async_event). The library does not read it. The program reads it
 * and passes the events on with doorbell_device_report_async_event. If nobody else reads it, the setting "events=library" makes
 * the library read it. Without either, failures that have no completion are found only by the deadlines of waits, and the
 * library does not learn that a device has been removed.
 *
 * Objects of two doorbell_device handles of one context do not work together; adopt a context once.
 *
 * Returns the codes of doorbell_device_open, and DOORBELL_ESTATE for "mlx5" if the mlx5 provider does not drive the
 * device.
 */
int doorbell_device_adopt(struct ibv_context *context, const char *settings, doorbell_release release, void *argument,
			  doorbell_device **device);

/*
 * Passes on an event that the program has read from the context, before ibv_ack_async_event: event.event_type, and the
 * pointer in event.element (all members of that union are pointers in the cases that matter here). Events of other
 * objects are ignored, so all may be passed on.
 */
int doorbell_device_report_async_event(const doorbell_device *device, uint32_t event_type, const void *element);

/*
 * Uses a protection domain, a plain one or a parent domain. Endpoints in it reach all memory that is registered in it.
 * Returns DOORBELL_EFOREIGN if it is of another ibv_context than the device, and DOORBELL_ESTATE if the device is not
 * one of libibverbs.
 */
int doorbell_domain_adopt(const doorbell_device *device, struct ibv_pd *pd, doorbell_release release, void *argument,
			  doorbell_domain **domain);

/*
 * Uses registered memory, with its range and keys. `access_flags` (DOORBELL_ACCESS_*) are the rights that it was
 * registered with, or fewer; an ibv_mr does not tell them. The library checks work requests against them. `kind` is
 * DOORBELL_REGION_HOST for memory that the CPU can access, otherwise DOORBELL_REGION_DMABUF or DOORBELL_REGION_PEERMEM.
 * Work requests name the memory by the address in `mr`. Memory that is registered under another address
 * (ibv_reg_mr_iova, IBV_ACCESS_ZERO_BASED) needs doorbell_region_adopt_keys.
 *
 * doorbell_region_deregister of such a region only keeps it out of later work requests: its keys stay valid.
 *
 * Returns DOORBELL_EFOREIGN if the memory is registered in another protection domain, and DOORBELL_ESTATE if the device
 * is not one of libibverbs, and for DOORBELL_REGION_COPIED.
 */
int doorbell_region_adopt(const doorbell_domain *domain, struct ibv_mr *mr, uint32_t access_flags, uint32_t kind,
			  doorbell_release release, void *argument, doorbell_region **region);

/* Registered memory, as work requests name it. */
typedef struct doorbell_memory_keys {
	uint64_t start;     /* the address by which work requests name the first byte */
	uint64_t len_bytes; /* 1 to 1 TiB */
	uint32_t lkey;      /* for work requests of this side; 0 if it is not known */
	uint32_t rkey;      /* for those of peers; 0 if it is not known */
} doorbell_memory_keys;

/*
 * Like doorbell_region_adopt, for memory of which only the range and the keys are known: a part of registered memory, or
 * memory that is registered under another address. The keys must be valid in the protection domain; the library cannot
 * check that. If `start` is not where this process has the memory, `kind` is DOORBELL_REGION_PEERMEM, and `start` may be 0, as
 * for memory of IBV_ACCESS_ZERO_BASED. DOORBELL_ERANGE for a `start` of 0 with DOORBELL_REGION_HOST.
 */
int doorbell_region_adopt_keys(const doorbell_domain *domain, const doorbell_memory_keys *keys, uint32_t access_flags,
			       uint32_t kind, doorbell_release release, void *argument, doorbell_region **region);

/*
 * Uses an address handle, for sends of UD endpoints. Work in flight uses the ibv_ah. Returns DOORBELL_EFOREIGN if it is of
 * another ibv_context than the domain, and DOORBELL_ESTATE if the device is not one of libibverbs.
 */
int doorbell_address_handle_adopt(const doorbell_domain *domain, struct ibv_ah *ah, doorbell_release release, void *argument,
				  doorbell_address_handle **handle);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_ADOPT_H */
