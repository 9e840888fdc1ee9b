/*
 * libgdsync's interface (github.com/gpudirect/libgdsync, API 2.2) on top of this library, for C11, C++17 and host code
 * of CUDA. Programs that were written for libgdsync include this header, link libdoorbell, and change what is listed
 * below. Nothing is exported: all functions are `static inline` and use doorbell.h.
 *
 *   #include <doorbell/gdsync.h>     or, with -I PREFIX/include/doorbell, <gdsync.h>, <gdsync/tools.h>, <gdsync/mlx5.h> as with libgdsync
 *
 * Types
 *   gds_send_wr is struct ibv_send_wr and gds_qp_init_attr_t is struct ibv_qp_init_attr of upstream verbs. If
 *   libibverbs' headers are installed, its types are used; otherwise this library declares the types that are needed.
 *   This header does not need libibverbs at link time. CUstream and CUdeviceptr are CUDA's types; cuda.h may be
 *   included before or after this header, or not at all.
 *
 * What stays the same
 *   Contexts and protection domains of libibverbs: gds_create_qp and gds_reg_mr use the name of their device, and work
 *   in a protection domain of this library on that device. ibv_poll_cq, ibv_post_send and ibv_post_recv work with the
 *   queues of a gds_qp. A completion that a stream has waited for remains available to ibv_poll_cq after the stream has
 *   passed the wait. If a program never polls, the oldest completions are dropped when there are twice as many as the
 *   queue is deep.
 *
 * What is not supported, and what to use instead
 *   ibv_exp_* types, fields and flags            those of upstream verbs: `opcode` and `send_flags` for `exp_opcode` and
 *                                                `exp_send_flags`, IBV_WR_* for IBV_EXP_WR_*
 *   ibv_reg_mr, ibv_dereg_mr                     gds_reg_mr, gds_dereg_mr. Keys of libibverbs belong to another protection
 *                                                domain; slices with them return EINVAL
 *   ibv_open_device, ibv_alloc_pd without        gds_open_device, gds_alloc_pd, gds_dealloc_pd, gds_close_device
 *     libibverbs, or for "softcx"
 *   ibv_modify_qp (INIT, RTR, RTS)               gds_qp_address, then gds_qp_connect with the peer's address
 *   ibv_modify_qp (RESET)                        gds_qp_reset
 *   other calls of libibverbs with `qp` or a     nothing: these are not objects of libibverbs, and it would access fields that
 *     `cq` of a gds_qp                           they do not have. There are no events: poll, or wait on a stream
 *   IBV_QPT_UD, address handles, SRQs            IBV_QPT_RC, one queue pair for each peer. Otherwise EOPNOTSUPP
 *   GDS_CREATE_QP_*_ON_GPU                       0: queues are in host memory, which GPUs can access. Otherwise EOPNOTSUPP
 *   gds_create_cq, res_domain                    a gds_qp has its own two CQs
 *   struct ibv_exp_peer_commit and _peek, and    doorbell_prepared_disassemble of doorbell.h, for debugging
 *     peer_op_wr in the requests
 *   posting a request twice                      prepare it again. Otherwise EINVAL
 *   dropping a prepared request                  gds_rollback_send, gds_abort_wait_cq: a request that is prepared and not posted
 *                                                blocks later ones
 *   a wait for a completion of work that is      post or prepare the work first. Otherwise EINVAL
 *     posted later
 *   waits without a timeout                      each wait has GDS_WAIT_TIMEOUT_MS. A wait that takes longer is released, and
 *                                                its queue pair fails: ibv_poll_cq returns the errors
 *   gds_post_send while work is on a stream      wait until the stream has executed that work. Otherwise EBUSY, because the new
 *                                                work would overtake it
 *   GDS_WAIT_COND_EQ                             GDS_WAIT_COND_GEQ with increasing values. Otherwise EOPNOTSUPP
 *   GDS_MEMORY_IO                                memory of the host or of the GPU. Otherwise EOPNOTSUPP
 *   waits and stores for words of GPU memory     words of host memory; or cuStreamWaitValue32 and cuStreamWriteValue32 on the same
 *     (GDS_MEMORY_GPU is accepted for host       stream, which are executed in order. Otherwise EINVAL
 *      memory that CUDA has allocated)
 *   gds_write_memory_t of any size               `dest` and `count` multiples of 4, up to GDS_WRITE_MEMORY_MAX_BYTES. Otherwise
 *                                                EINVAL
 *   registration of memory by its first use      gds_register_mem before, and gds_unregister_mem, which really unregisters. Otherwise
 *                                                EFAULT. GDS_REGISTER_ON_USE restores the old behaviour, for memory that is never
 *                                                freed
 *   gds_alloc_mapped_memory(GDS_MEMORY_GPU)      GDS_MEMORY_HOST; or doorbell_region_alloc_device, which the CPU cannot access.
 *                                                Otherwise EOPNOTSUPP
 *   gds_mem_desc_t.mh                            nothing: GDRCopy is not used
 *   an mlx5_send_info or _wait_info that a       doorbell_device_trigger() with its `trigger`: see gdsync/mlx5.h
 *     kernel stores and polls itself
 *   gdsync/device.cuh (gdsync::device::wait)     doorbell_device_wait_value32 of doorbell/device.cuh, which also has a timeout
 *   GDS_DISABLE_* and other environment          nothing: capabilities of the device are detected
 *     variables
 *   a library that is loaded with dlopen and     link the program with -rdynamic. Otherwise memory that is registered in one is
 *     shares registrations with the program      unknown in the other
 *   a new stream for each call                   the first call with a stream creates this library's object for it; call
 *                                                gds_release_stream before cuStreamDestroy
 *
 * Macros, to be defined before the first inclusion, the same in all source files
 *   GDS_WAIT_TIMEOUT_MS            timeout of a wait in ms, or DOORBELL_NO_TIMEOUT; default 30000
 *   GDS_REGISTER_ON_USE            1: words of unregistered memory are registered by page, until gds_unregister_mem
 *   DOORBELL_GDSYNC_OWN_VERBS      use this library's declarations of verbs types although libibverbs is installed
 */
#ifndef DOORBELL_GDSYNC_H
#define DOORBELL_GDSYNC_H

#include "../doorbell.h"

#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef GDS_WAIT_TIMEOUT_MS
#define GDS_WAIT_TIMEOUT_MS DOORBELL_DEFAULT_TIMEOUT
#endif
#ifndef GDS_REGISTER_ON_USE
#define GDS_REGISTER_ON_USE 0
#endif

#include "detail/gdsync/verbs.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The same as in cuda.h. */
typedef struct CUstream_st *CUstream;
typedef unsigned long long CUdeviceptr;

#include "gdsync/core.h"

#include "detail/gdsync/memory.h"
#include "detail/gdsync/queue.h"
#include "detail/gdsync/stream.h"

#include "gdsync/mlx5.h"
#include "gdsync/tools.h"

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_GDSYNC_H */
