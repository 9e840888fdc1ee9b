/*
 * Memory and devices behind libgdsync's names: keys of slices, registered words, protection domains.
 *
 * A slice names its memory by a key and an address; this library names it by a region. This layer has its own keys, so
 * that finding the region of a key takes no lock: a key is the number of a place in a table, and the number of times
 * the place was used. Words have no key; they are found by address, under the lock.
 */
#ifndef DOORBELL_GDSYNC_MEMORY_H
#define DOORBELL_GDSYNC_MEMORY_H

#ifndef DOORBELL_GDSYNC_H
#error "include <doorbell/gdsync.h>, which includes this"
#endif

/* The library's device and domain for a protection domain of verbs. `pd` is NULL for words. */
struct doorbell_gds_domain {
	struct doorbell_gds_domain *next;
	const struct ibv_pd *pd;
	char name[IBV_SYSFS_NAME_MAX];
	doorbell_device *device;
	doorbell_domain *domain;
	uint32_t users; /* number of regions and queue pairs */
};

/* A context of gds_open_device. The program has a pointer to the first field. */
struct doorbell_gds_context {
	struct ibv_context context;
	struct ibv_device device;
	uint32_t domains;
};

/* What a place in the table contains. */
enum doorbell_gds_kind {
	DOORBELL_GDS_FREE = 0,
	DOORBELL_GDS_SLICES = 1, /* gds_reg_mr */
	DOORBELL_GDS_WORDS = 2,	 /* gds_register_mem */
	DOORBELL_GDS_OWN = 3	 /* gds_alloc_mapped_memory */
};

struct doorbell_gds_memory {
	uint32_t key; /* atomic; 0 if the place is free */
	uint32_t kind;
	uint32_t uses; /* number of times the place was used, so that an old key does not match a new region */
	uint32_t count;
	uint64_t start;
	uint64_t len_bytes;
	doorbell_region *region;
	struct doorbell_gds_domain *domain;
};

enum {
	DOORBELL_GDS_CHUNKS = 64,
	DOORBELL_GDS_CHUNK = 1024 /* places; a key has 16 bits for the number of the place */
};

struct doorbell_gds_stream {
	struct doorbell_gds_stream *next;
	CUstream name;
	doorbell_stream *handle;
};

/* The state of this layer, one per process. */
struct doorbell_gds_state {
	pthread_mutex_t lock;
	struct doorbell_gds_memory *chunks[DOORBELL_GDS_CHUNKS]; /* atomic; never freed */
	uint32_t chunk_count;
	struct doorbell_gds_domain *domains;
	struct doorbell_gds_stream *streams;
	struct doorbell_gds_stream *idle; /* host streams that execute descriptors at once */
};

/* Layouts depend on the types of verbs, so source files that chose differently have separate states. */
#ifdef DOORBELL_GDSYNC_OWN_VERBS
#define doorbell_gds_state_here doorbell_gds_state_own_verbs
#else
#define doorbell_gds_state_here doorbell_gds_state_verbs
#endif

/*
 * Weak, so that all source files and shared libraries of a program share one definition. A library that is loaded with
 * dlopen shares the program's only if the program exports it (-rdynamic); otherwise memory that is registered in one
 * is unknown in the other.
 */
__attribute__((weak, visibility("default"))) struct doorbell_gds_state doorbell_gds_state_here = {
	PTHREAD_MUTEX_INITIALIZER, {NULL}, 0, NULL, NULL, NULL};

static inline void doorbell_gds_lock(void)
{
	pthread_mutex_lock(&doorbell_gds_state_here.lock);
}

static inline void doorbell_gds_unlock(void)
{
	pthread_mutex_unlock(&doorbell_gds_state_here.lock);
}

