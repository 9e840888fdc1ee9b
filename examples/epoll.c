/*
 * Waits by epoll: the program has one loop for its timer and for its transfers. Tickets write to an eventfd, which the loop
 * waits for beside its other descriptors. No thread of the program waits in the library.
 *
 *     epoll [DEVICE]
 */
#define _GNU_SOURCE
#include <doorbell.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum { TRANSFERS = 8, BYTES = 4096 };

static void check(int code)
{
	if (code < 0) {
		fprintf(stderr, "%s: %s\n", doorbell_error_name(code), doorbell_last_error());
		exit(1);
	}
}

static void need(int holds, const char *call)
{
	if (!holds) {
		perror(call);
		exit(1);
	}
}

static void watch(int loop, int fd)
{
	struct epoll_event event = {.events = EPOLLIN, .data = {.fd = fd}};

	need(epoll_ctl(loop, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
}

int main(int argc, char **argv)
{
	const struct itimerspec once = {.it_value = {.tv_nsec = 1000000}};
	doorbell_device *device;
	doorbell_domain *domain;
	doorbell_endpoint *a, *b;
	doorbell_address address_a, address_b;
	doorbell_region *source, *target;
	doorbell_ticket *received[TRANSFERS] = {0};
	int complete = 0, timer_runs = 1;

	check(doorbell_device_open(argc > 1 ? argv[1] : "softcx", &device));
	check(doorbell_domain_create(device, &domain));
	check(doorbell_endpoint_create(domain, NULL, &a));
	check(doorbell_endpoint_create(domain, NULL, &b));
	check(doorbell_endpoint_address(a, &address_a));
	check(doorbell_endpoint_address(b, &address_b));
	check(doorbell_endpoint_connect(a, &address_b));
	check(doorbell_endpoint_connect(b, &address_a));
	check(doorbell_region_alloc(domain, TRANSFERS * BYTES, 0, &source));
	check(doorbell_region_alloc(domain, TRANSFERS * BYTES, DOORBELL_ACCESS_LOCAL_WRITE, &target));
	memset(doorbell_region_pointer(source), 42, TRANSFERS * BYTES);

	const int loop = epoll_create1(EPOLL_CLOEXEC);
	const int transfers = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	const int timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);

	need(loop >= 0 && transfers >= 0 && timer >= 0, "descriptors");
	need(timerfd_settime(timer, 0, &once, NULL) == 0, "timerfd_settime");
	watch(loop, transfers);
	watch(loop, timer);

	/* Receives whose tickets write to the eventfd. The timer starts the sends. */
	for (uint64_t i = 0; i < TRANSFERS; i++) {
		const doorbell_slice to = {target, i * BYTES, BYTES};

		check(doorbell_post_recv(b, i, &to, 1, &received[i]));
		check(doorbell_ticket_notify(received[i], transfers));
	}
	while (complete < TRANSFERS) {
		struct epoll_event event;
		uint64_t count = 0;

		const int ready = epoll_wait(loop, &event, 1, 20000);

		if (ready == 0) {
			fprintf(stderr, "%d of %d transfers within 20 s\n", complete, TRANSFERS);
			return 1;
		}
		if (ready < 0 && errno == EINTR)
			continue;
		need(ready == 1, "epoll_wait");
		if (read(event.data.fd, &count, sizeof count) != sizeof count)
			continue;
		if (event.data.fd == timer) {
			for (uint64_t i = 0; i < TRANSFERS; i++) {
				const doorbell_slice from = {source, i * BYTES, BYTES};
				const doorbell_work send = doorbell_work_send(&from, 1);

				check(doorbell_post_send(a, &send, NULL));
			}
			timer_runs = 0;
			continue;
		}
		/* The count is that of tickets that are over, and not which: look at all. */
		for (int i = 0; i < TRANSFERS; i++) {
			if (!received[i] || doorbell_ticket_status(received[i], NULL) < DOORBELL_STATUS_COMPLETE)
				continue;
			/* It is over: the cause of a failure is what a wait returns. */
			check(doorbell_ticket_wait(received[i], 0));
			check(doorbell_ticket_destroy(received[i]));
			received[i] = NULL;
			complete++;
		}
	}

	const int arrived = !memcmp(doorbell_region_pointer(source), doorbell_region_pointer(target), TRANSFERS * BYTES);

	printf("%d transfers of %d bytes %s\n", TRANSFERS, BYTES, arrived && !timer_runs ? "arrived" : "are wrong");
	close(timer);
	close(transfers);
	close(loop);
	doorbell_region_destroy(target);
	doorbell_region_destroy(source);
	doorbell_endpoint_destroy(b);
	doorbell_endpoint_destroy(a);
	doorbell_domain_destroy(domain);
	doorbell_device_close(device);
	return arrived ? 0 : 1;
}
