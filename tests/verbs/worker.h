/* What in_memory.c gives to the libraries with UCX's names. */
#ifndef WORKER_H
#define WORKER_H

struct worker {
	unsigned (*poll)(void);
	/* The libraries that were asked for progress, and to arm. */
	int asked, armed;
};

unsigned ucp_worker_progress(struct worker *worker);
int ucp_worker_arm(struct worker *worker);

#endif
