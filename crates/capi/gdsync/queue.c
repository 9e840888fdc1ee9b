/*
 * Queue pairs and completions.
 *
 * In libgdsync, a wait of a stream looks at a completion without consuming it; the program takes it by ibv_poll_cq
 * afterwards. In libdoorbell each completion is consumed once. So a queue pair keeps a list of the work
 * requests that make completions, in order, which is also the order of the completions. A wait claims the first
 * unclaimed entry. ibv_poll_cq reports the oldest entry, from its completion or, if a wait has consumed that, from its
 * ticket.
 */
#include "internal.h"

/* Removes the oldest entry. */
static void doorbell_gds_drop_head(struct doorbell_gds_cq *cq)
{
	struct doorbell_gds_entry *entry = doorbell_gds_at(cq, cq->head);
	doorbell_ticket_destroy(entry->work);
	doorbell_ticket_destroy(entry->wait);
	entry->work = entry->wait = NULL;
	cq->head++;
	if (cq->next < cq->head)
		cq->next = cq->head;
	if (cq->kept < cq->head)
		cq->kept = cq->head;
}

/* Callers hold the lock of the queue pair, so nothing in here waits for a NIC that is being stopped. */
static int doorbell_gds_is_over(const doorbell_ticket *ticket)
{
	return ticket && doorbell_ticket_status_now(ticket, NULL) >= DOORBELL_STATUS_COMPLETE;
}

/* Stores the details of the oldest entry of which they are not stored. Its work request is over. */
static void doorbell_gds_keep(struct doorbell_gds_cq *cq)
{
	struct doorbell_gds_entry *entry = doorbell_gds_at(cq, cq->kept++);
	if (doorbell_ticket_details(entry->work, &entry->details) != 1)
		memset(&entry->details, 0, sizeof(entry->details));
}

/*
 * If the list is full, drops the oldest entry if a wait has consumed it, for programs that never poll. The list has more entries than
 * libdoorbell's queue has places, and libdoorbell forgets the details of a work request when another one takes its place. So they are
 * stored before that.
 */
int doorbell_gds_make_room(struct doorbell_gds_cq *cq)
{
	const struct doorbell_gds_entry *oldest;
	while (cq->kept < cq->tail) {
		const struct doorbell_gds_entry *entry = doorbell_gds_at(cq, cq->kept);
		if (cq->posted - entry->number < cq->depth)
			break;
		/* It has the place still. */
		if (!doorbell_gds_is_over(entry->work))
			return ENOMEM;
		doorbell_gds_keep(cq);
	}
	if (cq->tail - cq->head < cq->capacity)
		return 0;
	oldest = doorbell_gds_at(cq, cq->head);
	/* A wait that is prepared may be aborted still, which leaves the completion to ibv_poll_cq. */
	if (oldest->claim == DOORBELL_GDS_UNCLAIMED || (oldest->claim == DOORBELL_GDS_WAITED && !oldest->wait) ||
	    !doorbell_gds_is_over(oldest->wait ? oldest->wait : oldest->work))
		return ENOMEM;
	doorbell_gds_drop_head(cq);
	return 0;
}

uint64_t doorbell_gds_posted(struct doorbell_gds_cq *cq, uint64_t wr_id, uint32_t opcode, int is_signaled, doorbell_ticket *work)
{
	struct doorbell_gds_entry *entry = doorbell_gds_at(cq, cq->tail);
	const uint64_t number = cq->posted++;
	cq->wr_ids[number % cq->capacity] = wr_id;
	if (!is_signaled)
		return DOORBELL_GDS_NO_ENTRY;
	entry->wr_id = wr_id;
	entry->number = number;
	entry->opcode = opcode;
	entry->claim = DOORBELL_GDS_UNCLAIMED;
	entry->work = work;
	entry->wait = NULL;
	return cq->tail++;
}

void doorbell_gds_unposted(struct doorbell_gds_cq *cq, uint64_t entry)
{
	if (entry != DOORBELL_GDS_NO_ENTRY)
		cq->tail = entry;
	cq->posted--;
}

/*
 * The number by which libdoorbell knows the next work request of a queue. A failure is reported with it. Programs may give one wr_id to all
 * work requests, so theirs does not tell which one has failed.
 */
static uint64_t doorbell_gds_id(const struct doorbell_gds_cq *cq, uint64_t number)
{
	return number << 1 | cq->side;
}

