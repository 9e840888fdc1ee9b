/*
 * libgdsync's interface (github.com/gpudirect/libgdsync) on top of libdoorbell, for C11, C++17 and host code of CUDA.
 * Programs that were written for libgdsync include this header, link libgdsync, which lies beside libdoorbell, and
 * change what is listed below.
 *
 * Versions
 *   The declarations are those of API 2.2, with the names of MLNX_OFED 4 (ibv_exp_*, IBV_EXP_*) as names of upstream
 *   verbs. If GDSYNC_API is defined as 3 before the first inclusion, they are those of API 3.0: CQs are pointers, and
 *   gds_send_wr is struct ibv_send_wr.
 *
 * Types
 *   If libibverbs' headers are installed, their types are used; otherwise gdsync/verbs.h declares the types that are
 *   needed. CUstream and CUdeviceptr are CUDA's types; cuda.h may be included before or after this header, or not at
 *   all.
 *
 * Calls of libibverbs
 *   Contexts, protection domains and registered memory of libibverbs are used as they are (doorbell/adopt.h): queue pairs
 *   are created in the program's protection domain, and keys are those of ibv_reg_mr. The device checks them. ibv_poll_cq, ibv_post_send and ibv_post_recv work with the objects of a gds_qp. This header gives other names of
 *   libibverbs a second meaning for these objects, and the usual one for all others: ibv_modify_qp is gds_modify_qp,
 *   ibv_query_qp is gds_query_qp, ibv_reg_mr also registers memory of GPUs without a kernel module for it, ibv_destroy_cq returns
 *   EBUSY, and ibv_destroy_qp, ibv_resize_cq and ibv_req_notify_cq return EOPNOTSUPP. In sources that do not include this
 *   header, these calls of libibverbs return EOPNOTSUPP for the objects of a gds_qp. The `context` of these objects is
 *   for nothing else; use `dev_context`.
 *
 *   The library does not read the asynchronous events of the program's context, so a failure without a completion is found
 *   by the timeout of a wait. With GDS_DEVICE_SETTINGS=events=library in the environment, the library reads them.
 *
 *   A completion that a stream has waited for remains available to ibv_poll_cq after the stream has passed the wait. If
 *   a program never polls, the oldest completions are dropped when there are twice as many as the queue is deep.
 *
 * What is not supported, and what to use instead
 *   ibv_open_device, ibv_alloc_pd without        gds_open_device, gds_alloc_pd, gds_dealloc_pd, gds_close_device, and
 *     libibverbs, or for "softcx"                gds_qp_address and gds_qp_connect for gds_modify_qp
 *   SRQs, and IBV_QPT_UD without libibverbs      IBV_QPT_RC, one queue pair for each peer. Otherwise EOPNOTSUPP
 *   completion channels                          poll, or wait on a stream
 *   GDS_CREATE_QP_*_ON_GPU                       0: queues are in host memory, which GPUs can access. Otherwise EOPNOTSUPP
 *   gds_create_cq, res_domain                    a gds_qp has its own two CQs
 *   struct ibv_exp_peer_commit and _peek, and    doorbell_prepared_disassemble of doorbell.h, for debugging
 *     peer_op_wr in the requests
 *   posting a request twice                      prepare it again. Otherwise EINVAL
 *   dropping a prepared request                  gds_rollback_send, gds_abort_wait_cq: a request that is prepared and not posted
 *                                                blocks later ones
 *   a wait for a completion of work that is      post or prepare the work first. Otherwise EINVAL
 *     posted later
 *   waits without a timeout                      each wait for a completion or a word of host memory has a timeout
 *                                                (GDS_OPTION_WAIT_TIMEOUT_MS). A wait that takes longer is released, and its
 *                                                queue pair fails: ibv_poll_cq returns the errors
 *   gds_post_send while work is on a stream      wait until the stream has executed that work. Otherwise EBUSY, because the new
 *                                                work would overtake it
 *   GDS_MEMORY_IO                                memory of the host or of the GPU. Otherwise EOPNOTSUPP
 *   words of GPU memory in gds_post_descriptors  gds_stream_post_descriptors. Otherwise EINVAL
 *     or on a host stream
 *   gds_write_memory_t of any size               `dest` and `count` multiples of 4, up to GDS_WRITE_MEMORY_MAX_BYTES. Otherwise
 *                                                EINVAL
 *   gds_alloc_mapped_memory(GDS_MEMORY_GPU)      GDS_MEMORY_HOST; or doorbell_region_alloc_device, which the CPU cannot access.
 *                                                Otherwise EOPNOTSUPP
 *   gds_mem_desc_t.mh, gdrapi.h                  nothing: GDRCopy is not used, and this header does not include its header
 *   an mlx5_send_info or _wait_info that a       doorbell_device_trigger() with its `trigger`: see gdsync/mlx5.h
 *     kernel stores and polls itself
 *   GDS_DISABLE_* and other environment          nothing: capabilities of the device are detected
 *     variables
 *   a new stream for each call                   the first call with a stream creates this library's object for it; call
 *                                                gds_release_stream before cuStreamDestroy
 *   binaries linked with libgdsync               compile them again
 */
#ifndef DOORBELL_GDSYNC_H
#define DOORBELL_GDSYNC_H

#ifndef GDSYNC_API
#define GDSYNC_API 2
#endif
#if GDSYNC_API != 2 && GDSYNC_API != 3
#error "GDSYNC_API is 2 or 3"
#endif

#include "doorbell.h"

#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gdsync/verbs.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The same as in cuda.h. */
typedef struct CUstream_st *CUstream;
typedef unsigned long long CUdeviceptr;

#include "gdsync/core.h"

#ifdef __cplusplus
}
#endif

#include "gdsync/ibverbs.h"
#include "gdsync/mlx5.h"
#include "gdsync/tools.h"

#endif /* DOORBELL_GDSYNC_H */
