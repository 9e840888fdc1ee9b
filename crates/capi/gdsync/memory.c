/*
 * Memory and devices: keys of slices, registered words, protection domains.
 *
 * A slice names its memory by a key and an address; libdoorbell names it by a region. libgdsync has its own keys, so
 * that finding the region of a key takes no lock: a key is the number of a place in a table, and the number of times
 * the place was used. Words have no key; they are found by address, under the lock.
 */
#include "internal.h"

#include <unistd.h>

struct doorbell_gds_state doorbell_gds_state = {PTHREAD_MUTEX_INITIALIZER, {NULL}, 0, NULL, NULL, NULL, 0, 0};

void doorbell_gds_lock(void)
{
	pthread_mutex_lock(&doorbell_gds_state.lock);
}

void doorbell_gds_unlock(void)
{
	pthread_mutex_unlock(&doorbell_gds_state.lock);
}

/* ------------------------------------------------------------------------------------------------------ settings */

static int64_t doorbell_gds_setting(const char *name, int64_t usual)
{
	const char *text = getenv(name);
	char *end;
	long long value;
	if (!text || !*text)
		return usual;
	value = strtoll(text, &end, 10);
	return *end == 0 ? (int64_t)value : usual;
}

/* Before the program's first call. */
__attribute__((constructor)) static void doorbell_gds_settings(void)
{
	int64_t timeout_ms = doorbell_gds_setting("GDS_WAIT_TIMEOUT_MS", DOORBELL_DEFAULT_TIMEOUT);
	if (gds_set_option(GDS_OPTION_WAIT_TIMEOUT_MS, timeout_ms))
		gds_set_option(GDS_OPTION_WAIT_TIMEOUT_MS, DOORBELL_DEFAULT_TIMEOUT);
	if (gds_set_option(GDS_OPTION_REGISTER_ON_USE, doorbell_gds_setting("GDS_REGISTER_ON_USE", 1)))
		gds_set_option(GDS_OPTION_REGISTER_ON_USE, 1);
}

int gds_set_option(enum gds_option option, int64_t value)
{
	switch (option) {
	case GDS_OPTION_WAIT_TIMEOUT_MS:
		if (value <= 0 && value != DOORBELL_NO_TIMEOUT && value != DOORBELL_DEFAULT_TIMEOUT)
			return EINVAL;
		__atomic_store_n(&doorbell_gds_state.wait_timeout_ms, value, __ATOMIC_RELAXED);
		return 0;
	case GDS_OPTION_REGISTER_ON_USE:
		if (value != 0 && value != 1)
			return EINVAL;
		__atomic_store_n(&doorbell_gds_state.registers_on_use, value, __ATOMIC_RELAXED);
		return 0;
	default:
		return EINVAL;
	}
}

int64_t doorbell_gds_wait_timeout_ms(void)
{
	return __atomic_load_n(&doorbell_gds_state.wait_timeout_ms, __ATOMIC_RELAXED);
}

/* -------------------------------------------------------------------------------------------------------- errors */

int doorbell_gds_errno(int code)
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

/* libdoorbell is done with an adopted object. */
static void doorbell_gds_released(void *argument)
{
	__atomic_fetch_sub((uint32_t *)argument, 1, __ATOMIC_RELEASE);
}

/* Opens the device of a domain, or adopts its context and protection domain. */
static int doorbell_gds_domain_make(struct doorbell_gds_domain *domain, doorbell_device *device, struct ibv_pd *pd)
{
	int code = 0;
	domain->device = device;
	if (!domain->adopted) {
		if (!device)
			code = doorbell_device_open(domain->name, &domain->device);
		if (code >= 0)
			code = doorbell_domain_create(domain->device, &domain->domain);
	} else {
		if (!device)
			code = doorbell_device_adopt(domain->adopted, getenv("GDS_DEVICE_SETTINGS"), NULL, NULL, &domain->device);
		if (code >= 0) {
			domain->unreleased = 1;
			code = doorbell_domain_adopt(domain->device, pd, doorbell_gds_released, &domain->unreleased, &domain->domain);
		}
	}
	if (code < 0 && !device && domain->device)
		doorbell_device_close(domain->device);
	return doorbell_gds_errno(code);
}

