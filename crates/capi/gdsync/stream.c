/*
 * Streams, prepared requests and descriptors.
 */
#include "internal.h"

/* ------------------------------------------------------------------------------------------------------- streams */

/* A stream of libgdsync goes on behind an error, which completions report. */
static int doorbell_gds_goes_on(int created, doorbell_stream **handle)
{
	if (created == 0)
		created = doorbell_stream_continue_on_error(*handle, 1);
	return doorbell_gds_errno(created);
}

/* Adds a stream to a list. The caller holds the lock. */
static int doorbell_gds_stream_enter(const struct doorbell_gds_target *target, struct doorbell_gds_stream **list)
{
	struct doorbell_gds_stream *entry = (struct doorbell_gds_stream *)calloc(1, sizeof(*entry));
	if (!entry)
		return ENOMEM;
	entry->target = *target;
	entry->next = *list;
	*list = entry;
	return 0;
}

/*
 * The context that belongs to the name of a stream. NULL and CU_STREAM_LEGACY name the default stream of the current context. Any other
 * name is of one stream, whatever context is current.
 */
static void *doorbell_gds_context_of(CUstream stream)
{
	return (uintptr_t)stream <= 1 ? doorbell_gds_current_context() : NULL;
}

/* Finds the stream of that name, or creates libdoorbell's for a stream of the driver. */
static int doorbell_gds_target(CUstream stream, struct doorbell_gds_target *target)
{
	void *const context = doorbell_gds_context_of(stream);
	struct doorbell_gds_stream *entry;
	int error = 0;
	doorbell_gds_lock();
	for (entry = doorbell_gds_state.streams; entry; entry = entry->next)
		if (entry->target.name == stream && entry->target.context == context)
			break;
	if (entry) {
		*target = entry->target;
	} else {
		target->name = stream;
		target->context = context;
		target->is_cuda = 1;
		error = doorbell_gds_goes_on(doorbell_stream_create_cuda(stream, NULL, &target->handle), &target->handle);
		if (!error) {
			error = doorbell_gds_stream_enter(target, &doorbell_gds_state.streams);
			if (error)
				doorbell_stream_destroy(target->handle);
		}
	}
	doorbell_gds_unlock();
	return error;
}

int gds_stream_handle(CUstream stream, doorbell_stream **handle)
{
	struct doorbell_gds_target target;
	int error = handle ? doorbell_gds_target(stream, &target) : EINVAL;
	if (!error)
		*handle = target.handle;
	return error;
}

int gds_create_host_stream(CUstream *stream)
{
	struct doorbell_gds_target target;
	int error = stream ? 0 : EINVAL;
	if (!error)
		error = doorbell_gds_goes_on(doorbell_stream_create_host("gdsync", 0, &target.handle), &target.handle);
	if (error)
		return error;
	/* The address of the handle is a name that no CUDA stream has. */
	*stream = target.name = (CUstream)(void *)target.handle;
	target.context = NULL;
	target.is_cuda = 0;
	doorbell_gds_lock();
	error = doorbell_gds_stream_enter(&target, &doorbell_gds_state.streams);
	doorbell_gds_unlock();
	if (error)
		doorbell_stream_destroy(target.handle);
	return error;
}

int gds_release_stream(CUstream stream)
{
	void *const context = doorbell_gds_context_of(stream);
	struct doorbell_gds_stream **at, *entry = NULL;
	doorbell_gds_lock();
	for (at = &doorbell_gds_state.streams; *at; at = &(*at)->next) {
		if ((*at)->target.name == stream && (*at)->target.context == context) {
			entry = *at;
			*at = entry->next;
			break;
		}
	}
	doorbell_gds_unlock();
	if (!entry)
		return EINVAL;
	doorbell_stream_destroy(entry->target.handle);
	free(entry);
	return 0;
}

/*
 * Takes an idle host stream. Each call that executes descriptors at once uses a separate one, so that none waits for
 * another.
 */
static int doorbell_gds_idle_take(struct doorbell_gds_target *target)
{
	struct doorbell_gds_stream *entry;
	doorbell_gds_lock();
	entry = doorbell_gds_state.idle;
	if (entry)
		doorbell_gds_state.idle = entry->next;
	doorbell_gds_unlock();
	memset(target, 0, sizeof(*target));
	if (!entry)
		return doorbell_gds_goes_on(doorbell_stream_create_host("gdsync-cpu", 0, &target->handle), &target->handle);
	*target = entry->target;
	free(entry);
	return 0;
}

