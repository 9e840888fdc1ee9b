/* What programs ask for less often: descriptions, memory of other kinds, what is prepared, messages one way, aborts from elsewhere. */
#define _POSIX_C_SOURCE 200809L

#include "expect.h"

#include <pthread.h>
#include <time.h>

static int has(const char *text, const char *words)
{
	return strstr(text, words) != NULL;
}

static void describes(struct rig *rig)
{
	static char text[1 << 14];
	char version[64];
	int len = doorbell_describe(text, sizeof text);

	EXPECT(len > 0 && (size_t)len == strlen(text));
	snprintf(version, sizeof version, "doorbell %s\n", doorbell_version_text());
	EXPECT(has(text, version) && has(text, "the feature cuda\n") && has(text, "the feature verbs\n"));
	EXPECT(has(text, "device softcx\n"));
	len = doorbell_device_describe(rig->device, text, sizeof text);
	EXPECT(len > 0 && (size_t)len == strlen(text));
	/* A line for the name, and one for each way, taken or not. */
	EXPECT(has(text, "direct") && has(text, "proxy") && has(text, "sync"));
	EXPECT(doorbell_device_describe(rig->device, NULL, 0) == len);
}

static void other_regions(struct rig *rig)
{
	doorbell_region *region;
	uint32_t lkey = 0;
	uint64_t page;

	GIVES(DOORBELL_REGION_HOST, doorbell_region_kind(rig->region));
	EXPECT(doorbell_region_page_bytes(rig->region) == 0);
	WORKS(doorbell_region_lkey(rig->region, &lkey));
	EXPECT(lkey != 0);
	WORKS(doorbell_region_alloc_huge(rig->domain, 3 << 20, DOORBELL_ACCESS_ALL, &region));
	page = doorbell_region_page_bytes(region);
	EXPECT((page == 0 || page == 2 << 20) && doorbell_region_len_bytes(region) == 3 << 20);
	memset(doorbell_region_pointer(region), 1, 3 << 20);
	WORKS(doorbell_region_destroy(region));
	FAILS(DOORBELL_EINVAL, "`fd`", doorbell_region_register_dmabuf(rig->domain, -1, 0, 4096, 4096, 0, &region));
	FAILS(DOORBELL_ERANGE, "`addr`", doorbell_region_register_dmabuf(rig->domain, 0, 0, 4096, 0, 0, &region));
	/* Standard input is no dmabuf, and this process's memory no other device's: whatever the device is, there is no region. */
	EXPECT(doorbell_region_register_dmabuf(rig->domain, 0, 0, 4096, 4096, 0, &region) < 0 && !region);
	EXPECT(doorbell_region_register_peermem(rig->domain, (uint64_t)1 << 46, 4096, 0, &region) < 0 && !region);
}

