/* A program as those of libgdsync: a ping-pong of streams, batches, descriptors. Every call of gdsync.h, used as it should be. */
#define _POSIX_C_SOURCE 200809L

#include "rig.h"

enum { ROUNDS = 100, LENGTH = 1000 };

/* The client sends and waits for both completions, the server waits and sends back; all of it is queued ahead, in batches. */
static void ping_pong(struct side *client, struct side *server)
{
	CUstream streams[2];
	struct ibv_sge ping = at(client, 0, LENGTH), pong = at(server, 0, LENGTH);
	gds_send_wr there = request(2, IBV_WR_SEND, &ping), back = request(3, IBV_WR_SEND, &pong), *bad = NULL;
	const uint32_t waited = client->qp->send_cq.curr_offset;
	int round, i;
	streams[0] = new_stream();
	streams[1] = new_stream();
	for (round = 0; round < ROUNDS; round += DEPTH / 2) {
		for (i = 0; i < LENGTH; i++)
			client->buffer[i] = (uint8_t)(round + i);
		for (i = 0; i < DEPTH / 2; i++) {
			post_recv(client, 100 + (uint64_t)i, LENGTH, LENGTH);
			/* What the server gets it sends. */
			post_recv(server, 200 + (uint64_t)i, 0, LENGTH);
		}
		for (i = 0; i < DEPTH / 2; i++) {
			WORKS(gds_stream_queue_send(streams[0], client->qp, &there, &bad));
			WORKS(gds_stream_wait_cq(streams[1], &server->qp->recv_cq, 0));
			WORKS(gds_stream_queue_send(streams[1], server->qp, &back, &bad));
			WORKS(gds_stream_wait_cq(streams[1], &server->qp->send_cq, 0));
			WORKS(gds_stream_wait_cq(streams[0], &client->qp->send_cq, 0));
			WORKS(gds_stream_wait_cq(streams[0], &client->qp->recv_cq, 0));
		}
		sync_stream(streams[0]);
		sync_stream(streams[1]);
		EXPECT(memcmp(client->buffer, client->buffer + LENGTH, LENGTH) == 0);
		for (i = 0; i < DEPTH / 2; i++) {
			expect_wc(client->qp->send_cq.cq, 2, IBV_WC_SEND, 0);
			expect_wc(client->qp->recv_cq.cq, 100 + (uint64_t)i, IBV_WC_RECV, LENGTH);
			expect_wc(server->qp->qp->send_cq, 3, IBV_WC_SEND, 0);
			expect_wc(server->qp->qp->recv_cq, 200 + (uint64_t)i, IBV_WC_RECV, LENGTH);
		}
	}
	EXPECT(client->qp->send_cq.curr_offset - waited == (ROUNDS + DEPTH / 2 - 1) / (DEPTH / 2) * (DEPTH / 2));
	EXPECT(has_none(client->qp->send_cq.cq) && has_none(server->qp->recv_cq.cq));
	end_stream(streams[0]);
	end_stream(streams[1]);
}

