/*
 * Two connected endpoints, of which the first one's send queue is lent to threads of a processor: what the programs of this folder share. A
 * program defines the hooks of doorbell/queue.h that it wants before it includes this; DBL_TURN is defined here.
 */
#ifndef PAIR_H
#define PAIR_H

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <doorbell.h>

static doorbell_device *device;

/* A thread that waits lends its time to the engine of the software NIC. */
#ifndef DBL_TURN
#define DBL_TURN() ((void)(doorbell_device_progress(device) == 1 || sched_yield()))
#endif

#include <doorbell/queue.h>

#define SECOND 1000000000ull

#define CHECK(condition)                                                                                               \
	do {                                                                                                           \
		if (!(condition)) {                                                                                    \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, doorbell_last_error());     \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

static doorbell_domain *domain;
static doorbell_endpoint *ends[2];
static doorbell_region *local_region, *remote_region;
static doorbell_device_queue *device_queue;
static struct doorbell_queue_view queue;
static doorbell_local local;
static doorbell_remote remote;
static uint32_t depth, control;

/* Parts of both sides. */
static inline doorbell_local here_at(uint64_t offset, uint64_t len_bytes)
{
	return doorbell_device_local_at(local, offset, len_bytes);
}

static inline doorbell_remote there_at(uint64_t offset, uint64_t len_bytes)
{
	return doorbell_device_remote_at(remote, offset, len_bytes);
}

static inline void connect_ends(void)
{
	doorbell_address addresses[2];
	int end;

	for (end = 0; end < 2; end++)
		CHECK(doorbell_endpoint_address(ends[end], &addresses[end]) == 0);
	for (end = 0; end < 2; end++)
		CHECK(doorbell_endpoint_connect(ends[end], &addresses[1 - end]) == 0);
}

static inline void lend(void)
{
	const doorbell_slice slice = {local_region, 0, doorbell_region_len_bytes(local_region)};

	CHECK(doorbell_device_queue_create(ends[0], DOORBELL_KERNELS_HOST, &device_queue) == 0);
	CHECK(doorbell_device_queue_view(device_queue, &queue, sizeof(queue)) == 0);
	CHECK(doorbell_device_queue_local(device_queue, &slice, &local) == 0);
	CHECK((queue.record == 0) == (control == DOORBELL_CONTROL_PROXY));
}

static inline void set_up(uint64_t local_bytes, uint64_t remote_bytes)
{
	doorbell_endpoint_config config;
	const char *name = getenv("DOORBELL_TEST_DEVICE");
	int end;

	CHECK(doorbell_device_open(name ? name : "softcx", &device) == 0);
	CHECK(doorbell_domain_create(device, &domain) == 0);
	CHECK(doorbell_endpoint_config_init(&config, sizeof(config)) == 0);
	config.send_depth = depth;
	config.control = control + 1;
	/* 4.096 us * 2^10, twice: a dead peer is noticed soon. */
	config.ack_timeout = 10;
	config.retry_count = 1;
	for (end = 0; end < 2; end++)
		CHECK(doorbell_endpoint_create(domain, &config, &ends[end]) == 0);
	connect_ends();
	CHECK(doorbell_region_alloc(domain, local_bytes, DOORBELL_ACCESS_ALL, &local_region) == 0);
	CHECK(doorbell_region_alloc(domain, remote_bytes, DOORBELL_ACCESS_ALL, &remote_region) == 0);
	CHECK(doorbell_region_remote(remote_region, &remote) == 0);
	lend();
}

static inline void tear_down(void)
{
	CHECK(doorbell_device_queue_destroy(device_queue) == 0);
	CHECK(doorbell_endpoint_destroy(ends[0]) == 0);
	CHECK(doorbell_endpoint_destroy(ends[1]) == 0);
	CHECK(doorbell_region_destroy(local_region) == 0);
	CHECK(doorbell_region_destroy(remote_region) == 0);
	CHECK(doorbell_domain_destroy(domain) == 0);
	CHECK(doorbell_device_close(device) == 0);
}

/* After a failure: reset, connect, lend, and it works again. */
static inline void recover(void)
{
	uint32_t upto;
	int end;

	CHECK(doorbell_device_put(&queue, here_at(0, 8), there_at(0, 8), 0, &upto) == DOORBELL_EWORK);
	CHECK(doorbell_endpoint_reset(ends[0]) == DOORBELL_ESTATE);
	CHECK(doorbell_device_queue_destroy(device_queue) == 0);
	for (end = 0; end < 2; end++)
		CHECK(doorbell_endpoint_reset(ends[end]) == 0);
	CHECK(doorbell_region_remote(remote_region, &remote) == 0);
	connect_ends();
	lend();
	CHECK(doorbell_device_put(&queue, here_at(0, 8), there_at(0, 8), 0, &upto) == 0);
	CHECK(doorbell_device_wait(&queue, upto, 20 * SECOND) == 0);
}

static inline void destroy_peer(void)
{
	CHECK(doorbell_endpoint_destroy(ends[1]) == 0);
	ends[1] = NULL;
}

static inline void abort_it(void)
{
	CHECK(doorbell_endpoint_abort(ends[0]) == 0);
}

static doorbell_endpoint_config patient;

/* An endpoint whose peer is gone and that never gives up: what is waited for does not come. */
static inline void set_up_waiting(void)
{
	int end;

	set_up(4096, 4096);
	CHECK(doorbell_device_queue_destroy(device_queue) == 0);
	CHECK(doorbell_endpoint_config_init(&patient, sizeof(patient)) == 0);
	patient.send_depth = depth;
	patient.control = control + 1;
	patient.ack_timeout = 0;
	for (end = 0; end < 2; end++) {
		CHECK(doorbell_endpoint_destroy(ends[end]) == 0);
		CHECK(doorbell_endpoint_create(domain, &patient, &ends[end]) == 0);
	}
	connect_ends();
	lend();
	destroy_peer();
}

/* The counts begin there, as if as many had gone before: a multiple of the 65,536 that the NIC counts to. Before the first slot is reserved. */
static inline void begin_at(uint32_t first)
{
	struct dbl_queue_state *state = dbl_queue_state(&queue);
	uint32_t slot;

	CHECK(first % 65536 == 0 && state->reserved == 0);
	for (slot = first; slot != first + queue.slot_mask + 1; slot++)
		*dbl_queue_mark(&queue, slot) = slot - queue.slot_mask;
	state->reserved = state->rung = state->completed = first;
}

#endif
