/* CUDA's own streams and memory in C: WITH_CUDA says whether the library was built with the feature. */
#define _POSIX_C_SOURCE 200809L
#include <time.h>

#include "driver.h"
#include "expect.h"

enum { BYTES = 8192, HALF = BYTES / 2 };

static void without_the_feature(struct rig *rig)
{
	doorbell_stream *stream = rig->stream;
	doorbell_region *region = rig->region;
	doorbell_cuda_capabilities capabilities;
	doorbell_graph_builder *builder;
	doorbell_page_push push;
	uint64_t address = 3;

	FAILS(DOORBELL_EFEATURE, "feature `cuda`", doorbell_stream_create_cuda(NULL, NULL, &stream));
	EXPECT(stream == NULL);
	FAILS(DOORBELL_EFEATURE, "feature `cuda`", doorbell_region_alloc_device(rig->domain, 8, 0, &region));
	EXPECT(region == NULL);
	FAILS(DOORBELL_EFEATURE, "feature `cuda`", doorbell_region_register_device(rig->domain, 64, 8, 0, &region));
	FAILS(DOORBELL_EFEATURE, "feature `cuda`", doorbell_cuda_read_capabilities(&capabilities, sizeof capabilities));
	FAILS(DOORBELL_EFEATURE, "feature `cuda`", doorbell_region_device_pointer(rig->region, &address));
	EXPECT(address == 3);
	WORKS(doorbell_page_push_init(&push, sizeof push));
	FAILS(DOORBELL_EFEATURE, "feature `cuda`", doorbell_stream_push_pages(rig->stream, rig->a, &push, NULL));
	FAILS(DOORBELL_EFEATURE, "feature `cuda`",
	      doorbell_stream_wait_cuda_event(rig->stream, (struct CUevent_st *)(uintptr_t)64));
	FAILS(DOORBELL_EFEATURE, "feature `cuda`", doorbell_graph_builder_capture(rig->stream, &builder));
	FAILS(DOORBELL_EFEATURE, "feature `cuda`",
	      doorbell_graph_builder_for_graph(rig->stream, (struct CUgraph_st *)(uintptr_t)64, &builder));
	EXPECT(builder == NULL);
}

/* What needs no CUDA is the same in every build. */
static void everywhere(struct rig *rig)
{
	doorbell_cuda_stream_config config;
	doorbell_stream *stream;
	doorbell_region *region;
	uint64_t word = 1;
	int status = 1;

	memset(&config, 0xff, sizeof config);
	WORKS(doorbell_cuda_stream_config_init(&config, sizeof config));
	EXPECT(config.struct_size == sizeof config && config.execution == DOORBELL_EXECUTION_MEMORY_OPS && !config.name);
	config.execution = 2;
	FAILS(DOORBELL_ERANGE, "`execution`", doorbell_stream_create_cuda(NULL, &config, &stream));
	config.execution = DOORBELL_EXECUTION_KERNEL;
	config.name = "\xff";
	FAILS(DOORBELL_EINVAL, "UTF-8", doorbell_stream_create_cuda(NULL, &config, &stream));
	config.struct_size = 3;
	FAILS(DOORBELL_EINVAL, "struct_size of 3", doorbell_stream_create_cuda(NULL, &config, &stream));
	FAILS(DOORBELL_ERANGE, "`access_flags`", doorbell_region_alloc_device(rig->domain, 8, 16, &region));
	FAILS(DOORBELL_EINVAL, "`device_pointer`", doorbell_region_register_device(rig->domain, 0, 8, 0, &region));
	FAILS(DOORBELL_EINVAL, "`device_pointer`", doorbell_region_device_pointer(rig->region, NULL));
	FAILS(DOORBELL_EINVAL, "`region`", doorbell_region_device_pointer(NULL, &word));
	/* What only a GPU's streams have. */
	FAILS(DOORBELL_ESTATE, "doorbell_stream_create_cuda", doorbell_stream_status_word(rig->stream, &word));
	FAILS(DOORBELL_ESTATE, "not a CUDA stream", doorbell_stream_status(rig->stream, &status));
	FAILS(DOORBELL_EINVAL, "`cuda_event`", doorbell_stream_wait_cuda_event(rig->stream, NULL));
	FAILS(DOORBELL_EINVAL, "`stream`", doorbell_stream_wait_cuda_event(NULL, NULL));
	FAILS(DOORBELL_ESTATE, "not a CUDA stream", doorbell_stream_clear_status(rig->stream));
	EXPECT(word == 1 && status == 1);
}

static void note(void *argument)
{
	++*(int *)argument;
}

