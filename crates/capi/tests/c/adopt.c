/* Objects of libibverbs that this program makes, used by the library beside it. Where there is no verbs device: what the calls refuse. */
#define _GNU_SOURCE

#include "expect.h"

#include <stdint.h>
#include <unistd.h>

/* The order in which the library has released what it was given. */
static char released[8];

static void note(void *argument)
{
	const size_t len = strlen(released);

	released[len] = *(const char *)argument;
	released[len + 1] = 0;
}

static char of_device[] = "d", of_domain[] = "p", of_source[] = "s";

static void refused(struct rig *rig)
{
	const doorbell_memory_keys keys = {4096, 4096, 1, 1}, zero = {0, 4096, 1, 1};
	doorbell_device *device;
	doorbell_domain *domain;
	doorbell_region *region;
	doorbell_address_handle *handle;
	/* No call looks at it: the device is no verbs device, or there is no feature. */
	char none[256] = {0};
	const int code = WITH_VERBS ? DOORBELL_ESTATE : DOORBELL_EFEATURE;
	const char *const words = WITH_VERBS ? "not one of libibverbs" : "`verbs`";

	FAILS(DOORBELL_EINVAL, "`context`", doorbell_device_adopt(NULL, NULL, note, of_device, &device));
	EXPECT(device == NULL);
	FAILS(code, words, doorbell_domain_adopt(rig->device, (struct ibv_pd *)none, note, of_domain, &domain));
	EXPECT(domain == NULL);
	FAILS(code, words,
	      doorbell_region_adopt(rig->domain, (struct ibv_mr *)none, DOORBELL_ACCESS_ALL, DOORBELL_REGION_HOST, note,
				    of_source, &region));
	EXPECT(region == NULL);
	FAILS(code, words,
	      doorbell_region_adopt_keys(rig->domain, &keys, DOORBELL_ACCESS_ALL, DOORBELL_REGION_HOST, note, of_source,
					 &region));
	EXPECT(region == NULL);
	/* Host memory does not begin at 0; other memory may, and then the device is what refuses. */
	FAILS(WITH_VERBS ? DOORBELL_ERANGE : DOORBELL_EFEATURE, WITH_VERBS ? "addr" : words,
	      doorbell_region_adopt_keys(rig->domain, &zero, DOORBELL_ACCESS_ALL, DOORBELL_REGION_HOST, note, of_source,
					 &region));
	FAILS(code, words,
	      doorbell_region_adopt_keys(rig->domain, &zero, DOORBELL_ACCESS_ALL, DOORBELL_REGION_PEERMEM, note, of_source,
					 &region));
	FAILS(code, words, doorbell_address_handle_adopt(rig->domain, (struct ibv_ah *)none, note, of_source, &handle));
	EXPECT(handle == NULL);
	FAILS(DOORBELL_ERANGE, "kind",
	      doorbell_region_adopt_keys(rig->domain, &keys, DOORBELL_ACCESS_ALL, 9, note, of_source, &region));
	GIVES(WITH_VERBS ? 0 : DOORBELL_EFEATURE, doorbell_device_report_async_event(rig->device, 1, none));
	EXPECT(released[0] == 0);
}

#if WITH_VERBS
static char of_target[] = "t", of_handle[] = "h";
#include <dlfcn.h>
#include <fcntl.h>
#include <infiniband/verbs.h>

#undef ibv_reg_mr

/* Every registration of this process comes by here, because the program is linked before libibverbs. */
static int registrations;

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *start, size_t len_bytes, int access)
{
	struct ibv_mr *(*next)(struct ibv_pd *, void *, size_t, int);

	*(void **)&next = dlsym(RTLD_NEXT, "ibv_reg_mr");
	EXPECT(next);
	registrations++;
	return next(pd, start, len_bytes, access);
}

/*
 * The queue pairs that this process has created last. The library makes those of a device that it uses directly by
 * mlx5dv_create_qp, and those of plain verbs by ibv_create_qp.
 */
static struct ibv_qp *created[64];
static unsigned created_count;

static struct ibv_qp *note_created(struct ibv_qp *qp)
{
	if (qp)
		created[__atomic_fetch_add(&created_count, 1, __ATOMIC_RELAXED) % 64] = qp;
	return qp;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attributes)
{
	struct ibv_qp *(*next)(struct ibv_pd *, struct ibv_qp_init_attr *);

	*(void **)&next = dlsym(RTLD_NEXT, "ibv_create_qp");
	EXPECT(next);
	return note_created(next(pd, attributes));
}

