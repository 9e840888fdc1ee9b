/* Every call of the C interface, used as it should be. */
#define _POSIX_C_SOURCE 200809L

#include "expect.h"

#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <unistd.h>

static uint8_t *bytes_of(const struct rig *rig, uint64_t offset)
{
	return (uint8_t *)doorbell_region_pointer(rig->region) + offset;
}

static int is_filled(const uint8_t *bytes, int value, size_t len)
{
	for (size_t i = 0; i < len; i++)
		if (bytes[i] != value)
			return 0;
	return 1;
}

static void basics(void)
{
	char text[64], small[4];
	uint32_t version = doorbell_version();
	EXPECT(version == (DOORBELL_VERSION_MAJOR << 24 | DOORBELL_VERSION_MINOR << 12 | DOORBELL_VERSION_PATCH));
	EXPECT(doorbell_version_text()[0] >= '0' && doorbell_version_text()[0] <= '9');
	EXPECT(doorbell_device_count() >= 1);
	GIVES(6, doorbell_device_name((uint32_t)doorbell_device_count() - 1, text, sizeof text));
	EXPECT(!strcmp(text, "softcx"));
	GIVES(6, doorbell_device_name((uint32_t)doorbell_device_count() - 1, small, sizeof small));
	EXPECT(!strcmp(small, "sof"));
	EXPECT(!strcmp(doorbell_error_name(DOORBELL_ETIMEOUT), "DOORBELL_ETIMEOUT"));
	EXPECT(!strcmp(doorbell_error_name(-999), "unknown"));
}

/* By plain verbs no stream can. */
static int streams_ring(void)
{
	return strncmp(rig_device_name(), "verbs:", 6) != 0 && !strstr(rig_device_name(), "path=proxy");
}

static void flow_control(struct rig *rig)
{
	const doorbell_work work = doorbell_work_init(DOORBELL_OP_NOP, NULL, 0);
	doorbell_completion completion;
	doorbell_ticket *ticket, *recv;
	int depth, step;

	depth = doorbell_endpoint_room(rig->a, DOORBELL_QUEUE_SEND);
	EXPECT(depth == 128 && doorbell_endpoint_room(rig->a, DOORBELL_QUEUE_RECV) == 128);
	FAILS(DOORBELL_ERANGE, "queue_kind", doorbell_endpoint_room(rig->a, 2));
	for (step = 0; step < 3 * depth; step++) {
		WORKS(doorbell_endpoint_wait_room(rig->a, DOORBELL_QUEUE_SEND, 1, SOON_MS));
		WORKS(doorbell_post_send(rig->a, &work, &ticket));
		WORKS(doorbell_ticket_wait(ticket, SOON_MS));
		WORKS(doorbell_ticket_wait(ticket, 0));
		WORKS(doorbell_ticket_destroy(ticket));
		WORKS(doorbell_wait_cq(rig->a, DOORBELL_QUEUE_SEND, SOON_MS, &completion));
	}
	for (step = 0; step < 2 * depth; step++) {
		WORKS(doorbell_endpoint_wait_room(rig->a, DOORBELL_QUEUE_SEND, 1, SOON_MS));
		WORKS(doorbell_post_send(rig->a, &work, NULL));
	}
	/* The completions are not polled. */
	FAILS(DOORBELL_EFULL, "send completion",
	      doorbell_endpoint_wait_room(rig->a, DOORBELL_QUEUE_SEND, 1, DOORBELL_NO_TIMEOUT));
	for (step = 0; step < 2 * depth; step++)
		WORKS(doorbell_wait_cq(rig->a, DOORBELL_QUEUE_SEND, SOON_MS, &completion));
	GIVES(depth, doorbell_endpoint_room(rig->a, DOORBELL_QUEUE_SEND));
	FAILS(DOORBELL_ERANGE, "`count`",
	      doorbell_endpoint_wait_room(rig->a, DOORBELL_QUEUE_SEND, (uint32_t)depth + 1, SOON_MS));

	WORKS(doorbell_post_recv(rig->b, 1, NULL, 0, &recv));
	FAILS(DOORBELL_ETIMEOUT, "did not end within", doorbell_ticket_wait(recv, 10));
	{
		const doorbell_work empty = doorbell_work_send(NULL, 0);
		WORKS(doorbell_post_send(rig->a, &empty, NULL));
	}
	NOTIFIES(doorbell_ticket, recv);
	GIVES(DOORBELL_EINVAL, doorbell_ticket_notify(recv, -1));
	WORKS(doorbell_ticket_wait(recv, SOON_MS));
	WORKS(doorbell_ticket_destroy(recv));
	WORKS(doorbell_wait_cq(rig->a, DOORBELL_QUEUE_SEND, SOON_MS, &completion));
	WORKS(doorbell_wait_cq(rig->b, DOORBELL_QUEUE_RECV, SOON_MS, &completion));
}