static void transfers(const struct driver *driver, struct rig *rig, doorbell_stream *stream, doorbell_region *memory,
		      unsigned char value)
{
	const struct timespec moment = {0, 1000000};
	int looks;
	static unsigned char bytes[BYTES];
	const uint64_t start = (uint64_t)(uintptr_t)doorbell_region_pointer(memory);
	const doorbell_slice from = {memory, 0, HALF};
	doorbell_event *before, *after;
	doorbell_ticket *sent, *waited;
	doorbell_remote remote;
	uint64_t elapsed_ns = 0;
	int called = 0, i;

	EXPECT(start != 0);
	memset(bytes, value, HALF);
	memset(bytes + HALF, 0, HALF);
	if (doorbell_region_kind(memory) == DOORBELL_REGION_HOST)
		memcpy(doorbell_region_pointer(memory), bytes, BYTES);
	else
		DRIVER(driver->to_device(start, bytes, BYTES));
	WORKS(doorbell_region_remote(memory, &remote));
	EXPECT(remote.addr == start && remote.len_bytes == BYTES);
	WORKS(doorbell_event_create(0, &before));
	WORKS(doorbell_event_create(DOORBELL_EVENT_BLOCKING, &after));
	WORKS(doorbell_stream_record(stream, before));
	WORKS(doorbell_stream_queue_write(stream, rig->a, &from, 1, remote.addr + HALF, remote.rkey, &sent));
	WORKS(doorbell_stream_wait_cq(stream, rig->a, DOORBELL_QUEUE_SEND, DOORBELL_DEFAULT_TIMEOUT, &waited));
	WORKS(doorbell_stream_launch(stream, note, &called));
	WORKS(doorbell_stream_record(stream, after));
	WORKS(doorbell_event_synchronize(after, SOON_MS));
	EXPECT(called == 1);
	WORKS(doorbell_stream_synchronize(stream, SOON_MS));
	WORKS(doorbell_event_elapsed_ns(before, after, &elapsed_ns));
	/* The driver is done with what tells of the end an instant after that. */
	for (looks = 0; looks < SOON_MS && doorbell_stream_query(stream) == 0; looks++)
		nanosleep(&moment, NULL);
	GIVES(1, doorbell_stream_query(stream));
	GIVES(DOORBELL_STATUS_COMPLETE, doorbell_ticket_status(sent, NULL));
	GIVES(DOORBELL_STATUS_COMPLETE, doorbell_ticket_status(waited, NULL));
	memset(bytes, 0, BYTES);
	if (doorbell_region_kind(memory) == DOORBELL_REGION_HOST)
		memcpy(bytes, doorbell_region_pointer(memory), BYTES);
	else
		DRIVER(driver->to_host(bytes, start, BYTES));
	for (i = 0; i < BYTES; i++)
		EXPECT(bytes[i] == value);
	WORKS(doorbell_ticket_destroy(sent));
	WORKS(doorbell_ticket_destroy(waited));
	WORKS(doorbell_event_destroy(before));
	WORKS(doorbell_event_destroy(after));
}

/* A wait that does not come true ends the endpoint and is in the status word, on the GPU as well. */
static void failures_are_in_the_status_word(const struct driver *driver, struct rig *rig, doorbell_stream *stream)
{
	doorbell_ticket *waited;
	doorbell_failure failure;
	uint64_t word = 0;
	uint32_t control = 0;
	int status = 1, on_device = 1;
	char text[256];

	WORKS(doorbell_stream_status_word(stream, &word));
	EXPECT(word != 0);
	WORKS(doorbell_stream_status(stream, &status));
	DRIVER(driver->to_host(&on_device, word, sizeof on_device));
	EXPECT(status == 0 && on_device == 0);
	WORKS(doorbell_post_recv(rig->b, 7, &(doorbell_slice){rig->region, 0, 8}, 1, NULL));
	WORKS(doorbell_stream_wait_cq(stream, rig->b, DOORBELL_QUEUE_RECV, 50, &waited));
	/* Every call reports it, until the fault is taken. */
	GIVES(DOORBELL_EASYNC, doorbell_stream_synchronize(stream, SOON_MS));
	GIVES(DOORBELL_EASYNC, doorbell_stream_query(stream));
	EXPECT(doorbell_stream_take_fault(stream, &failure, text, sizeof text) > 0);
	EXPECT(failure.cause == DOORBELL_CAUSE_DEADLINE && strstr(text, "50"));
	GIVES(0, doorbell_stream_take_fault(stream, &failure, NULL, 0));
	WORKS(doorbell_stream_synchronize(stream, SOON_MS));
	GIVES(DOORBELL_STATUS_FAILED, doorbell_ticket_status(waited, &failure));
	EXPECT(failure.cause == DOORBELL_CAUSE_DEADLINE && failure.timeout_ms == 50);
	EXPECT(doorbell_endpoint_path(rig->b, &control, NULL, 0) > 0);
	/* Where this thread waits for the stream, the stream has not waited. */
	if (control != DOORBELL_CONTROL_SYNC) {
		WORKS(doorbell_stream_status(stream, &status));
		DRIVER(driver->to_host(&on_device, word, sizeof on_device));
		EXPECT(status == DOORBELL_EWORK && on_device == DOORBELL_EWORK);
	}
	WORKS(doorbell_stream_clear_status(stream));
	WORKS(doorbell_stream_status(stream, &status));
	DRIVER(driver->to_host(&on_device, word, sizeof on_device));
	EXPECT(status == 0 && on_device == 0);
	WORKS(doorbell_ticket_destroy(waited));
	WORKS(doorbell_endpoint_reset(rig->a));
	WORKS(doorbell_endpoint_reset(rig->b));
	rig_connect(rig);
}

/* What a GPU has is not taken back, but waits without end end. */
static void aborts(struct rig *rig, doorbell_stream *stream)
{
	doorbell_ticket *value, *completion;
	doorbell_failure failure;
	uint32_t control = 0;

	EXPECT(doorbell_endpoint_path(rig->b, &control, NULL, 0) > 0);
	memset(doorbell_region_pointer(rig->region), 0, 8);
	WORKS(doorbell_stream_wait_value32(stream, rig->region, 0, DOORBELL_WAIT_GEQ, 1, DOORBELL_NO_TIMEOUT, &value));
	completion = NULL;
	if (control != DOORBELL_CONTROL_SYNC) {
		WORKS(doorbell_post_recv(rig->b, 7, &(doorbell_slice){rig->region, 0, 8}, 1, NULL));
		WORKS(doorbell_stream_wait_cq(stream, rig->b, DOORBELL_QUEUE_RECV, DOORBELL_NO_TIMEOUT, &completion));
	}
	GIVES(DOORBELL_ETIMEOUT, doorbell_stream_synchronize(stream, 30));
	WORKS(doorbell_stream_abort(stream));
	/* That is no fault. */
	WORKS(doorbell_stream_synchronize(stream, SOON_MS));
	GIVES(DOORBELL_STATUS_DISCARDED, doorbell_ticket_status(value, &failure));
	EXPECT(*(uint32_t *)doorbell_region_pointer(rig->region) == 0);
	if (completion) {
		GIVES(DOORBELL_STATUS_DISCARDED, doorbell_ticket_status(completion, &failure));
		EXPECT(doorbell_endpoint_failure(rig->b, &failure, NULL, 0) > 0);
		EXPECT(failure.cause == DOORBELL_CAUSE_DISCARDED);
		WORKS(doorbell_endpoint_reset(rig->a));
		WORKS(doorbell_endpoint_reset(rig->b));
		rig_connect(rig);
	}
	WORKS(doorbell_ticket_destroy(value));
	WORKS(doorbell_ticket_destroy(completion));
	/* Nothing is left of it. */
	WORKS(doorbell_stream_abort(stream));
}