static void doorbell_gds_idle_give(const struct doorbell_gds_target *target)
{
	int error;
	doorbell_gds_lock();
	error = doorbell_gds_stream_enter(target, &doorbell_gds_state.idle);
	doorbell_gds_unlock();
	if (error)
		doorbell_stream_destroy(target->handle);
}

/* ------------------------------------------------------------------------------------------------------ requests */

/* Takes back the operations of a request, newest first. The caller holds the queue pair's lock. */
static int doorbell_gds_take_back(struct doorbell_gds_qp *qp, gds_send_request_t *request)
{
	struct doorbell_gds_cq *cq = &qp->cq[DOORBELL_QUEUE_SEND];
	int code;
	while (request->count > 0) {
		const uint32_t last = request->count - 1;
		code = doorbell_prepared_rollback(qp->endpoint, request->prepared[last]);
		if (code < 0)
			return doorbell_gds_errno(code);
		doorbell_gds_unposted(cq, request->entry[last]);
		request->count = last;
	}
	return 0;
}

/* The caller holds `posting`. `holds`: no wait claims the entries until the caller sets `held`. */
static int doorbell_gds_prepare_send(struct doorbell_gds_qp *qp, gds_send_wr *wr, gds_send_wr **bad_wr,
					    gds_send_request_t *request, int holds)
{
	struct doorbell_gds_cq *cq = &qp->cq[DOORBELL_QUEUE_SEND];
	struct doorbell_gds_work made;
	int error = 0;
	made.handle = NULL;
	memset(request, 0, sizeof(*request));
	request->owner = qp;
	pthread_mutex_lock(&qp->lock);
	if (holds)
		cq->held = cq->tail;
	for (; wr; wr = wr->next) {
		const uint32_t at = request->count;
		error = at < GDS_SEND_INFO_MAX_OPS ? doorbell_gds_translate(qp, wr, &made) : ENOMEM;
		if (!error)
			error = doorbell_gds_make_room(cq);
		if (!error)
			error = doorbell_gds_errno(doorbell_prepare_send(qp->endpoint, &made.work, &request->prepared[at]));
		doorbell_gds_work_end(qp, &made);
		if (error)
			break;
		request->entry[at] =
			doorbell_gds_posted(cq, wr->wr_id, made.opcode, !(made.work.flags & DOORBELL_WORK_UNSIGNALED), NULL);
		request->serial = cq->posted;
		request->count = at + 1;
	}
	if (error)
		doorbell_gds_take_back(qp, request);
	pthread_mutex_unlock(&qp->lock);
	if (error && bad_wr)
		*bad_wr = wr;
	return error;
}

int gds_prepare_send(struct gds_qp *gds, gds_send_wr *wr, gds_send_wr **bad_wr, gds_send_request_t *request)
{
	struct doorbell_gds_qp *qp;
	int error;
	if (!gds || !wr || !request)
		return EINVAL;
	qp = doorbell_gds_of(gds);
	pthread_mutex_lock(&qp->posting);
	error = doorbell_gds_prepare_send(qp, wr, bad_wr, request, 0);
	pthread_mutex_unlock(&qp->posting);
	return error;
}

int gds_rollback_send(struct gds_qp *gds, gds_send_request_t *request)
{
	struct doorbell_gds_qp *qp;
	const struct doorbell_gds_cq *cq;
	uint32_t i;
	int error = 0;
	if (!gds || !request)
		return EINVAL;
	qp = doorbell_gds_of(gds);
	if (request->owner != qp || request->count == 0)
		return EINVAL;
	cq = &qp->cq[DOORBELL_QUEUE_SEND];
	pthread_mutex_lock(&qp->lock);
	if (request->serial != cq->posted)
		error = EBUSY;
	/* Refused also if a wait for its completion is prepared. */
	for (i = 0; i < request->count && !error; i++)
		if (request->entry[i] != DOORBELL_GDS_NO_ENTRY && request->entry[i] < cq->next)
			error = EBUSY;
	if (!error)
		error = doorbell_gds_take_back(qp, request);
	pthread_mutex_unlock(&qp->lock);
	return error;
}

