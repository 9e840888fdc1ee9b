/* The interface of libgdsync; see gdsync.h. */
#ifndef DOORBELL_DOORBELL_GDSYNC_H
#define DOORBELL_DOORBELL_GDSYNC_H

#include "../gdsync.h"

#endif /* DOORBELL_DOORBELL_GDSYNC_H */