static void on_streams(const struct driver *driver, struct rig *rig, doorbell_region *own, doorbell_region *lent)
{
	const uint32_t executions[] = {DOORBELL_EXECUTION_MEMORY_OPS, DOORBELL_EXECUTION_KERNEL};
	unsigned i;

	for (i = 0; i < 2; i++) {
		struct CUstream_st *raw;
		doorbell_stream *stream;
		doorbell_cuda_stream_config config;
		uint64_t calls = 7;

		WORKS(doorbell_cuda_stream_config_init(&config, sizeof config));
		config.execution = executions[i];
		config.name = "of the test";
		/* CU_STREAM_NON_BLOCKING */
		DRIVER(driver->stream_create(&raw, 1));
		WORKS(doorbell_stream_create_cuda(raw, &config, &stream));
		WORKS(doorbell_stream_driver_calls(stream, &calls));
		EXPECT(calls == 0);
		WORKS(doorbell_stream_write_value32(stream, rig->region, 0, 1, NULL));
		WORKS(doorbell_stream_driver_calls(stream, &calls));
		EXPECT(calls == 1);
		transfers(driver, rig, stream, own, (unsigned char)(3 + i));
		transfers(driver, rig, stream, lent, (unsigned char)(5 + i));
		failures_are_in_the_status_word(driver, rig, stream);
		aborts(rig, stream);
		transfers(driver, rig, stream, own, (unsigned char)(7 + i));
		WORKS(doorbell_stream_destroy(stream));
		DRIVER(driver->stream_destroy(raw));
	}
	{
		/* The default stream, with the defaults; and that of each thread, which is none for a library with threads. */
		doorbell_stream *stream;
		WORKS(doorbell_stream_create_cuda(NULL, NULL, &stream));
		transfers(driver, rig, stream, own, 9);
		WORKS(doorbell_stream_destroy(stream));
		FAILS(DOORBELL_ESTATE, "between threads",
		      doorbell_stream_create_cuda((struct CUstream_st *)(uintptr_t)2, NULL, &stream));
		EXPECT(stream == NULL);
	}
}

static void count(void *calls)
{
	++*(int *)calls;
}

/* Streams of all kinds and an event that the program records, which stays the program's. */
static void streams_wait_for_events(const struct driver *driver, struct rig *rig)
{
	struct CUstream_st *raw, *others;
	doorbell_stream *waits, *holds;
	struct CUevent_st *event;
	doorbell_stream *kernels;
	int calls = 0;

	DRIVER(driver->stream_create(&raw, 1));
	DRIVER(driver->stream_create(&others, 1));
	DRIVER(driver->event_create(&event, 0));
	WORKS(doorbell_stream_create_cuda(raw, NULL, &waits));
	WORKS(doorbell_stream_create_cuda(others, NULL, &holds));
	/* It was never recorded. */
	WORKS(doorbell_stream_wait_cuda_event(rig->stream, event));
	WORKS(doorbell_stream_wait_cuda_event(waits, event));
	WORKS(doorbell_stream_write_value32(rig->stream, rig->region, 0, 0, NULL));
	WORKS(doorbell_stream_synchronize(rig->stream, SOON_MS));
	WORKS(doorbell_stream_wait_value32(holds, rig->region, 0, DOORBELL_WAIT_GEQ, 1, SOON_MS, NULL));
	DRIVER(driver->event_record(event, others));
	WORKS(doorbell_stream_wait_cuda_event(rig->stream, event));
	WORKS(doorbell_stream_wait_cuda_event(waits, event));
	WORKS(doorbell_stream_launch(rig->stream, count, &calls));
	GIVES(DOORBELL_ETIMEOUT, doorbell_stream_synchronize(rig->stream, 20));
	GIVES(DOORBELL_ETIMEOUT, doorbell_stream_synchronize(waits, 20));
	EXPECT(calls == 0);
	memset(doorbell_region_pointer(rig->region), 1, 4);
	WORKS(doorbell_stream_synchronize(rig->stream, SOON_MS));
	WORKS(doorbell_stream_synchronize(waits, SOON_MS));
	EXPECT(calls == 1);
	DRIVER(driver->event_query(event));
	if (doorbell_stream_create_trigger("kernels", &kernels) == 0) {
		FAILS(DOORBELL_ESTATE, "kernels execute", doorbell_stream_wait_cuda_event(kernels, event));
		WORKS(doorbell_stream_destroy(kernels));
	}
	WORKS(doorbell_stream_destroy(waits));
	WORKS(doorbell_stream_destroy(holds));
	DRIVER(driver->event_destroy(event));
	DRIVER(driver->stream_destroy(raw));
	DRIVER(driver->stream_destroy(others));
}