int gds_prepare_wait_cq(struct gds_cq *gds, gds_wait_request_t *request, int flags)
{
	struct doorbell_gds_cq *cq;
	int error;
	if (!gds || !gds->cq || !request || flags != 0)
		return EINVAL;
	cq = (struct doorbell_gds_cq *)gds->cq;
	request->owner = cq;
	request->prepared = NULL;
	request->appended = 0;
	pthread_mutex_lock(&cq->owner->lock);
	error = cq->next < cq->tail && cq->next < cq->held ? 0 : EINVAL;
	if (!error)
		error = doorbell_gds_errno(
			doorbell_prepare_wait_cq(cq->owner->endpoint, cq->side, doorbell_gds_wait_timeout_ms(), &request->prepared));
	if (!error) {
		request->entry = cq->next++;
		doorbell_gds_at(cq, request->entry)->claim = DOORBELL_GDS_WAITED;
		gds->curr_offset++;
	}
	pthread_mutex_unlock(&cq->owner->lock);
	return error;
}

int gds_append_wait_cq(gds_wait_request_t *request, uint32_t *dw, uint32_t val)
{
	if (!request || !request->prepared || !dw)
		return EINVAL;
	if (request->appended == GDS_WAIT_INFO_MAX_OPS - 2)
		return ENOMEM;
	request->append[request->appended].ptr = dw;
	request->append[request->appended].value = val;
	request->appended++;
	return 0;
}

int gds_abort_wait_cq(struct gds_cq *gds, gds_wait_request_t *request)
{
	struct doorbell_gds_cq *cq;
	struct doorbell_gds_entry *entry;
	int error;
	if (!gds || !request || !request->prepared || (struct doorbell_gds_cq *)gds->cq != request->owner)
		return EINVAL;
	cq = request->owner;
	pthread_mutex_lock(&cq->owner->lock);
	error = doorbell_gds_errno(doorbell_prepared_destroy(request->prepared));
	entry = doorbell_gds_entry_of(cq, request->entry);
	if (entry && !error)
		entry->claim = DOORBELL_GDS_LEFT;
	pthread_mutex_unlock(&cq->owner->lock);
	if (!error)
		request->prepared = NULL;
	return error;
}

int gds_post_wait_cq(struct gds_cq *cq, gds_wait_request_t *request, int flags)
{
	return flags == 0 ? gds_abort_wait_cq(cq, request) : EINVAL;
}

/* -------------------------------------------------------------------------------------------- making descriptors */

int doorbell_gds_check_flags(int flags, int allowed)
{
	const int type = flags & GDS_MEMORY_MASK;
	if (flags & ~(allowed | GDS_MEMORY_MASK))
		return EINVAL;
	if (type == GDS_MEMORY_IO)
		return EOPNOTSUPP;
	return type == GDS_MEMORY_GPU || type == GDS_MEMORY_HOST ? 0 : EINVAL;
}

int gds_prepare_wait_value32(gds_wait_value32_t *desc, uint32_t *ptr, uint32_t value,
					   gds_wait_cond_flag_t cond_flags, int flags)
{
	int error = desc ? doorbell_gds_check_flags(flags, GDS_WAIT_POST_FLUSH_REMOTE) : EINVAL;
	if (!error && (unsigned)cond_flags > GDS_WAIT_COND_NOR)
		error = EINVAL;
	if (error)
		return error;
	desc->ptr = ptr;
	desc->value = value;
	desc->cond_flags = cond_flags;
	desc->flags = flags;
	return 0;
}

int gds_prepare_write_value32(gds_write_value32_t *desc, uint32_t *ptr, uint32_t value, int flags)
{
	int error = desc ? doorbell_gds_check_flags(flags, GDS_WRITE_PRE_BARRIER_SYS) : EINVAL;
	if (error)
		return error;
	desc->ptr = ptr;
	desc->value = value;
	desc->flags = flags;
	return 0;
}

int gds_prepare_write_memory(gds_write_memory_t *desc, uint8_t *dest, const uint8_t *src, size_t count, int flags)
{
	int error = desc ? doorbell_gds_check_flags(flags, GDS_WRITE_MEMORY_POST_BARRIER_SYS | GDS_WRITE_MEMORY_PRE_BARRIER_SYS)
			 : EINVAL;
	if (error)
		return error;
	desc->dest = dest;
	desc->src = src;
	desc->count = count;
	desc->flags = flags;
	return 0;
}