static void rings_on_a_stream(struct rig *rig)
{
	const doorbell_slice from = {rig->region, 0, 100}, to = {rig->region, 4096, 100};
	const doorbell_slice parts[2] = {{rig->region, 10, 30}, {rig->region, 70, 30}};
	doorbell_work work = doorbell_work_send(&from, 1);
	doorbell_ticket *recv, *send, *wait;
	doorbell_details details;
	doorbell_remote remote;
	char path[256];
	uint32_t control = 99;

	EXPECT(doorbell_endpoint_path(rig->a, &control, path, sizeof path) > 0);
	if (streams_ring())
		EXPECT(control == DOORBELL_CONTROL_DIRECT && !strncmp(path, "direct (", 8));
	else
		EXPECT(control == DOORBELL_CONTROL_PROXY && !strncmp(path, "proxy (", 7));
	EXPECT(doorbell_endpoint_qpn(rig->a) > 0);
	EXPECT(doorbell_region_len_bytes(rig->region) == RIG_BYTES);

	/* A send with immediate data. */
	memset(bytes_of(rig, 0), 0x11, 100);
	work.flags = DOORBELL_WORK_IMM | DOORBELL_WORK_SOLICITED;
	work.imm = 0xfeedbeef;
	WORKS(doorbell_stream_queue_recv(rig->stream, rig->b, 7, &to, 1, &recv));
	WORKS(doorbell_stream_queue_send(rig->stream, rig->a, &work, &send));
	WORKS(doorbell_stream_wait_cq(rig->stream, rig->a, DOORBELL_QUEUE_SEND, DOORBELL_DEFAULT_TIMEOUT, &wait));
	WORKS(doorbell_stream_wait_cq(rig->stream, rig->b, DOORBELL_QUEUE_RECV, SOON_MS, NULL));
	WORKS(doorbell_stream_synchronize(rig->stream, SOON_MS));
	GIVES(1, doorbell_stream_query(rig->stream));
	GIVES(DOORBELL_STATUS_COMPLETE, doorbell_ticket_status(recv, NULL));
	GIVES(DOORBELL_STATUS_COMPLETE, doorbell_ticket_status(send, NULL));
	GIVES(DOORBELL_STATUS_COMPLETE, doorbell_ticket_status(wait, NULL));
	GIVES(1, doorbell_ticket_details(recv, &details));
	EXPECT(details.len_bytes == 100 && details.has_imm == 1 && details.imm == 0xfeedbeef);
	GIVES(0, doorbell_ticket_details(wait, &details));
	EXPECT(is_filled(bytes_of(rig, 4096), 0x11, 100));
	WORKS(doorbell_ticket_destroy(recv));
	WORKS(doorbell_ticket_destroy(send));
	WORKS(doorbell_ticket_destroy(wait));

	/* A write of two slices, and a read back of what it wrote. */
	WORKS(doorbell_region_remote(rig->region, &remote));
	EXPECT(remote.len_bytes == RIG_BYTES && remote.addr == (uintptr_t)bytes_of(rig, 0));
	memset(bytes_of(rig, 0), 0x22, 50);
	memset(bytes_of(rig, 50), 0x33, 50);
	WORKS(doorbell_stream_queue_write(rig->stream, rig->a, parts, 2, remote.addr + 8192, remote.rkey, NULL));
	WORKS(doorbell_stream_wait_cq(rig->stream, rig->a, DOORBELL_QUEUE_SEND, DOORBELL_NO_TIMEOUT, NULL));
	WORKS(doorbell_stream_queue_read(rig->stream, rig->a, &to, 1, remote.addr + 8192, remote.rkey, NULL));
	WORKS(doorbell_stream_wait_cq(rig->stream, rig->a, DOORBELL_QUEUE_SEND, DOORBELL_NO_TIMEOUT, NULL));
	WORKS(doorbell_stream_synchronize(rig->stream, SOON_MS));
	EXPECT(is_filled(bytes_of(rig, 8192), 0x22, 30) && is_filled(bytes_of(rig, 8222), 0x33, 30));
	EXPECT(!memcmp(bytes_of(rig, 4096), bytes_of(rig, 8192), 100));
}