/* --------------------------------------------------------------------------------------------------- work requests */

static int doorbell_gds_slices(struct doorbell_gds_qp *qp, const struct ibv_sge *list, int count, doorbell_slice *slices, uint32_t *filled)
{
	int i, error;
	*filled = 0;
	if (count < 0 || count > DOORBELL_SLICES_MAX || (count > 0 && !list))
		return EINVAL;
	for (i = 0; i < count; i++) {
		if (list[i].length == 0)
			continue;
		error = doorbell_gds_slice(qp, &list[i], &slices[*filled]);
		if (error)
			return error;
		++*filled;
	}
	return 0;
}

void doorbell_gds_work_end(struct doorbell_gds_qp *qp, struct doorbell_gds_work *made)
{
	doorbell_gds_slices_end(qp);
	doorbell_address_handle_destroy(made->handle);
	made->handle = NULL;
}

/* The receiver of a datagram. The program keeps its ibv_ah until the work request is complete, as with ibv_post_send. */
static int doorbell_gds_receiver(struct doorbell_gds_qp *qp, const gds_send_wr *wr, struct doorbell_gds_work *made)
{
	int code;
	if (made->work.opcode != DOORBELL_OP_SEND || !wr->wr.ud.ah)
		return EINVAL;
	code = doorbell_address_handle_adopt(qp->domain->domain, wr->wr.ud.ah, NULL, NULL, &made->handle);
	if (code < 0)
		return doorbell_gds_errno(code);
	made->work = doorbell_work_to(made->work, made->handle, wr->wr.ud.remote_qpn & 0xffffff, wr->wr.ud.remote_qkey);
	return 0;
}

