/* doorbell.h, a part of it: connections by rdma_cm. */
#ifndef DOORBELL_CM_H
#define DOORBELL_CM_H

#include "endpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------------- rdma_cm */

/*
 * Endpoints connected by rdma_cm, with peers that need not know this library, such as rping. Every library has these calls; one
 * that was built without the feature `verbs` gives DOORBELL_EFEATURE. Private data are bytes that the messages carry; who
 * gets them finds zeros behind, because the messages have a fixed length.
 */

/* Waits for peers. */
typedef struct doorbell_cm_listener doorbell_cm_listener;

/* A peer that wants a connection. */
typedef struct doorbell_cm_request doorbell_cm_request;

/* The connection of an endpoint. The two belong together: without its connection the endpoint fails. */
typedef struct doorbell_cm_connection doorbell_cm_connection;

/*
 * Connects the endpoint to who listens at `address`, such as "10.9.0.1:7174"; if nobody does yet, tries until `timeout_ms` have
 * passed. Up to 56 bytes of private data go with the request. DOORBELL_EREFUSED if the peer does not want to or nobody
 * listened; DOORBELL_EFOREIGN if the way there begins at another device than the endpoint's; DOORBELL_ETIMEOUT if nothing
 * answers; DOORBELL_ESTATE if the endpoint is connected or has failed; DOORBELL_EMALFORMED for no address; DOORBELL_ESYSTEM,
 * also where there is no rdma_cm.
 * Threads: one at a time for endpoint.
 */
int doorbell_cm_connect(doorbell_endpoint *endpoint, const char *address, const void *private_data, size_t len_bytes,
			int64_t timeout_ms, doorbell_cm_connection **connection);

/*
 * The peer's address: a text buffer.
 * Threads: one at a time for connection.
 */
int doorbell_cm_connection_peer(const doorbell_cm_connection *connection, char *text, size_t capacity);

/*
 * What the peer gave with its request or answer, which must fit `capacity`, else DOORBELL_ERANGE. The number of bytes.
 * Threads: one at a time for connection.
 */
int doorbell_cm_connection_private_data(const doorbell_cm_connection *connection, void *bytes, size_t capacity);

/*
 * 0 if the connection still is, or DOORBELL_ESTATE once the peer has disconnected or died, or the device is gone: the endpoint
 * has failed then. Does not wait.
 * Threads: one at a time for connection.
 */
int doorbell_cm_connection_check(doorbell_cm_connection *connection);

/*
 * Waits until the peer disconnects.
 * Threads: one at a time for connection.
 */
int doorbell_cm_connection_wait_disconnected(doorbell_cm_connection *connection, int64_t timeout_ms);

/*
 * Disconnects, and waits until the peer agrees; the endpoint fails. The handle is gone, on DOORBELL_ETIMEOUT as well.
 * Threads: alone with connection.
 */
int doorbell_cm_connection_disconnect(doorbell_cm_connection *connection, int64_t timeout_ms);

/*
 * Disconnects without waiting. NULL is allowed.
 * Threads: alone with connection.
 */
int doorbell_cm_connection_destroy(doorbell_cm_connection *connection);

/*
 * Listens at an address such as "10.9.0.1:7174", or "0.0.0.0:7174" for all devices; port 0 is a free one.
 * Threads: any.
 */
int doorbell_cm_listener_create(const char *address, doorbell_cm_listener **listener);

/*
 * The address at which it listens: a text buffer.
 * Threads: any.
 */
int doorbell_cm_listener_address(const doorbell_cm_listener *listener, char *text, size_t capacity);

/*
 * Waits for a request.
 * Threads: any.
 */
int doorbell_cm_listener_accept(const doorbell_cm_listener *listener, int64_t timeout_ms,
				doorbell_cm_request **request);

/*
 * Stops listening. Connections stay. NULL is allowed.
 * Threads: alone with listener.
 */
int doorbell_cm_listener_destroy(doorbell_cm_listener *listener);

/*
 * The address of the peer: a text buffer.
 * Threads: one at a time for request.
 */
int doorbell_cm_request_peer(const doorbell_cm_request *request, char *text, size_t capacity);

/*
 * The name of the device that it came in by, on which the endpoint must be; "" if it is not known. A text buffer.
 * Threads: one at a time for request.
 */
int doorbell_cm_request_device(const doorbell_cm_request *request, char *text, size_t capacity);

/*
 * What the peer gave with it, which must fit `capacity`, else DOORBELL_ERANGE. The number of bytes.
 * Threads: one at a time for request.
 */
int doorbell_cm_request_private_data(const doorbell_cm_request *request, void *bytes, size_t capacity);

/*
 * Takes the request: the endpoint is connected with the peer's, and up to 196 bytes of private data go with the answer. Post
 * receives before: the peer may send at once. The handle of the request is gone, on an error as well, but for those of the
 * arguments themselves (DOORBELL_EINVAL, DOORBELL_EHANDLE, DOORBELL_EBUSY).
 * Threads: alone with request, one at a time for endpoint.
 */
int doorbell_cm_request_accept(doorbell_cm_request *request, doorbell_endpoint *endpoint, const void *private_data,
			       size_t len_bytes, int64_t timeout_ms, doorbell_cm_connection **connection);

/*
 * Refuses the request, with up to 148 bytes of private data. The handle is gone, on an error as well, but for those of the
 * arguments themselves (DOORBELL_EINVAL, DOORBELL_EHANDLE, DOORBELL_EBUSY).
 * Threads: alone with request.
 */
int doorbell_cm_request_reject(doorbell_cm_request *request, const void *private_data, size_t len_bytes);

/*
 * Refuses the request without a word. NULL is allowed.
 * Threads: alone with request.
 */
int doorbell_cm_request_destroy(doorbell_cm_request *request);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_CM_H */
