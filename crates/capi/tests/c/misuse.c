/* What a C program can do wrong: each is an error that says what, and what was right before is right after. */
#define _POSIX_C_SOURCE 200809L

#include "expect.h"

#include <limits.h>
#include <pthread.h>
#include <time.h>

/* Whether the library looks handles up: DEBUG_LIBRARY is 0 or 1. */
#if DEBUG_LIBRARY
#define FINDS(words, call) FAILS(DOORBELL_EHANDLE, words, call)
#else
#define FINDS(words, call) (void)0
#endif

/* A handle that is used up or of another kind is found in every build. */
#define FINDS_ENDED(words, call) FAILS(DOORBELL_EHANDLE, words, call)

static void null_pointers(struct rig *rig)
{
	doorbell_slice slice = {NULL, 0, 8};
	doorbell_work work = doorbell_work_send(&slice, 1);
	doorbell_device *device = rig->device;
	doorbell_completion completion;

	FAILS(DOORBELL_EINVAL, "`name`", doorbell_device_open(NULL, &device));
	EXPECT(device == NULL);
	FAILS(DOORBELL_EINVAL, "`device`", doorbell_device_open("softcx", NULL));
	FAILS(DOORBELL_EINVAL, "`domain`", doorbell_domain_create(rig->device, NULL));
	FAILS(DOORBELL_EINVAL, "`region`", doorbell_region_alloc(rig->domain, 8, 0, NULL));
	{
		doorbell_region *region;
		FAILS(DOORBELL_EINVAL, "`start`", doorbell_region_register(rig->domain, NULL, 8, 0, &region));
	}
	FAILS(DOORBELL_EINVAL, "`remote`", doorbell_region_remote(rig->region, NULL));
	EXPECT(doorbell_region_pointer(NULL) == NULL && strstr(doorbell_last_error(), "`region`"));
	EXPECT(doorbell_region_len_bytes(NULL) == 0);
	FAILS(DOORBELL_EINVAL, "`peer`", doorbell_endpoint_connect(rig->a, NULL));
	FAILS(DOORBELL_EINVAL, "`attributes`", doorbell_endpoint_modify_qp(rig->a, NULL, 1));
	FAILS(DOORBELL_EINVAL, "`text`", doorbell_endpoint_path(rig->a, NULL, NULL, 8));
	FAILS(DOORBELL_EINVAL, "`function`", doorbell_stream_launch(rig->stream, NULL, NULL));
	FAILS(DOORBELL_EINVAL, "`endpoint`", doorbell_stream_queue_send(rig->stream, NULL, &work, NULL));
	FAILS(DOORBELL_EINVAL, "`work`", doorbell_stream_queue_send(rig->stream, rig->a, NULL, NULL));
	FAILS(DOORBELL_EINVAL, "`slices[].region`", doorbell_stream_queue_send(rig->stream, rig->a, &work, NULL));
	FAILS(DOORBELL_EINVAL, "`slices`", doorbell_post_recv(rig->b, 0, NULL, 1, NULL));
	FAILS(DOORBELL_EINVAL, "`completion`", doorbell_poll_cq(rig->a, DOORBELL_QUEUE_SEND, NULL));
	FAILS(DOORBELL_EINVAL, "`prepared`", doorbell_stream_post_all(rig->stream, NULL, 1, NULL));
	{
		doorbell_prepared *none = NULL;
		FAILS(DOORBELL_EINVAL, "`prepared[]`", doorbell_stream_post_all(rig->stream, &none, 1, NULL));
	}
	work = doorbell_work_send_inline(NULL, 4);
	FAILS(DOORBELL_EINVAL, "`work.inline_bytes`", doorbell_post_send(rig->a, &work, NULL));
	GIVES(0, doorbell_poll_cq(rig->a, DOORBELL_QUEUE_SEND, &completion));
}