/* ---------------------------------------------------------------------------------------------- posting descriptors */

/* Which component waits for words and stores them. */
enum doorbell_gds_word_kind {
	DOORBELL_GDS_WORD_REGION, /* libdoorbell, in a region of host memory */
	DOORBELL_GDS_WORD_GPU	  /* the driver, in memory of a GPU */
};

/*
 * Finds words. Those of GPU memory are the driver's: it needs no registration for them, and executes them in the order
 * of the stream.
 */
static int doorbell_gds_word(const void *start, size_t len_bytes, int flags, const struct doorbell_gds_target *target,
			     enum doorbell_gds_word_kind *kind, const doorbell_region **region, uint64_t *offset)
{
	int error;
	*kind = DOORBELL_GDS_WORD_REGION;
	if (!start || (uintptr_t)start % 4 != 0)
		return EINVAL;
	if ((flags & GDS_MEMORY_MASK) == GDS_MEMORY_GPU && doorbell_gds_is_gpu_memory(start))
		*kind = DOORBELL_GDS_WORD_GPU;
	if (*kind == DOORBELL_GDS_WORD_REGION) {
		error = doorbell_gds_words(start, len_bytes, region, offset);
		if (error)
			return error;
		if (doorbell_region_kind(*region) != DOORBELL_REGION_HOST)
			*kind = DOORBELL_GDS_WORD_GPU;
	}
	return *kind == DOORBELL_GDS_WORD_GPU && !target->is_cuda ? EINVAL : 0;
}

static int doorbell_gds_check_word(const void *start, size_t len_bytes, int flags, const struct doorbell_gds_target *target)
{
	enum doorbell_gds_word_kind kind;
	const doorbell_region *region;
	uint64_t offset;
	return doorbell_gds_word(start, len_bytes, flags, target, &kind, &region, &offset);
}

int doorbell_gds_check(const gds_descriptor_t *desc, const struct doorbell_gds_target *target)
{
	uint32_t i;
	int error = 0;
	switch (desc->tag) {
	case GDS_TAG_SEND:
		return desc->send && desc->send->count > 0 ? 0 : EINVAL;
	case GDS_TAG_WAIT:
		if (!desc->wait || !desc->wait->prepared)
			return EINVAL;
		for (i = 0; i < desc->wait->appended && !error; i++)
			error = doorbell_gds_check_word(desc->wait->append[i].ptr, 4, GDS_MEMORY_GPU, target);
		return error;
	case GDS_TAG_WAIT_VALUE32:
		return doorbell_gds_check_word(desc->wait32.ptr, 4, desc->wait32.flags, target);
	case GDS_TAG_WRITE_VALUE32:
		return doorbell_gds_check_word(desc->write32.ptr, 4, desc->write32.flags, target);
	case GDS_TAG_WRITE_MEMORY:
		if (!desc->writemem.src || desc->writemem.count % 4 != 0 || desc->writemem.count > GDS_WRITE_MEMORY_MAX_BYTES)
			return EINVAL;
		return doorbell_gds_check_word(desc->writemem.dest, desc->writemem.count, desc->writemem.flags, target);
	default:
		return EINVAL;
	}
}

/* Stores `count` bytes, a multiple of 4. */
static int doorbell_gds_store(const struct doorbell_gds_target *target, void *dest, const uint8_t *src, size_t count, int flags)
{
	enum doorbell_gds_word_kind kind;
	const doorbell_region *region;
	uint64_t offset;
	uint32_t word;
	size_t at;
	int error = doorbell_gds_word(dest, count, flags, target, &kind, &region, &offset);
	for (at = 0; at < count && !error; at += 4) {
		memcpy(&word, src + at, 4);
		if (kind == DOORBELL_GDS_WORD_GPU)
			error = doorbell_gds_driver_write(target->name, (uint8_t *)dest + at, word);
		else
			error = doorbell_gds_errno(doorbell_stream_write_value32(target->handle, region, offset + at, word, NULL));
	}
	return error;
}

