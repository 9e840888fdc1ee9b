/* rdma_cm: without an argument what is said where it cannot be, with the IP address of a device all of it, on DOORBELL_TEST_DEVICE. */
#include "expect.h"

#include <pthread.h>
#include <semaphore.h>

static void without_the_feature(struct rig *rig)
{
	doorbell_cm_listener *listener;
	doorbell_cm_connection *connection;

	FAILS(DOORBELL_EFEATURE, "`verbs`", doorbell_cm_listener_create("127.0.0.1:0", &listener));
	EXPECT(listener == NULL);
	FAILS(DOORBELL_EFEATURE, "`verbs`", doorbell_cm_connect(rig->a, "127.0.0.1:1", NULL, 0, 0, &connection));
	EXPECT(connection == NULL);
}

/* What is wrong on every machine. */
static void refused(struct rig *rig)
{
	doorbell_cm_listener *listener;
	doorbell_cm_connection *connection;
	char much[57] = {0};

	FAILS(DOORBELL_EMALFORMED, "", doorbell_cm_listener_create("nowhere", &listener));
	EXPECT(listener == NULL);
	FAILS(DOORBELL_ERANGE, "private", doorbell_cm_connect(rig->a, "10.9.0.1:1", much, sizeof much, 0, &connection));
	/* It is connected by other means. */
	FAILS(DOORBELL_ESTATE, "", doorbell_cm_connect(rig->a, "10.9.0.1:1", NULL, 0, 0, &connection));
	EXPECT(connection == NULL);
}

struct active {
	doorbell_endpoint *endpoint;
	const char *address;
	int refused;
	/* Posted when the active end has looked at the connection, which the passive end then ends. */
	sem_t seen;
};

static void *connects(void *argument)
{
	struct active *active = argument;
	doorbell_cm_connection *connection;
	char bytes[256], peer[64];

	if (active->refused) {
		FAILS(DOORBELL_EREFUSED, "refuses",
		      doorbell_cm_connect(active->endpoint, active->address, "x", 1, SOON_MS, &connection));
		EXPECT(connection == NULL);
		return NULL;
	}
	WORKS(doorbell_cm_connect(active->endpoint, active->address, "ping", 4, SOON_MS, &connection));
	EXPECT(doorbell_cm_connection_private_data(connection, bytes, sizeof bytes) >= 4);
	EXPECT(memcmp(bytes, "pong", 4) == 0);
	EXPECT(doorbell_cm_connection_peer(connection, peer, sizeof peer) > 0 && strcmp(peer, active->address) == 0);
	WORKS(doorbell_cm_connection_check(connection));
	EXPECT(sem_post(&active->seen) == 0);
	WORKS(doorbell_cm_connection_wait_disconnected(connection, SOON_MS));
	GIVES(DOORBELL_ESTATE, doorbell_cm_connection_check(connection));
	WORKS(doorbell_cm_connection_destroy(connection));
	return NULL;
}

static doorbell_cm_request *requested(struct active *active, pthread_t *thread, doorbell_cm_listener *listener,
				      const char *data)
{
	doorbell_cm_request *request;
	char bytes[256], device[64], peer[64];

	EXPECT(pthread_create(thread, NULL, connects, active) == 0);
	WORKS(doorbell_cm_listener_accept(listener, SOON_MS, &request));
	EXPECT(doorbell_cm_request_private_data(request, bytes, sizeof bytes) > 0);
	EXPECT(memcmp(bytes, data, strlen(data)) == 0);
	FAILS(DOORBELL_ERANGE, "`capacity`", doorbell_cm_request_private_data(request, bytes, 1));
	EXPECT(doorbell_cm_request_device(request, device, sizeof device) > 0);
	EXPECT(strstr(rig_device_name(), device));
	EXPECT(doorbell_cm_request_peer(request, peer, sizeof peer) > 0);
	return request;
}

static void everything(struct rig *rig, const char *host)
{
	doorbell_endpoint *active, *passive;
	doorbell_cm_listener *listener;
	doorbell_cm_connection *connection;
	doorbell_cm_request *request;
	struct active other;
	char address[64];
	pthread_t thread;

	WORKS(doorbell_endpoint_create(rig->domain, NULL, &active));
	WORKS(doorbell_endpoint_create(rig->domain, NULL, &passive));
	snprintf(address, sizeof address, "%.40s:0", host);
	WORKS(doorbell_cm_listener_create(address, &listener));
	EXPECT(doorbell_cm_listener_address(listener, address, sizeof address) > 0);
	GIVES(DOORBELL_ETIMEOUT, doorbell_cm_listener_accept(listener, 10, &request));
	other.endpoint = active;
	other.address = address;
	EXPECT(sem_init(&other.seen, 0, 0) == 0);

	other.refused = 1;
	request = requested(&other, &thread, listener, "x");
	WORKS(doorbell_cm_request_reject(request, "no", 2));
	EXPECT(pthread_join(thread, NULL) == 0);
	request = requested(&other, &thread, listener, "x");
	WORKS(doorbell_cm_request_destroy(request));
	EXPECT(pthread_join(thread, NULL) == 0);

	other.refused = 0;
	request = requested(&other, &thread, listener, "ping");
	WORKS(doorbell_cm_request_accept(request, passive, "pong", 4, SOON_MS, &connection));
	GIVES(1, doorbell_endpoint_is_connected(passive));
	WORKS(doorbell_cm_connection_check(connection));
	EXPECT(sem_wait(&other.seen) == 0);
	WORKS(doorbell_cm_connection_disconnect(connection, SOON_MS));
	EXPECT(pthread_join(thread, NULL) == 0);
	GIVES(0, doorbell_endpoint_is_connected(active));
	WORKS(doorbell_cm_listener_destroy(listener));
	WORKS(doorbell_endpoint_destroy(active));
	WORKS(doorbell_endpoint_destroy(passive));
}

int main(int argc, char **argv)
{
	struct rig rig;

	rig_make(&rig);
	if (WITH_VERBS)
		refused(&rig);
	else
		without_the_feature(&rig);
	if (argc > 1)
		everything(&rig, argv[1]);
	rig_end(&rig);
	puts("done");
	return 0;
}