/* What the GPU can do, as numbers; the text has the same. */
static void capabilities_are_reported(void)
{
	static char text[1 << 14];
	doorbell_cuda_capabilities capabilities, again;
	uint32_t first[4] = {9, 9, 9, 9};

	memset(&capabilities, 0xff, sizeof capabilities);
	WORKS(doorbell_cuda_read_capabilities(&capabilities, sizeof capabilities));
	EXPECT(capabilities.struct_size == sizeof capabilities);
	EXPECT(capabilities.driver_version >= 12000 && capabilities.driver_version < 1000000);
	EXPECT(capabilities.memops <= 1 && capabilities.kernels <= 1 && capabilities.qwords <= 1 && capabilities.nor <= 1);
	EXPECT(capabilities.flush <= 1 && capabilities.gpudirect <= 1 && capabilities.dmabuf <= 1);
	EXPECT(capabilities.host_addresses <= 1 && capabilities.iomemory <= DOORBELL_IOMEMORY_UNKNOWN);
	EXPECT(capabilities.ordering <= DOORBELL_ORDERING_ALL_DEVICES);
	EXPECT(doorbell_describe(text, sizeof text) > 0);
	EXPECT(strstr(text, capabilities.memops ? "memops: true" : "memops: false"));
	EXPECT(strstr(text, capabilities.kernels ? "kernels: true" : "kernels: false"));
	EXPECT(strstr(text, capabilities.qwords ? "qwords: true" : "qwords: false"));
	EXPECT(strstr(text, capabilities.nor ? "nor: true" : "nor: false"));
	EXPECT(strstr(text, capabilities.flush ? "flush: true" : "flush: false"));
	EXPECT(strstr(text, capabilities.gpudirect ? "gpudirect: true" : "gpudirect: false"));
	EXPECT(strstr(text, capabilities.dmabuf ? "dmabuf: true" : "dmabuf: false"));
	EXPECT(strstr(text, capabilities.host_addresses ? "host_addresses: true" : "host_addresses: false"));
	EXPECT(strstr(text, capabilities.ordering == DOORBELL_ORDERING_NONE    ? "ordering: None"
			    : capabilities.ordering == DOORBELL_ORDERING_OWNER ? "ordering: Owner"
									       : "ordering: AllDevices"));
	EXPECT(strstr(text, capabilities.iomemory == DOORBELL_IOMEMORY_UNKNOWN ? "iomemory: None"
			    : capabilities.iomemory			       ? "iomemory: Some(true)"
									       : "iomemory: Some(false)"));
	WORKS(doorbell_cuda_read_capabilities(&again, sizeof again));
	EXPECT(memcmp(&again, &capabilities, sizeof again) == 0);
	FAILS(DOORBELL_EINVAL, "struct_size of 16",
	      doorbell_cuda_read_capabilities((doorbell_cuda_capabilities *)(void *)first, sizeof first));
	EXPECT(first[0] == 9);
}

/* Host memory has an address on the GPU, by which what the GPU does is done to it. */
static void host_memory_has_a_device_address(const struct driver *driver, struct rig *rig, doorbell_region *memory)
{
	unsigned char *here = doorbell_region_pointer(rig->region);
	unsigned char back[8] = {0};
	uint64_t there = 0, again = 0;

	WORKS(doorbell_region_device_pointer(rig->region, &there));
	WORKS(doorbell_region_device_pointer(rig->region, &again));
	EXPECT(there != 0 && again == there);
	memcpy(here + 16, "by host", 8);
	DRIVER(driver->to_host(back, there + 16, sizeof back));
	EXPECT(memcmp(back, "by host", 8) == 0);
	DRIVER(driver->to_device(there + 24, "by GPU ", 8));
	EXPECT(memcmp(here + 24, "by GPU ", 8) == 0);
	FAILS(DOORBELL_ESTATE, "the CPU cannot access this memory", doorbell_region_device_pointer(memory, &again));
	EXPECT(again == there);
}

/* The reason of a copy that the driver refused, which the completion does not have. */
static void failed_copies_report_the_reason(const struct driver *driver, struct rig *rig, doorbell_region *memory)
{
	int (*fault)(const char *rule);
	const doorbell_slice from = {rig->region, 0, 64};
	doorbell_completion completion;
	doorbell_remote remote;
	doorbell_work work;
	char text[256] = "as it was";

	GIVES(0, doorbell_region_copy_failure(memory, text, sizeof text));
	EXPECT(strcmp(text, "as it was") == 0);
	*(void **)(void *)&fault = dlsym(driver->library, "doorbell_cuda_standin_fault");
	if (!fault)
		return;
	WORKS(doorbell_region_remote(memory, &remote));
	work = doorbell_work_write(&from, 1, remote.addr, remote.rkey);
	EXPECT(fault("cuMemcpyHtoDAsync_v2:999") == 0);
	WORKS(doorbell_post_send(rig->a, &work, NULL));
	GIVES(DOORBELL_EWORK, doorbell_wait_cq(rig->a, DOORBELL_QUEUE_SEND, SOON_MS, &completion));
	fault(NULL);
	EXPECT(doorbell_region_copy_failure(memory, NULL, 0) > 0);
	EXPECT(doorbell_region_copy_failure(memory, text, sizeof text) == (int)strlen(text));
	EXPECT(strstr(text, "999"));
	WORKS(doorbell_endpoint_reset(rig->a));
	WORKS(doorbell_endpoint_reset(rig->b));
	rig_connect(rig);
}

enum { LAUNCHES = 40 };

