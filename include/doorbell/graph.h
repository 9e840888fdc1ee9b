/*
 * Part of the interface of doorbell.h: CUDA graphs that contain operations.
 *
 * doorbell.h has the rules for results, handles, threads and text buffers.
 */
#ifndef DOORBELL_GRAPH_H
#define DOORBELL_GRAPH_H

#include "communicator.h"
#include "message.h"
#include "stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Types of CUDA, declared by name only. */
struct CUgraph_st;
struct CUgraphNode_st;
struct CUgraphExec_st;

/* -------------------------------------------------------------------------------------------------------- graphs */

/*
 * CUDA graphs that contain operations and can be launched repeatedly. The graph records operations, not fixed stores:
 * each launch prepares the operations again and updates what the nodes store and poll. Therefore such a graph must be
 * launched by the calls of this section.
 */

/*
 * Records operations in order. A builder is bound to the thread that created it; calls from other threads return
 * DOORBELL_ESTATE.
 */
typedef struct doorbell_graph_builder doorbell_graph_builder;

/* A graph that can be launched. */
typedef struct doorbell_graph doorbell_graph;

/*
 * Starts to capture a CUDA stream (cuStreamBeginCapture). The graph contains everything that is queued on it from now
 * on, by any caller. Until doorbell_graph_builder_instantiate, other calls of this library that queue on the stream
 * return DOORBELL_ESTATE.
 */
int doorbell_graph_builder_capture(doorbell_stream *stream, doorbell_graph_builder **builder);

/*
 * Adds nodes to the caller's CUgraph. The caller keeps `graph` and all added objects until builder and graph are
 * destroyed and the last launch is done. `stream` is a stream of the context in which the nodes will run.
 */
int doorbell_graph_builder_for_graph(doorbell_stream *stream, struct CUgraph_st *graph, doorbell_graph_builder **builder);

/*
 * Makes the next operation also depend on these nodes. Returns DOORBELL_ESTATE if the builder captures a stream, whose
 * order applies.
 * Threads: one at a time for builder.
 */
int doorbell_graph_builder_after(doorbell_graph_builder *builder, struct CUgraphNode_st *const *nodes, size_t count);

/*
 * Writes the node of the last operation, so that other nodes can depend on it. Returns 1, or 0 if there is none. The
 * next operation gets a new node.
 * Threads: one at a time for builder.
 */
int doorbell_graph_builder_last_node(doorbell_graph_builder *builder, struct CUgraphNode_st **node);

/*
 * Adds a work request. Slices, addresses and immediate data are the same in each launch; inline bytes are copied now.
 * Returns the codes of doorbell_prepare_send; on failure nothing is recorded.
 * Threads: one at a time for builder, one at a time for endpoint.
 */
int doorbell_graph_builder_send(doorbell_graph_builder *builder, doorbell_endpoint *endpoint,
				const doorbell_work *work);

/*
 * Adds a receive.
 * Threads: one at a time for builder, one at a time for endpoint.
 */
int doorbell_graph_builder_recv(doorbell_graph_builder *builder, doorbell_endpoint *endpoint, uint64_t wr_id,
				const doorbell_slice *slices, uint32_t slice_count);

/*
 * Adds a wait for the next completion of a queue (DOORBELL_QUEUE_*), counted at the time of each launch.
 * Threads: one at a time for builder, one at a time for endpoint.
 */
int doorbell_graph_builder_wait_cq(doorbell_graph_builder *builder, doorbell_endpoint *endpoint, uint32_t queue_kind,
				   int64_t timeout_ms);

/*
 * Adds a wait for a word, like doorbell_stream_wait_value32. The value is the same in each launch.
 * Threads: one at a time for builder.
 */
int doorbell_graph_builder_wait_value32(doorbell_graph_builder *builder, const doorbell_region *region, uint64_t offset,
					uint32_t wait_condition, uint32_t value, int64_t timeout_ms);

/*
 * Adds a store to a word, like doorbell_stream_write_value32. The value is the same in each launch.
 * Threads: one at a time for builder.
 */
int doorbell_graph_builder_write_value32(doorbell_graph_builder *builder, const doorbell_region *region,
					 uint64_t offset, uint32_t value);

/*
 * Adds a message and a wait until its memory may be used again, like doorbell_message_queue_send. The memory is the same
 * in each launch; a launch sends what is in it then. Messages take slots and numbers when a launch is prepared: if a
 * builder or a graph is destroyed while it is armed, the queue is aborted. Returns the codes of
 * doorbell_message_queue_send, and DOORBELL_ESTATE for a queue whose doorbells the calling thread rings; nothing is
 * recorded then. If the error comes while nodes are added, as those of the driver do and those of memory that the GPU
 * cannot reach, all that was recorded of the queue is taken back, and the builder can only be destroyed.
 * Threads: one at a time for builder, one at a time for queue.
 */
int doorbell_graph_builder_send_message(doorbell_graph_builder *builder, doorbell_message_queue *queue,
					const doorbell_slice *slices, uint32_t slice_count);

/*
 * Adds a message without a wait, like doorbell_message_queue_start_send. doorbell_graph_builder_wait_messages adds the
 * wait, or the next doorbell_graph_builder_send_message of the queue, or the end of the graph.
 * Threads: one at a time for builder, one at a time for queue.
 */
int doorbell_graph_builder_start_message(doorbell_graph_builder *builder, doorbell_message_queue *queue,
					 const doorbell_slice *slices, uint32_t slice_count);

/*
 * Adds the waits for all messages of the queue that were started and have none.
 * Threads: one at a time for builder, one at a time for queue.
 */
int doorbell_graph_builder_wait_messages(doorbell_graph_builder *builder, doorbell_message_queue *queue);