/* The errno of a result of the library; 0 for success. */
static inline int doorbell_gds_errno(int code)
{
	if (code >= 0)
		return 0;
	switch (code) {
	case DOORBELL_EHANDLE:
	case DOORBELL_EINVAL:
	case DOORBELL_ERANGE:
	case DOORBELL_EALIGNMENT:
	case DOORBELL_EFOREIGN:
	case DOORBELL_ESTATE:
	case DOORBELL_EMALFORMED:
		return EINVAL;
	case DOORBELL_EBOUNDS:
		return EFAULT;
	case DOORBELL_EFULL:
		return ENOMEM;
	case DOORBELL_EBUSY:
		return EBUSY;
	case DOORBELL_ETIMEOUT:
		return ETIMEDOUT;
	case DOORBELL_EFEATURE:
		return EOPNOTSUPP;
	default:
		return EIO;
	}
}

/* ------------------------------------------------------------------------------------------------------- domains */

/* Finds or creates the domain of a protection domain, and adds one user. The caller holds the lock. */
static inline int doorbell_gds_domain_get(const struct ibv_pd *pd, struct doorbell_gds_domain **found)
{
	const char *name = pd ? pd->context->device->name : "softcx";
	struct doorbell_gds_domain *domain;
	doorbell_device *device = NULL;
	int code;
	for (domain = doorbell_gds_state_here.domains; domain; domain = domain->next) {
		if (strcmp(domain->name, name) != 0)
			continue;
		device = domain->device;
		if (domain->pd == pd) {
			domain->users++;
			*found = domain;
			return 0;
		}
	}
	domain = (struct doorbell_gds_domain *)calloc(1, sizeof(*domain));
	if (!domain)
		return ENOMEM;
	/* Domains of one device share the device handle, because each doorbell_device_open of "softcx" makes another
	   NIC. */
	code = device ? 0 : doorbell_device_open(name, &device);
	if (code >= 0)
		code = doorbell_domain_create(device, &domain->domain);
	if (code < 0) {
		free(domain);
		return doorbell_gds_errno(code);
	}
	domain->device = device;
	domain->pd = pd;
	domain->users = 1;
	snprintf(domain->name, sizeof(domain->name), "%s", name);
	domain->next = doorbell_gds_state_here.domains;
	doorbell_gds_state_here.domains = domain;
	*found = domain;
	return 0;
}

/* Removes one user; the last one destroys the domain. The caller holds the lock. */
static inline void doorbell_gds_domain_put(struct doorbell_gds_domain *domain)
{
	struct doorbell_gds_domain **at = &doorbell_gds_state_here.domains, *other;
	if (--domain->users > 0)
		return;
	while (*at != domain)
		at = &(*at)->next;
	*at = domain->next;
	doorbell_domain_destroy(domain->domain);
	for (other = doorbell_gds_state_here.domains; other; other = other->next)
		if (other->device == domain->device)
			break;
	if (!other)
		doorbell_device_close(domain->device);
	free(domain);
}

static inline struct ibv_context *gds_open_device(const char *name)
{
	struct doorbell_gds_context *made;
	if (!name || strlen(name) >= IBV_SYSFS_NAME_MAX) {
		errno = EINVAL;
		return NULL;
	}
	made = (struct doorbell_gds_context *)calloc(1, sizeof(*made));
	if (!made) {
		errno = ENOMEM;
		return NULL;
	}
	snprintf(made->device.name, sizeof(made->device.name), "%s", name);
	made->context.device = &made->device;
	return &made->context;
}

static inline int gds_close_device(struct ibv_context *context)
{
	struct doorbell_gds_context *made = (struct doorbell_gds_context *)context;
	int busy;
	if (!context)
		return EINVAL;
	doorbell_gds_lock();
	busy = made->domains > 0;
	doorbell_gds_unlock();
	if (busy)
		return EBUSY;
	free(made);
	return 0;
}