int doorbell_gds_domain_get(const struct ibv_pd *pd, struct doorbell_gds_domain **found)
{
	const char *name = pd ? pd->context->device->name : "softcx";
	struct ibv_context *adopted = pd && !doorbell_gds_is_own_context(pd->context) ? pd->context : NULL;
	struct doorbell_gds_domain *domain;
	doorbell_device *device = NULL;
	int error;
	for (domain = doorbell_gds_state.domains; domain; domain = domain->next) {
		if (domain->adopted != adopted || strcmp(domain->name, name) != 0)
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
	domain->pd = pd;
	domain->adopted = adopted;
	domain->users = 1;
	snprintf(domain->name, sizeof(domain->name), "%s", name);
	/* Domains of one device share the device handle, because each doorbell_device_open of "softcx" makes another
	   NIC, and objects of two handles of one context do not work together. */
	error = doorbell_gds_domain_make(domain, device, (struct ibv_pd *)(uintptr_t)pd);
	if (error) {
		free(domain);
		return error;
	}
	domain->next = doorbell_gds_state.domains;
	doorbell_gds_state.domains = domain;
	*found = domain;
	return 0;
}

struct doorbell_gds_domain *doorbell_gds_domain_put(struct doorbell_gds_domain *domain)
{
	struct doorbell_gds_domain **at = &doorbell_gds_state.domains, *other;
	if (--domain->users > 0)
		return NULL;
	while (*at != domain)
		at = &(*at)->next;
	*at = domain->next;
	for (other = doorbell_gds_state.domains; other; other = other->next)
		if (other->device == domain->device)
			break;
	/* Another domain closes the device. */
	if (other)
		domain->device = NULL;
	return domain;
}

void doorbell_gds_domain_end(struct doorbell_gds_domain *domain)
{
	int turn;
	if (!domain)
		return;
	doorbell_domain_destroy(domain->domain);
	if (domain->device)
		doorbell_device_close(domain->device);
	/* The program may destroy its protection domain as soon as this returns. Streams may still use queue pairs in it; 2 s
	   are enough for those that go on. */
	for (turn = 0; turn < 2000 && __atomic_load_n(&domain->unreleased, __ATOMIC_ACQUIRE) > 0; turn++)
		usleep(1000);
	/* Otherwise libdoorbell writes there later. */
	if (__atomic_load_n(&domain->unreleased, __ATOMIC_ACQUIRE) == 0)
		free(domain);
}

struct ibv_context *gds_open_device(const char *name)
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
	doorbell_gds_context_init(&made->context);
	return &made->context;
}

int gds_close_device(struct ibv_context *context)
{
	struct doorbell_gds_context *made;
	int busy;
	if (!context || !doorbell_gds_is_own_context(context))
		return EINVAL;
	made = doorbell_gds_of_context(context);
	doorbell_gds_lock();
	busy = made->domains > 0;
	doorbell_gds_unlock();
	if (busy)
		return EBUSY;
	free(made);
	return 0;
}

struct ibv_pd *gds_alloc_pd(struct ibv_context *context)
{
	struct ibv_pd *pd;
	struct doorbell_gds_domain *domain;
	int error = context && doorbell_gds_is_own_context(context) ? 0 : EINVAL;
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
		doorbell_gds_of_context(context)->domains++;
	doorbell_gds_unlock();
	if (error) {
		free(pd);
		errno = error;
		return NULL;
	}
	return pd;
}

int gds_dealloc_pd(struct ibv_pd *pd)
{
	struct doorbell_gds_domain *domain, *ended = NULL;
	int error = EINVAL;
	doorbell_gds_lock();
	for (domain = doorbell_gds_state.domains; pd && domain; domain = domain->next) {
		if (domain->pd != pd || domain->adopted)
			continue;
		error = domain->users > 1 ? EBUSY : 0;
		if (!error) {
			doorbell_gds_of_context(pd->context)->domains--;
			ended = doorbell_gds_domain_put(domain);
		}
		break;
	}
	doorbell_gds_unlock();
	doorbell_gds_domain_end(ended);
	if (!error)
		free(pd);
	return error;
}