static void posts_from_the_cpu(struct rig *rig)
{
	const doorbell_slice to = {rig->region, 4096, 64}, result = {rig->region, 128, 8};
	const uint64_t first = 40;
	doorbell_work work = doorbell_work_send_inline("hello", 6);
	doorbell_completion completion;
	doorbell_remote remote;
	uint64_t word;

	GIVES(0, doorbell_poll_cq(rig->a, DOORBELL_QUEUE_SEND, &completion));
	WORKS(doorbell_post_recv(rig->b, 70, &to, 1, NULL));
	work.wr_id = 71;
	WORKS(doorbell_post_send(rig->a, &work, NULL));
	WORKS(doorbell_wait_cq(rig->a, DOORBELL_QUEUE_SEND, SOON_MS, &completion));
	EXPECT(completion.wr_id == 71 && completion.operation == DOORBELL_OP_SEND && completion.has_imm == 0);
	WORKS(doorbell_wait_cq(rig->b, DOORBELL_QUEUE_RECV, DOORBELL_DEFAULT_TIMEOUT, &completion));
	EXPECT(completion.wr_id == 70 && completion.operation == DOORBELL_OP_RECV && completion.len_bytes == 6);
	EXPECT(!strcmp((char *)bytes_of(rig, 4096), "hello"));

	/* Atomics, a write with immediate data, and nothing. */
	WORKS(doorbell_region_remote(rig->region, &remote));
	memcpy(bytes_of(rig, 256), &first, 8);
	work = doorbell_work_fetch_add(&result, remote.addr + 256, remote.rkey, 2);
	WORKS(doorbell_post_send(rig->a, &work, NULL));
	WORKS(doorbell_wait_cq(rig->a, DOORBELL_QUEUE_SEND, SOON_MS, &completion));
	EXPECT(completion.operation == DOORBELL_OP_FETCH_ADD);
	memcpy(&word, bytes_of(rig, 128), 8);
	EXPECT(word == 40);
	work = doorbell_work_compare_swap(&result, remote.addr + 256, remote.rkey, 42, 1000);
	work.flags = DOORBELL_WORK_FENCE;
	WORKS(doorbell_post_send(rig->a, &work, NULL));
	WORKS(doorbell_wait_cq(rig->a, DOORBELL_QUEUE_SEND, SOON_MS, &completion));
	EXPECT(completion.operation == DOORBELL_OP_COMPARE_SWAP);
	memcpy(&word, bytes_of(rig, 256), 8);
	EXPECT(word == 1000);
	WORKS(doorbell_post_recv(rig->b, 72, NULL, 0, NULL));
	work = doorbell_work_write_inline("imm", 4, remote.addr + 300, remote.rkey);
	work.flags |= DOORBELL_WORK_IMM | DOORBELL_WORK_UNSIGNALED;
	work.imm = 5;
	WORKS(doorbell_post_send(rig->a, &work, NULL));
	WORKS(doorbell_wait_cq(rig->b, DOORBELL_QUEUE_RECV, SOON_MS, &completion));
	EXPECT(completion.operation == DOORBELL_OP_RECV_WRITE && completion.has_imm == 1 && completion.imm == 5);
	EXPECT(!strcmp((char *)bytes_of(rig, 300), "imm"));
	work = doorbell_work_init(DOORBELL_OP_NOP, NULL, 0);
	WORKS(doorbell_post_send(rig->a, &work, NULL));
	WORKS(doorbell_wait_cq(rig->a, DOORBELL_QUEUE_SEND, SOON_MS, &completion));
	EXPECT(completion.operation == DOORBELL_OP_NOP);
	GIVES(0, doorbell_poll_cq(rig->a, DOORBELL_QUEUE_SEND, &completion));
	(void)doorbell_device_progress(rig->device);
}

static void prepares_and_posts(struct rig *rig)
{
	const doorbell_slice from = {rig->region, 0, 64}, to = {rig->region, 4096, 64};
	const doorbell_work work = doorbell_work_send(&from, 1);
	doorbell_prepared *list[4], *one, *second;
	doorbell_ticket *tickets[4], *ticket;
	doorbell_completion completion;
	char text[2048];
	int i;

	/* Four operations of two endpoints in one batch. */
	memset(bytes_of(rig, 0), 0x44, 64);
	WORKS(doorbell_prepare_recv(rig->b, 1, &to, 1, &list[0]));
	WORKS(doorbell_prepare_send(rig->a, &work, &list[1]));
	WORKS(doorbell_prepare_wait_cq(rig->a, DOORBELL_QUEUE_SEND, DOORBELL_DEFAULT_TIMEOUT, &list[2]));
	WORKS(doorbell_prepare_wait_cq(rig->b, DOORBELL_QUEUE_RECV, SOON_MS, &list[3]));
	EXPECT(doorbell_prepared_disassemble(list[1], text, sizeof text) > 0);
	EXPECT(strstr(text, streams_ring() ? "doorbell record" : "STORE_DWORD  progress"));
	WORKS(doorbell_stream_post_all(rig->stream, list, 4, tickets));
	WORKS(doorbell_stream_synchronize(rig->stream, SOON_MS));
	for (i = 0; i < 4; i++) {
		GIVES(DOORBELL_STATUS_COMPLETE, doorbell_ticket_status(tickets[i], NULL));
		WORKS(doorbell_ticket_destroy(tickets[i]));
	}
	EXPECT(is_filled(bytes_of(rig, 4096), 0x44, 64));
	WORKS(doorbell_stream_post_all(rig->stream, NULL, 0, NULL));

	/* A batch with one operation twice, and a post out of turn: refused, and nothing is lost. */
	WORKS(doorbell_prepare_send(rig->a, &work, &one));
	WORKS(doorbell_prepare_send(rig->a, &work, &second));
	list[0] = list[1] = one;
	GIVES(DOORBELL_EBUSY, doorbell_stream_post_all(rig->stream, list, 2, NULL));
	FAILS(DOORBELL_ESTATE, "prepared before", doorbell_stream_post(rig->stream, second, &ticket));
	EXPECT(ticket == NULL);
	list[0] = second;
	list[1] = one;
	GIVES(DOORBELL_ESTATE, doorbell_stream_post_all(rig->stream, list, 2, tickets));
	/* The newest is rolled back, and the other one cancelled: the peer's receive takes the message that comes next. */
	WORKS(doorbell_prepared_rollback(rig->a, second));
	WORKS(doorbell_prepared_destroy(one));
	memset(bytes_of(rig, 0), 0x55, 64);
	WORKS(doorbell_stream_queue_recv(rig->stream, rig->b, 2, &to, 1, NULL));
	WORKS(doorbell_prepare_send(rig->a, &work, &one));
	WORKS(doorbell_stream_post(rig->stream, one, &ticket));
	WORKS(doorbell_stream_wait_cq(rig->stream, rig->b, DOORBELL_QUEUE_RECV, SOON_MS, NULL));
	WORKS(doorbell_stream_synchronize(rig->stream, SOON_MS));
	EXPECT(is_filled(bytes_of(rig, 4096), 0x55, 64));
	for (i = 0; i < SOON_MS && doorbell_ticket_status(ticket, NULL) != DOORBELL_STATUS_COMPLETE; i++)
		WORKS(doorbell_stream_synchronize(rig->stream, 1));
	GIVES(DOORBELL_STATUS_COMPLETE, doorbell_ticket_status(ticket, NULL));
	WORKS(doorbell_ticket_destroy(ticket));
	/* The last completions were not polled. */
	while (doorbell_poll_cq(rig->a, DOORBELL_QUEUE_SEND, &completion) == 1)
		;
}

