/*
 * Part of the interface of doorbell.h: endpoints that are connected by rdma_cm.
 *
 * doorbell.h has the rules for results, handles, threads and text buffers.
 */
#ifndef DOORBELL_CM_H
#define DOORBELL_CM_H

#include "endpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------------- rdma_cm */

/*
 * Endpoints that are connected by rdma_cm. The peer may be any program that uses rdma_cm, such as rping. All calls
 * return DOORBELL_EFEATURE if the library was built without the feature `verbs`. Private data are bytes that a request
 * or an answer carries; since these have a fixed length, the receiver sees zeros after the bytes.
 */

/* Listens for peers. */
typedef struct doorbell_cm_listener doorbell_cm_listener;

/* A connection request of a peer. */
typedef struct doorbell_cm_request doorbell_cm_request;

/* The connection of an endpoint. If it is destroyed, the endpoint fails. */
typedef struct doorbell_cm_connection doorbell_cm_connection;

/*
 * Connects the endpoint to a peer that listens at `address`, such as "10.9.0.1:7174". If no peer listens yet, retries
 * until `timeout_ms` have passed. Sends up to 56 bytes of private data with the request. Returns DOORBELL_EREFUSED if
 * the peer refuses or nobody listened, DOORBELL_EFOREIGN if the route uses another device than the endpoint,
 * DOORBELL_ETIMEOUT if nothing answers, DOORBELL_ESTATE if the endpoint is connected or has failed,
 * DOORBELL_EMALFORMED if `address` is invalid, DOORBELL_ESYSTEM also if the system has no rdma_cm.
 * Threads: one at a time for endpoint.
 */
int doorbell_cm_connect(doorbell_endpoint *endpoint, const char *address, const void *private_data, size_t len_bytes,
			int64_t timeout_ms, doorbell_cm_connection **connection);

/*
 * Writes the peer's address to a text buffer.
 * Threads: one at a time for connection.
 */
int doorbell_cm_connection_peer(const doorbell_cm_connection *connection, char *text, size_t capacity);

/*
 * Writes the private data of the peer's request or answer to `bytes`. Returns their length, or DOORBELL_ERANGE if they
 * do not fit in `capacity`.
 * Threads: one at a time for connection.
 */
int doorbell_cm_connection_private_data(const doorbell_cm_connection *connection, void *bytes, size_t capacity);

/*
 * Returns 0 if the connection is up. Returns DOORBELL_ESTATE if the peer has disconnected or ended, or the device is
 * gone; the endpoint has then failed. Does not block.
 * Threads: one at a time for connection.
 */
int doorbell_cm_connection_check(doorbell_cm_connection *connection);

/*
 * Waits until the peer disconnects.
 * Threads: one at a time for connection.
 */
int doorbell_cm_connection_wait_disconnected(doorbell_cm_connection *connection, int64_t timeout_ms);

/*
 * Disconnects and waits until the peer acknowledges it. The endpoint fails. The handle is gone, also on
 * DOORBELL_ETIMEOUT.
 * Threads: alone with connection.
 */
int doorbell_cm_connection_disconnect(doorbell_cm_connection *connection, int64_t timeout_ms);

/*
 * Disconnects without waiting, and destroys the handle. NULL is allowed.
 * Threads: alone with connection.
 */
int doorbell_cm_connection_destroy(doorbell_cm_connection *connection);

/* Listens at an address such as "10.9.0.1:7174", or "0.0.0.0:7174" for all devices. Port 0 selects a free port. */
int doorbell_cm_listener_create(const char *address, doorbell_cm_listener **listener);

/* Writes the listening address to a text buffer. */
int doorbell_cm_listener_address(const doorbell_cm_listener *listener, char *text, size_t capacity);

/* Waits for a connection request. */
int doorbell_cm_listener_accept(const doorbell_cm_listener *listener, int64_t timeout_ms,
				doorbell_cm_request **request);

/*
 * Stops listening and destroys the handle. Connections remain. NULL is allowed.
 * Threads: alone with listener.
 */
int doorbell_cm_listener_destroy(doorbell_cm_listener *listener);

/*
 * Writes the peer's address to a text buffer.
 * Threads: one at a time for request.
 */
int doorbell_cm_request_peer(const doorbell_cm_request *request, char *text, size_t capacity);

/*
 * Writes the name of the device that received the request to a text buffer; the name is "" if it is not known. The
 * endpoint that accepts the request must be on this device.
 * Threads: one at a time for request.
 */
int doorbell_cm_request_device(const doorbell_cm_request *request, char *text, size_t capacity);

/*
 * Writes the private data of the request to `bytes`. Returns their length, or DOORBELL_ERANGE if they do not fit in
 * `capacity`.
 * Threads: one at a time for request.
 */
int doorbell_cm_request_private_data(const doorbell_cm_request *request, void *bytes, size_t capacity);

/*
 * Accepts the request: connects the endpoint to the peer's, and sends up to 196 bytes of private data with the answer.
 * Post receives before, because the peer may send at once. The handle of the request is gone, also on failure, except
 * when the arguments themselves are refused (DOORBELL_EINVAL, DOORBELL_EHANDLE, DOORBELL_EBUSY, DOORBELL_EPANIC).
 * Threads: alone with request, one at a time for endpoint.
 */
int doorbell_cm_request_accept(doorbell_cm_request *request, doorbell_endpoint *endpoint, const void *private_data,
			       size_t len_bytes, int64_t timeout_ms, doorbell_cm_connection **connection);

/*
 * Refuses the request, with up to 148 bytes of private data. The handle is gone, also on failure, except when the
 * arguments themselves are refused (DOORBELL_EINVAL, DOORBELL_EHANDLE, DOORBELL_EBUSY).
 * Threads: alone with request.
 */
int doorbell_cm_request_reject(doorbell_cm_request *request, const void *private_data, size_t len_bytes);

/*
 * Refuses the request without private data, and destroys the handle. NULL is allowed.
 * Threads: alone with request.
 */
int doorbell_cm_request_destroy(doorbell_cm_request *request);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_CM_H */