/* --------------------------------------------------------------------------------------------------------- table */

/* The place of a number; NULL if it is outside the table. */
static struct doorbell_gds_memory *doorbell_gds_place(uint32_t number)
{
	struct doorbell_gds_memory *chunk;
	if (number >= DOORBELL_GDS_CHUNKS * DOORBELL_GDS_CHUNK)
		return NULL;
	chunk = __atomic_load_n(&doorbell_gds_state.chunks[number / DOORBELL_GDS_CHUNK], __ATOMIC_ACQUIRE);
	return chunk ? chunk + number % DOORBELL_GDS_CHUNK : NULL;
}

/*
 * Finds a free place; the caller fills all fields except `key` and `kind`. NULL if there is no memory. The caller
 * holds the lock.
 */
static struct doorbell_gds_memory *doorbell_gds_place_take(uint32_t *number)
{
	struct doorbell_gds_memory *place;
	uint32_t used = doorbell_gds_state.chunk_count;
	for (*number = 0; (place = doorbell_gds_place(*number)) != NULL; ++*number)
		if (place->kind == DOORBELL_GDS_FREE)
			return place;
	if (used == DOORBELL_GDS_CHUNKS)
		return NULL;
	place = (struct doorbell_gds_memory *)calloc(DOORBELL_GDS_CHUNK, sizeof(*place));
	if (!place)
		return NULL;
	__atomic_store_n(&doorbell_gds_state.chunks[used], place, __ATOMIC_RELEASE);
	doorbell_gds_state.chunk_count = used + 1;
	return place;
}

/*
 * Registers memory, or allocates it if `start` is NULL, and adds it to the table. `count` is how often gds_unregister_mem has to
 * be called for it. The caller holds the lock.
 */
static int doorbell_gds_enter(const struct ibv_pd *pd, void *start, size_t len_bytes, uint32_t access,
				     uint32_t kind, uint32_t count, struct doorbell_gds_memory **entered)
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
		doorbell_gds_domain_end(doorbell_gds_domain_put(domain));
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
		/* Nothing else uses the domain, so this does not wait. */
		doorbell_gds_domain_end(doorbell_gds_domain_put(domain));
		return doorbell_gds_errno(code);
	}
	place->mr = NULL;
	place->kind = kind;
	place->uses = (place->uses + 1) & 0xffff;
	place->uses += place->uses == 0;
	place->count = count;
	place->start = (uint64_t)(uintptr_t)doorbell_region_pointer(region);
	place->len_bytes = len_bytes;
	place->region = region;
	place->domain = domain;
	__atomic_store_n(&place->key, place->uses << 16 | number, __ATOMIC_RELEASE);
	*entered = place;
	return 0;
}

/* What is left of memory that was removed from the table. */
struct doorbell_gds_left {
	doorbell_region *region; /* NULL: nothing was removed */
	struct doorbell_gds_domain *domain;
};

/* Removes memory from the table. The caller holds the lock. */
static struct doorbell_gds_left doorbell_gds_leave(struct doorbell_gds_memory *place)
{
	struct doorbell_gds_left left = {place->region, NULL};
	__atomic_store_n(&place->key, 0, __ATOMIC_RELEASE);
	place->kind = DOORBELL_GDS_FREE;
	place->region = NULL;
	place->mr = NULL;
	left.domain = doorbell_gds_domain_put(place->domain);
	return left;
}

/*
 * Deregisters memory. The caller must not hold the lock: the driver may wait for its GPU, which may wait for another
 * thread.
 */
static void doorbell_gds_end_region(struct doorbell_gds_left left)
{
	/* Destroying the handle would deregister it only when no work uses it, but the caller may free the memory
	   now. */
	doorbell_region_deregister(left.region);
	doorbell_region_destroy(left.region);
	doorbell_gds_domain_end(left.domain);
}

