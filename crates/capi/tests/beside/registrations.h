/* The registrations that another library makes in this process. */
#ifndef REGISTRATIONS_H
#define REGISTRATIONS_H

#include "../c/expect.h"

#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdint.h>

#undef ibv_reg_mr

enum { KEPT = 64 };

/* The other library's calls of libibverbs come by here, because the program is loaded before libibverbs. That is how a program gets at objects that
 * the other library does not show. Link with -rdynamic. */
static struct ibv_mr *registered[KEPT];
static unsigned rights_of[KEPT];
static int registrations;

static void *next(const char *name)
{
	void *const function = dlsym(RTLD_NEXT, name);

	EXPECT(function);
	return function;
}

static struct ibv_mr *noted(struct ibv_mr *mr, unsigned access)
{
	/* One of the calls may make the other. */
	if (mr && !(registrations > 0 && registered[registrations - 1] == mr)) {
		EXPECT(registrations < KEPT);
		rights_of[registrations] = access;
		registered[registrations++] = mr;
	}
	return mr;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *start, size_t len_bytes, int access)
{
	struct ibv_mr *(*call)(struct ibv_pd *, void *, size_t, int);

	*(void **)&call = next("ibv_reg_mr");
	return noted(call(pd, start, len_bytes, access), (unsigned)access);
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *start, size_t len_bytes, uint64_t iova, unsigned int access)
{
	struct ibv_mr *(*call)(struct ibv_pd *, void *, size_t, uint64_t, unsigned int);

	*(void **)&call = next("ibv_reg_mr_iova2");
	return noted(call(pd, start, len_bytes, iova, access), access);
}

/* The other library's registration of this memory. UCX has one with relaxed order and one without; this is the one without, if there is one. */
static struct ibv_mr *registration_of(const void *bytes, int *how_many)
{
	struct ibv_mr *mr = NULL;

	*how_many = 0;
	for (int i = 0; i < registrations; i++)
		if (registered[i]->addr == bytes)
			mr = !mr || (rights_of[i] & IBV_ACCESS_RELAXED_ORDERING) == 0 ? registered[i] : mr, ++*how_many;
	EXPECT(mr && *how_many <= 2);
	return mr;
}

#endif
