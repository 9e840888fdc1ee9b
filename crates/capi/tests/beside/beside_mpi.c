/* An MPI window on memory that UCX registers; this library uses the same context, protection domain and registration beside it. Two ranks put into each
 * other's buffer in turn, by MPI_Put and by this library, which registers nothing. */
#define _GNU_SOURCE

#include "registrations.h"

#include <mpi.h>

enum { QUARTER = 1 << 14, BYTES = 4 * QUARTER };

#define MPI(call) EXPECT((call) == MPI_SUCCESS)

static void exchange(const void *own, void *others, size_t len, int other)
{
	MPI(MPI_Sendrecv(own, (int)len, MPI_BYTE, other, 0, others, (int)len, MPI_BYTE, other, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
}

static void is_filled(const uint8_t *bytes, int value)
{
	for (int i = 0; i < QUARTER; i++)
		EXPECT(bytes[i] == (uint8_t)value);
}

int main(int count, char **arguments)
{
	uint8_t *const bytes = aligned_alloc(4096, BYTES);
	const int rights = DOORBELL_ACCESS_LOCAL_WRITE | DOORBELL_ACCESS_REMOTE_WRITE;
	doorbell_device *device;
	doorbell_domain *domain;
	doorbell_region *region;
	doorbell_endpoint *endpoint;
	doorbell_address own, others;
	doorbell_remote here, there;
	doorbell_completion completion;
	struct ibv_mr *mr;
	MPI_Win window;
	int rank, ranks, of_buffer, before;

	EXPECT(bytes);
	memset(bytes, 0, BYTES);
	MPI(MPI_Init(&count, &arguments));
	MPI(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
	MPI(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
	EXPECT(ranks == 2);
	MPI(MPI_Win_create(bytes, BYTES, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &window));
	mr = registration_of(bytes, &of_buffer);
	before = registrations;

	WORKS(doorbell_device_adopt(mr->context, NULL, NULL, NULL, &device));
	WORKS(doorbell_domain_adopt(device, mr->pd, NULL, NULL, &domain));
	WORKS(doorbell_region_adopt(domain, mr, (uint32_t)rights, DOORBELL_REGION_HOST, NULL, NULL, &region));
	WORKS(doorbell_endpoint_create(domain, NULL, &endpoint));
	WORKS(doorbell_endpoint_address(endpoint, &own));
	exchange(&own, &others, sizeof(own), !rank);
	WORKS(doorbell_endpoint_connect(endpoint, &others));
	WORKS(doorbell_region_remote(region, &here));
	exchange(&here, &there, sizeof(here), !rank);
	for (int step = 1; step <= 100; step++) {
		/* MPI's put reads the first quarter and writes the third, the library's reads the second and writes the last. */
		const doorbell_slice from = {region, QUARTER, QUARTER};
		const doorbell_work write = doorbell_work_write(&from, 1, there.addr + 3 * QUARTER, there.rkey);

		memset(bytes, step + rank, QUARTER);
		memset(bytes + QUARTER, step + rank + 100, QUARTER);
		MPI(MPI_Win_fence(0, window));
		WORKS(doorbell_post_send(endpoint, &write, NULL));
		MPI(MPI_Put(bytes, QUARTER, MPI_BYTE, !rank, 2 * QUARTER, QUARTER, MPI_BYTE, window));
		WORKS(doorbell_wait_cq(endpoint, DOORBELL_QUEUE_SEND, SOON_MS, &completion));
		/* After it both ranks' writes have arrived: the library's had completed before. */
		MPI(MPI_Win_fence(0, window));
		is_filled(bytes + 2 * QUARTER, step + !rank);
		is_filled(bytes + 3 * QUARTER, step + !rank + 100);
	}
	/* UCX registers memory for its own protocols at any time. */
	for (int i = before; i < registrations; i++)
		EXPECT((uint8_t *)registered[i]->addr >= bytes + BYTES || (uint8_t *)registered[i]->addr + registered[i]->length <= bytes);
	printf("rank %d: the window registered by MPI alone, %d times\n", rank, of_buffer);

	WORKS(doorbell_endpoint_destroy(endpoint));
	WORKS(doorbell_region_destroy(region));
	WORKS(doorbell_domain_destroy(domain));
	WORKS(doorbell_device_close(device));
	MPI(MPI_Win_free(&window));
	MPI(MPI_Finalize());
	free(bytes);
	return 0;
}