static int doorbell_gds_is_within(const struct doorbell_gds_memory *place, uint64_t start, uint64_t len_bytes)
{
	return start >= place->start && start - place->start <= place->len_bytes &&
	       len_bytes <= place->len_bytes - (start - place->start);
}

/* Finds memory of some kinds that contains these bytes; NULL if there is none. The caller holds the lock. */
static struct doorbell_gds_memory *doorbell_gds_find(uint64_t start, uint64_t len_bytes, uint32_t first_kind,
							    uint32_t last_kind)
{
	struct doorbell_gds_memory *place;
	uint32_t number;
	for (number = 0; (place = doorbell_gds_place(number)) != NULL; number++)
		if (place->kind >= first_kind && place->kind <= last_kind && doorbell_gds_is_within(place, start, len_bytes))
			return place;
	return NULL;
}

/* Memory that libibverbs has registered, by its key. */
static int doorbell_gds_adopted_slice(struct doorbell_gds_qp *qp, const struct ibv_sge *sge, doorbell_slice *slice)
{
	const uint64_t start = sge->addr & ~(DOORBELL_GDS_WINDOW / 2 - 1);
	/* One key may be used in several windows: the heap, mapped files and the stack are in different ones. */
	const uint32_t hash = (sge->lkey ^ (uint32_t)(start >> 39) * 0x85ebca6bu) * 0x9e3779b1u;
	struct doorbell_gds_key *key = &qp->keys[hash >> 24];
	if (!key->region || key->lkey != sge->lkey || key->start != start) {
		doorbell_memory_keys keys = {start, DOORBELL_GDS_WINDOW, sge->lkey, 0};
		doorbell_region *region;
		int error = doorbell_gds_errno(doorbell_region_adopt_keys(qp->domain->domain, &keys, DOORBELL_ACCESS_ALL,
									  DOORBELL_REGION_PEERMEM, NULL, NULL, &region));
		if (error)
			return error;
		/* An earlier slice of this work request may use the old one. There are at most as many as slices. */
		if (key->region)
			qp->evicted[qp->evicted_count++] = key->region;
		key->region = region;
		key->start = start;
		key->lkey = sge->lkey;
	}
	slice->region = key->region;
	slice->offset = sge->addr - start;
	slice->len_bytes = sge->length;
	return 0;
}

void doorbell_gds_slices_end(struct doorbell_gds_qp *qp)
{
	while (qp->evicted_count > 0)
		doorbell_region_destroy(qp->evicted[--qp->evicted_count]);
}

int doorbell_gds_slice(struct doorbell_gds_qp *qp, const struct ibv_sge *sge, doorbell_slice *slice)
{
	struct doorbell_gds_memory *place;
	if (qp->domain->adopted)
		return doorbell_gds_adopted_slice(qp, sge, slice);
	place = doorbell_gds_place(sge->lkey & 0xffff);
	if (!place || sge->lkey == 0 || __atomic_load_n(&place->key, __ATOMIC_ACQUIRE) != sge->lkey)
		return EINVAL;
	if (!doorbell_gds_is_within(place, sge->addr, sge->length))
		return EFAULT;
	slice->region = place->region;
	slice->offset = sge->addr - place->start;
	slice->len_bytes = sge->length;
	return 0;
}