static int doorbell_gds_wait_word(const struct doorbell_gds_target *target, const gds_wait_value32_t *wait)
{
	const gds_wait_cond_flag_t cond = wait->cond_flags;
	enum doorbell_gds_word_kind kind;
	const doorbell_region *region;
	uint64_t offset, mapped;
	uint32_t condition;
	int code, error = doorbell_gds_word(wait->ptr, 4, wait->flags, target, &kind, &region, &offset);
	if (error)
		return error;
	if (kind == DOORBELL_GDS_WORD_GPU)
		return doorbell_gds_driver_wait(target->name, (CUdeviceptr)(uintptr_t)wait->ptr, wait->value, cond, wait->flags);
	condition = cond == GDS_WAIT_COND_GEQ	? DOORBELL_WAIT_GEQ :
		    cond == GDS_WAIT_COND_AND	? DOORBELL_WAIT_AND :
		    cond == GDS_WAIT_COND_NOR	? DOORBELL_WAIT_NOR :
						  DOORBELL_WAIT_EQ;
	code = doorbell_stream_wait_value32(target->handle, region, offset, condition, wait->value, doorbell_gds_wait_timeout_ms(),
					    NULL);
	if (code == DOORBELL_ESTATE && cond == GDS_WAIT_COND_EQ && target->is_cuda) {
		/* The library has no kernels, one of which would wait with a timeout. The driver's wait has none. */
		error = doorbell_gds_errno(doorbell_region_device_pointer(region, &mapped));
		return error ? error : doorbell_gds_driver_wait(target->name, mapped + offset, wait->value, cond, wait->flags);
	}
	return doorbell_gds_errno(code);
}

static int doorbell_gds_give_words(const struct doorbell_gds_target *target, const gds_descriptor_t *desc)
{
	if (desc->tag == GDS_TAG_WAIT_VALUE32)
		return doorbell_gds_wait_word(target, &desc->wait32);
	if (desc->tag == GDS_TAG_WRITE_VALUE32)
		return doorbell_gds_store(target, desc->write32.ptr, (const uint8_t *)&desc->write32.value, 4, desc->write32.flags);
	return doorbell_gds_store(target, desc->writemem.dest, desc->writemem.src, desc->writemem.count, desc->writemem.flags);
}

/* Operations of requests that are posted in one batch, each with the entry of its ticket. */
enum { DOORBELL_GDS_BATCH = 64 };

struct doorbell_gds_batch {
	doorbell_prepared *prepared[DOORBELL_GDS_BATCH];
	doorbell_ticket *tickets[DOORBELL_GDS_BATCH];
	struct doorbell_gds_cq *cq[DOORBELL_GDS_BATCH];
	uint64_t entry[DOORBELL_GDS_BATCH];
	uint32_t *spent[DOORBELL_GDS_BATCH];	     /* set at the last operation of a send request: the request's
							count */
	doorbell_prepared **waited[DOORBELL_GDS_BATCH]; /* set at the operation of a wait request: the request's
							   `prepared` */
	uint32_t count;
};

/* Posts the batch to the stream, and stores its tickets in the entries. */
static int doorbell_gds_give_batch(doorbell_stream *stream, struct doorbell_gds_batch *batch)
{
	struct doorbell_gds_entry *entry;
	uint32_t i;
	int error;
	if (batch->count == 0)
		return 0;
	error = doorbell_gds_errno(doorbell_stream_post_all(stream, batch->prepared, batch->count, batch->tickets));
	for (i = 0; i < batch->count && !error; i++) {
		struct doorbell_gds_cq *cq = batch->cq[i];
		doorbell_ticket **place = NULL;
		pthread_mutex_lock(&cq->owner->lock);
		entry = batch->entry[i] == DOORBELL_GDS_NO_ENTRY ? NULL : doorbell_gds_entry_of(cq, batch->entry[i]);
		if (entry)
			place = batch->waited[i] ? &entry->wait : &entry->work;
		if (place)
			*place = batch->tickets[i];
		pthread_mutex_unlock(&cq->owner->lock);
		if (!place)
			doorbell_ticket_destroy(batch->tickets[i]);
		if (batch->spent[i])
			*batch->spent[i] = 0;
		if (batch->waited[i])
			*batch->waited[i] = NULL;
	}
	batch->count = 0;
	return error;
}