/*
 * Adds a receive of a message, like doorbell_message_queue_recv.
 * Threads: one at a time for builder, one at a time for queue.
 */
int doorbell_graph_builder_recv_message(doorbell_graph_builder *builder, doorbell_message_queue *queue,
					const doorbell_slice *slices, uint32_t slice_count);

/*
 * Adds a collective operation, like doorbell_communicator_launch. All ranks launch it as often, and in the same order
 * among their operations, in graphs or not. If a part of it was recorded before an error, and after DOORBELL_ECUDA, all
 * that was recorded of the communicator is taken back, and the builder can only be destroyed.
 * Threads: one at a time for builder, one at a time for communicator.
 */
int doorbell_graph_builder_collective(doorbell_graph_builder *builder, doorbell_communicator *communicator,
				      const doorbell_collective *collective);

/*
 * What the operations of a graph belong to. Initialise it with doorbell_graph_members_init. A call with members uses
 * each of them as its own calls do, so no other call may use them meanwhile.
 */
typedef struct doorbell_graph_members {
	uint32_t struct_size; /* sizeof(doorbell_graph_members) */
	uint32_t reserved;    /* 0 */
	doorbell_endpoint *const *endpoints;
	size_t endpoint_count;
	doorbell_message_queue *const *queues;
	size_t queue_count;
	doorbell_communicator *const *communicators;
	size_t communicator_count;
} doorbell_graph_members;

/* Fills members with none: doorbell_graph_members_init(&members, sizeof members). */
int doorbell_graph_members_init(doorbell_graph_members *members, uint32_t struct_size);

/*
 * Ends the recording and creates a graph that is armed for its first launch. The builder is gone, also after an error,
 * unless it returns DOORBELL_EINVAL, DOORBELL_EHANDLE, DOORBELL_EBUSY (also in another thread) or DOORBELL_EPANIC. After an
 * error behind which it is gone, the message queues and communicators that were recorded are aborted.
 * The driver may wait until all work of the context that is queued is done, and let no other thread use the GPU
 * meanwhile: ranks that share a context instantiate before any of their streams waits for another one.
 * Threads: alone with builder.
 */
int doorbell_graph_builder_instantiate(doorbell_graph_builder *builder, doorbell_graph **graph);

/*
 * Ends the recording without a graph and cancels the recorded operations. NULL is allowed.
 * Threads: alone with builder.
 */
int doorbell_graph_builder_destroy(doorbell_graph_builder *builder);

/*
 * Arms the graph if it is not armed, and launches it. `members` must contain all endpoints, message queues and
 * communicators that were recorded, in any order; others are ignored. NULL means none. If the launch is refused, the
 * graph remains armed. If arming fails, the graph is unchanged.
 * Threads: one at a time for graph.
 */
int doorbell_graph_launch(doorbell_graph *graph, doorbell_stream *stream, const doorbell_graph_members *members);

/*
 * Launches an armed graph. Returns DOORBELL_ESTATE if it is not armed or the stream belongs to another context;
 * DOORBELL_EWORK if an endpoint has failed. In these cases the graph remains as it was.
 * Threads: one at a time for graph.
 */
int doorbell_graph_launch_armed(doorbell_graph *graph, doorbell_stream *stream);

/*
 * Arms the graph: prepares the operations of the next launch. Earlier launches may still be running. Returns
 * DOORBELL_ESTATE if the graph is already armed, DOORBELL_EFOREIGN if one that was recorded is missing in `members`,
 * DOORBELL_EFULL if a queue has no room. On failure nothing is prepared.
 * Threads: one at a time for graph.
 */
int doorbell_graph_arm(doorbell_graph *graph, const doorbell_graph_members *members);

/*
 * Disarms the graph: takes the prepared operations back, so that other work can be posted before the next launch.
 * Returns DOORBELL_EFOREIGN if one that was recorded is missing in `members`, DOORBELL_ESTATE if another graph has
 * messages of the same queue prepared behind those of this one.
 * Threads: one at a time for graph.
 */
int doorbell_graph_disarm(doorbell_graph *graph, const doorbell_graph_members *members);

/*
 * Returns 1 if the graph is armed, else 0.
 * Threads: one at a time for graph.
 */
int doorbell_graph_is_armed(const doorbell_graph *graph);

/*
 * Creates a ticket of the last launch for the operation `index`, from 0, among those of endpoints and on words. Returns
 * 1, or returns 0 and stores NULL if there is none.
 * Threads: one at a time for graph.
 */
int doorbell_graph_ticket(const doorbell_graph *graph, size_t index, doorbell_ticket **ticket);

/*
 * Creates a ticket of the last launch for the message `index`, from 0, sent or received. Returns 1, or returns 0 and
 * stores NULL if there is none.
 * Threads: one at a time for graph.
 */
int doorbell_graph_message_ticket(const doorbell_graph *graph, size_t index, doorbell_message_ticket **ticket);

/*
 * Creates a ticket of the last launch for the collective operation `index`, from 0. Returns 1, or returns 0 and stores
 * NULL if there is none.
 * Threads: one at a time for graph.
 */
int doorbell_graph_collective_ticket(const doorbell_graph *graph, size_t index, doorbell_collective_ticket **ticket);

/*
 * Writes the CUgraphExec, for tools that inspect it. Launching it directly rings doorbells for work that is already
 * done.
 * Threads: one at a time for graph.
 */
int doorbell_graph_raw(const doorbell_graph *graph, struct CUgraphExec_st **raw);

/*
 * Destroys the handle. Launches that are queued or running continue. The operations of an armed graph are cancelled,
 * and its message queues and communicators are aborted. NULL is allowed.
 * Threads: alone with graph.
 */
int doorbell_graph_destroy(doorbell_graph *graph);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_GRAPH_H */