static void adds_one(void *argument)
{
	++*(int *)argument;
}

/* A stream without a thread: this thread executes it where it waits, and what is left is discarded with it. */
static void executes_a_stream_itself(struct rig *rig)
{
	doorbell_stream *stream;
	doorbell_ticket *store, *lost;
	int calls = 0;

	WORKS(doorbell_stream_create_host_without_thread("own", 0, &stream));
	memset(bytes_of(rig, 512), 0, 4);
	WORKS(doorbell_stream_launch(stream, adds_one, &calls));
	WORKS(doorbell_stream_wait_value32(stream, rig->region, 512, DOORBELL_WAIT_GEQ, 5, SOON_MS, NULL));
	WORKS(doorbell_stream_launch(stream, adds_one, &calls));
	WORKS(doorbell_stream_write_value32(stream, rig->region, 516, 9, &store));
	EXPECT(calls == 0);
	GIVES(0, doorbell_stream_query(stream));
	EXPECT(calls == 1);
	GIVES(DOORBELL_STATUS_QUEUED, doorbell_ticket_status(store, NULL));
	GIVES(DOORBELL_STATUS_QUEUED, doorbell_ticket_status_now(store, NULL));
	memset(bytes_of(rig, 512), 5, 1);
	WORKS(doorbell_wait_value32(rig->region, 516, DOORBELL_WAIT_GEQ, 9, SOON_MS));
	WORKS(doorbell_stream_write_value64(stream, rig->region, 528, (uint64_t)1 << 40, NULL));
	WORKS(doorbell_stream_wait_value64(stream, rig->region, 528, DOORBELL_WAIT_EQ, (uint64_t)1 << 40, SOON_MS, NULL));
	WORKS(doorbell_stream_wait_count64(stream, rig->region, 528, 7, 1, SOON_MS, NULL));
	WORKS(doorbell_wait_value64(rig->region, 528, DOORBELL_WAIT_AND, (uint64_t)3 << 40, SOON_MS));
	GIVES(DOORBELL_ETIMEOUT, doorbell_wait_value64(rig->region, 528, DOORBELL_WAIT_EQ, 1, 1));
	EXPECT(calls == 2);
	GIVES(1, doorbell_stream_query(stream));
	WORKS(doorbell_ticket_destroy(store));
	WORKS(doorbell_stream_launch(stream, adds_one, &calls));
	WORKS(doorbell_stream_write_value32(stream, rig->region, 516, 10, &lost));
	WORKS(doorbell_stream_destroy(stream));
	EXPECT(calls == 2);
	GIVES(DOORBELL_STATUS_DISCARDED, doorbell_ticket_status(lost, NULL));
	WORKS(doorbell_ticket_destroy(lost));
}