static void doorbell_gds_batch_add(struct doorbell_gds_batch *batch, doorbell_prepared *prepared, struct doorbell_gds_cq *cq,
					  uint64_t entry, uint32_t *spent, doorbell_prepared **waited)
{
	const uint32_t at = batch->count++;
	batch->prepared[at] = prepared;
	batch->cq[at] = cq;
	batch->entry[at] = entry;
	batch->spent[at] = spent;
	batch->waited[at] = waited;
}

/* Posts one descriptor to the stream, through the batch if possible. */
static int doorbell_gds_give(const struct doorbell_gds_target *target, struct doorbell_gds_batch *batch, gds_descriptor_t *desc)
{
	doorbell_stream *stream = target->handle;
	const uint32_t room = DOORBELL_GDS_BATCH - batch->count;
	uint32_t i;
	int error = 0;
	if (desc->tag == GDS_TAG_SEND) {
		gds_send_request_t *send = desc->send;
		/* A request is posted completely or not at all. */
		if (send->count > room)
			error = doorbell_gds_give_batch(stream, batch);
		for (i = 0; i < send->count && !error; i++)
			doorbell_gds_batch_add(batch, send->prepared[i], &send->owner->cq[DOORBELL_QUEUE_SEND], send->entry[i],
					       i + 1 == send->count ? &send->count : NULL, NULL);
		return error;
	}
	if (desc->tag == GDS_TAG_WAIT) {
		gds_wait_request_t *wait = desc->wait;
		if (room == 0)
			error = doorbell_gds_give_batch(stream, batch);
		if (!error)
			doorbell_gds_batch_add(batch, wait->prepared, wait->owner, wait->entry, NULL, &wait->prepared);
		if (!error && wait->appended > 0)
			error = doorbell_gds_give_batch(stream, batch);
		for (i = 0; i < wait->appended && !error; i++)
			error = doorbell_gds_store(target, wait->append[i].ptr, (const uint8_t *)&wait->append[i].value, 4,
						   GDS_MEMORY_GPU);
		return error;
	}
	error = doorbell_gds_give_batch(stream, batch);
	return error ? error : doorbell_gds_give_words(target, desc);
}

int doorbell_gds_give_all(const struct doorbell_gds_target *target, size_t n_descs, gds_descriptor_t *descs)
{
	struct doorbell_gds_batch batch;
	size_t i;
	int error = n_descs == 0 || descs ? 0 : EINVAL;
	batch.count = 0;
	for (i = 0; i < n_descs && !error; i++)
		error = doorbell_gds_check(&descs[i], target);
	for (i = 0; i < n_descs && !error; i++)
		error = doorbell_gds_give(target, &batch, &descs[i]);
	return error ? error : doorbell_gds_give_batch(target->handle, &batch);
}

int gds_stream_post_descriptors(CUstream stream, size_t n_descs, gds_descriptor_t *descs, int flags)
{
	struct doorbell_gds_target target;
	int error = flags == 0 ? doorbell_gds_target(stream, &target) : EINVAL;
	return error ? error : doorbell_gds_give_all(&target, n_descs, descs);
}

int gds_post_descriptors(size_t n_descs, gds_descriptor_t *descs, int flags)
{
	struct doorbell_gds_target target;
	int ended, error = flags == 0 ? doorbell_gds_idle_take(&target) : EINVAL;
	if (error)
		return error;
	error = doorbell_gds_give_all(&target, n_descs, descs);
	/* No timeout here: each wait of the descriptors has its own. */
	ended = doorbell_gds_errno(doorbell_stream_synchronize(target.handle, DOORBELL_NO_TIMEOUT));
	if (ended)
		doorbell_stream_destroy(target.handle);
	else
		doorbell_gds_idle_give(&target);
	return error ? error : ended;
}

/* ---------------------------------------------------------------------------------------- calls made of descriptors */

/*
 * Posts `count` requests, followed by a store of a word if `dw` is not NULL, to a stream or, if `target` is NULL,
 * executes them at once.
 */
