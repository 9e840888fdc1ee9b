/* For programs of libgdsync that include this header of MLNX_OFED 4: its names are in gdsync/verbs.h. */
#ifndef DOORBELL_INFINIBAND_PEER_OPS_H
#define DOORBELL_INFINIBAND_PEER_OPS_H

#include "../gdsync.h"

#endif /* DOORBELL_INFINIBAND_PEER_OPS_H */
