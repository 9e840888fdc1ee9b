/* Messages: on streams and from the thread, short ones and long ones, and what is refused. */
#include "expect.h"

enum { EAGER = 256, LONG = 5000, HALF = RIG_BYTES / 2 };

struct messages {
	doorbell_message_queue *a, *b;
	doorbell_stream *sends, *receives;
};

static void connect(const struct messages *messages)
{
	doorbell_message_address a, b, none;

	WORKS(doorbell_message_queue_address(messages->a, &a));
	WORKS(doorbell_message_queue_address(messages->b, &b));
	memset(&none, 0, sizeof none);
	GIVES(DOORBELL_EMALFORMED, doorbell_message_queue_connect(messages->a, &none));
	FAILS(DOORBELL_EINVAL, "`peer`", doorbell_message_queue_connect(messages->a, NULL));
	WORKS(doorbell_message_queue_connect(messages->a, &b));
	WORKS(doorbell_message_queue_connect(messages->b, &a));
	GIVES(DOORBELL_ESTATE, doorbell_message_queue_connect(messages->b, &a));
}

static void make(const struct rig *rig, struct messages *messages)
{
	doorbell_message_config config;
	doorbell_endpoint_config endpoint;

	WORKS(doorbell_message_config_init(&config, sizeof config));
	EXPECT(config.struct_size == sizeof config && config.slots == 16 && config.eager_bytes == 8192);
	EXPECT(config.ahead == 64 && config.max_slices == 3 && !config.reserved && !config.endpoint);
	config.slots = 2000;
	FAILS(DOORBELL_ERANGE, "`slots`", doorbell_message_queue_create(rig->domain, &config, &messages->a));
	EXPECT(messages->a == NULL);
	config.slots = 4;
	config.reserved = 1;
	FAILS(DOORBELL_ERANGE, "`reserved`", doorbell_message_queue_create(rig->domain, &config, &messages->a));
	config.reserved = 0;
	config.eager_bytes = EAGER;
	WORKS(doorbell_endpoint_config_init(&endpoint, sizeof endpoint));
	endpoint.wait_timeout_ms = SOON_MS;
	endpoint.room_timeout_ms = SOON_MS;
	config.endpoint = &endpoint;
	WORKS(doorbell_message_queue_create(rig->domain, &config, &messages->a));
	WORKS(doorbell_message_queue_create(rig->domain, &config, &messages->b));
	WORKS(doorbell_stream_create_host("sends", 0, &messages->sends));
	WORKS(doorbell_stream_create_host("receives", 0, &messages->receives));
}

/* Whether the receive brought the message of that length, and nothing behind it. */
static int arrived(const struct rig *rig, uint64_t len_bytes, int byte)
{
	const unsigned char *at = (unsigned char *)doorbell_region_pointer(rig->region) + HALF;
	uint64_t i;

	for (i = 0; i < HALF; i++)
		if (at[i] != (i < len_bytes ? byte : 0xee))
			return 0;
	return 1;
}

static void fill(const struct rig *rig, int byte)
{
	memset(doorbell_region_pointer(rig->region), byte, HALF);
	memset((unsigned char *)doorbell_region_pointer(rig->region) + HALF, 0xee, HALF);
}