/* The application's own capture, which it launches by itself. */
static void captured_by_the_application(const struct driver *driver, struct rig *rig)
{
	const doorbell_slice from = {rig->region, 0, 64}, to = {rig->region, 4096, 64};
	unsigned char *memory = doorbell_region_pointer(rig->region);
	doorbell_ticket *tickets[4], *plain;
	struct CUgraphExec_st *exec;
	struct CUgraph_st *graph;
	struct CUstream_st *raw;
	doorbell_stream *stream;
	doorbell_work work = doorbell_work_send(&from, 1);
	uint64_t launches = 77;
	uint32_t control;
	static const uint32_t entries[] = {3, 70, 0, 71, 2};
	doorbell_page_push push;
	int i, launch, notices = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);

	EXPECT(doorbell_endpoint_path(rig->a, &control, NULL, 0) > 0);
	WORKS(doorbell_post_recv(rig->b, 1, &to, 1, &plain));
	FAILS(DOORBELL_EINVAL, "`launches`", doorbell_ticket_launches(plain, NULL));
	GIVES(0, doorbell_ticket_launches(plain, &launches));
	EXPECT(launches == 77);
	WORKS(doorbell_ticket_destroy(plain));
	WORKS(doorbell_endpoint_reset(rig->a));
	WORKS(doorbell_endpoint_reset(rig->b));
	rig_connect(rig);
	DRIVER(driver->stream_create(&raw, 1));
	WORKS(doorbell_stream_create_cuda(raw, NULL, &stream));
	DRIVER(driver->begin_capture(raw, 0));
	if (control == DOORBELL_CONTROL_SYNC) {
		FAILS(DOORBELL_ESTATE, "sync", doorbell_stream_queue_send(stream, rig->a, &work, NULL));
		DRIVER(driver->end_capture(raw, &graph));
		DRIVER(driver->graph_destroy(graph));
		WORKS(doorbell_stream_destroy(stream));
		DRIVER(driver->stream_destroy(raw));
		return;
	}
	WORKS(doorbell_stream_queue_recv(stream, rig->b, 1, &to, 1, &tickets[0]));
	WORKS(doorbell_stream_queue_send(stream, rig->a, &work, &tickets[1]));
	WORKS(doorbell_stream_wait_cq(stream, rig->a, DOORBELL_QUEUE_SEND, SOON_MS, &tickets[2]));
	WORKS(doorbell_stream_wait_cq(stream, rig->b, DOORBELL_QUEUE_RECV, SOON_MS, &tickets[3]));
	WORKS(doorbell_page_push_init(&push, sizeof push));
	WORKS(doorbell_region_remote(rig->region, &push.remote));
	push.signal = push.remote;
	push.signal.addr += 8192;
	push.signal.len_bytes = 8;
	push.page_bytes = 64;
	push.local.region = push.table.region = push.count_region = rig->region;
	push.local.len_bytes = 1024;
	push.table.offset = 9216;
	push.table.len_bytes = 16;
	push.count_offset = 9232;
	/* Page 3 to 70, page 0 to 71. */
	memcpy(memory + 9216, entries, sizeof entries);
	memset(memory + 8192, 0, 8);
	FAILS(DOORBELL_ESTATE, "kernel", doorbell_stream_push_pages(rig->stream, rig->a, &push, NULL));
	WORKS(doorbell_stream_push_pages(stream, rig->a, &push, NULL));
	WORKS(doorbell_stream_wait_cq(stream, rig->a, DOORBELL_QUEUE_SEND, SOON_MS, NULL));
	WORKS(doorbell_stream_wait_count64(stream, rig->region, 8192, 1, 1, SOON_MS, NULL));
	DRIVER(driver->end_capture(raw, &graph));
	DRIVER(driver->graph_instantiate(&exec, graph, 0));
	DRIVER(driver->graph_destroy(graph));
	for (launch = 0; launch < LAUNCHES; launch++) {
		memset(memory, launch + 1, 64);
		DRIVER(driver->graph_launch(exec, raw));
		DRIVER(driver->stream_synchronize(raw));
		EXPECT(memory[4096] == launch + 1 && memory[4096 + 63] == launch + 1);
		EXPECT(memory[71 * 64] == launch + 1 && memory[71 * 64 + 63] == launch + 1);
		memcpy(&launches, memory + 8192, 8);
		EXPECT(launches == (uint64_t)launch + 1);
	}
	FAILS(DOORBELL_ESTATE, "graphs", doorbell_endpoint_reset(rig->a));
	EXPECT(notices >= 0);
	for (i = 0; i < 4; i++) {
		GIVES(1, doorbell_ticket_launches(tickets[i], &launches));
		EXPECT(launches == LAUNCHES);
		GIVES(DOORBELL_STATUS_RUNG, doorbell_ticket_status(tickets[i], NULL));
		FAILS(DOORBELL_ESTATE, "launches", doorbell_ticket_wait(tickets[i], 0));
		FAILS(DOORBELL_ESTATE, "launches", doorbell_ticket_notify(tickets[i], notices));
		WORKS(doorbell_ticket_destroy(tickets[i]));
	}
	/* Nobody was told. */
	EXPECT(read(notices, &launches, sizeof launches) == -1);
	EXPECT(close(notices) == 0);
	DRIVER(driver->graph_exec_destroy(exec));
	WORKS(doorbell_endpoint_reset(rig->a));
	WORKS(doorbell_endpoint_reset(rig->b));
	rig_connect(rig);
	WORKS(doorbell_stream_destroy(stream));
	DRIVER(driver->stream_destroy(raw));
}