/* What the objects of a rig report. */
static void objects_report_their_state(struct rig *rig)
{
	const int is_soft = strncmp(rig_device_name(), "softcx", 6) == 0;
	const doorbell_slice from = {rig->region, 0, 64};
	doorbell_device_counters before, after;
	doorbell_completion completion;
	doorbell_domain *domain;
	doorbell_device *device;
	doorbell_endpoint *large;
	doorbell_endpoint_config config;
	doorbell_remote remote;
	doorbell_region *region;
	doorbell_work work;
	uint64_t calls = 7;
	uint32_t first[2];
	char text[64] = "as it was";

	/* The device of the domain is the one that it was made of: it counts the same. */
	WORKS(doorbell_domain_device(rig->domain, &device));
	WORKS(doorbell_device_read_counters(device, &before, sizeof before));
	EXPECT(before.struct_size == sizeof before && before.reserved == 0 && before.doorbells_before_record == 0);
	WORKS(doorbell_region_remote(rig->region, &remote));
	work = doorbell_work_write(&from, 1, remote.addr + 4096, remote.rkey);
	WORKS(doorbell_post_send(rig->a, &work, NULL));
	WORKS(doorbell_wait_cq(rig->a, DOORBELL_QUEUE_SEND, SOON_MS, &completion));
	WORKS(doorbell_device_read_counters(rig->device, &after, sizeof after));
	if (is_soft)
		EXPECT(after.wqes > before.wqes && after.doorbells > before.doorbells &&
		       after.completions > before.completions && after.congestion_notices == 0);
	else
		EXPECT(after.wqes == 0 && after.completions == 0);
	FAILS(DOORBELL_EINVAL, "struct_size of 8",
	      doorbell_device_read_counters(device, (doorbell_device_counters *)(void *)first, sizeof first));
	FAILS(DOORBELL_EINVAL, "`counters`", doorbell_device_read_counters(device, NULL, sizeof before));
	/* Regions of it work with the endpoints of the other's: a domain may be made of either handle. */
	WORKS(doorbell_domain_create(device, &domain));
	WORKS(doorbell_device_close(device));
	WORKS(doorbell_region_alloc(domain, 4096, DOORBELL_ACCESS_ALL, &region));
	FAILS(DOORBELL_EINVAL, "`domain`", doorbell_domain_device(NULL, &device));
	EXPECT(device == NULL);

	/* Memory of this process is accessed directly, without copies. */
	GIVES(0, doorbell_region_reasons(region, text, sizeof text));
	EXPECT(text[0] == 0);
	GIVES(0, doorbell_region_reasons(region, NULL, 0));
	strcpy(text, "as it was");
	GIVES(0, doorbell_region_copy_failure(region, text, sizeof text));
	EXPECT(strcmp(text, "as it was") == 0);
	WORKS(doorbell_region_destroy(region));
	WORKS(doorbell_domain_destroy(domain));

	WORKS(doorbell_endpoint_config_init(&config, sizeof config));
	config.send_depth = 4096;
	WORKS(doorbell_endpoint_create(rig->domain, &config, &large));
	/* A work request takes 64 bytes at least. */
	EXPECT(doorbell_endpoint_memory_bytes(rig->a) >= 128 * 64);
	EXPECT(doorbell_endpoint_memory_bytes(large) >= doorbell_endpoint_memory_bytes(rig->a) + 3968 * 64);
	WORKS(doorbell_endpoint_destroy(large));

	FAILS(DOORBELL_ESTATE, "not a CUDA stream", doorbell_stream_driver_calls(rig->stream, &calls));
	FAILS(DOORBELL_EINVAL, "`calls`", doorbell_stream_driver_calls(rig->stream, NULL));
	EXPECT(calls == 7);
}

static void inspects_prepared_operations(struct rig *rig)
{
	const doorbell_slice from = {rig->region, 0, 64};
	const doorbell_work work = doorbell_work_write(&from, 1, 0, 0);
	unsigned char wqe[1024];
	doorbell_prepared *prepared, *wait;
	doorbell_ticket *ticket;
	int len, i, sum = 0;

	WORKS(doorbell_prepare_send(rig->a, &work, &prepared));
	WORKS(doorbell_prepare_wait_cq(rig->a, DOORBELL_QUEUE_SEND, SOON_MS, &wait));
	WORKS(doorbell_prepared_ticket(prepared, &ticket));
	GIVES(DOORBELL_STATUS_PREPARED, doorbell_ticket_status(ticket, NULL));
	FAILS(DOORBELL_ERANGE, "`capacity`", doorbell_prepared_wqe(prepared, wqe, 1));
	len = doorbell_prepared_wqe(prepared, wqe, sizeof wqe);
	EXPECT(len > 0 && len % 16 == 0);
	for (i = 0; i < len; i++)
		sum += wqe[i];
	EXPECT(sum != 0);
	GIVES(0, doorbell_prepared_wqe(wait, wqe, sizeof wqe));
	WORKS(doorbell_prepared_rollback(rig->a, wait));
	WORKS(doorbell_prepared_rollback(rig->a, prepared));
	GIVES(DOORBELL_STATUS_CANCELLED, doorbell_ticket_status(ticket, NULL));
	WORKS(doorbell_ticket_destroy(ticket));
}