static void invalid_numbers(struct rig *rig)
{
	const doorbell_slice good = {rig->region, 0, 8}, outside = {rig->region, RIG_BYTES - 4, 8};
	const doorbell_slice huge = {rig->region, UINT64_MAX, UINT64_MAX};
	doorbell_work work = doorbell_work_send(&good, 1);
	doorbell_completion completion;
	doorbell_endpoint_config config;
	doorbell_endpoint *endpoint;
	doorbell_region *region;
	doorbell_stream *stream;
	doorbell_event *event;
	char name[8];

	FAILS(DOORBELL_ERANGE, "`index`", doorbell_device_name(1000, name, sizeof name));
	FAILS(DOORBELL_ERANGE, "`len_bytes`", doorbell_region_alloc(rig->domain, 0, 0, &region));
	FAILS(DOORBELL_ERANGE, "`len_bytes`", doorbell_region_alloc(rig->domain, UINT64_MAX, 0, &region));
	FAILS(DOORBELL_ERANGE, "`access_flags`", doorbell_region_alloc(rig->domain, 8, 16, &region));
	FAILS(DOORBELL_EINVAL, "address space", doorbell_region_register(rig->domain, name, UINT64_MAX, 0, &region));
	FAILS(DOORBELL_ESTATE, "softcx", doorbell_device_open("none", &(doorbell_device *){NULL}));
	FAILS(DOORBELL_EINVAL, "UTF-8", doorbell_device_open("\xff\xfe", &(doorbell_device *){NULL}));
	FAILS(DOORBELL_ERANGE, "`capacity`", doorbell_stream_create_host("s", UINT32_MAX, &stream));
	FAILS(DOORBELL_ERANGE, "`capacity`", doorbell_stream_create_host_without_thread("s", UINT32_MAX, &stream));
	FAILS(DOORBELL_EINVAL, "`flags`", doorbell_event_create(4, &event));
	FAILS(DOORBELL_ERANGE, "`queue_kind`", doorbell_poll_cq(rig->a, 2, &completion));
	FAILS(DOORBELL_ERANGE, "`queue_kind`", doorbell_stream_wait_cq(rig->stream, rig->a, 7, 0, NULL));
	FAILS(DOORBELL_EINVAL, "`timeout_ms`", doorbell_stream_synchronize(rig->stream, -3));
	FAILS(DOORBELL_EINVAL, "`timeout_ms`", doorbell_wait_cq(rig->a, DOORBELL_QUEUE_SEND, INT64_MIN, &completion));
	WORKS(doorbell_stream_synchronize(rig->stream, INT64_MAX));
	FAILS(DOORBELL_ERANGE, "`condition`", doorbell_wait_value32(rig->region, 0, 4, 0, 0));
	FAILS(DOORBELL_ERANGE, "`condition`", doorbell_wait_value64(rig->region, 0, 4, 0, 0));
	FAILS(DOORBELL_EALIGNMENT, "offset", doorbell_wait_value64(rig->region, 4, DOORBELL_WAIT_GEQ, 0, 0));
	FAILS(DOORBELL_EALIGNMENT, "offset", doorbell_wait_value32(rig->region, 2, DOORBELL_WAIT_GEQ, 0, 0));
	FAILS(DOORBELL_EBOUNDS, "offset", doorbell_wait_value32(rig->region, RIG_BYTES, DOORBELL_WAIT_GEQ, 0, 0));
	FAILS(DOORBELL_ESTATE, "nothing to wait for", doorbell_stream_wait_cq(rig->stream, rig->a, DOORBELL_QUEUE_SEND, 0, NULL));

	work.opcode = DOORBELL_OP_RECV;
	FAILS(DOORBELL_ERANGE, "`work.opcode`", doorbell_post_send(rig->a, &work, NULL));
	work = doorbell_work_send(&good, 1);
	work.flags = 64;
	FAILS(DOORBELL_EINVAL, "`work.flags`", doorbell_post_send(rig->a, &work, NULL));
	work.flags = DOORBELL_WORK_INLINE;
	FAILS(DOORBELL_EINVAL, "`work.slice_count`", doorbell_post_send(rig->a, &work, NULL));
	work.flags = 0;
	work.inline_len_bytes = 1;
	FAILS(DOORBELL_EINVAL, "`work.inline_len_bytes`", doorbell_post_send(rig->a, &work, NULL));
	work = doorbell_work_read(&good, 1, 0, 0);
	work.flags = DOORBELL_WORK_IMM;
	FAILS(DOORBELL_EINVAL, "immediate", doorbell_post_send(rig->a, &work, NULL));
	work = doorbell_work_send(&outside, 1);
	FAILS(DOORBELL_EBOUNDS, "slice", doorbell_post_send(rig->a, &work, NULL));
	work = doorbell_work_send(&huge, 1);
	FAILS(DOORBELL_EBOUNDS, "slice", doorbell_post_send(rig->a, &work, NULL));
	work = doorbell_work_send(&good, 17);
	FAILS(DOORBELL_ERANGE, "16", doorbell_post_send(rig->a, &work, NULL));
	{
		const doorbell_slice five[5] = {good, good, good, good, good};
		work = doorbell_work_send(five, 5);
		FAILS(DOORBELL_ERANGE, "EndpointConfig::max_segments)` is 5; it must be 0 to 4", doorbell_post_send(rig->a, &work, NULL));
	}
	{
		static const char bytes[500];
		work = doorbell_work_send_inline(bytes, 65);
		GIVES(DOORBELL_ERANGE, doorbell_post_send(rig->a, &work, NULL));
		work = doorbell_work_send_inline(bytes, 500);
		GIVES(DOORBELL_ERANGE, doorbell_post_send(rig->a, &work, NULL));
	}

	/* Sizes of structs. */
	work = doorbell_work_send(&good, 1);
	work.struct_size = 0;
	FAILS(DOORBELL_EINVAL, "struct_size of 0", doorbell_post_send(rig->a, &work, NULL));
	work.struct_size = UINT32_MAX;
	FAILS(DOORBELL_EINVAL, "struct_size", doorbell_post_send(rig->a, &work, NULL));
	FAILS(DOORBELL_EINVAL, "struct_size of 8", doorbell_endpoint_config_init(&config, 8));
	WORKS(doorbell_endpoint_config_init(&config, sizeof config));
	config.struct_size = 60; /* less than the first version had */
	FAILS(DOORBELL_EINVAL, "struct_size", doorbell_endpoint_create(rig->domain, &config, &endpoint));
	{
		/* A program with a newer header: fine as long as it uses nothing that this library does not know. */
		struct {
			doorbell_endpoint_config known;
			uint32_t more[2];
		} newer;
		WORKS(doorbell_endpoint_config_init(&newer.known, sizeof newer));
		EXPECT(newer.known.struct_size == sizeof newer && newer.more[0] == 0 && newer.more[1] == 0);
		WORKS(doorbell_endpoint_create(rig->domain, &newer.known, &endpoint));
		WORKS(doorbell_endpoint_destroy(endpoint));
		newer.more[1] = 1;
		FAILS(DOORBELL_EINVAL, "does not know",
		      doorbell_endpoint_create(rig->domain, &newer.known, &endpoint));
	}
}

