/*
 * What the libibverbs programs of these tests share: a device, queue pairs and their connection. Each function ends the program, with the
 * line, when a call fails that must not.
 */
#ifndef PAIR_H
#define PAIR_H

#include <errno.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                                                       \
	do {                                                                                                                   \
		if (!(condition)) {                                                                                            \
			fprintf(stderr, "%s:%d: %s: %m\n", __FILE__, __LINE__, #condition);                                    \
			exit(1);                                                                                               \
		}                                                                                                              \
	} while (0)
/* For calls that give their errno back. */
#define CALL(call)                                                                                                             \
	do {                                                                                                                   \
		errno = (call);                                                                                                \
		CHECK(errno == 0);                                                                                             \
	} while (0)

#define EVERY_ACCESS                                                                                                           \
	(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |                \
	 IBV_ACCESS_MW_BIND)
/* Nothing takes nearly as long that works. In an emulated host PAIR_LIMIT_S sets another limit. */
#define LIMIT_S limit_s()

struct device {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_port_attr port;
	uint8_t gid_index;
	union ibv_gid gid;
};

/* What the other side has to know, as it goes over a socket. */
struct address {
	uint32_t qpn, psn, rkey, lid;
	uint64_t at, bytes;
	union ibv_gid gid;
};

/* How patient a queue pair is. The times are the codes of the specification. */
struct patience {
	uint8_t timeout, retries, rnr_retries, rnr_timer;
};
static const struct patience PATIENT = { .timeout = 14, .retries = 7, .rnr_retries = 7, .rnr_timer = 1 };

/* An environment variable that holds a number. */
__attribute__((unused)) static int number_of(const char *name, int usual)
{
	const char *text = getenv(name);
	return text ? atoi(text) : usual;
}

__attribute__((unused)) static int limit_s(void)
{
	static int limit;
	if (limit == 0)
		limit = number_of("PAIR_LIMIT_S", 60);
	return limit;
}

/* The first device. Its first GID, or PAIR_GID_INDEX: the first of SoftRoCE is no address of its host. */
__attribute__((unused)) static struct device open_device(void)
{
	struct device device = { .gid_index = (uint8_t)number_of("PAIR_GID_INDEX", 0) };
	int count = 0;
	struct ibv_device **list = ibv_get_device_list(&count);
	CHECK(list && count >= 1);
	CHECK((device.context = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	CHECK((device.pd = ibv_alloc_pd(device.context)));
	CALL(ibv_query_port(device.context, 1, &device.port));
	CALL(ibv_query_gid(device.context, 1, device.gid_index, &device.gid));
	return device;
}

__attribute__((unused)) static struct ibv_cq *new_cq(struct device *device, int entries)
{
	struct ibv_cq *cq = ibv_create_cq(device->context, entries, NULL, NULL, 0);
	CHECK(cq);
	return cq;
}

__attribute__((unused)) static struct ibv_qp *new_qp(struct device *device, enum ibv_qp_type type, struct ibv_cq *cq, uint32_t depth)
{
	struct ibv_qp_init_attr attributes = {
		.send_cq = cq,
		.recv_cq = cq,
		.qp_type = type,
		.cap = { .max_send_wr = depth, .max_recv_wr = depth, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 64 },
	};
	struct ibv_qp *qp = ibv_create_qp(device->pd, &attributes);
	CHECK(qp);
	return qp;
}

__attribute__((unused)) static struct address address_of(const struct device *device, const struct ibv_qp *qp)
{
	return (struct address){ .qpn = qp->qp_num, .psn = qp->qp_num & 0xffff, .lid = device->port.lid, .gid = device->gid };
}

__attribute__((unused)) static struct ibv_ah_attr way_to(const struct device *device, const struct address *to)
{
	return (struct ibv_ah_attr){
		.dlid = (uint16_t)to->lid,
		.port_num = 1,
		.is_global = device->port.link_layer == IBV_LINK_LAYER_ETHERNET,
		.grh = { .dgid = to->gid, .sgid_index = device->gid_index, .hop_limit = 8 },
	};
}

__attribute__((unused)) static void to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr change = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
		.qkey = 0x11111111,
	};
	CALL(ibv_modify_qp(qp, &change,
			   IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				   (qp->qp_type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)));
}

__attribute__((unused)) static void to_error(struct ibv_qp *qp)
{
	struct ibv_qp_attr change = { .qp_state = IBV_QPS_ERR };
	CALL(ibv_modify_qp(qp, &change, IBV_QP_STATE));
}

__attribute__((unused)) static enum ibv_qp_state state_of(struct ibv_qp *qp)
{
	struct ibv_qp_attr attributes;
	struct ibv_qp_init_attr initial;
	CALL(ibv_query_qp(qp, &attributes, IBV_QP_STATE, &initial));
	return attributes.qp_state;
}

/* From INIT to RTS, whatever the transport. */
__attribute__((unused)) static void join(const struct device *device, struct ibv_qp *qp, const struct address *peer,
					 struct patience patience)
{
	const int reliable = qp->qp_type == IBV_QPT_RC, datagram = qp->qp_type == IBV_QPT_UD;
	struct ibv_qp_attr change = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = peer->qpn,
		.rq_psn = peer->psn,
		.max_dest_rd_atomic = 4,
		.min_rnr_timer = patience.rnr_timer,
		.ah_attr = way_to(device, peer),
	};
	CALL(ibv_modify_qp(qp, &change,
			   IBV_QP_STATE | (datagram ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN) |
				   (reliable ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0)));
	change = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS,
		.sq_psn = qp->qp_num & 0xffff,
		.timeout = patience.timeout,
		.retry_cnt = patience.retries,
		.rnr_retry = patience.rnr_retries,
		.max_rd_atomic = 4,
	};
	CALL(ibv_modify_qp(qp, &change,
			   IBV_QP_STATE | IBV_QP_SQ_PSN |
				   (reliable ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0)));
}

/* The next completion; none in time is an error. */
__attribute__((unused)) static struct ibv_wc next_completion(struct ibv_cq *cq)
{
	struct ibv_wc completion;
	const time_t begun = time(NULL);
	int found;
	while ((found = ibv_poll_cq(cq, 1, &completion)) == 0)
		CHECK(time(NULL) - begun < LIMIT_S);
	CHECK(found == 1);
	return completion;
}

__attribute__((unused)) static struct ibv_mr *register_memory(struct device *device, size_t bytes, int access)
{
	void *memory = NULL;
	struct ibv_mr *region;
	CALL(posix_memalign(&memory, 4096, bytes));
	memset(memory, 0, bytes);
	CHECK((region = ibv_reg_mr(device->pd, memory, bytes, access)));
	return region;
}

#endif