/* Every opcode, chains, inline and immediate data; completions taken by the processor, in their order. */
static void work_requests(struct side *a, struct side *b)
{
	CUstream stream = new_stream();
	struct ibv_sge from = at(a, 0, 300), parts[3], result = at(a, 4096, 8), in_line;
	gds_send_wr chain[3], wr, *bad = NULL;
	struct ibv_wc wc;
	uint64_t word;
	memset(b->buffer, 0, 1024);
	memset(a->buffer, 0x21, 300);

	/* Three slices, one of them empty, from two sources of the program; a chain with one that makes no completion. */
	struct ibv_mr *other = register_elsewhere(a->pd, a->buffer + 8192, 4096);
	EXPECT(other && other->lkey != a->mr->lkey);
	memset(a->buffer + 8192, 0x22, 4096);
	parts[0] = at(a, 0, 100);
	parts[1] = at(a, 0, 0);
	parts[2] = at(a, 8192 + 4000, 96);
	parts[2].lkey = other->lkey;
	chain[0] = request_to(1, IBV_WR_RDMA_WRITE, &from, b, 0);
	chain[1] = request_to(2, IBV_WR_RDMA_WRITE, parts, b, 512);
	chain[1].num_sge = 3;
	chain[1].send_flags = 0;
	chain[2] = request_to(3, IBV_WR_RDMA_WRITE_WITH_IMM, &from, b, 1024);
	chain[2].imm_data = htonl(0x01020304);
	chain[2].send_flags |= IBV_SEND_SOLICITED | IBV_SEND_FENCE;
	chain[0].next = &chain[1];
	chain[1].next = &chain[2];
	post_recv(b, 7, 2048, 16);
	WORKS(gds_stream_queue_send(stream, a->qp, chain, &bad));
	WORKS(gds_stream_wait_cq(stream, &a->qp->send_cq, 0));
	sync_stream(stream);
	expect_wc(a->qp->send_cq.cq, 1, IBV_WC_RDMA_WRITE, 0);
	expect_wc(a->qp->send_cq.cq, 3, IBV_WC_RDMA_WRITE, 0);
	wc = poll_one(b->qp->recv_cq.cq);
	EXPECT(wc.wr_id == 7 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM);
	EXPECT((wc.wc_flags & IBV_WC_WITH_IMM) && wc.imm_data == htonl(0x01020304) && wc.qp_num == b->qp->qp->qp_num);
	EXPECT(b->buffer[0] == 0x21 && b->buffer[299] == 0x21 && b->buffer[611] == 0x21 && b->buffer[612] == 0x22 && b->buffer[707] == 0x22);
	WORKS(gds_dereg_mr(other));

	/* Sends with immediate data; inline. ibv_post_send is gds_post_send. */
	post_recv(b, 8, 4096, 64);
	in_line.addr = (uint64_t)(uintptr_t) "inline bytes";
	in_line.length = 12;
	in_line.lkey = 0;
	wr = request(4, IBV_WR_SEND_WITH_IMM, &in_line);
	wr.send_flags |= IBV_SEND_INLINE;
	wr.imm_data = htonl(5);
	WORKS(ibv_post_send(a->qp->qp, (struct ibv_send_wr *)(void *)&wr, (struct ibv_send_wr **)(void *)&bad));
	expect_wc(a->qp->send_cq.cq, 4, IBV_WC_SEND, 0);
	wc = poll_one(b->qp->recv_cq.cq);
	EXPECT(wc.wr_id == 8 && wc.byte_len == 12 && wc.imm_data == htonl(5) && memcmp(b->buffer + 4096, "inline bytes", 12) == 0);

	/* Reads and atomics. */
	memset(b->buffer + 5120, 0x33, 300);
	wr = request_to(5, IBV_WR_RDMA_READ, &from, b, 5120);
	WORKS(gds_post_send(a->qp, &wr, &bad));
	expect_wc(a->qp->send_cq.cq, 5, IBV_WC_RDMA_READ, 300);
	EXPECT(a->buffer[0] == 0x33 && a->buffer[299] == 0x33);
	word = 40;
	memcpy(b->buffer + 6144, &word, 8);
	wr = request(6, IBV_WR_ATOMIC_FETCH_AND_ADD, &result);
	wr.wr.atomic.remote_addr = (uint64_t)(uintptr_t)(b->buffer + 6144);
	wr.wr.atomic.rkey = b->mr->rkey;
	wr.wr.atomic.compare_add = 2;
	WORKS(gds_post_send(a->qp, &wr, &bad));
	expect_wc(a->qp->send_cq.cq, 6, IBV_WC_FETCH_ADD, 8);
	memcpy(&word, a->buffer + 4096, 8);
	EXPECT(word == 40);
	wr.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
	wr.wr.atomic.compare_add = 42;
	wr.wr.atomic.swap = 77;
	WORKS(gds_post_send(a->qp, &wr, &bad));
	expect_wc(a->qp->send_cq.cq, 6, IBV_WC_COMP_SWAP, 8);
	memcpy(&word, a->buffer + 4096, 8);
	EXPECT(word == 42);
	memcpy(&word, b->buffer + 6144, 8);
	EXPECT(word == 77);
	end_stream(stream);
}