/* A capture with transfers in it, launched again and again. */
static void graphs(const struct driver *driver, struct rig *rig)
{
	const doorbell_slice from = {rig->region, 0, 64}, to = {rig->region, 4096, 64};
	unsigned char *memory = doorbell_region_pointer(rig->region);
	doorbell_endpoint *endpoints[2], *twice[2];
	struct CUgraphExec_st *raw_exec = NULL;
	struct CUgraphNode_st *node = NULL;
	struct CUgraph_st *raw_graph;
	struct CUstream_st *raw;
	doorbell_graph_builder *builder, *other;
	doorbell_stream *stream;
	doorbell_graph *graph;
	doorbell_graph_members members, few, repeated;
	doorbell_ticket *ticket;
	doorbell_work work;
	uint32_t control, last;
	int i;

	endpoints[0] = rig->b;
	endpoints[1] = rig->a;
	WORKS(doorbell_graph_members_init(&members, sizeof members));
	members.endpoints = endpoints;
	members.endpoint_count = 2;
	few = repeated = members;
	few.endpoint_count = 1;
	repeated.endpoints = twice;
	twice[0] = twice[1] = rig->a;
	DRIVER(driver->stream_create(&raw, 1));
	WORKS(doorbell_stream_create_cuda(raw, NULL, &stream));
	EXPECT(doorbell_endpoint_path(rig->a, &control, NULL, 0) > 0);
	FAILS(DOORBELL_ESTATE, "not a CUDA stream", doorbell_graph_builder_capture(rig->stream, &builder));
	EXPECT(builder == NULL);
	WORKS(doorbell_graph_builder_capture(stream, &builder));
	FAILS(DOORBELL_ECUDA, "", doorbell_graph_builder_capture(stream, &other));
	FAILS(DOORBELL_ESTATE, "", doorbell_stream_write_value32(stream, rig->region, 8192, 1, NULL));
	work = doorbell_work_send(&from, 1);
	if (control == DOORBELL_CONTROL_SYNC) {
		FAILS(DOORBELL_ESTATE, "calling thread", doorbell_graph_builder_send(builder, rig->a, &work));
		WORKS(doorbell_graph_builder_destroy(builder));
		WORKS(doorbell_stream_destroy(stream));
		DRIVER(driver->stream_destroy(raw));
		return;
	}
	WORKS(doorbell_graph_builder_recv(builder, rig->b, 7, &to, 1));
	WORKS(doorbell_graph_builder_send(builder, rig->a, &work));
	WORKS(doorbell_graph_builder_wait_cq(builder, rig->b, DOORBELL_QUEUE_RECV, SOON_MS));
	WORKS(doorbell_graph_builder_wait_cq(builder, rig->a, DOORBELL_QUEUE_SEND, DOORBELL_DEFAULT_TIMEOUT));
	WORKS(doorbell_graph_builder_write_value32(builder, rig->region, 8192, 9));
	WORKS(doorbell_graph_builder_wait_value32(builder, rig->region, 8192, DOORBELL_WAIT_GEQ, 9, SOON_MS));
	FAILS(DOORBELL_ESTATE, "order", doorbell_graph_builder_after(builder, &node, 1));
	FAILS(DOORBELL_ERANGE, "`queue_kind`", doorbell_graph_builder_wait_cq(builder, rig->a, 3, 0));
	GIVES(1, doorbell_graph_builder_last_node(builder, &node));
	EXPECT(node != NULL);
	WORKS(doorbell_graph_builder_instantiate(builder, &graph));
	GIVES(1, doorbell_graph_is_armed(graph));
	GIVES(0, doorbell_graph_ticket(graph, 0, &ticket));
	EXPECT(ticket == NULL);
	WORKS(doorbell_graph_raw(graph, &raw_exec));
	EXPECT(raw_exec != NULL);
	FAILS(DOORBELL_ESTATE, "not a CUDA stream", doorbell_graph_launch_armed(graph, rig->stream));
	for (i = 0; i < LAUNCHES; i++) {
		memset(memory, i + 1, 64);
		WORKS(doorbell_graph_launch(graph, stream, &members));
		WORKS(doorbell_stream_synchronize(stream, SOON_MS));
		EXPECT(memory[4096] == i + 1 && memory[4096 + 63] == i + 1);
	}
	memcpy(&last, memory + 8192, sizeof last);
	EXPECT(last == 9);
	for (i = 0; i < 6; i++) {
		GIVES(1, doorbell_graph_ticket(graph, (size_t)i, &ticket));
		GIVES(DOORBELL_STATUS_COMPLETE, doorbell_ticket_status(ticket, NULL));
		WORKS(doorbell_ticket_destroy(ticket));
	}
	GIVES(0, doorbell_graph_ticket(graph, 6, &ticket));
	GIVES(0, doorbell_graph_is_armed(graph));
	FAILS(DOORBELL_ESTATE, "not armed", doorbell_graph_launch_armed(graph, stream));
	FAILS(DOORBELL_EFOREIGN, "`members`", doorbell_graph_arm(graph, &few));
	FAILS(DOORBELL_EBUSY, "`endpoint`", doorbell_graph_arm(graph, &repeated));
	GIVES(0, doorbell_graph_is_armed(graph));
	/* Armed and disarmed leaves no trace; armed and launched transfers. */
	WORKS(doorbell_graph_arm(graph, &members));
	FAILS(DOORBELL_ESTATE, "armed", doorbell_graph_arm(graph, &members));
	WORKS(doorbell_graph_disarm(graph, &members));
	WORKS(doorbell_graph_arm(graph, &members));
	memset(memory, 0x5a, 64);
	WORKS(doorbell_graph_launch_armed(graph, stream));
	WORKS(doorbell_stream_synchronize(stream, SOON_MS));
	EXPECT(memory[4096] == 0x5a);
	WORKS(doorbell_graph_destroy(graph));

	/* A graph that the program makes itself. */
	DRIVER(driver->graph_create(&raw_graph, 0));
	FAILS(DOORBELL_EINVAL, "`graph`", doorbell_graph_builder_for_graph(stream, NULL, &builder));
	WORKS(doorbell_graph_builder_for_graph(stream, raw_graph, &builder));
	WORKS(doorbell_graph_builder_write_value32(builder, rig->region, 8192, 10));
	GIVES(1, doorbell_graph_builder_last_node(builder, &node));
	WORKS(doorbell_graph_builder_after(builder, &node, 1));
	WORKS(doorbell_graph_builder_wait_value32(builder, rig->region, 8192, DOORBELL_WAIT_GEQ, 10, SOON_MS));
	WORKS(doorbell_graph_builder_instantiate(builder, &graph));
	WORKS(doorbell_graph_launch(graph, stream, NULL));
	WORKS(doorbell_stream_synchronize(stream, SOON_MS));
	memcpy(&last, memory + 8192, sizeof last);
	EXPECT(last == 10);
	WORKS(doorbell_graph_destroy(graph));
	DRIVER(driver->graph_destroy(raw_graph));
	WORKS(doorbell_stream_destroy(stream));
	DRIVER(driver->stream_destroy(raw));
}