int doorbell_gds_translate(struct doorbell_gds_qp *qp, const gds_send_wr *wr, struct doorbell_gds_work *made)
{
	static const uint32_t known = IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE;
	uint32_t opcode, count = 0, bytes = 0, flags = 0;
	int i, error, has_imm = 0;
	made->handle = NULL;
	if (wr->send_flags & ~known)
		return EOPNOTSUPP;
	switch (wr->opcode) {
	case IBV_WR_SEND_WITH_IMM:
		has_imm = 1; /* fall through */
	case IBV_WR_SEND:
		opcode = DOORBELL_OP_SEND;
		made->opcode = IBV_WC_SEND;
		break;
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		has_imm = 1; /* fall through */
	case IBV_WR_RDMA_WRITE:
		opcode = DOORBELL_OP_WRITE;
		made->opcode = IBV_WC_RDMA_WRITE;
		break;
	case IBV_WR_RDMA_READ:
		opcode = DOORBELL_OP_READ;
		made->opcode = IBV_WC_RDMA_READ;
		break;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		opcode = DOORBELL_OP_COMPARE_SWAP;
		made->opcode = IBV_WC_COMP_SWAP;
		break;
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		opcode = DOORBELL_OP_FETCH_ADD;
		made->opcode = IBV_WC_FETCH_ADD;
		break;
	default:
		return EOPNOTSUPP;
	}
	if (wr->send_flags & IBV_SEND_INLINE) {
		if (wr->num_sge < 0 || (wr->num_sge > 0 && !wr->sg_list))
			return EINVAL;
		for (i = 0; i < wr->num_sge; i++) {
			if (wr->sg_list[i].length > sizeof(made->inline_bytes) - bytes)
				return ENOMEM;
			memcpy(made->inline_bytes + bytes, (const void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
			bytes += wr->sg_list[i].length;
		}
		flags |= DOORBELL_WORK_INLINE;
	} else {
		error = doorbell_gds_slices(qp, wr->sg_list, wr->num_sge, made->slices, &count);
		if (error)
			return error;
	}
	made->work = doorbell_work_init(opcode, made->slices, count);
	made->work.inline_bytes = made->inline_bytes;
	made->work.inline_len_bytes = bytes;
	made->work.wr_id = doorbell_gds_id(&qp->cq[DOORBELL_QUEUE_SEND], qp->cq[DOORBELL_QUEUE_SEND].posted);
	if (has_imm) {
		flags |= DOORBELL_WORK_IMM;
		made->work.imm = ntohl(wr->imm_data);
	}
	if (!qp->signals_all && !(wr->send_flags & IBV_SEND_SIGNALED))
		flags |= DOORBELL_WORK_UNSIGNALED;
	/* As in verbs, the flag is for these only, and without effect for others. */
	if ((wr->send_flags & IBV_SEND_SOLICITED) && (has_imm || opcode == DOORBELL_OP_SEND))
		flags |= DOORBELL_WORK_SOLICITED;
	if (wr->send_flags & IBV_SEND_FENCE)
		flags |= DOORBELL_WORK_FENCE;
	made->work.flags = flags;
	if (opcode == DOORBELL_OP_WRITE || opcode == DOORBELL_OP_READ) {
		made->work.remote_addr = wr->wr.rdma.remote_addr;
		made->work.rkey = wr->wr.rdma.rkey;
	} else if (opcode != DOORBELL_OP_SEND) {
		made->work.remote_addr = wr->wr.atomic.remote_addr;
		made->work.rkey = wr->wr.atomic.rkey;
		made->work.compare = wr->wr.atomic.compare_add;
		made->work.operand = opcode == DOORBELL_OP_FETCH_ADD ? wr->wr.atomic.compare_add : wr->wr.atomic.swap;
	}
	if (opcode == DOORBELL_OP_FETCH_ADD)
		made->work.compare = 0;
	if (qp->ib.qp_type == IBV_QPT_UD)
		return doorbell_gds_receiver(qp, wr, made);
	return 0;
}

/* ------------------------------------------------------------------------------------------------- completions */

static void doorbell_gds_complete(const struct doorbell_gds_cq *cq, const struct doorbell_gds_entry *entry,
					 uint32_t len_bytes, uint32_t has_imm, uint32_t imm, struct ibv_wc *wc)
{
	memset(wc, 0, sizeof(*wc));
	wc->wr_id = entry->wr_id;
	wc->status = IBV_WC_SUCCESS;
	wc->opcode = (enum ibv_wc_opcode)entry->opcode;
	wc->byte_len = len_bytes;
	wc->qp_num = cq->owner->ib.qp_num;
	if (has_imm) {
		wc->wc_flags = IBV_WC_WITH_IMM;
		wc->imm_data = htonl(imm);
	}
}

/* A failed work request: it has failed itself, or was flushed because another one has failed. */
static void doorbell_gds_fail(const struct doorbell_gds_cq *cq, uint64_t number, uint64_t wr_id, const doorbell_failure *failure,
				     struct ibv_wc *wc)
{
	const int own = failure->cause == DOORBELL_CAUSE_COMPLETION && failure->has_wr_id &&
			failure->wr_id == doorbell_gds_id(cq, number);
	memset(wc, 0, sizeof(*wc));
	wc->wr_id = wr_id;
	wc->status = own ? (enum ibv_wc_status)failure->wc_status : IBV_WC_WR_FLUSH_ERR;
	wc->vendor_err = own ? failure->vendor_syndrome : 0;
	wc->qp_num = cq->owner->ib.qp_num;
}

/* An unsignaled work request makes a completion if it fails. Returns 1 once if such a work request has failed. */
static int doorbell_gds_poll_unsignaled(struct doorbell_gds_cq *cq, struct ibv_wc *wc)
{
	struct doorbell_gds_qp *qp = cq->owner;
	doorbell_failure failure;
	uint64_t number;
	if (cq->side != DOORBELL_QUEUE_SEND || qp->told || doorbell_endpoint_failure(qp->endpoint, &failure, NULL, 0) <= 0)
		return 0;
	number = failure.wr_id >> 1;
	if (failure.cause != DOORBELL_CAUSE_COMPLETION || !failure.has_wr_id || failure.wr_id != doorbell_gds_id(cq, number))
		return 0;
	/* Otherwise it was queued with the endpoint directly. */
	if (number >= cq->posted || cq->posted - number > cq->capacity)
		return 0;
	/* Earlier work requests are reported first. If it is signaled, it has an entry itself. */
	if (cq->head < cq->tail && doorbell_gds_at(cq, cq->head)->number <= number)
		return 0;
	qp->told = 1;
	doorbell_gds_fail(cq, number, cq->wr_ids[number % cq->capacity], &failure, wc);
	return 1;
}

/* Reports the oldest entry. Returns 1 and removes the entry if it is done, else 0. */
static int doorbell_gds_poll_head(struct doorbell_gds_cq *cq, struct ibv_wc *wc)
{
	struct doorbell_gds_entry *entry;
	doorbell_completion completion;
	doorbell_failure failure;
	int status, code;
	if (cq->head == cq->tail)
		return 0;
	entry = doorbell_gds_at(cq, cq->head);
	if (!entry->work)
		return 0;
	if (entry->claim == DOORBELL_GDS_UNCLAIMED) {
		code = doorbell_poll_cq(cq->owner->endpoint, cq->side, &completion);
		if (code == 0)
			return 0;
		if (code == 1) {
			if (completion.operation == DOORBELL_OP_RECV_WRITE)
				entry->opcode = IBV_WC_RECV_RDMA_WITH_IMM;
			doorbell_gds_complete(cq, entry, completion.len_bytes, completion.has_imm, completion.imm, wc);
			wc->src_qp = completion.source_qpn;
			wc->slid = completion.source_lid;
			if (completion.has_grh)
				wc->wc_flags |= IBV_WC_GRH;
			doorbell_gds_drop_head(cq);
			return 1;
		}
		/* Of an endpoint that has failed, the ticket says which work requests were done before. Another code, as while another
		   thread uses the endpoint, leaves the completion queued: if the entry were reported from its ticket, the next entry
		   would get that completion. After a panic no call takes a completion any more. */
		if (code != DOORBELL_EWORK && code != DOORBELL_EPANIC)
			return 0;
	}
	/* Until the stream has passed its wait, the completion belongs to the stream. */
	if (entry->claim == DOORBELL_GDS_WAITED && !doorbell_gds_is_over(entry->wait))
		return 0;
	status = doorbell_ticket_status_now(entry->work, &failure);
	if (status == DOORBELL_STATUS_COMPLETE) {
		if (cq->kept == cq->head)
			doorbell_gds_keep(cq);
		if (entry->details.is_write)
			entry->opcode = IBV_WC_RECV_RDMA_WITH_IMM;
		doorbell_gds_complete(cq, entry, entry->details.len_bytes, entry->details.has_imm, entry->details.imm, wc);
	} else if (status == DOORBELL_STATUS_FAILED || status == DOORBELL_STATUS_UNKNOWN) {
		if (doorbell_gds_poll_unsignaled(cq, wc))
			return 1;
		doorbell_gds_fail(cq, entry->number, entry->wr_id, &failure, wc);
		if (wc->status != IBV_WC_WR_FLUSH_ERR)
			cq->owner->told = 1;
	} else {
		return 0;
	}
	doorbell_gds_drop_head(cq);
	return 1;
}

int doorbell_gds_poll_cq(struct ibv_cq *ibcq, int num_entries, struct ibv_wc *wc)
{
	struct doorbell_gds_cq *cq = (struct doorbell_gds_cq *)ibcq;
	struct doorbell_gds_qp *qp = cq->owner;
	int count = 0;
	pthread_mutex_lock(&qp->lock);
	while (count < num_entries &&
	       (doorbell_gds_poll_head(cq, wc + count) || doorbell_gds_poll_unsignaled(cq, wc + count)))
		count++;
	pthread_mutex_unlock(&qp->lock);
	return count;
}

/* -------------------------------------------------------------------------------------------------- posting at once */

int gds_post_send(struct gds_qp *gds, gds_send_wr *wr, gds_send_wr **bad_wr)
{
	struct doorbell_gds_qp *qp;
	struct doorbell_gds_work made;
	doorbell_ticket *ticket;
	int code, error = 0;
	if (!gds || !wr)
		return EINVAL;
	qp = doorbell_gds_of(gds);
	pthread_mutex_lock(&qp->lock);
	for (; wr; wr = wr->next) {
		error = doorbell_gds_translate(qp, wr, &made);
		if (!error)
			error = doorbell_gds_make_room(&qp->cq[DOORBELL_QUEUE_SEND]);
		if (error) {
			doorbell_gds_work_end(qp, &made);
			break;
		}
		ticket = NULL;
		if (made.work.flags & DOORBELL_WORK_UNSIGNALED)
			code = doorbell_post_send(qp->endpoint, &made.work, NULL);
		else
			code = doorbell_post_send(qp->endpoint, &made.work, &ticket);
		doorbell_gds_work_end(qp, &made);
		/* For a connected endpoint, DOORBELL_ESTATE means that earlier work is on a stream or prepared. */
		error = code == DOORBELL_ESTATE && doorbell_endpoint_is_connected(qp->endpoint) == 1 ? EBUSY : doorbell_gds_errno(code);
		if (error)
			break;
		doorbell_gds_posted(&qp->cq[DOORBELL_QUEUE_SEND], wr->wr_id, made.opcode, ticket != NULL, ticket);
	}
	pthread_mutex_unlock(&qp->lock);
	if (error && bad_wr)
		*bad_wr = wr;
	return error;
}

int gds_post_recv(struct gds_qp *gds, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	struct doorbell_gds_qp *qp;
	struct doorbell_gds_cq *cq;
	doorbell_slice slices[DOORBELL_SLICES_MAX];
	doorbell_ticket *ticket;
	uint32_t count;
	int error = 0;
	if (!gds || !wr)
		return EINVAL;
	qp = doorbell_gds_of(gds);
	cq = &qp->cq[DOORBELL_QUEUE_RECV];
	pthread_mutex_lock(&qp->lock);
	for (; wr; wr = wr->next) {
		error = doorbell_gds_slices(qp, wr->sg_list, wr->num_sge, slices, &count);
		if (!error)
			error = doorbell_gds_make_room(cq);
		if (!error)
			error = doorbell_gds_errno(
				doorbell_post_recv(qp->endpoint, doorbell_gds_id(cq, cq->posted), slices, count, &ticket));
		doorbell_gds_slices_end(qp);
		if (error)
			break;
		doorbell_gds_posted(cq, wr->wr_id, IBV_WC_RECV, 1, ticket);
	}
	pthread_mutex_unlock(&qp->lock);
	if (error && bad_wr)
		*bad_wr = wr;
	return error;
}

static int doorbell_gds_ibv_post_send(struct ibv_qp *ib, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr)
{
	return gds_post_send(&doorbell_gds_of_verbs(ib)->qp, (gds_send_wr *)(void *)wr, (gds_send_wr **)(void *)bad_wr);
}

static int doorbell_gds_ibv_post_recv(struct ibv_qp *ib, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	return gds_post_recv(&doorbell_gds_of_verbs(ib)->qp, wr, bad_wr);
}

/* --------------------------------------------------------------------------------------------------- queue pairs */

static int doorbell_gds_cq_make(struct doorbell_gds_qp *qp, uint32_t side, uint32_t depth)
{
	struct doorbell_gds_cq *cq = &qp->cq[side];
	/* As many entries as the queue has, and as many that a stream has waited for and nobody has polled. */
	cq->capacity = 2 * (uint64_t)depth;
	cq->depth = depth;
	cq->held = UINT64_MAX;
	cq->entries = (struct doorbell_gds_entry *)calloc(cq->capacity, sizeof(*cq->entries));
	cq->wr_ids = (uint64_t *)calloc(cq->capacity, sizeof(*cq->wr_ids));
	cq->owner = qp;
	cq->side = side;
	cq->cq.context = &qp->context;
	cq->cq.cqe = (int)depth;
	return cq->entries && cq->wr_ids ? 0 : ENOMEM;
}

static void doorbell_gds_cq_clear(struct doorbell_gds_cq *cq)
{
	while (cq->head < cq->tail)
		doorbell_gds_drop_head(cq);
}

static void doorbell_gds_qp_free(struct doorbell_gds_qp *qp)
{
	uint32_t side;
	for (side = 0; side < 2; side++) {
		doorbell_gds_cq_clear(&qp->cq[side]);
		free(qp->cq[side].entries);
		free(qp->cq[side].wr_ids);
	}
	doorbell_gds_slices_end(qp);
	for (side = 0; side < DOORBELL_GDS_KEYS; side++)
		doorbell_region_destroy(qp->keys[side].region);
	free(qp->attributes);
	/* Kernels may still execute triggers that were taken before. */
	for (side = 0; side < 3; side++)
		doorbell_stream_destroy(qp->kernels[side]);
	pthread_mutex_destroy(&qp->lock);
	pthread_mutex_destroy(&qp->posting);
	free(qp);
}

struct gds_qp *gds_create_qp(struct ibv_pd *pd, struct ibv_context *context, gds_qp_init_attr_t *attr, int gpu_id,
					   int flags)
{
	doorbell_endpoint_config config;
	struct doorbell_gds_qp *qp = NULL;
	struct doorbell_gds_domain *ended = NULL;
	uint32_t side;
	int error = pd && context && attr ? 0 : EINVAL;
	(void)gpu_id;
	if (!error && (flags != GDS_CREATE_QP_DEFAULT || (attr->qp_type != IBV_QPT_RC && attr->qp_type != IBV_QPT_UD) ||
		       attr->srq))
		error = EOPNOTSUPP;
	if (!error)
		error = doorbell_gds_errno(doorbell_endpoint_config_init(&config, (uint32_t)sizeof(config)));
	if (!error) {
		const struct ibv_qp_cap *cap = &attr->cap;
		config.send_depth = cap->max_send_wr ? cap->max_send_wr : 1;
		config.recv_depth = cap->max_recv_wr ? cap->max_recv_wr : 1;
		config.max_segments = cap->max_send_sge > cap->max_recv_sge ? cap->max_send_sge : cap->max_recv_sge;
		config.max_segments += config.max_segments == 0;
		/* Programs ask for what the device has. */
		if (config.max_segments > DOORBELL_SLICES_MAX)
			config.max_segments = DOORBELL_SLICES_MAX;
		config.max_inline_bytes = cap->max_inline_data;
		if (attr->qp_type == IBV_QPT_UD)
			config.transport = DOORBELL_TRANSPORT_UD;
		qp = (struct doorbell_gds_qp *)calloc(1, sizeof(*qp));
		error = qp ? 0 : ENOMEM;
	}
	if (!error) {
		pthread_mutex_init(&qp->lock, NULL);
		pthread_mutex_init(&qp->posting, NULL);
		doorbell_gds_lock();
		error = doorbell_gds_domain_get(pd, &qp->domain);
		/* Address handles are objects of libibverbs. */
		if (!error && attr->qp_type == IBV_QPT_UD && !qp->domain->adopted) {
			error = EOPNOTSUPP;
			ended = doorbell_gds_domain_put(qp->domain);
		}
		if (!error) {
			error = doorbell_gds_errno(doorbell_endpoint_create(qp->domain->domain, &config, &qp->endpoint));
			if (error)
				ended = doorbell_gds_domain_put(qp->domain);
		}
		doorbell_gds_unlock();
		doorbell_gds_domain_end(ended);
		if (!error)
			error = doorbell_gds_cq_make(qp, DOORBELL_QUEUE_SEND, config.send_depth);
		if (!error)
			error = doorbell_gds_cq_make(qp, DOORBELL_QUEUE_RECV, config.recv_depth);
		/* gds_destroy_qp finds the queue pair by its object of verbs. */
		qp->qp.qp = &qp->ib;
		if (error && qp->endpoint)
			gds_destroy_qp(&qp->qp);
		else if (error)
			doorbell_gds_qp_free(qp);
	}
	if (error) {
		errno = error;
		return NULL;
	}
	qp->signals_all = attr->sq_sig_all != 0;
	qp->context.device = context->device;
	doorbell_gds_context_init(&qp->context);
	qp->context.ops.poll_cq = doorbell_gds_poll_cq;
	qp->context.ops.post_send = doorbell_gds_ibv_post_send;
	qp->context.ops.post_recv = doorbell_gds_ibv_post_recv;
	qp->ib.context = &qp->context;
	qp->ib.qp_context = attr->qp_context;
	qp->ib.pd = pd;
	qp->ib.send_cq = &qp->cq[DOORBELL_QUEUE_SEND].cq;
	qp->ib.recv_cq = &qp->cq[DOORBELL_QUEUE_RECV].cq;
	qp->ib.qp_type = attr->qp_type;
	qp->ib.qp_num = (uint32_t)doorbell_endpoint_qpn(qp->endpoint);
	qp->qp.qp = &qp->ib;
	qp->qp.send_cq.cq = attr->send_cq = qp->ib.send_cq;
	qp->qp.recv_cq.cq = attr->recv_cq = qp->ib.recv_cq;
	qp->qp.dev_context = context;
	qp->cap.max_send_wr = config.send_depth;
	qp->cap.max_recv_wr = config.recv_depth;
	qp->cap.max_send_sge = qp->cap.max_recv_sge = config.max_segments;
	qp->cap.max_inline_data = config.max_inline_bytes;
	attr->cap = qp->cap;
	for (side = 0; side < 2; side++) {
		qp->cq_v3[side].ibcq = &qp->cq[side].cq;
		qp->cq_v3[side].ctype = side == DOORBELL_QUEUE_SEND ? GDS_CQ_TYPE_SQ : GDS_CQ_TYPE_RQ;
		qp->cq_v3[side].dtype = GDS_DRIVER_TYPE_MLX5;
	}
	qp->qp_v3.ibqp = &qp->ib;
	qp->qp_v3.send_cq = &qp->cq_v3[DOORBELL_QUEUE_SEND];
	qp->qp_v3.recv_cq = &qp->cq_v3[DOORBELL_QUEUE_RECV];
	qp->qp_v3.dtype = GDS_DRIVER_TYPE_MLX5;
	qp->qp_v3.dev_context = context;
	return &qp->qp;
}

struct doorbell_gds_qp_v3 *gds_create_qp_v3(struct ibv_pd *pd, struct ibv_context *context, gds_qp_init_attr_t *attr, int gpu_id,
					    int flags);

struct doorbell_gds_qp_v3 *gds_create_qp_v3(struct ibv_pd *pd, struct ibv_context *context, gds_qp_init_attr_t *attr, int gpu_id,
					    int flags)
{
	struct gds_qp *made = gds_create_qp(pd, context, attr, gpu_id, flags);
	return made ? &doorbell_gds_of(made)->qp_v3 : NULL;
}

void gds_destroy_cq(struct gds_cq *cq)
{
	(void)cq;
	errno = EBUSY;
}

int gds_poll_cq(struct gds_cq *cq, int num_entries, struct ibv_wc *wc)
{
	if (!cq || !cq->cq || !wc || num_entries < 0)
		return -EINVAL;
	return doorbell_gds_poll_cq(cq->cq, num_entries, wc);
}

int gds_destroy_qp(struct gds_qp *gds)
{
	struct doorbell_gds_domain *domain;
	struct doorbell_gds_qp *qp;
	int code;
	if (!gds)
		return EINVAL;
	qp = doorbell_gds_of(gds);
	code = doorbell_endpoint_destroy(qp->endpoint);
	if (code < 0)
		return doorbell_gds_errno(code);
	domain = qp->domain;
	/* What refers to the domain goes first. */
	doorbell_gds_qp_free(qp);
	doorbell_gds_lock();
	domain = doorbell_gds_domain_put(domain);
	doorbell_gds_unlock();
	doorbell_gds_domain_end(domain);
	return 0;
}

int gds_qp_address(struct gds_qp *gds, doorbell_address *address)
{
	struct doorbell_gds_qp *qp;
	int code;
	if (!gds)
		return EINVAL;
	qp = doorbell_gds_of(gds);
	pthread_mutex_lock(&qp->lock);
	code = doorbell_endpoint_address(qp->endpoint, address);
	pthread_mutex_unlock(&qp->lock);
	return doorbell_gds_errno(code);
}

int gds_qp_connect(struct gds_qp *gds, const doorbell_address *peer)
{
	struct doorbell_gds_qp *qp;
	int code;
	if (!gds)
		return EINVAL;
	qp = doorbell_gds_of(gds);
	pthread_mutex_lock(&qp->lock);
	code = doorbell_endpoint_connect(qp->endpoint, peer);
	pthread_mutex_unlock(&qp->lock);
	return doorbell_gds_errno(code);
}

int gds_qp_reset(struct gds_qp *gds)
{
	struct doorbell_gds_qp *qp;
	int code;
	if (!gds)
		return EINVAL;
	qp = doorbell_gds_of(gds);
	pthread_mutex_lock(&qp->lock);
	code = doorbell_endpoint_reset(qp->endpoint);
	if (code >= 0) {
		doorbell_gds_cq_clear(&qp->cq[DOORBELL_QUEUE_SEND]);
		doorbell_gds_cq_clear(&qp->cq[DOORBELL_QUEUE_RECV]);
		qp->qp.send_cq.curr_offset = qp->qp.recv_cq.curr_offset = 0;
		qp->cq_v3[0].curr_offset = qp->cq_v3[1].curr_offset = 0;
		qp->told = 0;
		/* gds_query_qp says IBV_QPS_RESET, which is 0, and nothing of the old connection. */
		free(qp->attributes);
		qp->attributes = NULL;
		qp->ib.qp_num = (uint32_t)doorbell_endpoint_qpn(qp->endpoint);
	}
	pthread_mutex_unlock(&qp->lock);
	return doorbell_gds_errno(code);
}

doorbell_endpoint *gds_qp_endpoint(struct gds_qp *gds)
{
	return gds ? doorbell_gds_of(gds)->endpoint : NULL;
}
