/* doorbell.h, a part of it: CUDA graphs with operations in them. */
#ifndef DOORBELL_GRAPH_H
#define DOORBELL_GRAPH_H

#include "stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* CUDA's, known by name only. */
struct CUgraph_st;
struct CUgraphNode_st;
struct CUgraphExec_st;

/* -------------------------------------------------------------------------------------------------------- graphs */

/*
 * CUDA graphs with operations in them, launched again and again. What is recorded is not the stores, but the operations: each
 * launch prepares them anew and changes what the nodes store and poll. So such a graph is launched by these calls only.
 */

/* Records operations, one after the other. It stays in the thread that made it: elsewhere its calls are DOORBELL_ESTATE. */
typedef struct doorbell_graph_builder doorbell_graph_builder;

/* A graph that can be launched. */
typedef struct doorbell_graph doorbell_graph;

/*
 * Begins to capture a CUDA stream (cuStreamBeginCapture): what anybody queues on it from now on is in the graph. Until it is
 * instantiated, other calls of this library that queue on the stream are DOORBELL_ESTATE.
 * Threads: any.
 */
int doorbell_graph_builder_capture(doorbell_stream *stream, doorbell_graph_builder **builder);

/*
 * Adds nodes to a CUgraph that the caller makes and keeps, with what is added, until builder and graph are destroyed and the
 * last launch is done. `stream` is one of the context that the nodes will run in.
 * Threads: any.
 */
int doorbell_graph_builder_over(doorbell_stream *stream, struct CUgraph_st *graph, doorbell_graph_builder **builder);

/*
 * Lets the next operation come after these nodes as well. DOORBELL_ESTATE if a stream is captured: its order counts.
 * Threads: one at a time for builder.
 */
int doorbell_graph_builder_after(doorbell_graph_builder *builder, struct CUgraphNode_st *const *nodes, size_t count);

/*
 * The node of the last operation, for others to come after: 1, or 0 if there is none. The next operation has a new node.
 * Threads: one at a time for builder.
 */
int doorbell_graph_builder_last_node(doorbell_graph_builder *builder, struct CUgraphNode_st **node);

/*
 * Adds a work request, with the same slices, address and immediate data in each launch; inline bytes are copied now. Errors
 * as of doorbell_prepare_send, and nothing was recorded then.
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
 * Adds a wait for the next completion of a queue at the time of each launch.
 * Threads: one at a time for builder, one at a time for endpoint.
 */
int doorbell_graph_builder_wait_cq(doorbell_graph_builder *builder, doorbell_endpoint *endpoint, uint32_t queue_side,
				   int64_t timeout_ms);

/*
 * Adds a wait for a word, as doorbell_stream_wait_value32; the value is the same in each launch.
 * Threads: one at a time for builder.
 */
int doorbell_graph_builder_wait_value32(doorbell_graph_builder *builder, const doorbell_region *region, uint64_t offset,
					uint32_t wait_condition, uint32_t value, int64_t timeout_ms);

/*
 * Adds a store to a word, as doorbell_stream_write_value32.
 * Threads: one at a time for builder.
 */
int doorbell_graph_builder_write_value32(doorbell_graph_builder *builder, const doorbell_region *region,
					 uint64_t offset, uint32_t value);

/*
 * Ends the recording; the graph is armed for its first launch. The builder is gone, on an error of CUDA's as well.
 * Threads: alone with builder.
 */
int doorbell_graph_builder_instantiate(doorbell_graph_builder *builder, doorbell_graph **graph);

/*
 * Ends a recording without a graph; what it has prepared is cancelled. NULL is allowed.
 * Threads: alone with builder.
 */
int doorbell_graph_builder_destroy(doorbell_graph_builder *builder);

/*
 * Arms the graph, if it is not, and launches it. `endpoints` are those that were recorded, in any order; others among them are
 * not minded. If the launch is refused, the graph is armed; if it could not be armed, it is as it was.
 * Threads: one at a time for graph, one at a time for endpoints.
 */
int doorbell_graph_launch(doorbell_graph *graph, doorbell_stream *stream, doorbell_endpoint *const *endpoints,
			  size_t count);

/*
 * Launches what is armed, once. DOORBELL_ESTATE if it is not, or the stream is of another context; DOORBELL_EWORK if an
 * endpoint has failed. It is armed as before then.
 * Threads: one at a time for graph.
 */
int doorbell_graph_launch_armed(doorbell_graph *graph, doorbell_stream *stream);

/*
 * Prepares the operations of the next launch, while earlier ones may still be running. DOORBELL_ESTATE if that is done,
 * DOORBELL_EFOREIGN if an endpoint is missing, DOORBELL_EFULL: nothing is prepared then.
 * Threads: one at a time for graph, one at a time for endpoints.
 */
int doorbell_graph_arm(doorbell_graph *graph, doorbell_endpoint *const *endpoints, size_t count);

/*
 * Takes the preparation back, so that other work can be posted before the next launch. DOORBELL_EFOREIGN if an endpoint is
 * missing.
 * Threads: one at a time for graph, one at a time for endpoints.
 */
int doorbell_graph_disarm(doorbell_graph *graph, doorbell_endpoint *const *endpoints, size_t count);

/*
 * 1 if the next launch is prepared, 0 if not.
 * Threads: one at a time for graph.
 */
int doorbell_graph_is_armed(const doorbell_graph *graph);

/*
 * A ticket of the last launch, by the place of its operation in the recording, from 0: 1, or 0 and NULL if there is none.
 * Threads: one at a time for graph.
 */
int doorbell_graph_ticket(const doorbell_graph *graph, size_t index, doorbell_ticket **ticket);

/*
 * The CUgraphExec, for tools that show it. To launch it by other means is to ring for work that is done.
 * Threads: one at a time for graph.
 */
int doorbell_graph_raw(const doorbell_graph *graph, struct CUgraphExec_st **raw);

/*
 * Ends the handle; launches that are queued or running go on. What was armed is cancelled. NULL is allowed.
 * Threads: alone with graph.
 */
int doorbell_graph_destroy(doorbell_graph *graph);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_GRAPH_H */