/* Messages and a reduction between two sides, in graphs. */
static void graphs_of_messages(const struct driver *driver, struct rig *rig)
{
	unsigned char *memory;
	doorbell_region *region;
	doorbell_slice sum[2] = {{NULL, 8192, 4}, {NULL, 8256, 4}};
	doorbell_message_queue *queues[2], *of_ranks[2][2];
	doorbell_message_address addresses[2];
	doorbell_communicator *ranks[2];
	doorbell_collective *collectives[2];
	doorbell_collective_ticket *reduced;
	doorbell_message_ticket *ticket;
	doorbell_graph_builder *builder;
	doorbell_graph_members members[2];
	doorbell_stream *streams[2];
	doorbell_graph *graphs[2];
	struct CUstream_st *raw[2];
	uint32_t control, value;
	uint64_t len;
	int i, round;

	/* Of its own: a part of the rig's is mapped to the GPU by itself, which not all devices can map as a part of the whole. */
	WORKS(doorbell_region_alloc(rig->domain, RIG_BYTES, DOORBELL_ACCESS_ALL, &region));
	memory = doorbell_region_pointer(region);
	sum[0].region = sum[1].region = region;
	EXPECT(doorbell_endpoint_path(rig->a, &control, NULL, 0) > 0);
	for (i = 0; i < 2; i++) {
		WORKS(doorbell_message_queue_create(rig->domain, NULL, &queues[i]));
		WORKS(doorbell_message_queue_create(rig->domain, NULL, &of_ranks[i][1 - i]));
		of_ranks[i][i] = NULL;
		DRIVER(driver->stream_create(&raw[i], 1));
		WORKS(doorbell_stream_create_cuda(raw[i], NULL, &streams[i]));
	}
	for (i = 0; i < 2; i++) {
		WORKS(doorbell_message_queue_address(queues[1 - i], &addresses[0]));
		WORKS(doorbell_message_queue_connect(queues[i], &addresses[0]));
		WORKS(doorbell_message_queue_address(of_ranks[1 - i][i], &addresses[1]));
		WORKS(doorbell_message_queue_connect(of_ranks[i][1 - i], &addresses[1]));
	}
	for (i = 0; i < 2; i++) {
		const doorbell_slice from = {region, 1024 * (uint64_t)i, 64};
		const doorbell_slice to = {region, 4096 + 1024 * (uint64_t)i, 100};
		WORKS(doorbell_communicator_create((uint32_t)i, of_ranks[i], 2, &ranks[i]));
		WORKS(doorbell_communicator_all_reduce(ranks[i], &sum[i], &sum[i], DOORBELL_TYPE_I32,
						       DOORBELL_REDUCE_SUM, DOORBELL_ALGORITHM_AUTO, &collectives[i]));
		WORKS(doorbell_graph_builder_capture(streams[i], &builder));
		if (control == DOORBELL_CONTROL_SYNC) {
			FAILS(DOORBELL_ESTATE, "calling thread",
			      doorbell_graph_builder_start_message(builder, queues[i], &from, 1));
			FAILS(DOORBELL_ESTATE, "calling thread",
			      doorbell_graph_builder_collective(builder, ranks[i], collectives[i]));
			WORKS(doorbell_graph_builder_destroy(builder));
			graphs[i] = NULL;
			continue;
		}
		if (i == 0)
			WORKS(doorbell_graph_builder_send_message(builder, queues[i], &from, 1));
		else
			WORKS(doorbell_graph_builder_start_message(builder, queues[i], &from, 1));
		if (i == 1)
			FAILS(DOORBELL_EFOREIGN, "", doorbell_graph_builder_collective(builder, ranks[1], collectives[0]));
		WORKS(doorbell_graph_builder_recv_message(builder, queues[i], &to, 1));
		WORKS(doorbell_graph_builder_wait_messages(builder, queues[i]));
		WORKS(doorbell_graph_builder_collective(builder, ranks[i], collectives[i]));
		WORKS(doorbell_graph_builder_instantiate(builder, &graphs[i]));
		GIVES(0, doorbell_graph_message_ticket(graphs[i], 0, &ticket));
		WORKS(doorbell_graph_members_init(&members[i], sizeof members[i]));
		members[i].queues = &queues[i];
		members[i].queue_count = 1;
		members[i].communicators = &ranks[i];
		members[i].communicator_count = 1;
	}
	for (round = 0; graphs[0] != NULL && round < LAUNCHES; round++) {
		for (i = 0; i < 2; i++) {
			memset(memory + 1024 * i, 100 * i + round, 64);
			value = (uint32_t)(round + 1000 * i);
			memcpy(memory + 8192 + 64 * i, &value, 4);
		}
		for (i = 0; i < 2; i++)
			WORKS(doorbell_graph_launch(graphs[i], streams[i], &members[i]));
		for (i = 0; i < 2; i++) {
			/* The message that was sent, the one that was received, and the reduction. */
			GIVES(1, doorbell_graph_message_ticket(graphs[i], 0, &ticket));
			WORKS(doorbell_message_ticket_wait(ticket, &len, SOON_MS));
			EXPECT(len == 64);
			WORKS(doorbell_message_ticket_destroy(ticket));
			GIVES(1, doorbell_graph_message_ticket(graphs[i], 1, &ticket));
			WORKS(doorbell_message_ticket_wait(ticket, &len, SOON_MS));
			EXPECT(len == 64);
			WORKS(doorbell_message_ticket_destroy(ticket));
			GIVES(0, doorbell_graph_message_ticket(graphs[i], 2, &ticket));
			EXPECT(ticket == NULL);
			GIVES(1, doorbell_graph_collective_ticket(graphs[i], 0, &reduced));
			WORKS(doorbell_collective_ticket_wait(reduced, SOON_MS));
			WORKS(doorbell_collective_ticket_destroy(reduced));
			GIVES(0, doorbell_graph_collective_ticket(graphs[i], 1, &reduced));
			memcpy(&value, memory + 8192 + 64 * i, 4);
			EXPECT(value == (uint32_t)(2 * round + 1000));
			EXPECT(memory[4096 + 1024 * i] == (unsigned char)(100 * (1 - i) + round));
			EXPECT(memory[4096 + 1024 * i + 63] == (unsigned char)(100 * (1 - i) + round));
		}
	}
	if (graphs[0] != NULL) {
		members[0].communicator_count = 0;
		FAILS(DOORBELL_EFOREIGN, "communicator", doorbell_graph_arm(graphs[0], &members[0]));
		members[0].communicator_count = 1;
		members[0].reserved = 1;
		FAILS(DOORBELL_ERANGE, "`reserved`", doorbell_graph_arm(graphs[0], &members[0]));
		members[0].reserved = 0;
		WORKS(doorbell_graph_arm(graphs[0], &members[0]));
		WORKS(doorbell_graph_disarm(graphs[0], &members[0]));
	}
	for (i = 0; i < 2; i++) {
		WORKS(doorbell_graph_destroy(graphs[i]));
		WORKS(doorbell_message_queue_finish(queues[i], SOON_MS));
		WORKS(doorbell_communicator_finish(ranks[i], SOON_MS));
	}
	for (i = 0; i < 2; i++) {
		WORKS(doorbell_collective_destroy(collectives[i]));
		WORKS(doorbell_communicator_destroy(ranks[i]));
		WORKS(doorbell_message_queue_destroy(queues[i]));
		WORKS(doorbell_stream_destroy(streams[i]));
		DRIVER(driver->stream_destroy(raw[i]));
	}
	WORKS(doorbell_region_destroy(region));
}

