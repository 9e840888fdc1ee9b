/*
 * Memory and devices: keys of slices, registered words, protection domains.
 *
 * A slice names its memory by a key and an address; libdoorbell names it by a region. libgdsync has its own keys, so
 * that finding the region of a key takes no lock: a key is the number of a place in a table, and the number of times
 * the place was used. Words have no key; they are found by address, under the lock.
 */
#include "internal.h"

struct doorbell_gds_state doorbell_gds_state = {PTHREAD_MUTEX_INITIALIZER, {NULL}, 0, NULL, NULL, NULL, 0, 0, 0};

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
	static const char *const names[3] = {"direct", "proxy", "sync"};
	const char *control = getenv("GDS_CONTROL");
	int i;
	int64_t timeout_ms = doorbell_gds_setting("GDS_WAIT_TIMEOUT_MS", DOORBELL_DEFAULT_TIMEOUT);
	if (gds_set_option(GDS_OPTION_WAIT_TIMEOUT_MS, timeout_ms))
		gds_set_option(GDS_OPTION_WAIT_TIMEOUT_MS, DOORBELL_DEFAULT_TIMEOUT);
	if (gds_set_option(GDS_OPTION_REGISTER_ON_USE, doorbell_gds_setting("GDS_REGISTER_ON_USE", 1)))
		gds_set_option(GDS_OPTION_REGISTER_ON_USE, 1);
	for (i = 0; control && i < 3; i++)
		if (strcmp(control, names[i]) == 0)
			gds_set_option(GDS_OPTION_CONTROL, 1 + i);
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
	case GDS_OPTION_CONTROL:
		if (value < 0 || value > 1 + DOORBELL_CONTROL_SYNC)
			return EINVAL;
		__atomic_store_n(&doorbell_gds_state.control, value, __ATOMIC_RELAXED);
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

int doorbell_gds_domain_get(const struct ibv_pd *pd, struct doorbell_gds_domain **found)
{
	const char *name = pd ? pd->context->device->name : "softcx";
	struct doorbell_gds_domain *domain;
	doorbell_device *device = NULL;
	int code;
	for (domain = doorbell_gds_state.domains; domain; domain = domain->next) {
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
	domain->next = doorbell_gds_state.domains;
	doorbell_gds_state.domains = domain;
	*found = domain;
	return 0;
}

void doorbell_gds_domain_put(struct doorbell_gds_domain *domain)
{
	struct doorbell_gds_domain **at = &doorbell_gds_state.domains, *other;
	if (--domain->users > 0)
		return;
	while (*at != domain)
		at = &(*at)->next;
	*at = domain->next;
	doorbell_domain_destroy(domain->domain);
	for (other = doorbell_gds_state.domains; other; other = other->next)
		if (other->device == domain->device)
			break;
	if (!other)
		doorbell_device_close(domain->device);
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
	return &made->context;
}

int gds_close_device(struct ibv_context *context)
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

struct ibv_pd *gds_alloc_pd(struct ibv_context *context)
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

int gds_dealloc_pd(struct ibv_pd *pd)
{
	struct doorbell_gds_domain *domain;
	int error = EINVAL;
	doorbell_gds_lock();
	for (domain = doorbell_gds_state.domains; pd && domain; domain = domain->next) {
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

/* Registers memory, or allocates it if `start` is NULL, and adds it to the table. The caller holds the lock. */
static int doorbell_gds_enter(const struct ibv_pd *pd, void *start, size_t len_bytes, uint32_t access,
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
static doorbell_region *doorbell_gds_leave(struct doorbell_gds_memory *place)
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
static void doorbell_gds_end_region(doorbell_region *region)
{
	/* Destroying the handle would deregister it only when no work uses it, but the caller may free the memory
	   now. */
	doorbell_region_deregister(region);
	doorbell_region_destroy(region);
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

int doorbell_gds_slice(const struct ibv_sge *sge, doorbell_slice *slice)
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
		error = doorbell_gds_enter(NULL, (void *)(uintptr_t)page, (size_t)(end - page), DOORBELL_ACCESS_ALL,
					   DOORBELL_GDS_WORDS, &place);
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

int gds_dereg_mr(struct ibv_mr *mr)
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

int gds_register_mem(void *ptr, size_t size, gds_memory_type_t type, CUdeviceptr *dev_ptr)
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

int gds_unregister_mem(void *ptr, size_t size)
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

/* ------------------------------------------------------------------------------------------------- mapped memory */

int gds_alloc_mapped_memory(gds_mem_desc_t *desc, size_t size, int flags)
{
	struct doorbell_gds_memory *place;
	int error = 0;
	if (size == 0)
		return 0;
	if (!desc || ((flags & GDS_MEMORY_MASK) != GDS_MEMORY_GPU && (flags & GDS_MEMORY_MASK) != GDS_MEMORY_HOST))
		return EINVAL;
	if ((flags & GDS_MEMORY_MASK) == GDS_MEMORY_GPU)
		return EOPNOTSUPP;
	doorbell_gds_lock();
	error = doorbell_gds_enter(NULL, NULL, size, DOORBELL_ACCESS_ALL, DOORBELL_GDS_OWN, &place);
	if (!error) {
		desc->d_ptr = (CUdeviceptr)place->start;
		desc->h_ptr = (void *)(uintptr_t)place->start;
		desc->bar_ptr = NULL;
		desc->flags = flags;
		desc->alloc_size = size;
	}
	doorbell_gds_unlock();
	return error;
}

int gds_free_mapped_memory(gds_mem_desc_t *desc)
{
	struct doorbell_gds_memory *place = NULL;
	doorbell_region *region = NULL;
	if (!desc || !desc->h_ptr)
		return EINVAL;
	doorbell_gds_lock();
	place = doorbell_gds_find((uint64_t)(uintptr_t)desc->h_ptr, desc->alloc_size, DOORBELL_GDS_OWN, DOORBELL_GDS_OWN);
	if (place && place->start == (uint64_t)(uintptr_t)desc->h_ptr)
		region = doorbell_gds_leave(place);
	doorbell_gds_unlock();
	if (!region)
		return EINVAL;
	doorbell_region_destroy(region);
	memset(desc, 0, sizeof(*desc));
	return 0;
}