static void waits_for_words_and_events(struct rig *rig)
{
	doorbell_stream *other;
	doorbell_event *start, *end, *plain, *later;
	doorbell_ticket *wait;
	doorbell_failure failure;
	uint64_t elapsed_ns = UINT64_MAX, told = 0;
	struct pollfd readable = {.events = POLLIN};

	readable.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	EXPECT(readable.fd >= 0);
	WORKS(doorbell_stream_create_host(NULL, 8, &other));
	WORKS(doorbell_event_create(DOORBELL_EVENT_BLOCKING, &start));
	WORKS(doorbell_event_create(0, &end));
	WORKS(doorbell_event_create(DOORBELL_EVENT_NO_TIMING, &plain));
	memset(bytes_of(rig, 512), 0, 4);
	GIVES(1, doorbell_event_query(start));
	WORKS(doorbell_stream_record(rig->stream, start));
	WORKS(doorbell_stream_wait_value32(rig->stream, rig->region, 512, DOORBELL_WAIT_GEQ, 5, SOON_MS, &wait));
	WORKS(doorbell_stream_record(rig->stream, end));
	WORKS(doorbell_stream_wait_event(other, end));
	WORKS(doorbell_stream_record(other, plain));
	WORKS(doorbell_event_synchronize(start, SOON_MS));
	WORKS(doorbell_event_notify(start, readable.fd));
	EXPECT(read(readable.fd, &told, sizeof told) == sizeof told && told == 1);
	GIVES(DOORBELL_ESTATE, doorbell_event_notify(plain, readable.fd));
	GIVES(DOORBELL_EINVAL, doorbell_event_notify(start, -1));
	WORKS(doorbell_event_create(DOORBELL_EVENT_BLOCKING, &later));
	WORKS(doorbell_stream_record(other, later));
	WORKS(doorbell_event_notify(later, readable.fd));
	EXPECT(poll(&readable, 1, 20) == 0);
	GIVES(0, doorbell_event_query(end));
	GIVES(0, doorbell_event_query(plain));
	GIVES(DOORBELL_ETIMEOUT, doorbell_event_synchronize(plain, 1));
	GIVES(DOORBELL_ETIMEOUT, doorbell_stream_synchronize(other, 1));
	GIVES(0, doorbell_stream_query(other));
	GIVES(DOORBELL_ETIMEOUT,
	      doorbell_wait_value32(rig->region, 512, DOORBELL_WAIT_AND, 4, 1));
	{
		doorbell_stream *third;
		WORKS(doorbell_stream_create_host("third", 0, &third));
		WORKS(doorbell_stream_write_value32(third, rig->region, 512, 6, NULL));
		WORKS(doorbell_stream_destroy(third));
	}
	WORKS(doorbell_wait_value32(rig->region, 512, DOORBELL_WAIT_AND, 4, SOON_MS));
	WORKS(doorbell_wait_value32(rig->region, 512, DOORBELL_WAIT_NOR, 6, DOORBELL_DEFAULT_TIMEOUT));
	WORKS(doorbell_event_synchronize(plain, SOON_MS));
	EXPECT(poll(&readable, 1, SOON_MS) == 1);
	GIVES(1, doorbell_event_query(later));
	WORKS(doorbell_event_destroy(later));
	EXPECT(close(readable.fd) == 0);
	GIVES(DOORBELL_STATUS_COMPLETE, doorbell_ticket_status(wait, NULL));
	WORKS(doorbell_event_elapsed_ns(start, end, &elapsed_ns));
	EXPECT(elapsed_ns < (uint64_t)SOON_MS * 1000000);
	GIVES(DOORBELL_ESTATE, doorbell_event_elapsed_ns(start, plain, &elapsed_ns));
	WORKS(doorbell_ticket_destroy(wait));

	/* A word that never comes: its wait is released, and the stream says so until its failure is taken. */
	WORKS(doorbell_stream_wait_value32(rig->stream, rig->region, 512, DOORBELL_WAIT_GEQ, 100, 20, &wait));
	GIVES(DOORBELL_EASYNC, doorbell_stream_synchronize(rig->stream, SOON_MS));
	GIVES(DOORBELL_STATUS_FAILED, doorbell_ticket_status(wait, &failure));
	EXPECT(failure.cause == DOORBELL_CAUSE_DEADLINE && failure.timeout_ms == 20 && failure.has_wr_id == 0);
	GIVES(DOORBELL_EASYNC, doorbell_stream_synchronize(rig->stream, SOON_MS));
	{
		char text[128];
		EXPECT(doorbell_stream_take_fault(rig->stream, NULL, text, sizeof text) > 0);
		EXPECT(strstr(text, "did not end within 20ms"));
	}
	GIVES(0, doorbell_stream_take_fault(rig->stream, NULL, NULL, 0));
	WORKS(doorbell_stream_synchronize(rig->stream, SOON_MS));
	WORKS(doorbell_ticket_destroy(wait));
	WORKS(doorbell_event_destroy(start));
	WORKS(doorbell_event_destroy(end));
	WORKS(doorbell_event_destroy(plain));
	WORKS(doorbell_stream_destroy(other));
}

static void reset_and_transfer(struct rig *rig)
{
	WORKS(doorbell_endpoint_reset(rig->a));
	WORKS(doorbell_endpoint_reset(rig->b));
	GIVES(0, doorbell_endpoint_is_connected(rig->a));
	GIVES(0, doorbell_endpoint_failure(rig->a, NULL, NULL, 0));
	rig_connect(rig);
	rings_on_a_stream(rig);
}

/* Waits for a stream on which a wait of that endpoint ends without success: each call says so, until the fault is taken. */
static void synchronize_released(struct rig *rig, const doorbell_endpoint *endpoint)
{
	doorbell_failure of_stream, of_endpoint;

	GIVES(DOORBELL_EASYNC, doorbell_stream_synchronize(rig->stream, SOON_MS));
	GIVES(DOORBELL_EASYNC, doorbell_stream_synchronize(rig->stream, SOON_MS));
	EXPECT(doorbell_stream_take_fault(rig->stream, &of_stream, NULL, 0) > 0);
	EXPECT(doorbell_endpoint_failure(endpoint, &of_endpoint, NULL, 0) > 0);
	EXPECT(of_stream.cause == of_endpoint.cause && of_stream.qpn == of_endpoint.qpn);
	GIVES(0, doorbell_stream_take_fault(rig->stream, NULL, NULL, 0));
	WORKS(doorbell_stream_synchronize(rig->stream, SOON_MS));
}