static void *one_way(void *address)
{
	doorbell_channel *channel;
	char message[8];

	WORKS(doorbell_channel_connect(address, SOON_MS, &channel));
	WORKS(doorbell_channel_send(channel, "one", 4, SOON_MS));
	WORKS(doorbell_channel_send(channel, "three", 6, SOON_MS));
	GIVES(0, doorbell_channel_receive(channel, message, sizeof message, SOON_MS));
	FAILS(DOORBELL_ETIMEOUT, "", doorbell_channel_receive(channel, message, sizeof message, 20));
	WORKS(doorbell_channel_destroy(channel));
	return NULL;
}

static void sends_one_way(void)
{
	doorbell_listener *listener;
	doorbell_channel *channel;
	pthread_t peer;
	char address[64], message[8];

	WORKS(doorbell_listener_create("127.0.0.1:0", &listener));
	EXPECT(doorbell_listener_address(listener, address, sizeof address) > 0);
	EXPECT(pthread_create(&peer, NULL, one_way, address) == 0);
	WORKS(doorbell_listener_accept(listener, SOON_MS, &channel));
	GIVES(4, doorbell_channel_receive(channel, message, sizeof message, SOON_MS));
	EXPECT(strcmp(message, "one") == 0);
	FAILS(DOORBELL_ERANGE, "`capacity`", doorbell_channel_receive(channel, message, 3, SOON_MS));
	WORKS(doorbell_channel_send(channel, NULL, 0, SOON_MS));
	EXPECT(pthread_join(peer, NULL) == 0);
	FAILS(DOORBELL_ESTATE, "gone", doorbell_channel_receive(channel, message, sizeof message, SOON_MS));
	WORKS(doorbell_channel_destroy(channel));
	WORKS(doorbell_listener_destroy(listener));
}

static void *waits_without_end(void *endpoint)
{
	doorbell_completion completion;
	int code;

	/* The other thread may be there just then. */
	do
		code = doorbell_wait_cq(endpoint, DOORBELL_QUEUE_RECV, DOORBELL_NO_TIMEOUT, &completion);
	while (code == DOORBELL_EBUSY);
	/* Of the abort itself, or of the receive that was flushed by it, whichever it sees first. */
	GIVES(DOORBELL_EWORK, code);
	return NULL;
}

/* The thread that has the endpoint waits for ever; another one ends that. */
static void aborts_from_another_thread(struct rig *rig)
{
	const doorbell_slice to = {rig->region, 0, 64};
	struct timespec moment = {0, 1000000};
	doorbell_failure failure;
	pthread_t waiter;
	int tries, code = 0;

	WORKS(doorbell_post_recv(rig->b, 1, &to, 1, NULL));
	EXPECT(pthread_create(&waiter, NULL, waits_without_end, rig->b) == 0);
	for (tries = 0; tries < SOON_MS && code != DOORBELL_EBUSY; tries++) {
		nanosleep(&moment, NULL);
		code = doorbell_endpoint_qpn(rig->b);
	}
	GIVES(DOORBELL_EBUSY, code);
	WORKS(doorbell_endpoint_abort(rig->b));
	EXPECT(pthread_join(waiter, NULL) == 0);
	EXPECT(doorbell_endpoint_failure(rig->b, &failure, NULL, 0) > 0);
	EXPECT(failure.cause == DOORBELL_CAUSE_ABORTED);
	/* And back. */
	WORKS(doorbell_endpoint_reset(rig->a));
	WORKS(doorbell_endpoint_reset(rig->b));
	rig_connect(rig);
	WORKS(doorbell_endpoint_abort(rig->b));
	EXPECT(doorbell_endpoint_failure(rig->b, NULL, NULL, 0) > 0);
}

int main(void)
{
	struct rig rig;

	rig_make(&rig);
	describes(&rig);
	other_regions(&rig);
	objects_report_their_state(&rig);
	inspects_prepared_operations(&rig);
	sends_one_way();
	aborts_from_another_thread(&rig);
	rig_end(&rig);
	puts("done");
	return 0;
}