int doorbell_gds_words(const void *start, size_t len_bytes, const doorbell_region **region, uint64_t *offset)
{
	const uint64_t address = (uint64_t)(uintptr_t)start;
	struct doorbell_gds_memory *place;
	int error = 0;
	if (!start || address % 4 != 0)
		return EINVAL;
	doorbell_gds_lock();
	place = doorbell_gds_find(address, len_bytes, DOORBELL_GDS_SLICES, DOORBELL_GDS_OWN);
	if (!place && __atomic_load_n(&doorbell_gds_state.registers_on_use, __ATOMIC_RELAXED)) {
		const uint64_t page = address & ~(uint64_t)4095, end = (address + len_bytes + 4095) & ~(uint64_t)4095;
		/* The first gds_register_mem of it takes it over. */
		error = doorbell_gds_enter(NULL, (void *)(uintptr_t)page, (size_t)(end - page), DOORBELL_ACCESS_ALL,
					   DOORBELL_GDS_WORDS, 0, &place);
	}
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

struct ibv_mr *gds_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	struct ibv_mr *mr = NULL;
	struct doorbell_gds_memory *place;
	struct doorbell_gds_left left = {NULL, NULL};
	doorbell_remote remote;
	uint32_t lkey;
	/* Access rights that verbs calls optional are ignored, such as relaxed ordering. */
	const uint32_t rights = (uint32_t)access & ~0x3ff00000u;
	int error = pd && addr && (rights & ~(uint32_t)DOORBELL_ACCESS_ALL) == 0 ? 0 : EINVAL;
	if (!error) {
		mr = (struct ibv_mr *)calloc(1, sizeof(*mr));
		error = mr ? 0 : ENOMEM;
	}
	if (!error) {
		doorbell_gds_lock();
		error = doorbell_gds_enter(pd, addr, length, rights, DOORBELL_GDS_SLICES, 1, &place);
		if (!error) {
			lkey = place->key;
			error = doorbell_gds_errno(doorbell_region_remote(place->region, &remote));
			if (!error && place->domain->adopted)
				error = doorbell_gds_errno(doorbell_region_lkey(place->region, &lkey));
			if (error)
				left = doorbell_gds_leave(place);
		}
		if (!error) {
			place->mr = mr;
			mr->lkey = lkey;
			mr->handle = place->key & 0xffff;
			mr->context = pd->context;
			mr->pd = pd;
			mr->addr = addr;
			mr->length = length;
			mr->rkey = remote.rkey;
		}
		doorbell_gds_unlock();
	}
	if (left.region)
		doorbell_gds_end_region(left);
	if (error) {
		free(mr);
		errno = error;
		return NULL;
	}
	return mr;
}

/* The place of memory of gds_reg_mr, or NULL. The caller holds the lock. */
static struct doorbell_gds_memory *doorbell_gds_of_mr(const struct ibv_mr *mr)
{
	struct doorbell_gds_memory *place = doorbell_gds_place(mr->handle);
	return place && place->mr == mr ? place : NULL;
}

int gds_owns_mr(const struct ibv_mr *mr)
{
	int owns;
	if (!mr)
		return 0;
	doorbell_gds_lock();
	owns = doorbell_gds_of_mr(mr) != NULL;
	doorbell_gds_unlock();
	return owns;
}

int gds_dereg_mr(struct ibv_mr *mr)
{
	struct doorbell_gds_left left = {NULL, NULL};
	struct doorbell_gds_memory *place;
	if (!mr)
		return EINVAL;
	doorbell_gds_lock();
	place = doorbell_gds_of_mr(mr);
	if (place)
		left = doorbell_gds_leave(place);
	doorbell_gds_unlock();
	if (!left.region)
		return EINVAL;
	doorbell_gds_end_region(left);
	free(mr);
	return 0;
}

int gds_register_mem(void *ptr, size_t size, gds_memory_type_t type, CUdeviceptr *dev_ptr)
{
	const uint64_t start = (uint64_t)(uintptr_t)ptr;
	/* Words of a region are at aligned offsets. These bytes are of the same page, and of the same allocation of a GPU. */
	const uint64_t skew = start % 8;
	struct doorbell_gds_left left = {NULL, NULL};
	const doorbell_region *region = NULL;
	struct doorbell_gds_memory *place;
	uint64_t offset = 0;
	uint32_t number;
	int error = 0, has_entered = 0;
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
			error = doorbell_gds_enter(NULL, (char *)ptr - skew, size + skew, DOORBELL_ACCESS_ALL, DOORBELL_GDS_WORDS, 1, &place);
		has_entered = !error;
	}
	if (!error) {
		region = place->region;
		offset = start - place->start;
	}
	doorbell_gds_unlock();
	/* This call's count keeps the region. */
	if (!error && dev_ptr) {
		error = doorbell_gds_device_address(region, offset, dev_ptr);
		if (error) {
			doorbell_gds_lock();
			place->count--;
			/* Others may use memory that was registered before this call, also with a count of 0. */
			if (has_entered && place->count == 0)
				left = doorbell_gds_leave(place);
			doorbell_gds_unlock();
			if (left.region)
				doorbell_gds_end_region(left);
		}
	}
	return error;
}