static void fails_and_works_after_reset(struct rig *rig)
{
	const doorbell_slice to = {rig->region, 4096, 64}, from = {rig->region, 0, 64};
	doorbell_work work;
	doorbell_remote remote;
	doorbell_ticket *wait, *send;
	doorbell_failure failure;
	doorbell_completion completion;
	char text[256];

	/* A key that does not exist. */
	WORKS(doorbell_region_remote(rig->region, &remote));
	work = doorbell_work_write(&from, 1, remote.addr, remote.rkey ^ 0x5500);
	work.wr_id = 77;
	WORKS(doorbell_post_send(rig->a, &work, &send));
	GIVES(DOORBELL_EWORK, doorbell_wait_cq(rig->a, DOORBELL_QUEUE_SEND, SOON_MS, &completion));
	GIVES(1, doorbell_last_failure(&failure));
	EXPECT(failure.cause == DOORBELL_CAUSE_COMPLETION && failure.has_wr_id == 1 && failure.wr_id == 77);
	EXPECT(failure.wc_status == 10 /* IBV_WC_REM_ACCESS_ERR */ && failure.syndrome == 0x13);
	GIVES(DOORBELL_STATUS_FAILED, doorbell_ticket_status(send, &failure));
	memset(&failure, 0, sizeof failure);
	GIVES(DOORBELL_STATUS_FAILED, doorbell_ticket_status_now(send, &failure));
	EXPECT(failure.wr_id == 77);
	EXPECT(doorbell_endpoint_failure(rig->a, &failure, text, sizeof text) > 0);
	EXPECT(strstr(text, "remote access error") && failure.qpn == (uint32_t)doorbell_endpoint_qpn(rig->a));
	FAILS(DOORBELL_EWORK, "remote access error", doorbell_post_send(rig->a, &work, NULL));
	FAILS(DOORBELL_EWORK, "77", doorbell_stream_wait_cq(rig->stream, rig->a, DOORBELL_QUEUE_SEND, 5, NULL));
	WORKS(doorbell_ticket_destroy(send));
	reset_and_transfer(rig);

	/* A message that never comes. */
	WORKS(doorbell_post_recv(rig->b, 1, &to, 1, NULL));
	WORKS(doorbell_stream_wait_cq(rig->stream, rig->b, DOORBELL_QUEUE_RECV, 20, &wait));
	synchronize_released(rig, rig->b);
	GIVES(DOORBELL_STATUS_FAILED, doorbell_ticket_status(wait, &failure));
	EXPECT(failure.cause == DOORBELL_CAUSE_DEADLINE && failure.timeout_ms == 20);
	WORKS(doorbell_ticket_destroy(wait));
	reset_and_transfer(rig);

	/* Where the stream is to go on, one call says so. */
	WORKS(doorbell_stream_continue_on_error(rig->stream, 1));
	WORKS(doorbell_post_recv(rig->b, 1, &to, 1, NULL));
	WORKS(doorbell_stream_wait_cq(rig->stream, rig->b, DOORBELL_QUEUE_RECV, 20, NULL));
	GIVES(DOORBELL_EASYNC, doorbell_stream_synchronize(rig->stream, SOON_MS));
	WORKS(doorbell_stream_synchronize(rig->stream, SOON_MS));
	WORKS(doorbell_stream_continue_on_error(rig->stream, 0));
	reset_and_transfer(rig);

	/* Giving up. */
	WORKS(doorbell_post_recv(rig->b, 1, &to, 1, NULL));
	WORKS(doorbell_stream_wait_cq(rig->stream, rig->b, DOORBELL_QUEUE_RECV, DOORBELL_NO_TIMEOUT, NULL));
	WORKS(doorbell_endpoint_abort(rig->b));
	synchronize_released(rig, rig->b);
	EXPECT(doorbell_endpoint_failure(rig->b, &failure, NULL, 0) > 0);
	EXPECT(failure.cause == DOORBELL_CAUSE_ABORTED);
	reset_and_transfer(rig);

	/* A stream that is aborted takes the endpoint of its work along. */
	WORKS(doorbell_post_recv(rig->b, 1, &to, 1, NULL));
	WORKS(doorbell_stream_wait_cq(rig->stream, rig->b, DOORBELL_QUEUE_RECV, DOORBELL_NO_TIMEOUT, &wait));
	WORKS(doorbell_stream_abort(rig->stream));
	/* That is no fault. */
	WORKS(doorbell_stream_synchronize(rig->stream, SOON_MS));
	GIVES(DOORBELL_STATUS_DISCARDED, doorbell_ticket_status(wait, NULL));
	EXPECT(doorbell_endpoint_failure(rig->b, &failure, NULL, 0) > 0);
	EXPECT(failure.cause == DOORBELL_CAUSE_DISCARDED);
	WORKS(doorbell_ticket_destroy(wait));
	reset_and_transfer(rig);
}