/* Requests that are prepared, posted one by one and all at once, taken back and left to the processor. */
static void prepared(struct side *a, struct side *b)
{
	CUstream stream = new_stream();
	struct ibv_sge from = at(a, 0, 64);
	gds_send_wr wr = request(1, IBV_WR_SEND, &from), *bad = NULL;
	gds_send_request_t sends[4];
	gds_wait_request_t waits[4];
	gds_mem_desc_t words;
	uint32_t *word;
	int i;
	memset(&words, 0, sizeof(words));
	WORKS(gds_alloc_mapped_memory(&words, 4096, GDS_MEMORY_HOST));
	word = (uint32_t *)words.h_ptr;
	EXPECT(words.d_ptr == on_device(words.h_ptr) && words.alloc_size == 4096 && !words.bar_ptr && *word == 0);
	EXPECT(words.original_d_ptr == words.d_ptr);
	for (i = 0; i < 9; i++)
		post_recv(b, (uint64_t)i, 4096, 64);

	/* One by one. */
	WORKS(gds_prepare_send(a->qp, &wr, &bad, &sends[0]));
	WORKS(gds_prepare_wait_cq(&a->qp->send_cq, &waits[0], 0));
	EXPECT(has_none(a->qp->send_cq.cq));
	WORKS(gds_stream_post_send(stream, &sends[0]));
	EXPECT(has_none(a->qp->send_cq.cq));
	WORKS(gds_stream_post_wait_cq(stream, &waits[0]));
	sync_stream(stream);
	expect_wc(a->qp->send_cq.cq, 1, IBV_WC_SEND, 0);

	/* All at once, the last wait with stores behind it. */
	for (i = 0; i < 3; i++) {
		wr.wr_id = 10 + (uint64_t)i;
		WORKS(gds_prepare_send(a->qp, &wr, &bad, &sends[i]));
		WORKS(gds_prepare_wait_cq(&a->qp->send_cq, &waits[i], 0));
	}
	WORKS(gds_append_wait_cq(&waits[1], word + 1, 0xa1));
	WORKS(gds_append_wait_cq(&waits[1], word + 2, 0xa2));
	WORKS(gds_stream_post_send_all(stream, 3, sends));
	WORKS(gds_stream_post_wait_cq_all(stream, 3, waits));
	sync_stream(stream);
	EXPECT(load(word + 1) == 0xa1 && load(word + 2) == 0xa2);
	for (i = 0; i < 3; i++)
		expect_wc(a->qp->send_cq.cq, 10 + (uint64_t)i, IBV_WC_SEND, 0);

	/* With a word behind them. */
	WORKS(gds_prepare_send(a->qp, &wr, &bad, &sends[0]));
	WORKS(gds_prepare_wait_cq(&a->qp->send_cq, &waits[0], 0));
	WORKS(gds_post_pokes(stream, 1, sends, word + 3, 0xa3));
	WORKS(gds_stream_post_wait_cq_multi(stream, 1, waits, word + 4, 0xa4));
	sync_stream(stream);
	EXPECT(load(word + 3) == 0xa3 && load(word + 4) == 0xa4);
	WORKS(gds_prepare_send(a->qp, &wr, &bad, &sends[0]));
	WORKS(gds_post_pokes_on_cpu(1, sends, word + 5, 0xa5));
	EXPECT(load(word + 5) == 0xa5);
	expect_wc(a->qp->send_cq.cq, 12, IBV_WC_SEND, 0);
	expect_wc(a->qp->send_cq.cq, 12, IBV_WC_SEND, 0);

	/* Waits that are taken back leave completions to the processor: the older one, and the newest. */
	for (i = 0; i < 3; i++) {
		wr.wr_id = 20 + (uint64_t)i;
		if (i < 2)
			WORKS(gds_stream_queue_send(stream, a->qp, &wr, &bad));
		else
			WORKS(gds_prepare_send(a->qp, &wr, &bad, &sends[0]));
		if (i < 2)
			WORKS(gds_prepare_wait_cq(&a->qp->send_cq, &waits[i], 0));
	}
	WORKS(gds_post_wait_cq(&a->qp->send_cq, &waits[0], 0));
	sync_stream(stream);
	expect_wc(a->qp->send_cq.cq, 20, IBV_WC_SEND, 0);
	WORKS(gds_abort_wait_cq(&a->qp->send_cq, &waits[1]));
	expect_wc(a->qp->send_cq.cq, 21, IBV_WC_SEND, 0);
	EXPECT(has_none(a->qp->send_cq.cq));

	/* A send that is taken back was never there. */
	WORKS(gds_rollback_send(a->qp, &sends[0]));
	wr.wr_id = 23;
	WORKS(gds_stream_queue_send(stream, a->qp, &wr, &bad));
	sync_stream(stream);
	expect_wc(a->qp->send_cq.cq, 23, IBV_WC_SEND, 0);
	EXPECT(has_none(a->qp->send_cq.cq));
	for (i = 0; i < 9; i++)
		expect_wc(b->qp->recv_cq.cq, (uint64_t)i, IBV_WC_RECV, 64);
	EXPECT(has_none(b->qp->recv_cq.cq));
	WORKS(gds_free_mapped_memory(&words));
	end_stream(stream);
}

