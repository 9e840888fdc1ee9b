/* The other source: what it registers, the first one uses. */
#define _POSIX_C_SOURCE 200809L

#include "rig.h"

struct ibv_mr *register_elsewhere(struct ibv_pd *pd, void *start, size_t len_bytes)
{
	return gds_reg_mr(pd, start, len_bytes, IBV_ACCESS_LOCAL_WRITE);
}