static void states(struct rig *rig)
{
	const doorbell_slice good = {rig->region, 0, 8};
	const doorbell_work work = doorbell_work_send(&good, 1);
	doorbell_endpoint *endpoint;
	doorbell_endpoint_config config;
	doorbell_domain *domain;
	doorbell_address address;
	int i;

	/* Not connected; connected twice; another domain; a full queue. */
	WORKS(doorbell_endpoint_create(rig->domain, NULL, &endpoint));
	FAILS(DOORBELL_ESTATE, "not connected", doorbell_post_send(endpoint, &work, NULL));
	WORKS(doorbell_endpoint_destroy(endpoint));
	WORKS(doorbell_endpoint_address(rig->b, &address));
	FAILS(DOORBELL_ESTATE, "connected already", doorbell_endpoint_connect(rig->a, &address));
	WORKS(doorbell_domain_create(rig->device, &domain));
	WORKS(doorbell_endpoint_create(domain, NULL, &endpoint));
	FAILS(DOORBELL_EFOREIGN, "slices", doorbell_post_recv(endpoint, 0, &good, 1, NULL));
	WORKS(doorbell_endpoint_destroy(endpoint));
	WORKS(doorbell_domain_destroy(domain));
	WORKS(doorbell_endpoint_config_init(&config, sizeof config));
	config.recv_depth = 4;
	WORKS(doorbell_endpoint_create(rig->domain, &config, &endpoint));
	for (i = 0; i < 4; i++)
		WORKS(doorbell_post_recv(endpoint, 0, &good, 1, NULL));
	FAILS(DOORBELL_EFULL, "4 of 4", doorbell_post_recv(endpoint, 0, &good, 1, NULL));
	WORKS(doorbell_endpoint_destroy(endpoint));
}

