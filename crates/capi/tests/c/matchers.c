/* Matchers: two ranks of this process and each of them with itself, by streams and by the thread, and what is refused. */
#include "expect.h"

enum { EAGER = 256, LONG = 5000, HALF = RIG_BYTES / 2 };

struct matchers {
	doorbell_message_queue *queues[2];
	doorbell_matcher *a, *b;
	doorbell_stream *sends, *receives;
};

static void connect_queues(const struct rig *rig, struct matchers *matchers, const doorbell_message_config *config)
{
	doorbell_message_address addresses[2];
	int i;

	for (i = 0; i < 2; i++) {
		WORKS(doorbell_message_queue_create(rig->domain, config, &matchers->queues[i]));
		WORKS(doorbell_message_queue_address(matchers->queues[i], &addresses[i]));
	}
	for (i = 0; i < 2; i++)
		WORKS(doorbell_message_queue_connect(matchers->queues[i], &addresses[1 - i]));
}

static void make(const struct rig *rig, struct matchers *matchers)
{
	doorbell_matcher_config config;
	doorbell_message_config messages;
	doorbell_endpoint_config endpoint;
	doorbell_message_queue *list[2], *alone;
	doorbell_message_address address;
	doorbell_matcher *none;

	WORKS(doorbell_message_config_init(&messages, sizeof messages));
	WORKS(doorbell_endpoint_config_init(&endpoint, sizeof endpoint));
	endpoint.wait_timeout_ms = SOON_MS;
	endpoint.room_timeout_ms = SOON_MS;
	messages.eager_bytes = EAGER;
	messages.slots = 4;
	messages.endpoint = &endpoint;
	WORKS(doorbell_matcher_config_init(&config, sizeof config));
	EXPECT(config.struct_size == sizeof config && config.unexpected == 64 && config.receives == 256);
	EXPECT(!config.reserved && !config.messages);
	config.messages = &messages;
	connect_queues(rig, matchers, &messages);
	list[0] = list[1] = matchers->queues[0];
	FAILS(DOORBELL_EINVAL, "twice", doorbell_matcher_create(rig->domain, list, 2, &config, &none));
	EXPECT(none == NULL);
	list[0] = NULL;
	/* The queues are the caller's after DOORBELL_EINVAL, and destroyed after any other code, whatever part is refused. */
	WORKS(doorbell_message_queue_create(rig->domain, NULL, &alone));
	list[1] = alone;
	config.struct_size = 1;
	FAILS(DOORBELL_EINVAL, "`config`", doorbell_matcher_create(rig->domain, list, 2, &config, &none));
	config.struct_size = sizeof config;
	EXPECT(doorbell_message_queue_address(alone, &address) == DOORBELL_OK);
	config.reserved = 1;
	FAILS(DOORBELL_ERANGE, "`reserved`", doorbell_matcher_create(rig->domain, list, 2, &config, &none));
	config.reserved = 0;
	GIVES(DOORBELL_EHANDLE, doorbell_message_queue_abort(alone));
	WORKS(doorbell_message_queue_create(rig->domain, NULL, &alone));
	list[1] = alone;
	config.receives = 0;
	FAILS(DOORBELL_ERANGE, "receives", doorbell_matcher_create(rig->domain, list, 2, &config, &none));
	config.receives = 256;
	GIVES(DOORBELL_EHANDLE, doorbell_message_queue_abort(alone));
	WORKS(doorbell_message_queue_create(rig->domain, NULL, &alone));
	list[1] = alone;
	FAILS(DOORBELL_ESTATE, "not connected", doorbell_matcher_create(rig->domain, list, 2, &config, &none));
	GIVES(DOORBELL_EHANDLE, doorbell_message_queue_abort(alone));
	list[1] = NULL;
	FAILS(DOORBELL_ESTATE, "more than one", doorbell_matcher_create(rig->domain, list, 2, NULL, &none));
	list[1] = matchers->queues[0];
	WORKS(doorbell_matcher_create(rig->domain, list, 2, &config, &matchers->a));
	list[0] = matchers->queues[1];
	list[1] = NULL;
	WORKS(doorbell_matcher_create(rig->domain, list, 2, &config, &matchers->b));
	WORKS(doorbell_stream_create_host("sends", 0, &matchers->sends));
	WORKS(doorbell_stream_create_host("receives", 0, &matchers->receives));
}

