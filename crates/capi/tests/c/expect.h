/* Checks of the test programs: the first that fails says where, and ends the program. */
#ifndef EXPECT_H
#define EXPECT_H

#include <doorbell.h>

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define SOON_MS 20000

#define EXPECT(condition)                                                                                    \
	do {                                                                                                 \
		if (!(condition)) {                                                                          \
			fprintf(stderr, "%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition,       \
				doorbell_last_error());                                                      \
			exit(1);                                                                             \
		}                                                                                            \
	} while (0)

/* The call gives this number. */
#define GIVES(expected, call)                                                                                \
	do {                                                                                                 \
		const int code_ = (call);                                                                    \
		if (code_ != (expected)) {                                                                   \
			fprintf(stderr, "%s:%d: %s gave %d (%s), not %s; last error: %s\n", __FILE__,        \
				__LINE__, #call, code_, doorbell_error_name(code_), #expected,               \
				doorbell_last_error());                                                      \
			exit(1);                                                                             \
		}                                                                                            \
	} while (0)

/* The call fails with this code, and its text has these words. */
#define FAILS(code, words, call)                                                                             \
	do {                                                                                                 \
		GIVES(code, call);                                                                           \
		if (!strstr(doorbell_last_error(), words)) {                                                 \
			fprintf(stderr, "%s:%d: %s: \"%s\" has no \"%s\"\n", __FILE__, __LINE__, #call,      \
				doorbell_last_error(), words);                                               \
			exit(1);                                                                             \
		}                                                                                            \
	} while (0)

#define WORKS(call) GIVES(0, call)

/* The notice of a ticket of that type comes. */
#define NOTIFIES(type, ticket)                                                                               \
	do {                                                                                                 \
		struct pollfd readable_ = {.fd = eventfd(0, EFD_NONBLOCK), .events = POLLIN};                \
		EXPECT(readable_.fd >= 0);                                                                   \
		WORKS(type##_notify(ticket, readable_.fd));                                                  \
		EXPECT(poll(&readable_, 1, SOON_MS) == 1);                                                   \
		close(readable_.fd);                                                                         \
	} while (0)

/* A device with a pair of connected endpoints, a region and a stream. */
struct rig {
	doorbell_device *device;
	doorbell_domain *domain;
	doorbell_region *region;
	doorbell_endpoint *a;
	doorbell_endpoint *b;
	doorbell_stream *stream;
};

enum { RIG_BYTES = 16384 };

static inline void rig_connect(struct rig *rig)
{
	doorbell_address a, b;
	WORKS(doorbell_endpoint_address(rig->a, &a));
	WORKS(doorbell_endpoint_address(rig->b, &b));
	WORKS(doorbell_endpoint_connect(rig->a, &b));
	WORKS(doorbell_endpoint_connect(rig->b, &a));
	GIVES(1, doorbell_endpoint_is_connected(rig->a));
}

/* The device to test, which may be any that the library opens. */
static inline const char *rig_device_name(void)
{
	const char *name = getenv("DOORBELL_TEST_DEVICE");
	return name ? name : "softcx";
}

static inline void rig_make(struct rig *rig)
{
	WORKS(doorbell_device_open(rig_device_name(), &rig->device));
	WORKS(doorbell_domain_create(rig->device, &rig->domain));
	WORKS(doorbell_region_alloc(rig->domain, RIG_BYTES, DOORBELL_ACCESS_ALL, &rig->region));
	WORKS(doorbell_endpoint_create(rig->domain, NULL, &rig->a));
	WORKS(doorbell_endpoint_create(rig->domain, NULL, &rig->b));
	WORKS(doorbell_stream_create_host("test", 0, &rig->stream));
	rig_connect(rig);
}

static inline void rig_end(struct rig *rig)
{
	/* What others need stays: the order is the wrong one on purpose. */
	WORKS(doorbell_device_close(rig->device));
	WORKS(doorbell_domain_destroy(rig->domain));
	WORKS(doorbell_region_destroy(rig->region));
	WORKS(doorbell_endpoint_destroy(rig->a));
	WORKS(doorbell_stream_destroy(rig->stream));
	WORKS(doorbell_endpoint_destroy(rig->b));
}

#endif