/* All five tags in one list, on a stream and at once. */
static void descriptors(struct side *a, struct side *b)
{
	CUstream stream = new_stream();
	struct ibv_sge from = at(a, 0, 256);
	gds_send_wr wr = request_to(1, IBV_WR_RDMA_WRITE, &from, b, 0), *bad = NULL;
	gds_send_request_t send, more;
	gds_wait_request_t wait;
	gds_descriptor_t descs[7];
	static uint32_t page[1024] __attribute__((aligned(4096)));
	const uint8_t text[8] = {'c', 'o', 'p', 'i', 'e', 'd', '.', 0};
	CUdeviceptr device = 0;
	int turn;
	WORKS(gds_register_mem(page, sizeof(page), GDS_MEMORY_HOST, &device));
	EXPECT(device == on_device(page));
	for (turn = 0; turn < 3; turn++) {
		const uint32_t value = 1000 + (uint32_t)turn;
		memset(page, 0, sizeof(page));
		memset(a->buffer, 0x40 + turn, 256);
		memset(b->buffer, 0, 256);
		memset(descs, 0, sizeof(descs));
		WORKS(gds_prepare_send(a->qp, &wr, &bad, &send));
		WORKS(gds_prepare_send(a->qp, &wr, &bad, &more));
		WORKS(gds_prepare_wait_cq(&a->qp->send_cq, &wait, 0));
		descs[0].tag = GDS_TAG_WAIT_VALUE32;
		WORKS(gds_prepare_wait_value32(&descs[0].wait32, page, value, GDS_WAIT_COND_GEQ,
					       GDS_MEMORY_HOST | GDS_WAIT_POST_FLUSH));
		descs[1].tag = GDS_TAG_SEND;
		descs[1].send = &send;
		descs[2].tag = GDS_TAG_WAIT;
		descs[2].wait = &wait;
		descs[3].tag = GDS_TAG_WRITE_VALUE32;
		WORKS(gds_prepare_write_value32(&descs[3].write32, page + 1, value, GDS_MEMORY_HOST | GDS_WRITE_PRE_BARRIER));
		descs[4].tag = GDS_TAG_WRITE_MEMORY;
		WORKS(gds_prepare_write_memory(&descs[4].writemem, (uint8_t *)(page + 2), text, sizeof(text),
					       GDS_MEMORY_GPU | GDS_WRITE_MEMORY_POST_BARRIER_SYS));
		descs[5].tag = GDS_TAG_SEND;
		descs[5].send = &more;
		descs[6].tag = GDS_TAG_WAIT_VALUE32;
		WORKS(gds_prepare_wait_value32(&descs[6].wait32, page + 1, 8, GDS_WAIT_COND_AND, GDS_MEMORY_HOST));
		if (turn == 2) {
			/* At once, and what it waits for is there. */
			store(page, value);
			WORKS(gds_post_descriptors(7, descs, 0));
		} else if (is_sync()) {
			store(page, value);
			WORKS(gds_stream_post_descriptors(stream, 7, descs, 0));
			sync_stream(stream);
		} else {
			WORKS(gds_stream_post_descriptors(stream, 7, descs, 0));
			EXPECT(is_idle(stream) == 0 && load(page + 1) == 0 && has_none(a->qp->send_cq.cq));
			store(page, value);
			sync_stream(stream);
		}
		EXPECT(load(page + 1) == value && memcmp(page + 2, text, sizeof(text)) == 0);
		EXPECT(b->buffer[0] == 0x40 + turn && b->buffer[255] == 0x40 + turn);
		expect_wc(a->qp->send_cq.cq, 1, IBV_WC_RDMA_WRITE, 0);
		expect_wc(a->qp->send_cq.cq, 1, IBV_WC_RDMA_WRITE, 0);
	}
	WORKS(gds_post_descriptors(0, NULL, 0));
	WORKS(gds_unregister_mem(page, sizeof(page)));
	end_stream(stream);
}