int gds_unregister_mem(void *ptr, size_t size)
{
	struct doorbell_gds_left left = {NULL, NULL};
	struct doorbell_gds_memory *place, *found = NULL;
	uint32_t number;
	if (!ptr || size == 0)
		return EINVAL;
	doorbell_gds_lock();
	/* What a use has registered has a count of 0 until a gds_register_mem takes it over, and may contain what one has registered before. */
	for (number = 0; (place = doorbell_gds_place(number)) != NULL; number++) {
		if (place->kind != DOORBELL_GDS_WORDS || !doorbell_gds_is_within(place, (uint64_t)(uintptr_t)ptr, size))
			continue;
		if (!found || place->count > 0)
			found = place;
		if (found->count > 0)
			break;
	}
	place = found;
	if (place && place->count > 0)
		place->count--;
	if (place && place->count == 0)
		left = doorbell_gds_leave(place);
	doorbell_gds_unlock();
	if (left.region)
		doorbell_gds_end_region(left);
	return place ? 0 : EINVAL;
}

/* ------------------------------------------------------------------------------------------------- mapped memory */

int gds_alloc_mapped_memory(gds_mem_desc_t *desc, size_t size, int flags)
{
	struct doorbell_gds_left left = {NULL, NULL};
	struct doorbell_gds_memory *place;
	const doorbell_region *region = NULL;
	CUdeviceptr address;
	int error = 0;
	if (size == 0)
		return 0;
	if (!desc || ((flags & GDS_MEMORY_MASK) != GDS_MEMORY_GPU && (flags & GDS_MEMORY_MASK) != GDS_MEMORY_HOST))
		return EINVAL;
	if ((flags & GDS_MEMORY_MASK) == GDS_MEMORY_GPU)
		return EOPNOTSUPP;
	doorbell_gds_lock();
	error = doorbell_gds_enter(NULL, NULL, size, DOORBELL_ACCESS_ALL, DOORBELL_GDS_OWN, 1, &place);
	if (!error)
		region = place->region;
	doorbell_gds_unlock();
	if (error)
		return error;
	/* No other thread has the address of the memory yet. */
	error = doorbell_gds_device_address(region, 0, &address);
	if (error) {
		doorbell_gds_lock();
		left = doorbell_gds_leave(place);
		doorbell_gds_unlock();
		doorbell_gds_end_region(left);
		return error;
	}
	desc->d_ptr = address;
	desc->h_ptr = doorbell_region_pointer(region);
	desc->bar_ptr = NULL;
	desc->flags = flags;
	desc->alloc_size = size;
	desc->original_d_ptr = desc->d_ptr;
	return 0;
}

int gds_free_mapped_memory(gds_mem_desc_t *desc)
{
	struct doorbell_gds_left left = {NULL, NULL};
	struct doorbell_gds_memory *place = NULL;
	if (!desc || !desc->h_ptr)
		return EINVAL;
	doorbell_gds_lock();
	place = doorbell_gds_find((uint64_t)(uintptr_t)desc->h_ptr, desc->alloc_size, DOORBELL_GDS_OWN, DOORBELL_GDS_OWN);
	if (place && place->start == (uint64_t)(uintptr_t)desc->h_ptr)
		left = doorbell_gds_leave(place);
	doorbell_gds_unlock();
	if (!left.region)
		return EINVAL;
	doorbell_region_destroy(left.region);
	doorbell_gds_domain_end(left.domain);
	memset(desc, 0, sizeof(*desc));
	return 0;
}