static int with_the_feature(struct rig *rig)
{
	struct driver driver;
	struct CUctx_st *context;
	doorbell_stream *stream;
	doorbell_region *own, *lent;
	doorbell_cuda_capabilities capabilities;
	char text[1024];
	uint64_t memory;
	int device;

	if (!driver_load(&driver))
		return 0;
	FAILS(DOORBELL_ESTATE, "context", doorbell_stream_create_cuda(NULL, NULL, &stream));
	FAILS(DOORBELL_ESTATE, "context", doorbell_region_alloc_device(rig->domain, 8, 0, &own));
	FAILS(DOORBELL_ESTATE, "context", doorbell_region_register_device(rig->domain, 64, 8, 0, &own));
	FAILS(DOORBELL_ESTATE, "context", doorbell_cuda_read_capabilities(&capabilities, sizeof capabilities));
	FAILS(DOORBELL_ESTATE, "current", doorbell_stream_wait_cuda_event(rig->stream, (struct CUevent_st *)(uintptr_t)64));
	DRIVER(driver.device_get(&device, 0));
	DRIVER(driver.ctx_retain(&context, device));
	DRIVER(driver.ctx_set(context));
	capabilities_are_reported();
	streams_wait_for_events(&driver, rig);
	DRIVER(driver.alloc(&memory, BYTES));
	FAILS(DOORBELL_ERANGE, "`len_bytes`", doorbell_region_alloc_device(rig->domain, 0, 0, &own));
	if (strncmp(rig_device_name(), "softcx", 6) == 0) {
		WORKS(doorbell_region_alloc_device(rig->domain, BYTES, DOORBELL_ACCESS_ALL, &own));
		WORKS(doorbell_region_register_device(rig->domain, memory, BYTES, DOORBELL_ACCESS_ALL, &lent));
		EXPECT((uint64_t)(uintptr_t)doorbell_region_pointer(lent) == memory);
		GIVES(DOORBELL_REGION_COPIED, doorbell_region_kind(own));
		/* Nothing is better than what the software NIC does. */
		GIVES(0, doorbell_region_reasons(own, text, sizeof text));
		host_memory_has_a_device_address(&driver, rig, lent);
		failed_copies_report_the_reason(&driver, rig, lent);
		FAILS(DOORBELL_ESTATE, "cannot access", doorbell_wait_value32(lent, 0, DOORBELL_WAIT_GEQ, 0, 0));
		{
			doorbell_region *none;
			FAILS(DOORBELL_ESTATE, "bytes at",
			      doorbell_region_register_device(rig->domain, memory, (uint64_t)1 << 50, 0, &none));
			EXPECT(none == NULL);
		}
	} else {
		/* Whether a NIC reaches a GPU's memory is the machine's: here it is about the streams. */
		WORKS(doorbell_region_alloc(rig->domain, BYTES, DOORBELL_ACCESS_ALL, &own));
		WORKS(doorbell_region_alloc(rig->domain, BYTES, DOORBELL_ACCESS_ALL, &lent));
	}
	on_streams(&driver, rig, own, lent);
	graphs(&driver, rig);
	captured_by_the_application(&driver, rig);
	graphs_of_messages(&driver, rig);
	WORKS(doorbell_region_destroy(own));
	WORKS(doorbell_region_destroy(lent));
	DRIVER(driver.free(memory));
	return 1;
}

int main(void)
{
	struct rig rig;
	int ran = 1;

	rig_make(&rig);
	everywhere(&rig);
	if (WITH_CUDA)
		ran = with_the_feature(&rig);
	else
		without_the_feature(&rig);
	rig_end(&rig);
	if (ran)
		puts("done");
	return 0;
}