static void carries_addresses(struct rig *rig)
{
	doorbell_address address, again;
	char text[DOORBELL_ADDRESS_TEXT_BYTES];
	WORKS(doorbell_endpoint_address(rig->a, &address));
	GIVES(DOORBELL_ADDRESS_TEXT_BYTES - 1, doorbell_address_to_text(&address, text, sizeof text));
	WORKS(doorbell_address_from_text(text, &again));
	EXPECT(!memcmp(&address, &again, sizeof address));
	text[20] ^= 1;
	GIVES(DOORBELL_EMALFORMED, doorbell_address_from_text(text, &again));
	address.bytes[0] ^= 1;
	GIVES(DOORBELL_EMALFORMED, doorbell_address_to_text(&address, text, sizeof text));
	GIVES(DOORBELL_EMALFORMED, doorbell_endpoint_connect(rig->a, &address));
}

/* A datagram on a stream, to an endpoint that the work request names. */
static void sends_datagrams(struct rig *rig)
{
	enum { QKEY = 0x1111, GRH = 40 };
	doorbell_endpoint_config config;
	doorbell_endpoint *from, *to;
	doorbell_address address;
	doorbell_address_handle *handle, *of_port;
	doorbell_completion completion;
	const doorbell_slice place = {rig->region, 0, GRH + 64}, source = {rig->region, 1024, 64};
	doorbell_work work;
	int qpn;

	WORKS(doorbell_endpoint_config_init(&config, sizeof config));
	config.transport = 2;
	FAILS(DOORBELL_ERANGE, "transport", doorbell_endpoint_create(rig->domain, &config, &from));
	config.transport = DOORBELL_TRANSPORT_UD;
	config.qkey = QKEY;
	config.mtu_bytes = 256;
	WORKS(doorbell_endpoint_create(rig->domain, &config, &from));
	WORKS(doorbell_endpoint_create(rig->domain, &config, &to));
	FAILS(DOORBELL_ESTATE, "reliable", doorbell_endpoint_activate(rig->a));
	WORKS(doorbell_endpoint_activate(from));
	WORKS(doorbell_endpoint_activate(to));
	GIVES(1, doorbell_endpoint_is_connected(from));
	WORKS(doorbell_endpoint_address(to, &address));
	FAILS(DOORBELL_ESTATE, "reliable", doorbell_endpoint_connect(from, &address));
	qpn = doorbell_address_qpn(&address);
	EXPECT(qpn > 0 && qpn == doorbell_endpoint_qpn(to));
	WORKS(doorbell_address_handle_create(from, &address, &handle));

	memset((char *)doorbell_region_pointer(rig->region) + 1024, 0x5d, 64);
	WORKS(doorbell_post_recv(to, 7, &place, 1, NULL));
	work = doorbell_work_send(&source, 1);
	FAILS(DOORBELL_ESTATE, "Work::to", doorbell_post_send(from, &work, NULL));
	work = doorbell_work_to(work, handle, (uint32_t)qpn, QKEY);
	FAILS(DOORBELL_ESTATE, "receiver", doorbell_post_send(rig->a, &work, NULL));
	work.address_handle = NULL;
	FAILS(DOORBELL_EINVAL, "remote_qpn", doorbell_post_send(from, &work, NULL));
	work.address_handle = handle;
	work.flags = DOORBELL_WORK_IMM;
	work.imm = 0x01020304;
	WORKS(doorbell_stream_queue_send(rig->stream, from, &work, NULL));
	/* Work in flight holds what it needs of the handle. */
	WORKS(doorbell_address_handle_destroy(handle));
	WORKS(doorbell_stream_wait_cq(rig->stream, from, DOORBELL_QUEUE_SEND, SOON_MS, NULL));
	WORKS(doorbell_stream_synchronize(rig->stream, SOON_MS));
	WORKS(doorbell_wait_cq(to, DOORBELL_QUEUE_RECV, SOON_MS, &completion));
	EXPECT(completion.wr_id == 7 && completion.operation == DOORBELL_OP_RECV && completion.len_bytes == GRH + 64);
	EXPECT(completion.has_imm == 1 && completion.imm == 0x01020304);
	EXPECT(completion.source_qpn == (uint32_t)doorbell_endpoint_qpn(from) && completion.has_grh <= 1);
	EXPECT(!memcmp((char *)doorbell_region_pointer(rig->region) + GRH,
		       (char *)doorbell_region_pointer(rig->region) + 1024, 64));

	/* The embedded device has neither LIDs nor GIDs; any other has one at least, or refuses. */
	FAILS(DOORBELL_ERANGE, "lid", doorbell_address_handle_create_for_port(from, 0x10000, NULL, &of_port));
	if (!strcmp(rig_device_name(), "softcx"))
		FAILS(DOORBELL_ESTATE, "LID", doorbell_address_handle_create_for_port(from, 1, NULL, &of_port));
	WORKS(doorbell_address_handle_destroy(NULL));
	WORKS(doorbell_endpoint_destroy(from));
	WORKS(doorbell_endpoint_destroy(to));
}

