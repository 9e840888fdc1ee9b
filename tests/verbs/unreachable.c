/*
 * What the kernel refuses of a path on Ethernet before it asks the device: the address of a peer that is of another family than the port's, and one that no route
 * leads to. A peer that is there, or may be, is accepted, and so is a multicast group.
 */
#include "pair.h"

/* The errno of setting a path to that address, and of an address handle for it: the same. */
static int refusal(struct device *device, struct ibv_cq *cq, const char *hex)
{
	struct address to = { .qpn = 5, .psn = 7 };
	for (int i = 0; i < 16; i++)
		CHECK(sscanf(hex + 2 * i, "%2hhx", &to.gid.raw[i]) == 1);
	struct ibv_qp *qp = new_qp(device, IBV_QPT_RC, cq, 4);
	struct ibv_qp_attr change = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = to.qpn,
		.rq_psn = to.psn,
		.max_dest_rd_atomic = 4,
		.min_rnr_timer = 12,
		.ah_attr = way_to(device, &to),
	};
	to_init(qp);
	const int modified = ibv_modify_qp(qp, &change,
					   IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
						   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	CHECK(state_of(qp) == (modified ? IBV_QPS_INIT : IBV_QPS_RTR));
	CALL(ibv_destroy_qp(qp));
	struct ibv_ah *ah = ibv_create_ah(device->pd, &change.ah_attr);
	const int created = ah ? 0 : errno;
	if (ah)
		CALL(ibv_destroy_ah(ah));
	if (modified != created)
		fprintf(stderr, "%s: %d for a path, %d for an address handle\n", hex, modified, created);
	CHECK(modified == created);
	return modified;
}

int main(void)
{
	struct device device = open_device();
	struct ibv_cq *cq = new_cq(&device, 16);
	/* Another address of the loopback interface, whether a device is there or not. */
	CHECK(refusal(&device, cq, "00000000000000000000ffff7f640001") == 0);
	/* 224.0.0.9 */
	CHECK(refusal(&device, cq, "00000000000000000000ffffe0000009") == 0);
	/* fd00::7 */
	CHECK(refusal(&device, cq, "fd000000000000000000000000000007") == EINVAL);
	/* 192.0.2.1, from an address of the loopback interface: with or without a default route. */
	const int error = refusal(&device, cq, "00000000000000000000ffffc0000201");
	CHECK(error == ENETUNREACH || error == EINVAL);
	printf("every path was right\n");
	return 0;
}