static void invalid_handles(struct rig *rig)
{
	doorbell_event *event;
	doorbell_prepared *prepared;
	doorbell_ticket *ticket;
	const doorbell_work work = doorbell_work_init(DOORBELL_OP_NOP, NULL, 0);
	doorbell_completion completion;

	WORKS(doorbell_event_create(0, &event));
	WORKS(doorbell_event_destroy(event));
	FINDS_ENDED("`event`: it was a doorbell_event that was destroyed before", doorbell_event_query(event));
	FINDS_ENDED("destroyed", doorbell_stream_record(rig->stream, event));
	FINDS_ENDED("destroyed", doorbell_event_destroy(event));
	FINDS("`event`: it is a doorbell_stream, not a doorbell_event",
	      doorbell_event_query((doorbell_event *)(void *)rig->stream));
	FINDS("`endpoint`: it is not a valid doorbell_endpoint handle",
	      doorbell_endpoint_destroy((doorbell_endpoint *)(void *)&completion));
	FINDS("`region`", doorbell_region_deregister((doorbell_region *)(void *)rig));

	/* What a stream has taken is gone. */
	WORKS(doorbell_prepare_send(rig->a, &work, &prepared));
	WORKS(doorbell_stream_post(rig->stream, prepared, &ticket));
	FINDS_ENDED("destroyed", doorbell_stream_post(rig->stream, prepared, NULL));
	FINDS_ENDED("destroyed", doorbell_prepared_destroy(prepared));
	WORKS(doorbell_wait_cq(rig->a, DOORBELL_QUEUE_SEND, SOON_MS, &completion));
	WORKS(doorbell_ticket_destroy(ticket));
	FINDS_ENDED("destroyed", doorbell_ticket_status(ticket, NULL));
	FINDS_ENDED("destroyed", doorbell_ticket_status_now(ticket, NULL));
	GIVES(DOORBELL_EINVAL, doorbell_ticket_status_now(NULL, NULL));
}

static void *wait_long(void *endpoint)
{
	doorbell_completion completion;
	int code;
	/* The other thread may be there just then. */
	do
		code = doorbell_wait_cq(endpoint, DOORBELL_QUEUE_RECV, DOORBELL_NO_TIMEOUT, &completion);
	while (code == DOORBELL_EBUSY);
	GIVES(0, code);
	return NULL;
}

static void two_threads(struct rig *rig)
{
	const doorbell_slice to = {rig->region, 0, 64};
	const doorbell_work message = doorbell_work_send_inline("x", 1);
	doorbell_completion completion;
	pthread_t other;
	struct timespec moment = {0, 100000};
	int code = 0, tries;
	WORKS(doorbell_post_recv(rig->b, 1, &to, 1, NULL));
	EXPECT(pthread_create(&other, NULL, wait_long, rig->b) == 0);
	for (tries = 0; tries < 10 * SOON_MS && code != DOORBELL_EBUSY; tries++) {
		nanosleep(&moment, NULL);
		code = doorbell_endpoint_qpn(rig->b);
	}
	GIVES(DOORBELL_EBUSY, code);
	EXPECT(strstr(doorbell_last_error(), "another thread"));
	FAILS(DOORBELL_EBUSY, "`endpoint`", doorbell_endpoint_destroy(rig->b));
	/* It has it until it gets what it waits for. */
	WORKS(doorbell_post_send(rig->a, &message, NULL));
	EXPECT(pthread_join(other, NULL) == 0);
	WORKS(doorbell_wait_cq(rig->a, DOORBELL_QUEUE_SEND, SOON_MS, &completion));
	EXPECT(doorbell_endpoint_qpn(rig->b) > 0);
}

static void wait_for_its_own_stream(void *argument)
{
	FAILS(DOORBELL_ESTATE, "wait for itself", doorbell_stream_synchronize(argument, SOON_MS));
}

static void still_works(struct rig *rig)
{
	const doorbell_slice from = {rig->region, 0, 64}, to = {rig->region, 64, 64};
	const doorbell_work work = doorbell_work_send(&from, 1);
	memset(doorbell_region_pointer(rig->region), 0x77, 64);
	WORKS(doorbell_stream_launch(rig->stream, wait_for_its_own_stream, rig->stream));
	WORKS(doorbell_post_recv(rig->b, 1, &to, 1, NULL));
	WORKS(doorbell_stream_queue_send(rig->stream, rig->a, &work, NULL));
	WORKS(doorbell_stream_wait_cq(rig->stream, rig->b, DOORBELL_QUEUE_RECV, SOON_MS, NULL));
	WORKS(doorbell_stream_synchronize(rig->stream, SOON_MS));
	EXPECT(((uint8_t *)doorbell_region_pointer(rig->region))[127] == 0x77);
	GIVES(0, doorbell_endpoint_failure(rig->a, NULL, NULL, 0));
	GIVES(0, doorbell_endpoint_failure(rig->b, NULL, NULL, 0));
}

int main(void)
{
	struct rig rig;
	EXPECT(doorbell_last_error()[0] == 0);
	GIVES(0, doorbell_last_failure(&(doorbell_failure){0}));
	rig_make(&rig);
	null_pointers(&rig);
	invalid_numbers(&rig);
	states(&rig);
	invalid_handles(&rig);
	two_threads(&rig);
	still_works(&rig);
	rig_end(&rig);
	puts("done");
	return 0;
}