struct mlx5dv_qp_init_attr;
struct ibv_qp *mlx5dv_create_qp(struct ibv_context *context, struct ibv_qp_init_attr_ex *attributes,
				struct mlx5dv_qp_init_attr *of_mlx5);
struct ibv_qp *mlx5dv_create_qp(struct ibv_context *context, struct ibv_qp_init_attr_ex *attributes,
				struct mlx5dv_qp_init_attr *of_mlx5)
{
	struct ibv_qp *(*next)(struct ibv_context *, struct ibv_qp_init_attr_ex *, struct mlx5dv_qp_init_attr *);

	*(void **)&next = dlsym(RTLD_NEXT, "mlx5dv_create_qp");
	EXPECT(next);
	return note_created(next(context, attributes, of_mlx5));
}

/* The queue pair of an endpoint that was made lately. Of two with that number, the older one was destroyed. */
static struct ibv_qp *queue_pair_of(const doorbell_endpoint *endpoint, const unsigned before)
{
	for (unsigned at = created_count; at > before; at--)
		if (created[(at - 1) % 64]->qp_num == (uint32_t)doorbell_endpoint_qpn(endpoint))
			return created[(at - 1) % 64];
	return NULL;
}

static int is_filled(const uint8_t *bytes, int value, size_t len)
{
	for (size_t i = 0; i < len; i++)
		if (bytes[i] != value)
			return 0;
	return 1;
}

static void complete(doorbell_endpoint *endpoint, const doorbell_work *work)
{
	doorbell_completion completion;

	WORKS(doorbell_post_send(endpoint, work, NULL));
	WORKS(doorbell_wait_cq(endpoint, DOORBELL_QUEUE_SEND, SOON_MS, &completion));
}

/* What the program has before it knows of this library. */
struct theirs {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_mr *source, *target;
	uint8_t *memory;
};

static struct ibv_context *open_first(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context;

	EXPECT(list && list[0]);
	context = ibv_open_device(list[0]);
	EXPECT(context);
	ibv_free_device_list(list);
	return context;
}