static void exchange(const struct rig *rig, const struct messages *messages)
{
	static const uint64_t lens[] = {0, 1, EAGER, EAGER + 1, LONG};
	doorbell_message_ticket *sent, *received;
	doorbell_pending_send *pending;
	uint32_t at;

	for (at = 0; at < sizeof lens / sizeof *lens; at++) {
		const doorbell_slice from = {rig->region, 0, lens[at]}, to = {rig->region, HALF, lens[at] + 5};
		uint64_t len_bytes = 99;

		/* Queued on streams, in one call and in two. */
		fill(rig, (int)at + 1);
		WORKS(doorbell_message_queue_recv(messages->b, messages->receives, &to, 1, &received));
		WORKS(doorbell_message_queue_send(messages->a, messages->sends, &from, 1, &sent));
		NOTIFIES(doorbell_message_ticket, received);
		WORKS(doorbell_message_ticket_wait(received, &len_bytes, SOON_MS));
		EXPECT(len_bytes == lens[at] && arrived(rig, len_bytes, (int)at + 1));
		WORKS(doorbell_message_ticket_wait(sent, NULL, SOON_MS));
		len_bytes = 99;
		GIVES(1, doorbell_message_ticket_check(sent, &len_bytes));
		EXPECT(len_bytes == lens[at]);
		WORKS(doorbell_message_ticket_destroy(sent));
		WORKS(doorbell_message_ticket_destroy(received));
		fill(rig, (int)at + 51);
		WORKS(doorbell_message_queue_start_send(messages->a, messages->sends, &from, 1, &pending));
		WORKS(doorbell_stream_synchronize(messages->receives, SOON_MS));
		WORKS(doorbell_message_queue_recv_now(messages->b, &to, 1, &len_bytes, SOON_MS));
		EXPECT(len_bytes == lens[at] && arrived(rig, len_bytes, (int)at + 51));
		WORKS(doorbell_message_queue_wait_send(messages->a, messages->receives, pending, &sent));
		WORKS(doorbell_message_ticket_wait(sent, NULL, SOON_MS));
		WORKS(doorbell_message_ticket_destroy(sent));
		GIVES(DOORBELL_EHANDLE, doorbell_pending_send_destroy(pending));
	}
	{
		const doorbell_slice from[2] = {{rig->region, 0, 3}, {rig->region, 10, 4}};
		const doorbell_slice to = {rig->region, HALF, 7};
		uint64_t len_bytes = 99;

		/* From the thread, in several slices. */
		fill(rig, 9);
		WORKS(doorbell_stream_synchronize(messages->sends, SOON_MS));
		WORKS(doorbell_stream_synchronize(messages->receives, SOON_MS));
		WORKS(doorbell_message_queue_send_now(messages->a, from, 2, SOON_MS));
		WORKS(doorbell_message_queue_recv_now(messages->b, &to, 1, NULL, SOON_MS));
		EXPECT(arrived(rig, 7, 9));
		{
			/* A long message, which is not done before it is received, by the same thread. */
			const doorbell_slice whole = {rig->region, 0, LONG}, into = {rig->region, HALF, LONG};
			doorbell_posted_send *posted;

			fill(rig, 10);
			WORKS(doorbell_message_queue_start_send_now(messages->a, &whole, 1, &posted, SOON_MS));
			GIVES(DOORBELL_ETIMEOUT, doorbell_message_queue_wait_send_now(messages->a, posted, 20));
			WORKS(doorbell_message_queue_recv_now(messages->b, &into, 1, NULL, SOON_MS));
			WORKS(doorbell_message_queue_wait_send_now(messages->a, posted, SOON_MS));
			EXPECT(arrived(rig, LONG, 10));
			GIVES(DOORBELL_EFOREIGN, doorbell_message_queue_wait_send_now(messages->b, posted, SOON_MS));
			WORKS(doorbell_posted_send_destroy(posted));
			GIVES(DOORBELL_EHANDLE, doorbell_posted_send_destroy(posted));
		}
		{
			/* Whichever queue has a message. */
			doorbell_message_queue *both[2], *twice[2];
			size_t index = 9;

			both[0] = messages->a;
			both[1] = messages->b;
			twice[0] = twice[1] = messages->b;
			GIVES(DOORBELL_ETIMEOUT, doorbell_message_queues_recv_any_now(both, 2, &to, 1, &index, NULL, 20));
			EXPECT(index == 9);
			fill(rig, 11);
			WORKS(doorbell_message_queue_send_now(messages->a, from, 2, SOON_MS));
			WORKS(doorbell_message_queues_recv_any_now(both, 2, &to, 1, &index, &len_bytes, SOON_MS));
			EXPECT(index == 1 && len_bytes == 7 && arrived(rig, 7, 11));
			WORKS(doorbell_message_queue_send_now(messages->b, from, 2, SOON_MS));
			WORKS(doorbell_message_queues_recv_any_now(both, 2, &to, 1, NULL, NULL, SOON_MS));
			GIVES(DOORBELL_EBUSY, doorbell_message_queues_recv_any_now(twice, 2, &to, 1, NULL, NULL, SOON_MS));
			FAILS(DOORBELL_ERANGE, "`queues.len()`",
			      doorbell_message_queues_recv_any_now(both, 0, &to, 1, NULL, NULL, SOON_MS));
			len_bytes = 99;
		}
		GIVES(DOORBELL_ETIMEOUT, doorbell_message_queue_recv_now(messages->b, &to, 1, &len_bytes, 20));
		EXPECT(len_bytes == 99);
	}
}

