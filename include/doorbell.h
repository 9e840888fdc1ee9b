/*
 * doorbell: GPU-triggered RDMA. Transfers are queued on a stream the way kernels are.
 *
 * This header includes the whole C interface of the library, for C11 and C++17. Each header below can also be included
 * alone.
 *
 *   doorbell/core.h      versions, error codes, timeouts, devices, protection domains
 *   doorbell/region.h    registered memory, and caches of registrations
 *   doorbell/adopt.h     open devices, protection domains and registered memory of other parts of the program
 *   doorbell/endpoint.h  endpoints (queue pairs), work requests, tickets, posting and polling from the CPU
 *   doorbell/stream.h    streams, events, operations that are queued on streams
 *   doorbell/gpu.h       GPU capabilities, CUDA streams, queues and streams that GPU kernels use
 *   doorbell/graph.h     CUDA graphs that contain operations
 *   doorbell/bounce.h    transfers of memory that the NIC cannot reach, through pinned buffers
 *   doorbell/group.h     exchange of addresses and keys: rendezvous over TCP, groups, key-value stores
 *   doorbell/message.h   messages between two processes, queued on streams
 *   doorbell/matcher.h   messages that are matched by tag, from any peer
 *   doorbell/communicator.h  collective operations of several ranks, queued on streams
 *   doorbell/cm.h        endpoints that are connected by rdma_cm
 *
 * It does not include these, which programs include if they need them:
 *
 *   doorbell/device.cuh  GPU kernels that post or trigger work requests
 *   doorbell/queue.h     the part of it for posting; for threads of a CPU, too
 *   doorbell/trigger.h   the part of it for triggers; for threads of a CPU, too
 *   doorbell/signal.h    the part of it for words that signal; for threads of a CPU, too
 *   gdsync.h             libgdsync's interface; in libgdsync.so
 *
 * Programs do not include files of doorbell/detail.
 *
 * `examples/first.c` and `examples/loop.c` are complete programs.
 *
 * Linking
 *   scripts/install-c PREFIX     installs headers, libdoorbell.so, libdoorbell.a, libgdsync.so and doorbell.pc
 *   shared:   cc program.c $(pkg-config --cflags --libs doorbell)
 *   static:   cc program.c $(pkg-config --cflags --libs --static doorbell | sed s/-ldoorbell/-l:libdoorbell.a/)
 *   CMake:    find_package(doorbell 0.1 REQUIRED), then link doorbell::doorbell; see examples/cmake
 *   Without installation, from the build folder, where the libraries have no version number:
 *   cc -I include program.c target/release/libdoorbell.a -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc
 *   If the library was built with the feature `verbs`, the static library needs -lrdmacm -lmlx5 -libverbs before these.
 *   Before 1.0, each minor version may change the interface. The soname contains it: libdoorbell.so.0.1.
 *
 * Results
 *   A call that returns `int` returns 0 or a positive number on success, and a negative DOORBELL_E* code on failure.
 *   After a failure, doorbell_last_error() returns a text that names the argument and the limit. A call that fails
 *   changes nothing, unless its comment says otherwise. The comments list the codes that are specific to a call. Not
 *   listed are those that many calls return: DOORBELL_EINVAL, DOORBELL_EHANDLE, DOORBELL_ERANGE and DOORBELL_EPANIC,
 *   DOORBELL_EBUSY (see Threads), DOORBELL_ETIMEOUT from calls with a timeout, and DOORBELL_ESYSTEM from calls that
 *   need the operating system.
 *
 * Handles
 *   Objects are pointers to types that are not defined in the headers. A call that creates an object stores the pointer
 *   through its last handle argument, and stores NULL there on failure. The caller owns the handle. Each type has one
 *   call that destroys it; that call accepts NULL. Destroying a handle does not affect other objects and work in flight
 *   that still use the object: devices, domains, regions, endpoints, streams, events and tickets may be destroyed in
 *   any order, even while work is queued on them. In all other calls a NULL handle returns DOORBELL_EINVAL. A handle
 *   that was destroyed, or that has another type, returns DOORBELL_EHANDLE. The library remembers the last 1024 destroyed
 *   objects. A pointer that is no handle, or a handle that was destroyed before those, returns DOORBELL_EHANDLE if the
 *   library was built with debug assertions (`cargo build`); in release builds it is undefined behaviour, as with free().
 *
 * Threads
 *   A call may be made from any thread at any time, also while other threads use the same objects, unless its comment
 *   has a line `Threads:`. That line names the exceptions:
 *     one at a time for NAME   Two threads must not use this object at the same time. It is not bound to a thread. If two calls
 *                              overlap, the second one returns DOORBELL_EBUSY and does nothing.
 *     alone with NAME          The call ends the object. No other call that uses it may be in progress or start later.
 *     any                      The call may overlap with calls that are `one at a time` for the same object.
 *   No call may be made from a signal handler, or in a child process between fork() and exec().
 *
 * Ownership of arguments
 *   A call has read its input (slices, work requests, texts, bytes) when it returns; the caller may then reuse that
 *   memory. Input texts are UTF-8. Texts that are returned as `const char *` belong to the library.
 *
 * Text buffers
 *   A call with `char *text, size_t capacity` writes like snprintf(): at most `capacity` bytes including the
 *   terminating zero. It returns the length of the whole text in bytes without that zero. If `capacity` is 0, the
 *   pointer may be NULL.
 *
 * Structs that begin with `struct_size`
 *   Later versions may append fields to these structs. `struct_size` is the size in bytes that the program was compiled
 *   with; calls that fill such a struct set it. Fields beyond that size have their defaults. Structs without
 *   `struct_size` that the library fills have a field `reserved`, which is 0 and may get a meaning in later versions;
 *   doorbell_completion, doorbell_details and doorbell_envelope have none, and stay as they are.
 *
 * CUDA
 *   Calls take CUDA's own types, but the headers do not need CUDA's headers: `struct CUstream_st *` is CUstream or
 *   cudaStream_t, `struct CUevent_st *` is CUevent or cudaEvent_t, and a `uint64_t` device address is a CUdeviceptr. Calls
 *   use the context that is current in the calling thread; the runtime API creates one in its first call. Every build of
 *   the library exports these calls. They return DOORBELL_EFEATURE if the library was built without the feature `cuda`,
 *   and DOORBELL_ESTATE if there is no driver or no current context. Streams share the work queues of their context (8, or CUDA_DEVICE_MAX_CONNECTIONS, at
 *   most 32). While as many streams wait as there are queues, no other stream goes on, whatever its priority. A kernel
 *   queue or a region is unregistered from the driver when it is destroyed; an endpoint, and what is destroyed while a
 *   stream of this library has work, by the next call of the program that destroys a device queue, a region or a stream,
 *   or synchronizes a stream. These calls may wait for GPU work that the program itself has queued, as cuMemFree does.
 *   Do not make them in a thread that such work waits for. The library's own threads unregister nothing.
 *
 * What only the Rust interface has
 *   Queries for values that the program itself supplied: names, depths, lengths, access rights, the domains of regions and
 *   endpoints, whether a region was deregistered, and which pages are only advised to be huge.
 *   Reading and writing a region: C uses its pointer, or CUDA for memory of a GPU.
 *   Wrappers of CUDA: CudaContext::primary and from_raw (cudaSetDevice, cuCtxSetCurrent), CudaStream::new
 *   (cudaStreamCreateWithFlags), TimingEvent (cudaEvent_t), parts of a device buffer (addresses).
 *   Kernels for measurements: CudaStream::spin, CudaStream::step, DeviceQueue::put_step.
 *   Launcher variables from a source other than the environment (LaunchEnvironment::from_vars): in C, set rank, size and address.
 *   Interfaces that change with the library: custom executors, copy engines and bytecode, the formats of mlx5, the
 *   packets and messages of the software NIC and of groups, the software NIC itself and its doors (the command
 *   `doorbell softcx run`), and fault injection for tests.
 *
 * Panics of the Rust code do not cross this interface; the call returns DOORBELL_EPANIC.
 */
#ifndef DOORBELL_H
#define DOORBELL_H

#include "doorbell/core.h"
#include "doorbell/region.h"
#include "doorbell/adopt.h"
#include "doorbell/endpoint.h"
#include "doorbell/stream.h"
#include "doorbell/gpu.h"
#include "doorbell/graph.h"
#include "doorbell/bounce.h"
#include "doorbell/group.h"
#include "doorbell/message.h"
#include "doorbell/matcher.h"
#include "doorbell/communicator.h"
#include "doorbell/cm.h"

#endif /* DOORBELL_H */