static int doorbell_gds_post_requests(const struct doorbell_gds_target *target, int count, gds_send_request_t *sends, gds_wait_request_t *waits,
					     uint32_t *dw, uint32_t val)
{
	const size_t n_descs = (size_t)count + (dw ? 1 : 0);
	gds_descriptor_t *descs;
	int i, error;
	if (count <= 0 || (!sends && !waits))
		return EINVAL;
	descs = (gds_descriptor_t *)calloc(n_descs, sizeof(*descs));
	if (!descs)
		return ENOMEM;
	for (i = 0; i < count; i++) {
		descs[i].tag = sends ? GDS_TAG_SEND : GDS_TAG_WAIT;
		if (sends)
			descs[i].send = &sends[i];
		else
			descs[i].wait = &waits[i];
	}
	if (dw) {
		descs[count].tag = GDS_TAG_WRITE_VALUE32;
		descs[count].write32.ptr = dw;
		descs[count].write32.value = val;
		descs[count].write32.flags = GDS_MEMORY_GPU;
	}
	error = target ? doorbell_gds_give_all(target, n_descs, descs) : gds_post_descriptors(n_descs, descs, 0);
	free(descs);
	return error;
}

int gds_post_pokes(CUstream stream, int count, gds_send_request_t *info, uint32_t *dw, uint32_t val)
{
	struct doorbell_gds_target target;
	int error = doorbell_gds_target(stream, &target);
	return error ? error : doorbell_gds_post_requests(&target, count, info, NULL, dw, val);
}

int gds_post_pokes_on_cpu(int count, gds_send_request_t *info, uint32_t *dw, uint32_t val)
{
	return doorbell_gds_post_requests(NULL, count, info, NULL, dw, val);
}

int gds_stream_post_wait_cq_multi(CUstream stream, int count, gds_wait_request_t *request, uint32_t *dw, uint32_t val)
{
	struct doorbell_gds_target target;
	int error = doorbell_gds_target(stream, &target);
	return error ? error : doorbell_gds_post_requests(&target, count, NULL, request, dw, val);
}

int gds_stream_post_send_all(CUstream stream, int count, gds_send_request_t *request)
{
	return gds_post_pokes(stream, count, request, NULL, 0);
}

int gds_stream_post_send(CUstream stream, gds_send_request_t *request)
{
	return gds_stream_post_send_all(stream, 1, request);
}

int gds_stream_post_wait_cq_all(CUstream stream, int count, gds_wait_request_t *request)
{
	return gds_stream_post_wait_cq_multi(stream, count, request, NULL, 0);
}

int gds_stream_post_wait_cq(CUstream stream, gds_wait_request_t *request)
{
	return gds_stream_post_wait_cq_all(stream, 1, request);
}

int gds_stream_queue_send(CUstream stream, struct gds_qp *qp, gds_send_wr *wr, gds_send_wr **bad_wr)
{
	struct doorbell_gds_qp *own;
	struct doorbell_gds_cq *cq;
	gds_send_request_t request;
	int error;
	if (!qp || !wr)
		return EINVAL;
	own = doorbell_gds_of(qp);
	cq = &own->cq[DOORBELL_QUEUE_SEND];
	/* So that no other thread prepares between this prepare and its post. No wait of another thread claims the entries either: then
	   the request could not be taken back. */
	pthread_mutex_lock(&own->posting);
	error = doorbell_gds_prepare_send(own, wr, bad_wr, &request, 1);
	if (!error) {
		error = gds_stream_post_send(stream, &request);
		if (error) {
			gds_rollback_send(qp, &request);
			if (bad_wr)
				*bad_wr = wr;
		}
	}
	pthread_mutex_lock(&own->lock);
	cq->held = UINT64_MAX;
	pthread_mutex_unlock(&own->lock);
	pthread_mutex_unlock(&own->posting);
	return error;
}

int gds_stream_wait_cq(CUstream stream, struct gds_cq *cq, int flags)
{
	gds_wait_request_t request;
	int error = gds_prepare_wait_cq(cq, &request, flags);
	if (error)
		return error;
	error = gds_stream_post_wait_cq(stream, &request);
	if (error)
		gds_abort_wait_cq(cq, &request);
	return error;
}

int gds_stream_post_poll_dword(CUstream stream, uint32_t *ptr, uint32_t magic, gds_wait_cond_flag_t cond_flag, int flags)
{
	gds_descriptor_t desc;
	int error;
	desc.tag = GDS_TAG_WAIT_VALUE32;
	error = gds_prepare_wait_value32(&desc.wait32, ptr, magic, cond_flag, flags);
	return error ? error : gds_stream_post_descriptors(stream, 1, &desc, 0);
}