static void refuses(const struct rig *rig, const struct messages *messages)
{
	const doorbell_slice from = {rig->region, 0, 9}, to = {rig->region, HALF, 8};
	const doorbell_slice four[4] = {{rig->region, 0, 1}, {rig->region, 0, 1}, {rig->region, 0, 1}, {rig->region, 0, 1}};
	doorbell_message_ticket *ticket;
	doorbell_pending_send *pending;
	char text[256];

	GIVES(DOORBELL_ERANGE, doorbell_message_queue_send(messages->a, messages->sends, four, 4, &ticket));
	EXPECT(ticket == NULL);
	FAILS(DOORBELL_EINVAL, "`stream`", doorbell_message_queue_recv(messages->b, NULL, &to, 1, &ticket));
	/* The wait belongs to the queue that has sent. */
	WORKS(doorbell_message_queue_start_send(messages->a, messages->sends, &to, 1, &pending));
	GIVES(DOORBELL_EFOREIGN, doorbell_message_queue_wait_send(messages->b, messages->sends, pending, &ticket));
	GIVES(DOORBELL_EHANDLE, doorbell_message_queue_wait_send(messages->a, messages->sends, pending, &ticket));
	WORKS(doorbell_message_queue_recv_now(messages->b, &to, 1, NULL, SOON_MS));
	/* Too long: an error of the receiver alone. */
	fill(rig, 1);
	WORKS(doorbell_message_queue_send(messages->a, messages->sends, &from, 1, NULL));
	WORKS(doorbell_message_queue_recv(messages->b, messages->receives, &to, 1, &ticket));
	FAILS(DOORBELL_EBOUNDS, "9", doorbell_message_ticket_wait(ticket, NULL, SOON_MS));
	GIVES(DOORBELL_EBOUNDS, doorbell_message_ticket_check(ticket, NULL));
	WORKS(doorbell_message_ticket_destroy(ticket));
	EXPECT(arrived(rig, 0, 0));
	EXPECT(doorbell_stream_take_fault(messages->receives, NULL, text, sizeof text) > 0);
	WORKS(doorbell_message_queue_send_now(messages->a, &from, 1, SOON_MS));
	GIVES(DOORBELL_EBOUNDS, doorbell_message_queue_recv_now(messages->b, &to, 1, NULL, SOON_MS));
	GIVES(0, doorbell_message_queue_failure(messages->b, NULL, text, sizeof text));
	WORKS(doorbell_message_queue_finish(messages->a, SOON_MS));
	WORKS(doorbell_message_queue_finish(messages->b, SOON_MS));
}

static void ends(const struct rig *rig, const struct messages *messages)
{
	const doorbell_slice to = {rig->region, HALF, 8};
	doorbell_message_ticket *ticket;
	doorbell_failure failure;
	uint32_t control = 99;
	char text[1024];

	EXPECT(doorbell_message_queue_path(messages->a, &control, text, sizeof text) >= 0);
	EXPECT(control <= DOORBELL_CONTROL_SYNC);
	if (control != DOORBELL_CONTROL_SYNC) {
		WORKS(doorbell_message_queue_recv(messages->b, messages->receives, &to, 1, &ticket));
		GIVES(0, doorbell_message_ticket_check(ticket, NULL));
		WORKS(doorbell_message_queue_abort(messages->b));
		GIVES(DOORBELL_EWORK, doorbell_message_ticket_wait(ticket, NULL, SOON_MS));
		WORKS(doorbell_message_ticket_destroy(ticket));
	} else
		WORKS(doorbell_message_queue_abort(messages->b));
	EXPECT(doorbell_message_queue_failure(messages->b, &failure, text, sizeof text) > 0);
	EXPECT(failure.cause == DOORBELL_CAUSE_ABORTED);
	GIVES(DOORBELL_EWORK, doorbell_message_queue_send_now(messages->b, &to, 1, SOON_MS));
	WORKS(doorbell_message_queue_destroy(messages->a));
	WORKS(doorbell_message_queue_destroy(messages->b));
	GIVES(DOORBELL_EHANDLE, doorbell_message_queue_abort(messages->b));
	WORKS(doorbell_message_queue_destroy(NULL));
	WORKS(doorbell_pending_send_destroy(NULL));
	WORKS(doorbell_posted_send_destroy(NULL));
	WORKS(doorbell_message_ticket_destroy(NULL));
	WORKS(doorbell_stream_destroy(messages->sends));
	WORKS(doorbell_stream_destroy(messages->receives));
}

int main(void)
{
	struct rig rig;
	struct messages messages;

	rig_make(&rig);
	make(&rig, &messages);
	connect(&messages);
	exchange(&rig, &messages);
	refuses(&rig, &messages);
	ends(&rig, &messages);
	rig_end(&rig);
	puts("done");
	return 0;
}
