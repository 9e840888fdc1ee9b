/* A library that was linked with one of these. */
#include "worker.h"

unsigned user_progress(struct worker *worker)
{
	return ucp_worker_progress(worker);
}

int user_arm(struct worker *worker)
{
	return ucp_worker_arm(worker);
}