/* More operations than one batch has, in one call. */
static void long_list(struct side *a, struct side *b)
{
	enum { COUNT = 100 };
	CUstream stream = new_stream();
	static gds_wait_request_t waits[COUNT];
	static gds_descriptor_t descs[COUNT];
	struct ibv_sge from = at(a, 0, 8);
	gds_send_wr chain[COUNT], *bad = NULL;
	gds_send_request_t sends[4];
	int i;
	memset(descs, 0, sizeof(descs));
	for (i = 0; i < DEPTH; i++) {
		chain[i] = request_to((uint64_t)i, IBV_WR_RDMA_WRITE, &from, b, 0);
		chain[i].next = i % 4 < 3 ? &chain[i + 1] : NULL;
	}
	for (i = 0; i < 4; i++)
		WORKS(gds_prepare_send(a->qp, &chain[4 * i], &bad, &sends[i]));
	for (i = 0; i < DEPTH; i++)
		WORKS(gds_prepare_wait_cq(&a->qp->send_cq, &waits[i], 0));
	for (i = 0; i < 4; i++) {
		descs[5 * i].tag = GDS_TAG_SEND;
		descs[5 * i].send = &sends[i];
	}
	for (i = 0; i < DEPTH; i++) {
		const int place = i / 4 * 5 + 1 + i % 4;
		descs[place].tag = GDS_TAG_WAIT;
		descs[place].wait = &waits[i];
	}
	WORKS(gds_stream_post_descriptors(stream, 20, descs, 0));
	sync_stream(stream);
	for (i = 0; i < DEPTH; i++)
		expect_wc(a->qp->send_cq.cq, (uint64_t)i, IBV_WC_RDMA_WRITE, 0);
	end_stream(stream);
}

/* The names of version 2.1: waits for words, stores, copies. */
static void words(void)
{
	CUstream stream = new_stream();
	static uint32_t page[1024] __attribute__((aligned(4096)));
	gds_mlx5_dword_wait_info_t info;
	uint32_t *polls[2], *pokes[2];
	uint32_t magics[2] = {5, 0xffffff00u}, values[2] = {0xb1, 0xb2};
	gds_wait_cond_flag_t conditions[2] = {GDS_WAIT_COND_GEQ, GDS_WAIT_COND_NOR};
	int flags[2] = {GDS_MEMORY_HOST, GDS_MEMORY_HOST};
	uint8_t data[2][8] = {{1, 2, 3, 4, 5, 6, 7, 8}, {9, 10, 11, 12, 0, 0, 0, 0}};
	void *places[2], *sources[2];
	size_t lengths[2] = {8, 4};
	memset(page, 0, sizeof(page));
	WORKS(gds_register_mem(page, sizeof(page), GDS_MEMORY_HOST, NULL));
	WORKS(gds_mlx5_get_dword_wait_info(page + 9, 77, GDS_MEMORY_HOST, &info));
	EXPECT((CUdeviceptr)(uintptr_t)info.ptr == on_device(page + 9) && info.value == 77);
	/* Equality: a larger word does not do. */
	store(page + 12, 9);
	WORKS(gds_stream_post_poll_dword(stream, page + 12, 8, GDS_WAIT_COND_EQ, GDS_MEMORY_HOST));
	WORKS(gds_stream_post_poke_dword(stream, page + 13, 1, GDS_MEMORY_HOST));
	for (const int64_t end_ms = now_ms() + 20; now_ms() < end_ms;)
		EXPECT(load(page + 13) == 0);
	store(page + 12, 8);
	sync_stream(stream);
	EXPECT(load(page + 13) == 1);
	GIVES(EFAULT, gds_mlx5_get_dword_wait_info(page + 1024, 77, GDS_MEMORY_HOST, &info));
	store(page + 1, 0xff);
	polls[0] = page;
	polls[1] = page + 1;
	pokes[0] = page + 2;
	pokes[1] = page + 3;
	WORKS(gds_stream_post_polls_and_pokes(stream, 2, polls, magics, conditions, flags, 2, pokes, values, flags));
	EXPECT(is_idle(stream) == 0 && load(page + 2) == 0);
	store(page, 5);
	EXPECT(load(page + 2) == 0);
	store(page + 1, 0xfe);
	sync_stream(stream);
	EXPECT(load(page + 2) == 0xb1 && load(page + 3) == 0xb2);

	places[0] = page + 4;
	places[1] = page + 6;
	sources[0] = data[0];
	sources[1] = data[1];
	WORKS(gds_stream_post_polls_and_immediate_copies(stream, 2, polls, magics, conditions, flags, 2, places, sources, lengths, flags));
	/* What is copied was read. */
	memset(data, 0, sizeof(data));
	sync_stream(stream);
	EXPECT(((uint8_t *)(page + 4))[7] == 8 && page[6] == (9u | 10u << 8 | 11u << 16 | 12u << 24) && page[7] == 0);

	WORKS(gds_stream_post_poll_dword(stream, page + 8, 1, GDS_WAIT_COND_AND, GDS_MEMORY_HOST));
	WORKS(gds_stream_post_poke_dword(stream, page + 9, 9, GDS_MEMORY_HOST));
	data[0][0] = 0xcc;
	WORKS(gds_stream_post_inline_copy(stream, page + 10, data[0], 4, GDS_MEMORY_HOST));
	EXPECT(is_idle(stream) == 0 && load(page + 9) == 0);
	store(page + 8, 3);
	sync_stream(stream);
	EXPECT(load(page + 9) == 9 && load(page + 10) == 0xcc);
	WORKS(gds_unregister_mem(page, sizeof(page)));
	end_stream(stream);
}