static inline struct ibv_pd *gds_alloc_pd(struct ibv_context *context)
{
	struct ibv_pd *pd;
	struct doorbell_gds_domain *domain;
	int error = context ? 0 : EINVAL;
	if (error) {
		errno = error;
		return NULL;
	}
	pd = (struct ibv_pd *)calloc(1, sizeof(*pd));
	if (!pd) {
		errno = ENOMEM;
		return NULL;
	}
	pd->context = context;
	doorbell_gds_lock();
	/* This finds out whether the device exists. The protection domain itself is the first user. */
	error = doorbell_gds_domain_get(pd, &domain);
	if (!error)
		((struct doorbell_gds_context *)context)->domains++;
	doorbell_gds_unlock();
	if (error) {
		free(pd);
		errno = error;
		return NULL;
	}
	return pd;
}

static inline int gds_dealloc_pd(struct ibv_pd *pd)
{
	struct doorbell_gds_domain *domain;
	int error = EINVAL;
	doorbell_gds_lock();
	for (domain = doorbell_gds_state_here.domains; pd && domain; domain = domain->next) {
		if (domain->pd != pd)
			continue;
		error = domain->users > 1 ? EBUSY : 0;
		if (!error) {
			((struct doorbell_gds_context *)pd->context)->domains--;
			doorbell_gds_domain_put(domain);
		}
		break;
	}
	doorbell_gds_unlock();
	if (!error)
		free(pd);
	return error;
}

/* --------------------------------------------------------------------------------------------------------- table */

/* The place of a number; NULL if it is outside the table. */
static inline struct doorbell_gds_memory *doorbell_gds_place(uint32_t number)
{
	struct doorbell_gds_memory *chunk;
	if (number >= DOORBELL_GDS_CHUNKS * DOORBELL_GDS_CHUNK)
		return NULL;
	chunk = __atomic_load_n(&doorbell_gds_state_here.chunks[number / DOORBELL_GDS_CHUNK], __ATOMIC_ACQUIRE);
	return chunk ? chunk + number % DOORBELL_GDS_CHUNK : NULL;
}

/*
 * Finds a free place; the caller fills all fields except `key` and `kind`. NULL if there is no memory. The caller
 * holds the lock.
 */
static inline struct doorbell_gds_memory *doorbell_gds_place_take(uint32_t *number)
{
	struct doorbell_gds_memory *place;
	uint32_t used = doorbell_gds_state_here.chunk_count;
	for (*number = 0; (place = doorbell_gds_place(*number)) != NULL; ++*number)
		if (place->kind == DOORBELL_GDS_FREE)
			return place;
	if (used == DOORBELL_GDS_CHUNKS)
		return NULL;
	place = (struct doorbell_gds_memory *)calloc(DOORBELL_GDS_CHUNK, sizeof(*place));
	if (!place)
		return NULL;
	__atomic_store_n(&doorbell_gds_state_here.chunks[used], place, __ATOMIC_RELEASE);
	doorbell_gds_state_here.chunk_count = used + 1;
	return place;
}

/* Registers memory, or allocates it if `start` is NULL, and adds it to the table. The caller holds the lock. */
static inline int doorbell_gds_enter(const struct ibv_pd *pd, void *start, size_t len_bytes, uint32_t access,
				     uint32_t kind, struct doorbell_gds_memory **entered)
{
	struct doorbell_gds_domain *domain;
	struct doorbell_gds_memory *place;
	doorbell_region *region = NULL;
	uint32_t number;
	int code, error = doorbell_gds_domain_get(pd, &domain);
	if (error)
		return error;
	place = doorbell_gds_place_take(&number);
	if (!place) {
		doorbell_gds_domain_put(domain);
		return ENOMEM;
	}
	if (!start) {
		code = doorbell_region_alloc(domain->domain, len_bytes, access, &region);
	} else {
		/* GPU memory is tried first, because a driver that maps its addresses could register them as host
		   memory. */
		code = doorbell_region_register_device(domain->domain, (uint64_t)(uintptr_t)start, len_bytes, access, &region);
		if (code < 0)
			code = doorbell_region_register(domain->domain, start, len_bytes, access, &region);
	}
	if (code < 0) {
		doorbell_gds_domain_put(domain);
		return doorbell_gds_errno(code);
	}
	place->kind = kind;
	place->uses = (place->uses + 1) & 0xffff;
	place->uses += place->uses == 0;
	place->count = 1;
	place->start = (uint64_t)(uintptr_t)doorbell_region_pointer(region);
	place->len_bytes = len_bytes;
	place->region = region;
	place->domain = domain;
	__atomic_store_n(&place->key, place->uses << 16 | number, __ATOMIC_RELEASE);
	*entered = place;
	return 0;
}

