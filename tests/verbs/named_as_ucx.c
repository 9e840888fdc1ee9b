/* A library with names of UCX, the one of number LIBRARY. */
#include "worker.h"

unsigned ucp_worker_progress(struct worker *worker)
{
	worker->asked = LIBRARY;
	return worker->poll();
}

int ucp_worker_arm(struct worker *worker)
{
	worker->armed = LIBRARY;
	return LIBRARY == 1 ? 0 : -15;
}