/* Registered, counted, and let go of: by device and driver. */
static void memory(void)
{
	CUstream stream = new_stream();
	void *at_page;
	uint32_t *page;
	CUdeviceptr device = 0;
	EXPECT(posix_memalign(&at_page, 4096, 8192) == 0);
	page = (uint32_t *)at_page;
	memset(page, 0, 8192);
	WORKS(gds_register_mem(page, 8192, GDS_MEMORY_HOST, &device));
	WORKS(gds_register_mem(page + 4, 64, GDS_MEMORY_GPU, &device));
	EXPECT(device == on_device(page + 4));
	WORKS(gds_stream_post_poke_dword(stream, page, 1, GDS_MEMORY_HOST));
	sync_stream(stream);
	WORKS(gds_unregister_mem(page, 8192));
	WORKS(gds_stream_post_poke_dword(stream, page + 1, 2, GDS_MEMORY_HOST));
	sync_stream(stream);
	EXPECT(page[0] == 1 && page[1] == 2);
	WORKS(gds_unregister_mem(page + 4, 64));
	GIVES(EINVAL, gds_unregister_mem(page, 8192));
	GIVES(EFAULT, gds_stream_post_poke_dword(stream, page, 3, GDS_MEMORY_HOST));
	if (by_cuda()) {
		/* The driver refuses memory that is registered. */
		const int64_t end_ms = now_ms() + SOON_MS;
		int code;
		while ((code = driver()->register_host(page, 8192, 2)) != 0) {
			EXPECT(now_ms() < end_ms);
			/* Memory whose last user was a thread of the library is given back by the next call. */
			sync_stream(stream);
		}
		WORKS(driver()->unregister_host(page));
	}
	/* And again, for many turns. */
	for (int turn = 0; turn < 3000; turn++) {
		WORKS(gds_register_mem(page, 8192, GDS_MEMORY_HOST, NULL));
		WORKS(gds_unregister_mem(page, 8192));
	}
	free(page);
	end_stream(stream);
}

struct worker {
	pthread_t thread;
	struct side a;
	struct side b;
};

/* Each with queue pairs of its own, all with the same tables; waits of one do not block the others. */
static void *work(void *argument)
{
	struct worker *worker = (struct worker *)argument;
	gds_descriptor_t descs[2];
	gds_wait_request_t wait;
	gds_send_request_t send;
	struct ibv_sge from;
	gds_send_wr wr, *bad = NULL;
	make_pair(&worker->a, &worker->b);
	ping_pong(&worker->a, &worker->b);
	from = at(&worker->a, 0, 64);
	wr = request(9, IBV_WR_SEND, &from);
	for (int turn = 0; turn < 50; turn++) {
		post_recv(&worker->b, 1, 0, 64);
		memset(descs, 0, sizeof(descs));
		WORKS(gds_prepare_send(worker->a.qp, &wr, &bad, &send));
		WORKS(gds_prepare_wait_cq(&worker->b.qp->recv_cq, &wait, 0));
		descs[0].tag = GDS_TAG_SEND;
		descs[0].send = &send;
		descs[1].tag = GDS_TAG_WAIT;
		descs[1].wait = &wait;
		WORKS(gds_post_descriptors(2, descs, 0));
		expect_wc(worker->b.qp->recv_cq.cq, 1, IBV_WC_RECV, 64);
		expect_wc(worker->a.qp->send_cq.cq, 9, IBV_WC_SEND, 0);
	}
	end_side(&worker->a);
	end_side(&worker->b);
	return NULL;
}

static void threads(void)
{
	struct worker workers[3];
	int i;
	for (i = 0; i < 3; i++)
		WORKS(pthread_create(&workers[i].thread, NULL, work, &workers[i]));
	for (i = 0; i < 3; i++)
		WORKS(pthread_join(workers[i].thread, NULL));
}