/* Removes memory from the table. Returns its region, for doorbell_gds_end_region. The caller holds the lock. */
static inline doorbell_region *doorbell_gds_leave(struct doorbell_gds_memory *place)
{
	doorbell_region *region = place->region;
	__atomic_store_n(&place->key, 0, __ATOMIC_RELEASE);
	place->kind = DOORBELL_GDS_FREE;
	place->region = NULL;
	doorbell_gds_domain_put(place->domain);
	return region;
}

/*
 * Deregisters memory. The caller must not hold the lock: the driver may wait for its GPU, which may wait for another
 * thread.
 */
static inline void doorbell_gds_end_region(doorbell_region *region)
{
	/* Destroying the handle would deregister it only when no work uses it, but the caller may free the memory
	   now. */
	doorbell_region_deregister(region);
	doorbell_region_destroy(region);
}

static inline int doorbell_gds_is_within(const struct doorbell_gds_memory *place, uint64_t start, uint64_t len_bytes)
{
	return start >= place->start && start - place->start <= place->len_bytes &&
	       len_bytes <= place->len_bytes - (start - place->start);
}

/* Finds memory of some kinds that contains these bytes; NULL if there is none. The caller holds the lock. */
static inline struct doorbell_gds_memory *doorbell_gds_find(uint64_t start, uint64_t len_bytes, uint32_t first_kind,
							    uint32_t last_kind)
{
	struct doorbell_gds_memory *place;
	uint32_t number;
	for (number = 0; (place = doorbell_gds_place(number)) != NULL; number++)
		if (place->kind >= first_kind && place->kind <= last_kind && doorbell_gds_is_within(place, start, len_bytes))
			return place;
	return NULL;
}

/* Converts an address and a key to a slice. */
static inline int doorbell_gds_slice(const struct ibv_sge *sge, doorbell_slice *slice)
{
	struct doorbell_gds_memory *place = doorbell_gds_place(sge->lkey & 0xffff);
	if (!place || sge->lkey == 0 || __atomic_load_n(&place->key, __ATOMIC_ACQUIRE) != sge->lkey)
		return EINVAL;
	if (!doorbell_gds_is_within(place, sge->addr, sge->length))
		return EFAULT;
	slice->region = place->region;
	slice->offset = sge->addr - place->start;
	slice->len_bytes = sge->length;
	return 0;
}

/* Finds the region that contains `len_bytes` bytes for stores and waits. */
static inline int doorbell_gds_words(const void *start, size_t len_bytes, const doorbell_region **region, uint64_t *offset)
{
	const uint64_t address = (uint64_t)(uintptr_t)start;
	struct doorbell_gds_memory *place;
	int error = 0;
	if (!start || address % 4 != 0)
		return EINVAL;
	doorbell_gds_lock();
	place = doorbell_gds_find(address, len_bytes, DOORBELL_GDS_SLICES, DOORBELL_GDS_OWN);
#if GDS_REGISTER_ON_USE
	if (!place) {
		const uint64_t page = address & ~(uint64_t)4095, end = (address + len_bytes + 4095) & ~(uint64_t)4095;
		error = doorbell_gds_enter(NULL, (void *)(uintptr_t)page, (size_t)(end - page), DOORBELL_ACCESS_ALL,
					   DOORBELL_GDS_WORDS, &place);
	}
#endif
	if (!place) {
		error = error ? error : EFAULT;
	} else {
		*region = place->region;
		*offset = address - place->start;
	}
	doorbell_gds_unlock();
	return error;
}