static void make_theirs(struct theirs *theirs)
{
	theirs->context = open_first();
	theirs->pd = ibv_alloc_pd(theirs->context);
	EXPECT(theirs->pd);
	theirs->memory = aligned_alloc(4096, 8192);
	EXPECT(theirs->memory);
	memset(theirs->memory, 0, 8192);
	theirs->source = ibv_reg_mr(theirs->pd, theirs->memory, 4096, 0);
	theirs->target = ibv_reg_mr(theirs->pd, theirs->memory + 4096, 4096,
				    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
	EXPECT(theirs->source && theirs->target);
}

/* Fails if anything of the library's is left in an object. */
static void end_theirs(struct theirs *theirs)
{
	EXPECT(ibv_dereg_mr(theirs->source) == 0);
	EXPECT(ibv_dereg_mr(theirs->target) == 0);
	EXPECT(ibv_dealloc_pd(theirs->pd) == 0);
	EXPECT(ibv_close_device(theirs->context) == 0);
	free(theirs->memory);
}

/* How the device under test is used, as the settings of an open device say it. */
static const char *settings(char *text)
{
	const char *const name = rig_device_name(), *const rest = strchr(name, ',');

	sprintf(text, "%s%s", !strncmp(name, "verbs", 5) ? "verbs" : "mlx5", rest ? rest : "");
	return text;
}

/* An endpoint in the program's domain, connected to one of a device that the library has opened. */
static void connect_both(doorbell_endpoint *a, doorbell_endpoint *b)
{
	doorbell_address address;

	WORKS(doorbell_endpoint_address(a, &address));
	WORKS(doorbell_endpoint_connect(b, &address));
	WORKS(doorbell_endpoint_address(b, &address));
	WORKS(doorbell_endpoint_connect(a, &address));
}

/* A datagram from the program's domain, to a port for which the program has an address handle. */
static void sends_to_an_address_handle(struct rig *rig, const struct theirs *theirs, const doorbell_domain *domain,
				       const doorbell_region *target)
{
	const doorbell_slice place = {target, 0, 40 + 8};
	struct ibv_ah_attr attributes = {.port_num = 1};
	struct ibv_port_attr port;
	struct ibv_ah *ah;
	doorbell_endpoint_config config;
	doorbell_endpoint *from, *to;
	doorbell_address_handle *handle = NULL;
	doorbell_completion completion;
	doorbell_work work;

	EXPECT(ibv_query_port(theirs->context, 1, &port) == 0);
	EXPECT(ibv_query_gid(theirs->context, 1, 0, &attributes.grh.dgid) == 0);
	attributes.dlid = port.lid;
	attributes.is_global = port.link_layer == IBV_LINK_LAYER_ETHERNET;
	attributes.grh.hop_limit = 1;
	ah = ibv_create_ah(theirs->pd, &attributes);
	EXPECT(ah);
	WORKS(doorbell_endpoint_config_init(&config, sizeof config));
	config.transport = DOORBELL_TRANSPORT_UD;
	config.qkey = 0x1111;
	WORKS(doorbell_endpoint_create(domain, &config, &from));
	WORKS(doorbell_endpoint_create(domain, &config, &to));
	WORKS(doorbell_endpoint_activate(from));
	WORKS(doorbell_endpoint_activate(to));
	FAILS(DOORBELL_EFOREIGN, "context", doorbell_address_handle_adopt(rig->domain, ah, note, of_source, &handle));
	WORKS(doorbell_address_handle_adopt(domain, ah, note, of_handle, &handle));
	work = doorbell_work_to(doorbell_work_send_inline("datagram", 8), handle, (uint32_t)doorbell_endpoint_qpn(to), 0x1111);
	WORKS(doorbell_post_recv(to, 1, &place, 1, NULL));
	complete(from, &work);
	WORKS(doorbell_wait_cq(to, DOORBELL_QUEUE_RECV, SOON_MS, &completion));
	EXPECT(completion.len_bytes == 40 + 8 && completion.source_qpn == (uint32_t)doorbell_endpoint_qpn(from));
	EXPECT(!memcmp(theirs->memory + 4096 + 40, "datagram", 8));
	/* The work request is complete, so that the library releases it with the program's handle. */
	WORKS(doorbell_address_handle_destroy(handle));
	EXPECT(strchr(released, 'h'));
	WORKS(doorbell_endpoint_destroy(to));
	WORKS(doorbell_endpoint_destroy(from));
	memset(released, 0, sizeof released);
	EXPECT(ibv_destroy_ah(ah) == 0);
}

static void used_beside_the_program(struct rig *rig)
{
	const int flags = DOORBELL_ACCESS_LOCAL_WRITE | DOORBELL_ACCESS_REMOTE_WRITE | DOORBELL_ACCESS_REMOTE_READ;
	struct theirs theirs;
	doorbell_device *device;
	doorbell_domain *domain;
	doorbell_region *source, *target, *part, *zero_based;
	struct ibv_mr *from_zero;
	doorbell_endpoint *endpoint, *peer;
	doorbell_memory_keys keys;
	doorbell_remote remote;
	doorbell_completion completion;
	doorbell_stream *stream;
	struct ibv_context *elsewhere;
	struct ibv_pd *foreign;
	char text[256];
	int before, event_flags;

	make_theirs(&theirs);
	event_flags = fcntl(theirs.context->async_fd, F_GETFL);
	before = registrations;

	FAILS(DOORBELL_EMALFORMED, "nobody", doorbell_device_adopt(theirs.context, "nobody", note, of_device, &device));
	FAILS(DOORBELL_EMALFORMED, "events", doorbell_device_adopt(theirs.context, "events=x", note, of_device, &device));
	WORKS(doorbell_device_adopt(theirs.context, settings(text), note, of_device, &device));
	elsewhere = open_first();
	foreign = ibv_alloc_pd(elsewhere);
	EXPECT(foreign);
	FAILS(DOORBELL_EFOREIGN, "context", doorbell_domain_adopt(device, foreign, note, of_domain, &domain));
	WORKS(doorbell_domain_adopt(device, theirs.pd, note, of_domain, &domain));
	WORKS(doorbell_region_adopt(domain, theirs.source, 0, DOORBELL_REGION_HOST, note, of_source, &source));
	WORKS(doorbell_region_adopt(domain, theirs.target, flags, DOORBELL_REGION_HOST, note, of_target, &target));
	EXPECT(doorbell_region_pointer(source) == theirs.memory && doorbell_region_len_bytes(source) == 4096);
	/* A part of the same registration; and the domain of another device. */
	keys = (doorbell_memory_keys){(uintptr_t)theirs.memory + 64, 100, theirs.source->lkey, theirs.source->rkey};
	WORKS(doorbell_region_adopt_keys(domain, &keys, 0, DOORBELL_REGION_HOST, NULL, NULL, &part));
	FAILS(DOORBELL_EFOREIGN, "protection domain",
	      doorbell_region_adopt(rig->domain, theirs.source, 0, DOORBELL_REGION_HOST, note, of_source, &(doorbell_region *){0}));
	EXPECT(released[0] == 0);

	WORKS(doorbell_endpoint_create(domain, NULL, &endpoint));
	WORKS(doorbell_endpoint_create(rig->domain, NULL, &peer));
	connect_both(endpoint, peer);
	sends_to_an_address_handle(rig, &theirs, domain, target);
	WORKS(doorbell_stream_create_host("adopted", 0, &stream));

	{
		/* From the program's memory to the library's, on a stream; the range and the rights are checked. */
		const doorbell_slice from = {source, 0, 4096}, small = {part, 0, 100}, beyond = {part, 1, 100};
		const doorbell_slice to = {rig->region, 0, 4096};
		const doorbell_work send = doorbell_work_send(&from, 1), too_long = doorbell_work_send(&beyond, 1);
		const doorbell_work of_part = doorbell_work_send(&small, 1);

		memset(theirs.memory, 0x5a, 4096);
		WORKS(doorbell_post_recv(peer, 1, &to, 1, NULL));
		WORKS(doorbell_stream_queue_send(stream, endpoint, &send, NULL));
		WORKS(doorbell_stream_wait_cq(stream, endpoint, DOORBELL_QUEUE_SEND, SOON_MS, NULL));
		WORKS(doorbell_stream_synchronize(stream, SOON_MS));
		WORKS(doorbell_wait_cq(peer, DOORBELL_QUEUE_RECV, SOON_MS, &completion));
		EXPECT(is_filled(doorbell_region_pointer(rig->region), 0x5a, 4096));
		memset(theirs.memory + 64, 0x6b, 100);
		WORKS(doorbell_post_recv(peer, 2, &to, 1, NULL));
		complete(endpoint, &of_part);
		WORKS(doorbell_wait_cq(peer, DOORBELL_QUEUE_RECV, SOON_MS, &completion));
		EXPECT(is_filled(doorbell_region_pointer(rig->region), 0x6b, 100));
		FAILS(DOORBELL_EBOUNDS, "100 bytes", doorbell_post_send(endpoint, &too_long, NULL));
	}
	{
		/* Memory whose first byte work requests name by the address 0. */
		const doorbell_slice to = {rig->region, 0, 4096};
		doorbell_slice from = {NULL, 0, 4096};
		doorbell_work send;

		from_zero = ibv_reg_mr_iova(theirs.pd, theirs.memory, 4096, 0, 0);
		EXPECT(from_zero);
		keys = (doorbell_memory_keys){0, 4096, from_zero->lkey, from_zero->rkey};
		FAILS(DOORBELL_ERANGE, "addr", doorbell_region_adopt_keys(domain, &keys, 0, DOORBELL_REGION_HOST, NULL, NULL, &zero_based));
		WORKS(doorbell_region_adopt_keys(domain, &keys, 0, DOORBELL_REGION_PEERMEM, NULL, NULL, &zero_based));
		EXPECT(doorbell_region_pointer(zero_based) == NULL && doorbell_region_len_bytes(zero_based) == 4096);
		WORKS(doorbell_region_remote(zero_based, &remote));
		EXPECT(remote.addr == 0 && remote.rkey == from_zero->rkey);
		from.region = zero_based;
		send = doorbell_work_send(&from, 1);
		memset(theirs.memory, 0x39, 4096);
		WORKS(doorbell_post_recv(peer, 2, &to, 1, NULL));
		complete(endpoint, &send);
		WORKS(doorbell_wait_cq(peer, DOORBELL_QUEUE_RECV, SOON_MS, &completion));
		EXPECT(is_filled(doorbell_region_pointer(rig->region), 0x39, 4096));
		WORKS(doorbell_region_destroy(zero_based));
		EXPECT(ibv_dereg_mr(from_zero) == 0);
	}
	{
		/* A peer writes the program's memory by its key. Nothing may be received into memory without that right. */
		const doorbell_slice from = {rig->region, 0, 4096}, read_only = {source, 0, 64};
		doorbell_work write;

		WORKS(doorbell_region_remote(target, &remote));
		EXPECT(remote.rkey == theirs.target->rkey && remote.addr == (uintptr_t)theirs.memory + 4096);
		memset(doorbell_region_pointer(rig->region), 0x7c, 4096);
		write = doorbell_work_write(&from, 1, remote.addr, remote.rkey);
		complete(peer, &write);
		EXPECT(is_filled(theirs.memory + 4096, 0x7c, 4096));
		FAILS(DOORBELL_ESTATE, "", doorbell_post_recv(endpoint, 3, &read_only, 1, NULL));
	}

	/* The library has registered nothing of it, and has not touched what other users of the context see. */
	EXPECT(registrations == before);
	EXPECT(fcntl(theirs.context->async_fd, F_GETFL) == event_flags);
	{
		/* An event of another object is ignored; one of the endpoint's queue pair is the failure of the endpoint. */
		doorbell_failure failure;
		doorbell_address address;
		doorbell_endpoint *fails;
		struct ibv_qp *qp;
		const unsigned older = created_count;
		int polled = 0;

		WORKS(doorbell_endpoint_create(domain, NULL, &fails));
		qp = queue_pair_of(fails, older);
		EXPECT(qp);
		/* To itself. */
		WORKS(doorbell_endpoint_address(fails, &address));
		WORKS(doorbell_endpoint_connect(fails, &address));
		WORKS(doorbell_device_report_async_event(device, IBV_EVENT_QP_FATAL, theirs.pd));
		WORKS(doorbell_device_report_async_event(device, IBV_EVENT_COMM_EST, qp));
		for (int ms = 0; ms < 20; ms++) {
			EXPECT(doorbell_poll_cq(fails, DOORBELL_QUEUE_SEND, &completion) == 0);
			usleep(1000);
		}
		EXPECT(doorbell_endpoint_failure(fails, &failure, NULL, 0) == 0);
		WORKS(doorbell_device_report_async_event(device, IBV_EVENT_QP_FATAL, qp));
		for (int ms = 0; ms < SOON_MS && !polled; ms++) {
			polled = doorbell_poll_cq(fails, DOORBELL_QUEUE_SEND, &completion);
			usleep(1000);
		}
		EXPECT(polled == DOORBELL_EWORK);
		EXPECT(doorbell_endpoint_failure(fails, &failure, NULL, 0) > 0);
		EXPECT(failure.cause == DOORBELL_CAUSE_QUEUE_PAIR);
		/* The other endpoints go on. */
		EXPECT(doorbell_endpoint_failure(endpoint, &failure, NULL, 0) == 0);
		WORKS(doorbell_endpoint_destroy(fails));
	}

	/* Deregistering takes the region from later work of this side, and nothing from the program. */
	GIVES(1, doorbell_region_deregister(source));
	{
		const doorbell_slice from = {source, 0, 64};
		const doorbell_work send = doorbell_work_send(&from, 1);

		FAILS(DOORBELL_ESTATE, "deregistered", doorbell_post_send(endpoint, &send, NULL));
	}
	/* In the wrong order on purpose. */
	WORKS(doorbell_device_close(device));
	WORKS(doorbell_domain_destroy(domain));
	EXPECT(released[0] == 0);
	WORKS(doorbell_endpoint_destroy(endpoint));
	WORKS(doorbell_endpoint_destroy(peer));
	WORKS(doorbell_stream_destroy(stream));
	WORKS(doorbell_region_destroy(part));
	WORKS(doorbell_region_destroy(source));
	WORKS(doorbell_region_destroy(target));
	for (int ms = 0; ms < SOON_MS && strlen(released) < 4; ms++)
		usleep(1000);
	/* Memory before its domain, and that before the device. */
	EXPECT(strlen(released) == 4 && !strcmp(released + 2, "pd"));
	end_theirs(&theirs);
	EXPECT(ibv_dealloc_pd(foreign) == 0 && ibv_close_device(elsewhere) == 0);
}
#endif

int main(void)
{
	struct rig rig;

	rig_make(&rig);
	if (!strncmp(rig_device_name(), "softcx", 6))
		refused(&rig);
#if WITH_VERBS
	else
		used_beside_the_program(&rig);
#endif
	rig_end(&rig);
	puts("done");
	return 0;
}