/* A completion that a wait is queued for is there to be polled when the stream has passed the wait, and not when the work is done. */
static void polls_behind_waits(struct side *a, struct side *b)
{
	CUstream first, second;
	static uint32_t page[1024] __attribute__((aligned(4096)));
	struct ibv_sge from = at(a, 0, 8);
	gds_send_wr wr = request_to(1, IBV_WR_RDMA_WRITE, &from, b, 0), *bad = NULL;
	if (is_sync())
		return;
	first = new_stream();
	second = new_stream();
	WORKS(gds_register_mem(page, sizeof(page), GDS_MEMORY_HOST, NULL));
	memset(b->buffer, 0, 8);
	memset(a->buffer, 0x55, 8);
	WORKS(gds_stream_post_poll_dword(second, page, 1, GDS_WAIT_COND_GEQ, GDS_MEMORY_HOST));
	WORKS(gds_stream_queue_send(first, a->qp, &wr, &bad));
	WORKS(gds_stream_wait_cq(second, &a->qp->send_cq, 0));
	sync_stream(first);
	for (const int64_t end_ms = now_ms() + SOON_MS; *(volatile uint8_t *)b->buffer != 0x55;)
		EXPECT(now_ms() < end_ms);
	for (const int64_t end_ms = now_ms() + 50; now_ms() < end_ms;)
		EXPECT(has_none(a->qp->send_cq.cq));
	store(page, 1);
	sync_stream(second);
	expect_wc(a->qp->send_cq.cq, 1, IBV_WC_RDMA_WRITE, 0);
	WORKS(gds_unregister_mem(page, sizeof(page)));
	end_stream(first);
	end_stream(second);
}

/* A program that waits on streams and polls nothing, which was never right, goes on. */
static void never_polls(struct side *a, struct side *b)
{
	CUstream stream = new_stream();
	struct ibv_sge from = at(a, 0, 8);
	gds_send_wr wr = request_to(1, IBV_WR_RDMA_WRITE, &from, b, 0), *bad = NULL;
	int i, left = 0;
	for (i = 0; i < 5 * DEPTH; i++) {
		wr.wr_id = (uint64_t)i;
		WORKS(gds_stream_queue_send(stream, a->qp, &wr, &bad));
		WORKS(gds_stream_wait_cq(stream, &a->qp->send_cq, 0));
		sync_stream(stream);
	}
	for (i = 3 * DEPTH; i < 5 * DEPTH; i++, left++)
		expect_wc(a->qp->send_cq.cq, (uint64_t)i, IBV_WC_RDMA_WRITE, 0);
	EXPECT(left == 2 * DEPTH && has_none(a->qp->send_cq.cq));
	end_stream(stream);
}

/* Queues a write on the default stream of the current context, which is blocked, and lets the stream go on. */
static void send_behind_a_wait(CUstream stream, struct side *a, struct side *b, uint32_t *word)
{
	int (*wait_value)(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags);
	struct ibv_sge from = at(a, 0, 8);
	gds_send_wr wr = request_to(1, IBV_WR_RDMA_WRITE, &from, b, 0), *bad = NULL;
	find(dlopen("libcuda.so.1", RTLD_NOW), "cuStreamWaitValue32_v2", &wait_value);
	store(word, 0);
	memset(a->buffer, 0x66, 8);
	memset(b->buffer, 0, 8);
	WORKS(wait_value(stream, on_device(word), 1, 0));
	WORKS(gds_stream_queue_send(stream, a->qp, &wr, &bad));
	for (const int64_t end_ms = now_ms() + 50; now_ms() < end_ms;)
		EXPECT(has_none(a->qp->send_cq.cq) && *(volatile uint8_t *)b->buffer == 0);
	store(word, 1);
	expect_wc(a->qp->send_cq.cq, 1, IBV_WC_RDMA_WRITE, 0);
	EXPECT(b->buffer[7] == 0x66);
	sync_stream(stream);
}

