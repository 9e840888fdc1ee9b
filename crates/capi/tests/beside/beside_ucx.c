/* UCX opens the device and registers memory; this library uses the same context, protection domain and registration beside it. Both put into one
 * buffer, which this library does not register. */
#define _GNU_SOURCE

#include "registrations.h"

#include <ucp/api/ucp.h>

enum { BYTES = 1 << 16 };

#define UCX(call)                                                                                            \
	do {                                                                                                 \
		const ucs_status_t status_ = (call);                                                         \
		if (status_ != UCS_OK) {                                                                     \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call,                        \
				ucs_status_string(status_));                                                 \
			exit(1);                                                                             \
		}                                                                                            \
	} while (0)

struct ucx {
	ucp_context_h context;
	ucp_worker_h worker;
	ucp_ep_h self;
	ucp_mem_h memory;
	ucp_rkey_h rkey;
};

static void finish(struct ucx *ucx, ucs_status_ptr_t request)
{
	EXPECT(!UCS_PTR_IS_ERR(request));
	if (!request)
		return;
	while (ucp_request_check_status(request) == UCS_INPROGRESS)
		ucp_worker_progress(ucx->worker);
	UCX(ucp_request_check_status(request));
	ucp_request_free(request);
}

static void ucx_begin(struct ucx *ucx, uint8_t *bytes)
{
	const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA};
	const ucp_worker_params_t worker = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
					    .thread_mode = UCS_THREAD_MODE_SINGLE};
	const ucp_mem_map_params_t map = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
					  .address = bytes, .length = BYTES};
	ucp_ep_params_t ep = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS};
	ucp_config_t *config;
	ucp_address_t *address;
	size_t len;
	void *packed;

	UCX(ucp_config_read(NULL, NULL, &config));
	UCX(ucp_init(&params, config, &ucx->context));
	ucp_config_release(config);
	UCX(ucp_worker_create(ucx->context, &worker, &ucx->worker));
	UCX(ucp_worker_get_address(ucx->worker, &address, &len));
	ep.address = address;
	UCX(ucp_ep_create(ucx->worker, &ep, &ucx->self));
	ucp_worker_release_address(ucx->worker, address);
	UCX(ucp_mem_map(ucx->context, &map, &ucx->memory));
	UCX(ucp_rkey_pack(ucx->context, ucx->memory, &packed, &len));
	UCX(ucp_ep_rkey_unpack(ucx->self, packed, &ucx->rkey));
	ucp_rkey_buffer_release(packed);
}

/* A put of UCX's own over the device, from the first half of the buffer into the second. */
static void ucx_put(struct ucx *ucx, uint8_t *bytes, size_t len)
{
	const ucp_request_param_t params = {0};

	finish(ucx, ucp_put_nbx(ucx->self, bytes, len, (uintptr_t)bytes + BYTES / 2, ucx->rkey, &params));
	finish(ucx, ucp_ep_flush_nbx(ucx->self, &params));
}

static void ucx_end(struct ucx *ucx)
{
	const ucp_request_param_t params = {0};

	ucp_rkey_destroy(ucx->rkey);
	finish(ucx, ucp_ep_close_nbx(ucx->self, &params));
	UCX(ucp_mem_unmap(ucx->context, ucx->memory));
	ucp_worker_destroy(ucx->worker);
	ucp_cleanup(ucx->context);
}

int main(void)
{
	uint8_t *const bytes = aligned_alloc(4096, BYTES);
	struct ucx ucx;
	struct ibv_mr *mr;
	doorbell_device *device;
	doorbell_domain *domain;
	doorbell_region *region;
	doorbell_endpoint *a, *b;
	doorbell_address address;
	doorbell_completion completion;
	doorbell_remote remote;
	const int rights = DOORBELL_ACCESS_LOCAL_WRITE | DOORBELL_ACCESS_REMOTE_WRITE;
	int of_buffer = 0, before;

	EXPECT(bytes);
	memset(bytes, 0, BYTES);
	ucx_begin(&ucx, bytes);
	memset(bytes, 0x11, 4096);
	ucx_put(&ucx, bytes, 4096);
	EXPECT(bytes[BYTES / 2] == 0x11 && bytes[BYTES / 2 + 4095] == 0x11);
	mr = registration_of(bytes, &of_buffer);
	before = registrations;

	WORKS(doorbell_device_adopt(mr->context, NULL, NULL, NULL, &device));
	WORKS(doorbell_domain_adopt(device, mr->pd, NULL, NULL, &domain));
	WORKS(doorbell_region_adopt(domain, mr, (uint32_t)rights, DOORBELL_REGION_HOST, NULL, NULL, &region));
	WORKS(doorbell_endpoint_create(domain, NULL, &a));
	WORKS(doorbell_endpoint_create(domain, NULL, &b));
	WORKS(doorbell_endpoint_address(a, &address));
	WORKS(doorbell_endpoint_connect(b, &address));
	WORKS(doorbell_endpoint_address(b, &address));
	WORKS(doorbell_endpoint_connect(a, &address));
	WORKS(doorbell_region_remote(region, &remote));
	for (int step = 0; step < 100; step++) {
		/* A put of each in turn, over the same device and with the same registration. */
		const doorbell_slice from = {region, 0, 4096};
		const doorbell_work write = doorbell_work_write(&from, 1, remote.addr + BYTES / 2 + 8192, remote.rkey);

		memset(bytes, step, 4096);
		WORKS(doorbell_post_send(a, &write, NULL));
		ucx_put(&ucx, bytes, 4096);
		WORKS(doorbell_wait_cq(a, DOORBELL_QUEUE_SEND, SOON_MS, &completion));
		EXPECT(!memcmp(bytes, bytes + BYTES / 2, 4096) && !memcmp(bytes, bytes + BYTES / 2 + 8192, 4096));
	}
	printf("%d registrations by UCX, %d of them of the buffer; %d more by this library\n", before, of_buffer,
	       registrations - before);
	EXPECT(registrations == before);

	WORKS(doorbell_endpoint_destroy(a));
	WORKS(doorbell_endpoint_destroy(b));
	WORKS(doorbell_region_destroy(region));
	WORKS(doorbell_domain_destroy(domain));
	WORKS(doorbell_device_close(device));
	ucx_end(&ucx);
	free(bytes);
	puts("done");
	return 0;
}
