/*
 * The names of libgdsync (github.com/gpudirect/libgdsync, API 2.2) over this library, for C11, C++17 and the host side of CUDA:
 * programs that were written for its calls include this, link libdoorbell, and change what is listed below. Nothing here is
 * exported; it is `static inline` over doorbell.h.
 *
 *   #include <doorbell/gdsync.h>     or, with -I PREFIX/include/doorbell, <gdsync.h>, <gdsync/tools.h>, <gdsync/mlx5.h> as ever
 *
 * Types
 *   gds_send_wr is struct ibv_send_wr and gds_qp_init_attr_t is struct ibv_qp_init_attr, of upstream verbs: where
 *   libibverbs is installed its own, else detail/gdsync/verbs.h has what is needed of them. libibverbs is not linked for this header.
 *   CUstream and CUdeviceptr are CUDA's; cuda.h may be included before or after, and need not be there.
 *
 * What stays as it was
 *   A context and a protection domain of libibverbs, as they are: gds_create_qp and gds_reg_mr take them for their device's name,
 *   and work in a protection domain of the library's own on that device. ibv_poll_cq, ibv_post_send and ibv_post_recv with the
 *   queues of a gds_qp. A completion that a stream has waited for is still there for ibv_poll_cq, once the stream has passed
 *   its wait. A program that never polls loses the oldest of them when there are twice as many as the queue is deep.
 *
 * What cannot be kept, and what takes its place
 *   ibv_exp_* types, fields and flags            those of upstream verbs: `opcode` and `send_flags` for `exp_opcode` and
 *                                                `exp_send_flags`, IBV_WR_* for IBV_EXP_WR_*
 *   ibv_reg_mr, ibv_dereg_mr                     gds_reg_mr, gds_dereg_mr: keys of libibverbs are of another protection
 *                                                domain, and EINVAL in slices
 *   ibv_open_device, ibv_alloc_pd without        gds_open_device, gds_alloc_pd, gds_dealloc_pd, gds_close_device
 *     libibverbs, or for "softcx"
 *   ibv_modify_qp (INIT, RTR, RTS)               gds_qp_address, then gds_qp_connect with the peer's
 *   ibv_modify_qp (RESET)                        gds_qp_reset
 *   any other call of libibverbs with `qp` or    none: they are not its objects, and it would not find its own there. Of events
 *     a `cq` of a gds_qp                         there are none: poll, or let a stream wait
 *   IBV_QPT_UD, address handles, SRQs            IBV_QPT_RC, one queue pair for each peer: else EOPNOTSUPP
 *   GDS_CREATE_QP_*_ON_GPU                       0: queues are in host memory, which GPUs reach. EOPNOTSUPP
 *   gds_create_cq, res_domain                    a gds_qp brings its two CQs
 *   struct ibv_exp_peer_commit and _peek, and    doorbell_prepared_disassemble of doorbell.h, for people who look
 *     peer_op_wr in the requests
 *   a request that is posted again               prepare it again: EINVAL
 *   a request that is forgotten                  gds_rollback_send, gds_abort_wait_cq: what is prepared and not posted
 *                                                holds up what is prepared behind it
 *   a wait for a completion of work that is      post or prepare the work first: EINVAL
 *     posted later
 *   waits without an end                         every wait has GDS_WAIT_TIMEOUT_MS. One that takes longer is released, and
 *                                                its queue pair has failed: ibv_poll_cq has the errors
 *   gds_post_send beside work on a stream        wait until the stream has come to it: EBUSY, for it would overtake
 *   GDS_WAIT_COND_EQ                             GDS_WAIT_COND_GEQ with values that grow. EOPNOTSUPP
 *   GDS_MEMORY_IO                                memory of the host or of the GPU. EOPNOTSUPP
 *   waits and stores with words of GPU memory    words of host memory; or cuStreamWaitValue32 and cuStreamWriteValue32 on the
 *     (GDS_MEMORY_GPU is taken for host memory   same stream, whose order they keep. EINVAL
 *     that CUDA has allocated, as ever)
 *   gds_write_memory_t of any shape              `dest` and `count` multiples of 4, up to GDS_WRITE_MEMORY_MAX_BYTES: else EINVAL
 *   memory that is registered by its first use   gds_register_mem before, and gds_unregister_mem, which does unregister: else
 *                                                EFAULT. GDS_REGISTER_ON_USE brings the old way back, for memory that is
 *                                                never freed
 *   gds_alloc_mapped_memory(GDS_MEMORY_GPU)      GDS_MEMORY_HOST; or doorbell_region_alloc_device, which the processor does not
 *                                                map: EOPNOTSUPP
 *   gds_mem_desc_t.mh                            none: GDRCopy is not used
 *   an mlx5_send_info or _wait_info that a       doorbell_trigger_thread() with its `trigger`: see gdsync/mlx5.h
 *     kernel stores and polls itself
 *   gdsync/device.cuh (gdsync::device::wait)     doorbell_kernel_wait_value32 of doorbell/device.cuh, which has a bound as well
 *   GDS_DISABLE_* and other variables of the     none: what a device can do is found out
 *     environment
 *   a library that is loaded with dlopen and     -rdynamic of the program: else what is registered in one is unknown to
 *     shares what the program has registered      the other
 *   a stream for each call                       the first call with a stream makes the library's for it. gds_release_stream
 *                                                before cuStreamDestroy
 *
 * To be defined before the first inclusion, alike in all sources
 *   GDS_WAIT_TIMEOUT_MS            the bound of a wait: milliseconds, or DOORBELL_NO_TIMEOUT. 30000 by default
 *   GDS_REGISTER_ON_USE            1: words of memory that is not registered are, page by page, until gds_unregister_mem
 *   DOORBELL_GDSYNC_OWN_VERBS      the types of detail/gdsync/verbs.h, though libibverbs is installed
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

/* As cuda.h has them. */
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