/* NULL and CU_STREAM_LEGACY are the default stream of the context that is current, of which a program may have several. */
static void default_streams(struct side *a, struct side *b)
{
	int (*create)(void **context, unsigned flags, int device);
	int (*destroy)(void *context);
	static uint32_t page[1024] __attribute__((aligned(4096)));
	CUstream const names[2] = {NULL, (CUstream)(uintptr_t)1};
	doorbell_stream *handles[2];
	void *contexts[2];
	int i, name;
	if (!by_cuda())
		return;
	find(dlopen("libcuda.so.1", RTLD_NOW), "cuCtxCreate_v2", &create);
	find(dlopen("libcuda.so.1", RTLD_NOW), "cuCtxDestroy_v2", &destroy);
	contexts[0] = driver()->context;
	WORKS(create(&contexts[1], 0, 0));
	/* Portable and mapped: for both contexts. */
	WORKS(driver()->register_host(page, sizeof(page), 1 | 2));
	for (name = 0; name < 2; name++) {
		for (i = 0; i < 2; i++) {
			WORKS(driver()->set_current(contexts[i]));
			WORKS(gds_stream_handle(names[name], &handles[i]));
			send_behind_a_wait(names[name], a, b, page);
		}
		EXPECT(handles[0] != handles[1]);
		/* Of the current context only. */
		WORKS(gds_release_stream(names[name]));
		GIVES(EINVAL, gds_release_stream(names[name]));
		WORKS(driver()->set_current(contexts[0]));
		WORKS(gds_release_stream(names[name]));
	}
	WORKS(driver()->unregister_host(page));
	WORKS(destroy(contexts[1]));
	WORKS(driver()->set_current(contexts[0]));
}

struct sender {
	struct side *from, *to;
	pthread_t thread;
	uint32_t refused;
};

/* On a stream of its own. A full queue is the only thing that may be said against it. */
static void *send_many(void *argument)
{
	struct sender *sender = (struct sender *)argument;
	CUstream stream = new_stream();
	struct ibv_sge from = at(sender->from, 0, 8);
	gds_send_wr wr = request_to(1, IBV_WR_RDMA_WRITE, &from, sender->to, 0), *bad = NULL;
	struct ibv_wc wc;
	int sent = 0, error;
	while (sent < 1000) {
		error = gds_stream_queue_send(stream, sender->from->qp, &wr, &bad);
		if (error == ENOMEM) {
			sender->refused++;
			sync_stream(stream);
			while (ibv_poll_cq(sender->from->qp->send_cq.cq, 1, &wc) > 0)
				EXPECT(wc.status == IBV_WC_SUCCESS);
			continue;
		}
		WORKS(error);
		sent++;
	}
	sync_stream(stream);
	end_stream(stream);
	return NULL;
}

/* Two threads at one queue pair, neither of which knows of the other. */
static void two_senders(struct side *a, struct side *b)
{
	struct sender senders[2];
	struct ibv_wc wc;
	int i;
	for (i = 0; i < 2; i++) {
		memset(&senders[i], 0, sizeof(senders[i]));
		senders[i].from = a;
		senders[i].to = b;
		EXPECT(pthread_create(&senders[i].thread, NULL, send_many, &senders[i]) == 0);
	}
	for (i = 0; i < 2; i++)
		EXPECT(pthread_join(senders[i].thread, NULL) == 0);
	while (ibv_poll_cq(a->qp->send_cq.cq, 1, &wc) > 0)
		EXPECT(wc.status == IBV_WC_SUCCESS);
}

int main(void)
{
	struct side a, b;
	int version = 0;
	WORKS(gds_query_param(GDS_PARAM_VERSION, &version));
	EXPECT(GDS_API_VERSION_COMPATIBLE(version) && !GDS_API_VERSION_COMPATIBLE(0x10002));
	GIVES(EINVAL, gds_query_param(GDS_NUM_PARAMS, &version));
	WORKS(gds_set_option(GDS_OPTION_WAIT_TIMEOUT_MS, WAIT_TIMEOUT_MS));
	WORKS(gds_set_option(GDS_OPTION_REGISTER_ON_USE, 0));
	make_pair(&a, &b);
	EXPECT(gds_qp_endpoint(a.qp) != NULL);
	ping_pong(&a, &b);
	work_requests(&a, &b);
	prepared(&a, &b);
	descriptors(&a, &b);
	long_list(&a, &b);
	polls_behind_waits(&a, &b);
	never_polls(&a, &b);
	default_streams(&a, &b);
	words();
	memory();
	threads();
	two_senders(&a, &b);
	/* Back to the beginning, and once more. */
	WORKS(gds_qp_reset(a.qp));
	WORKS(gds_qp_reset(b.qp));
	connect_sides(&a, &b);
	ping_pong(&b, &a);
	end_side(&a);
	end_side(&b);
	puts("done");
	return 0;
}
