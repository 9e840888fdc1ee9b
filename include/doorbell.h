/*
 * doorbell: queue a transfer on a stream the way you queue a kernel.
 *
 * The C interface of the library, for C11 and C++17. `examples/loop.c` is a whole program that uses it.
 *
 * Linking
 *   scripts/install-c PREFIX     installs headers, libdoorbell.so, libdoorbell.a and doorbell.pc
 *   shared:   cc program.c $(pkg-config --cflags --libs doorbell)
 *   static:   cc program.c $(pkg-config --cflags --libs --static doorbell | sed s/-ldoorbell/-l:libdoorbell.a/)
 *   CMake:    pkg_check_modules(DOORBELL REQUIRED IMPORTED_TARGET doorbell), and PkgConfig::DOORBELL; see examples/cmake
 *   Or from the build's own folder, where the libraries have no version:
 *   cc -I include program.c target/release/libdoorbell.a -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc
 *   With the feature `verbs`, the static library needs -lrdmacm -lmlx5 -libverbs before these.
 *   Until 1.0 another minor version is another interface: the soname is libdoorbell.so.0.1.
 *
 * Results
 *   A call that returns `int` gives 0 or a positive number when it succeeds, and one of the negative DOORBELL_E* codes when
 *   it does not. doorbell_last_error() then has a text that names the argument and the limit. A call that fails has changed
 *   nothing, unless its comment says otherwise.
 *
 * Handles
 *   Objects are known by pointers to types that are not defined here. A call that makes one writes it through its last
 *   handle argument, and writes NULL there if it fails. Each has one call that destroys it, and that takes NULL, too.
 *   Destroying a handle does not end what other objects and work in flight still need of it: devices, domains, regions,
 *   endpoints, streams, events and tickets may be destroyed in any order, with work queued on them.
 *   A null handle is DOORBELL_EINVAL anywhere else. A handle that was destroyed, is of another type, or is none at all is
 *   DOORBELL_EHANDLE if the library was built with debug assertions, as `cargo build` does; in release builds it is
 *   undefined behaviour, as with free().
 *
 * Threads
 *   The comment of each call has a line `Threads:`.
 *     any                      from any thread at any time, with the same objects in other threads as well.
 *     one at a time for NAME   two threads may not use this object at once; any thread may have its turn. Where two meet,
 *                              the second gets DOORBELL_EBUSY, and nothing happens.
 *     alone with NAME          the call ends the object: no other call with it may be under way, or come later.
 *   No call may be made from a signal handler, or in a child after fork() without exec().
 *
 * Ownership
 *   What a call is given, such as slices, work requests, texts and bytes, it has read when it returns. Texts that are given
 *   are UTF-8. Texts that are returned as `const char *` belong to the library.
 *
 * Text buffers
 *   A call with `char *text, size_t capacity` writes as snprintf() does: at most `capacity` bytes, with a zero at the end,
 *   and returns the length that the whole text has without that zero. With a capacity of 0 the pointer may be NULL.
 *
 * Structs that begin with `struct_size`
 *   They may grow at their end in later versions. The field is the size that your header has; the functions that fill such
 *   a struct set it. What a later library knows beyond that takes its default. Structs without it that the library fills have a field
 *   `reserved`, which later versions may give a meaning.
 *
 * CUDA
 *   Calls with CUDA's own types take them as they are, without CUDA's headers: `struct CUstream_st *` is CUstream and
 *   cudaStream_t, and a `uint64_t` is a CUdeviceptr. They work in the context that is current in the calling thread, which
 *   the runtime API makes with its first call. Every library has them; one that was built without the feature `cuda` gives
 *   DOORBELL_EFEATURE. DOORBELL_ESTATE if there is no driver, or no current context.
 *   Streams of one priority share the device's queues, 8 unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise: a wait, and a kernel
 *   that waits, may hold up a stream that shares its queue. What waits for each other needs queues of its own, or other priorities.
 *   Memory that a GPU has mapped, that of endpoints, kernel queues and regions, is unregistered when they are destroyed; the driver
 *   may wait for the GPU then, as it does where memory is freed. A thread that destroys one should not be the one that a stream
 *   or a kernel waits for.
 *
 * What the Rust interface has beyond this
 *   What a program has given or done itself is not asked back: names, depths, lengths, rights, domains of regions and
 *   endpoints, that a region was deregistered, and which pages the kernel was only asked to make huge.
 *   Memory of a region is read and written through its pointer, that of a GPU by CUDA.
 *   Contexts, streams and memory of a GPU are CUDA's own here, made and ended by CUDA's calls: CudaContext::primary and from_raw
 *   are cudaSetDevice() or cuCtxSetCurrent(), CudaStream::new is cudaStreamCreateWithFlags(), TimingEvent is cudaEvent_t, parts
 *   of a buffer are addresses. The kernels that only take time or make one work request (CudaStream::spin, CudaStream::step,
 *   KernelQueue::put_step) are for measuring from a language that has none of its own. Types of cudarc are Rust's.
 *   A launcher's variables from elsewhere than the environment (Place::from_vars): give rank, size and address.
 *   Executors, copy engines and bytecode of one's own, the formats of mlx5, packets and messages of the software NIC and of
 *   groups, the software NIC by itself and its doors (the command `doorbell softcx run`), and what breaks it for tests (faults,
 *   a NIC that hangs, a proxy that stalls) are for Rust programs: they are tied to the library's own code, and change with it.
 *
 * Panics of the Rust code do not cross this interface: they become DOORBELL_EPANIC.
 */
#ifndef DOORBELL_H
#define DOORBELL_H

#include "doorbell/core.h"
#include "doorbell/region.h"
#include "doorbell/endpoint.h"
#include "doorbell/stream.h"
#include "doorbell/gpu.h"
#include "doorbell/graph.h"
#include "doorbell/bounce.h"
#include "doorbell/group.h"
#include "doorbell/cm.h"

#endif /* DOORBELL_H */
