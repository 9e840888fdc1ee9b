/*
 * The first program: a kernel fills a buffer, the stream sends it, and the receiving side waits for it on the stream. The
 * CPU is free from the first queued call to the last.
 */
#include <doorbell.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(int code)
{
	if (code < 0) {
		fprintf(stderr, "%s: %s\n", doorbell_error_name(code), doorbell_last_error());
		exit(1);
	}
}

static void fill(void *buffer) /* a kernel; on a GPU a __global__ function */
{
	memset(buffer, 42, 64);
}

int main(void)
{
	doorbell_device *device;
	doorbell_domain *domain;
	doorbell_endpoint *a, *b;
	doorbell_address address_a, address_b;
	doorbell_region *source, *target;
	doorbell_stream *stream;
	char path[256];

	check(doorbell_device_open("softcx", &device));
	check(doorbell_domain_create(device, &domain));
	check(doorbell_endpoint_create(domain, NULL, &a));
	check(doorbell_endpoint_create(domain, NULL, &b));
	check(doorbell_endpoint_address(a, &address_a));
	check(doorbell_endpoint_address(b, &address_b));
	check(doorbell_endpoint_connect(a, &address_b));
	check(doorbell_endpoint_connect(b, &address_a));
	check(doorbell_region_alloc(domain, 4096, 0, &source));
	check(doorbell_region_alloc(domain, 4096, DOORBELL_ACCESS_LOCAL_WRITE, &target));
	check(doorbell_stream_create_host("compute", 0, &stream));

	const doorbell_slice from = {source, 0, 64}, to = {target, 0, 64};
	const doorbell_work send = doorbell_work_send(&from, 1);
	check(doorbell_post_recv(b, 1, &to, 1, NULL));
	check(doorbell_stream_launch(stream, fill, doorbell_region_pointer(source)));
	check(doorbell_stream_queue_send(stream, a, &send, NULL));
	check(doorbell_stream_wait_cq(stream, a, DOORBELL_QUEUE_SEND, DOORBELL_DEFAULT_TIMEOUT, NULL));
	check(doorbell_stream_wait_cq(stream, b, DOORBELL_QUEUE_RECV, DOORBELL_DEFAULT_TIMEOUT, NULL));

	/* Nothing above has waited. Now we do, to look at the result. */
	check(doorbell_stream_synchronize(stream, 5000));
	const int arrived = memcmp(doorbell_region_pointer(source), doorbell_region_pointer(target), 64) == 0;
	check(doorbell_endpoint_path(a, NULL, path, sizeof(path)));
	printf("64 bytes %s; control path: %s\n", arrived ? "arrived" : "are wrong", path);

	doorbell_stream_destroy(stream);
	doorbell_region_destroy(target);
	doorbell_region_destroy(source);
	doorbell_endpoint_destroy(b);
	doorbell_endpoint_destroy(a);
	doorbell_domain_destroy(domain);
	doorbell_device_close(device);
	return arrived ? 0 : 1;
}