int gds_stream_post_poke_dword(CUstream stream, uint32_t *ptr, uint32_t value, int flags)
{
	gds_descriptor_t desc;
	int error;
	desc.tag = GDS_TAG_WRITE_VALUE32;
	error = gds_prepare_write_value32(&desc.write32, ptr, value, flags);
	return error ? error : gds_stream_post_descriptors(stream, 1, &desc, 0);
}

int gds_stream_post_inline_copy(CUstream stream, void *ptr, void *src, size_t nbytes, int flags)
{
	gds_descriptor_t desc;
	int error;
	desc.tag = GDS_TAG_WRITE_MEMORY;
	error = gds_prepare_write_memory(&desc.writemem, (uint8_t *)ptr, (const uint8_t *)src, nbytes, flags);
	return error ? error : gds_stream_post_descriptors(stream, 1, &desc, 0);
}

/* Waits for words, then stores or copies. */
static int doorbell_gds_polls_and(CUstream stream, size_t n_polls, uint32_t *ptrs[], uint32_t magics[],
					 gds_wait_cond_flag_t cond_flags[], int poll_flags[], size_t n_pokes,
					 uint32_t *poke_ptrs[], uint32_t poke_values[], void *imm_ptrs[], void *imm_datas[],
					 size_t imm_bytes[], int flags[])
{
	gds_descriptor_t *descs;
	size_t i;
	int error = 0;
	if (n_polls + n_pokes == 0)
		return 0;
	descs = (gds_descriptor_t *)calloc(n_polls + n_pokes, sizeof(*descs));
	if (!descs)
		return ENOMEM;
	for (i = 0; i < n_polls && !error; i++) {
		descs[i].tag = GDS_TAG_WAIT_VALUE32;
		error = gds_prepare_wait_value32(&descs[i].wait32, ptrs[i], magics[i], cond_flags[i], poll_flags[i]);
	}
	for (i = 0; i < n_pokes && !error; i++) {
		gds_descriptor_t *desc = &descs[n_polls + i];
		if (poke_ptrs) {
			desc->tag = GDS_TAG_WRITE_VALUE32;
			error = gds_prepare_write_value32(&desc->write32, poke_ptrs[i], poke_values[i], flags[i]);
		} else {
			desc->tag = GDS_TAG_WRITE_MEMORY;
			error = gds_prepare_write_memory(&desc->writemem, (uint8_t *)imm_ptrs[i], (const uint8_t *)imm_datas[i],
							 imm_bytes[i], flags[i]);
		}
	}
	if (!error)
		error = gds_stream_post_descriptors(stream, n_polls + n_pokes, descs, 0);
	free(descs);
	return error;
}

int gds_stream_post_polls_and_pokes(CUstream stream, size_t n_polls, uint32_t *ptrs[], uint32_t magics[],
						  gds_wait_cond_flag_t cond_flags[], int poll_flags[], size_t n_pokes,
						  uint32_t *poke_ptrs[], uint32_t poke_values[], int poke_flags[])
{
	return doorbell_gds_polls_and(stream, n_polls, ptrs, magics, cond_flags, poll_flags, n_pokes, poke_ptrs, poke_values, NULL, NULL,
				      NULL, poke_flags);
}

int gds_stream_post_polls_and_immediate_copies(CUstream stream, size_t n_polls, uint32_t *ptrs[], uint32_t magics[],
							     gds_wait_cond_flag_t cond_flags[], int poll_flags[], size_t n_imms,
							     void *imm_ptrs[], void *imm_datas[], size_t imm_bytes[],
							     int imm_flags[])
{
	return doorbell_gds_polls_and(stream, n_polls, ptrs, magics, cond_flags, poll_flags, n_imms, NULL, NULL, imm_ptrs, imm_datas,
				      imm_bytes, imm_flags);
}

int gds_query_param(gds_param_t param, int *value)
{
	if (param != GDS_PARAM_VERSION || !value)
		return EINVAL;
	*value = (int)GDS_API_VERSION;
	return 0;
}

int gds_query_param_v3(gds_param_t param, int *value);

int gds_query_param_v3(gds_param_t param, int *value)
{
	if (param != GDS_PARAM_VERSION || !value)
		return EINVAL;
	*value = 3 << 16;
	return 0;
}