static void fill(const struct rig *rig, int byte)
{
	memset(doorbell_region_pointer(rig->region), byte, HALF);
	memset((unsigned char *)doorbell_region_pointer(rig->region) + HALF, 0xee, HALF);
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

static int is_envelope(const doorbell_envelope *found, uint32_t peer, uint32_t tag, uint64_t len_bytes)
{
	return found->peer == peer && found->tag == tag && found->len_bytes == len_bytes;
}

static void exchange(const struct rig *rig, const struct matchers *matchers)
{
	static const uint64_t lens[] = {0, 1, EAGER, EAGER + 1, LONG};
	doorbell_envelope envelope;
	doorbell_message_ticket *sent;
	doorbell_match_ticket *received;
	doorbell_pending_send *pending;
	doorbell_posted_send *posted;
	uint32_t at;

	for (at = 0; at < sizeof lens / sizeof *lens; at++) {
		const doorbell_slice from = {rig->region, 0, lens[at]}, to = {rig->region, HALF, LONG + 5};

		/* On streams: a receive of any message, then one of a tag for a message that waits. */
		fill(rig, (int)at + 1);
		WORKS(doorbell_matcher_recv(matchers->b, matchers->receives, DOORBELL_ANY_PEER, 0, DOORBELL_ANY_TAG, &to, 1,
					    &received));
		WORKS(doorbell_matcher_send(matchers->a, matchers->sends, 1, 7 + at, &from, 1, &sent));
		NOTIFIES(doorbell_match_ticket, received);
		WORKS(doorbell_match_ticket_wait(received, &envelope, SOON_MS));
		EXPECT(is_envelope(&envelope, 0, 7 + at, lens[at]) && arrived(rig, lens[at], (int)at + 1));
		WORKS(doorbell_message_ticket_wait(sent, NULL, SOON_MS));
		memset(&envelope, 0xff, sizeof envelope);
		GIVES(1, doorbell_match_ticket_check(received, &envelope));
		EXPECT(is_envelope(&envelope, 0, 7 + at, lens[at]));
		WORKS(doorbell_message_ticket_destroy(sent));
		WORKS(doorbell_match_ticket_destroy(received));
		GIVES(DOORBELL_EHANDLE, doorbell_match_ticket_check(received, NULL));
		fill(rig, (int)at + 51);
		WORKS(doorbell_matcher_start_send(matchers->a, matchers->sends, 1, 0x70 + at, &from, 1, &pending));
		do
			memset(&envelope, 0, sizeof envelope);
		while (doorbell_matcher_probe_now(matchers->b, 0, 0x70, 0xf, &envelope) == 0);
		EXPECT(is_envelope(&envelope, 0, 0x70 + at, lens[at]));
		GIVES(0, doorbell_matcher_probe_now(matchers->b, 0, 0x80, 0xf, NULL));
		GIVES(0, doorbell_matcher_probe_now(matchers->b, 1, 0, DOORBELL_ANY_TAG, NULL));
		WORKS(doorbell_matcher_recv_now(matchers->b, 0, 0x70 + at, 0, &to, 1, &envelope, SOON_MS));
		EXPECT(is_envelope(&envelope, 0, 0x70 + at, lens[at]) && arrived(rig, lens[at], (int)at + 51));
		WORKS(doorbell_matcher_wait_send(matchers->a, matchers->receives, pending, NULL));
		WORKS(doorbell_stream_synchronize(matchers->receives, SOON_MS));
		GIVES(DOORBELL_EHANDLE, doorbell_pending_send_destroy(pending));
	}
	{
		const doorbell_slice from[2] = {{rig->region, 0, 3}, {rig->region, 10, 4}};
		const doorbell_slice to = {rig->region, HALF, LONG}, whole = {rig->region, 0, LONG};

		/* From the thread, to the other one and to itself. */
		WORKS(doorbell_stream_synchronize(matchers->sends, SOON_MS));
		fill(rig, 9);
		WORKS(doorbell_matcher_send_now(matchers->a, 1, 1, from, 2, SOON_MS));
		WORKS(doorbell_matcher_recv_now(matchers->b, DOORBELL_ANY_PEER, 1, 0, &to, 1, NULL, SOON_MS));
		EXPECT(arrived(rig, 7, 9));
		fill(rig, 10);
		WORKS(doorbell_matcher_start_send_now(matchers->a, 0, 2, &whole, 1, &posted, SOON_MS));
		GIVES(DOORBELL_ETIMEOUT, doorbell_matcher_wait_send_now(matchers->a, posted, 20));
		WORKS(doorbell_matcher_recv_now(matchers->a, 0, 2, 0, &to, 1, &envelope, SOON_MS));
		EXPECT(is_envelope(&envelope, 0, 2, LONG) && arrived(rig, LONG, 10));
		WORKS(doorbell_matcher_wait_send_now(matchers->a, posted, SOON_MS));
		GIVES(DOORBELL_EFOREIGN, doorbell_matcher_wait_send_now(matchers->b, posted, SOON_MS));
		WORKS(doorbell_posted_send_destroy(posted));
	}
}

static void refuses(const struct rig *rig, const struct matchers *matchers)
{
	const doorbell_slice from = {rig->region, 0, 9}, to = {rig->region, HALF, 8}, outside = {rig->region, RIG_BYTES, 1};
	doorbell_match_ticket *received;
	doorbell_message_ticket *sent;
	char text[512];

	FAILS(DOORBELL_ERANGE, "`peer`", doorbell_matcher_send(matchers->a, matchers->sends, 2, 0, &from, 1, &sent));
	EXPECT(sent == NULL);
	FAILS(DOORBELL_ERANGE, "`peer`",
	      doorbell_matcher_recv(matchers->a, matchers->receives, 2, 0, 0, &to, 1, &received));
	EXPECT(received == NULL);
	FAILS(DOORBELL_ERANGE, "`peer`", doorbell_matcher_exclude(matchers->a, 2));
	FAILS(DOORBELL_ERANGE, "`peer`", doorbell_matcher_failure(matchers->a, 2, NULL, NULL, 0));
	GIVES(DOORBELL_EBOUNDS, doorbell_matcher_recv_now(matchers->a, 0, 0, 0, &outside, 1, NULL, 20));
	GIVES(DOORBELL_ETIMEOUT, doorbell_matcher_recv_now(matchers->a, 0, 0, 0, &to, 1, NULL, 20));
	/* Too long for its memory. */
	WORKS(doorbell_matcher_recv(matchers->b, matchers->receives, 0, 3, 0, &to, 1, &received));
	GIVES(0, doorbell_match_ticket_check(received, NULL));
	WORKS(doorbell_matcher_send(matchers->a, matchers->sends, 1, 3, &from, 1, NULL));
	FAILS(DOORBELL_EBOUNDS, "9 bytes", doorbell_match_ticket_wait(received, NULL, SOON_MS));
	WORKS(doorbell_match_ticket_destroy(received));
	GIVES(DOORBELL_EASYNC, doorbell_stream_synchronize(matchers->receives, SOON_MS));
	EXPECT(doorbell_stream_take_fault(matchers->receives, NULL, text, sizeof text) > 0 && strstr(text, "9 bytes"));
	/* Cancelled. */
	WORKS(doorbell_matcher_recv(matchers->b, matchers->receives, 0, 3, 0, &to, 1, &received));
	GIVES(DOORBELL_EFOREIGN, doorbell_matcher_cancel(matchers->a, received));
	GIVES(1, doorbell_matcher_cancel(matchers->b, received));
	GIVES(0, doorbell_matcher_cancel(matchers->b, received));
	FAILS(DOORBELL_ESTATE, "cancelled", doorbell_match_ticket_wait(received, NULL, SOON_MS));
	WORKS(doorbell_match_ticket_destroy(received));
	EXPECT(doorbell_stream_take_fault(matchers->receives, NULL, text, sizeof text) > 0 && strstr(text, "cancelled"));
	WORKS(doorbell_stream_synchronize(matchers->sends, SOON_MS));
}

static void ends(const struct rig *rig, const struct matchers *matchers)
{
	const doorbell_slice to = {rig->region, HALF, 8};
	doorbell_match_ticket *received;
	doorbell_failure failure;
	char text[256];

	WORKS(doorbell_matcher_finish(matchers->a, SOON_MS));
	WORKS(doorbell_matcher_finish(matchers->b, SOON_MS));
	WORKS(doorbell_matcher_exclude(matchers->a, 1));
	GIVES(0, doorbell_matcher_failure(matchers->a, 1, &failure, text, sizeof text));
	WORKS(doorbell_matcher_recv(matchers->b, matchers->receives, 0, 3, 0, &to, 1, &received));
	WORKS(doorbell_matcher_destroy(matchers->b));
	FAILS(DOORBELL_ESTATE, "dropped", doorbell_match_ticket_wait(received, NULL, SOON_MS));
	WORKS(doorbell_match_ticket_destroy(received));
	GIVES(DOORBELL_EHANDLE, doorbell_matcher_finish(matchers->b, SOON_MS));
	WORKS(doorbell_matcher_destroy(matchers->a));
	WORKS(doorbell_matcher_destroy(NULL));
	WORKS(doorbell_match_ticket_destroy(NULL));
	WORKS(doorbell_stream_destroy(matchers->sends));
	WORKS(doorbell_stream_destroy(matchers->receives));
}

int main(void)
{
	struct matchers matchers;
	struct rig rig;

	rig_make(&rig);
	make(&rig, &matchers);
	exchange(&rig, &matchers);
	refuses(&rig, &matchers);
	ends(&rig, &matchers);
	rig_end(&rig);
	puts("done");
	return 0;
}