static void *meet(void *argument)
{
	doorbell_channel *channel;
	char answer[8];
	WORKS(doorbell_channel_connect(argument, SOON_MS, &channel));
	GIVES(5, doorbell_channel_exchange(channel, "ping", 5, answer, sizeof answer, SOON_MS));
	EXPECT(!strcmp(answer, "pong"));
	GIVES(0, doorbell_channel_exchange(channel, NULL, 0, NULL, 0, SOON_MS));
	/* The peer's message is too long for the place. */
	FAILS(DOORBELL_ERANGE, "capacity", doorbell_channel_exchange(channel, "x", 1, answer, 2, SOON_MS));
	WORKS(doorbell_channel_destroy(channel));
	return NULL;
}

static void meets_a_peer(void)
{
	doorbell_listener *listener;
	doorbell_channel *channel;
	pthread_t peer;
	char address[64], message[8] = "pong";
	WORKS(doorbell_listener_create("127.0.0.1:0", &listener));
	EXPECT(doorbell_listener_address(listener, address, sizeof address) > 10);
	GIVES(DOORBELL_ETIMEOUT, doorbell_listener_accept(listener, 1, &channel));
	EXPECT(channel == NULL);
	EXPECT(pthread_create(&peer, NULL, meet, address) == 0);
	WORKS(doorbell_listener_accept(listener, SOON_MS, &channel));
	/* The answer to where the message is. */
	GIVES(5, doorbell_channel_exchange(channel, message, 5, message, sizeof message, DOORBELL_NO_TIMEOUT));
	EXPECT(!strcmp(message, "ping"));
	GIVES(0, doorbell_channel_exchange(channel, NULL, 0, NULL, 0, SOON_MS));
	GIVES(1, doorbell_channel_exchange(channel, "four", 4, message, sizeof message, SOON_MS));
	EXPECT(pthread_join(peer, NULL) == 0);
	FAILS(DOORBELL_ESTATE, "gone", doorbell_channel_exchange(channel, NULL, 0, message, 8, SOON_MS));
	WORKS(doorbell_channel_destroy(channel));
	WORKS(doorbell_listener_destroy(listener));
	GIVES(DOORBELL_ETIMEOUT, doorbell_channel_connect(address, 30, &channel));
}

static void registers_its_own_memory(struct rig *rig)
{
	uint8_t *memory = calloc(1, 4096);
	doorbell_region *region;
	doorbell_slice from;
	doorbell_remote remote;
	EXPECT(memory != NULL);
	memset(memory, 0x66, 256);
	WORKS(doorbell_region_register(rig->domain, memory, 4096, DOORBELL_ACCESS_ALL, &region));
	EXPECT(doorbell_region_pointer(region) == memory);
	WORKS(doorbell_region_remote(rig->region, &remote));
	from.region = region;
	from.offset = 0;
	from.len_bytes = 256;
	WORKS(doorbell_stream_queue_write(rig->stream, rig->a, &from, 1, remote.addr, remote.rkey, NULL));
	WORKS(doorbell_stream_wait_cq(rig->stream, rig->a, DOORBELL_QUEUE_SEND, SOON_MS, NULL));
	WORKS(doorbell_stream_synchronize(rig->stream, SOON_MS));
	EXPECT(is_filled(bytes_of(rig, 0), 0x66, 256));
	GIVES(1, doorbell_region_deregister(region));
	GIVES(0, doorbell_region_deregister(region));
	free(memory);
	FAILS(DOORBELL_ESTATE, "deregistered",
	      doorbell_stream_queue_write(rig->stream, rig->a, &from, 1, remote.addr, remote.rkey, NULL));
	WORKS(doorbell_region_destroy(region));
}

static void configures(struct rig *rig)
{
	doorbell_endpoint_config config;
	doorbell_endpoint *endpoint;
	WORKS(doorbell_endpoint_config_init(&config, sizeof config));
	EXPECT(config.struct_size == sizeof config && config.send_depth == 128 && config.wait_timeout_ms == 30000);
	config.send_depth = 1 << 20;
	FAILS(DOORBELL_ERANGE, "`send_depth` is 1048576; it must be 1 to 16384",
	      doorbell_endpoint_create(rig->domain, &config, &endpoint));
	EXPECT(endpoint == NULL);
	config.send_depth = 4;
	config.wait_timeout_ms = DOORBELL_NO_TIMEOUT;
	config.blueflame = 1;
	WORKS(doorbell_endpoint_create(rig->domain, &config, &endpoint));
	WORKS(doorbell_endpoint_destroy(endpoint));
}

int main(void)
{
	struct rig rig;
	basics();
	rig_make(&rig);
	rings_on_a_stream(&rig);
	flow_control(&rig);
	posts_from_the_cpu(&rig);
	prepares_and_posts(&rig);
	executes_a_stream_itself(&rig);
	waits_for_words_and_events(&rig);
	carries_addresses(&rig);
	sends_datagrams(&rig);
	meets_a_peer();
	registers_its_own_memory(&rig);
	configures(&rig);
	fails_and_works_after_reset(&rig);
	rig_end(&rig);
	puts("done");
	return 0;
}