/* ----------------------------------------------------------------------------------------------------- registration */

static inline struct ibv_mr *gds_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	struct ibv_mr *mr = NULL;
	struct doorbell_gds_memory *place;
	doorbell_remote remote;
	/* Access rights that verbs calls optional are ignored, such as relaxed ordering. */
	const uint32_t rights = (uint32_t)access & ~0x3ff00000u;
	int error = pd && addr && (rights & ~(uint32_t)DOORBELL_ACCESS_ALL) == 0 ? 0 : EINVAL;
	if (!error) {
		mr = (struct ibv_mr *)calloc(1, sizeof(*mr));
		error = mr ? 0 : ENOMEM;
	}
	if (!error) {
		doorbell_gds_lock();
		error = doorbell_gds_enter(pd, addr, length, rights, DOORBELL_GDS_SLICES, &place);
		if (!error) {
			error = doorbell_gds_errno(doorbell_region_remote(place->region, &remote));
			mr->context = pd->context;
			mr->pd = pd;
			mr->addr = addr;
			mr->length = length;
			mr->lkey = place->key;
			mr->rkey = remote.rkey;
		}
		doorbell_gds_unlock();
	}
	if (error) {
		free(mr);
		errno = error;
		return NULL;
	}
	return mr;
}

static inline int gds_dereg_mr(struct ibv_mr *mr)
{
	struct doorbell_gds_memory *place;
	doorbell_region *region = NULL;
	if (!mr)
		return EINVAL;
	doorbell_gds_lock();
	place = doorbell_gds_place(mr->lkey & 0xffff);
	if (place && mr->lkey != 0 && place->key == mr->lkey && place->kind == DOORBELL_GDS_SLICES) {
		region = doorbell_gds_leave(place);
	}
	doorbell_gds_unlock();
	if (!region)
		return EINVAL;
	doorbell_gds_end_region(region);
	free(mr);
	return 0;
}

static inline int gds_register_mem(void *ptr, size_t size, gds_memory_type_t type, CUdeviceptr *dev_ptr)
{
	const uint64_t start = (uint64_t)(uintptr_t)ptr;
	struct doorbell_gds_memory *place;
	uint32_t number;
	int error = 0;
	if (!ptr || size == 0 || start + size < start || (type != GDS_MEMORY_GPU && type != GDS_MEMORY_HOST && type != GDS_MEMORY_IO))
		return EINVAL;
	if (type == GDS_MEMORY_IO)
		return EOPNOTSUPP;
	doorbell_gds_lock();
	place = doorbell_gds_find(start, size, DOORBELL_GDS_WORDS, DOORBELL_GDS_WORDS);
	if (place) {
		place->count++;
	} else {
		for (number = 0; (place = doorbell_gds_place(number)) != NULL && !error; number++)
			if (place->kind == DOORBELL_GDS_WORDS && start < place->start + place->len_bytes && place->start < start + size)
				error = EINVAL;
		if (!error)
			error = doorbell_gds_enter(NULL, ptr, size, DOORBELL_ACCESS_ALL, DOORBELL_GDS_WORDS, &place);
	}
	doorbell_gds_unlock();
	if (!error && dev_ptr)
		*dev_ptr = (CUdeviceptr)start;
	return error;
}

static inline int gds_unregister_mem(void *ptr, size_t size)
{
	struct doorbell_gds_memory *place;
	doorbell_region *region = NULL;
	if (!ptr || size == 0)
		return EINVAL;
	doorbell_gds_lock();
	place = doorbell_gds_find((uint64_t)(uintptr_t)ptr, size, DOORBELL_GDS_WORDS, DOORBELL_GDS_WORDS);
	if (place && --place->count == 0)
		region = doorbell_gds_leave(place);
	doorbell_gds_unlock();
	if (region)
		doorbell_gds_end_region(region);
	return place ? 0 : EINVAL;
}

#endif /* DOORBELL_GDSYNC_MEMORY_H */
