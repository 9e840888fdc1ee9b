/*
 * Takes a message out of its slot: what the stream of a receive does between the wait for the message and the doorbell of
 * the READ. One thread of a GPU, or of a CPU in tests, executes it. C11 and CUDA. docs/messages.md has the protocol, and
 * src/message/receive.rs does the same for streams of the host.
 *
 * An eager message is copied into the slices. For a message that the sender keeps, a NOP in the send ring becomes the READ
 * of it.
 */
#ifndef DOORBELL_TAKE_H
#define DOORBELL_TAKE_H

#include <string.h>

#include "access.h"
#include "executor.h"
#include "wqe.h"

/* The header in front of each message, little-endian: src/message/header.rs. */
struct dbl_message_header {
	uint32_t number;    /* running number of the message in its direction */
	uint32_t kind;      /* enum dbl_message_kind */
	uint64_t len_bytes; /* length of the message */
	uint64_t addr;      /* of the message in the sender's memory, if it is not in the slot */
	uint32_t rkey;
	uint32_t tag; /* for a matcher; a queue without one does not look at it */
};

enum dbl_message_kind { DBL_MESSAGE_EAGER = 1, DBL_MESSAGE_RENDEZVOUS = 2 };

/* The result for the host, on a cache line of its own. Each word is the number of the message at first, and one more once it is set. */
struct dbl_taken {
	struct dbl_message_header header; /* as it was found */
	uint32_t taken; /* the message was copied, or its READ is ready: the stream waits for this */
	uint32_t seen;	/* stored last, whether it was taken or refused */
	uint32_t skip;	/* by the host: what comes before has failed, so nothing is taken */
	uint32_t reserved[5];
};

/* What is taken, and where to. `slices` follow it in an item, 0 to DBL_TAKE_SLICES_MAX. */
struct dbl_take {
	uint64_t slot;	 /* address of the header, 16-byte aligned; an eager message follows it */
	uint64_t result; /* address of a struct dbl_taken */
	uint64_t wqe;	 /* address of the NOP that becomes the READ; 0 if no message is longer than a slot */
	uint32_t number; /* of the message that is expected */
	uint32_t eager_bytes;
	uint32_t index; /* running WQEBB count of the NOP */
	uint32_t qpn;
};

struct dbl_take_slice {
	uint64_t addr;
	uint64_t len_bytes;
};

#define DBL_TAKE_SLICES_MAX 15
#define DBL_TAKE_WORDS ((uint32_t)(sizeof(struct dbl_take) / sizeof(uint64_t)))
#define DBL_TAKE_SLICE_WORDS ((uint32_t)(sizeof(struct dbl_take_slice) / sizeof(uint64_t)))

DBL_STATIC_ASSERT(sizeof(struct dbl_message_header) == 32, "a header is 32 bytes");
DBL_STATIC_ASSERT(sizeof(struct dbl_taken) == 64, "a result is a cache line");
DBL_STATIC_ASSERT(offsetof(struct dbl_taken, taken) == 32, "taken");
DBL_STATIC_ASSERT(sizeof(struct dbl_take) == 40, "five words");

enum dbl_take_end {
	DBL_TAKE_DONE = 0,
	DBL_TAKE_REFUSED = 1,	  /* no header of the expected message, or the message is longer than the slices */
	DBL_TAKE_UNREACHABLE = 2, /* DBL_MAP_ADDRESS returned NULL */
	DBL_TAKE_MALFORMED = 3	  /* the words are not those of a struct dbl_take */
};

/* Copies bytes. Returns whether DBL_MAP_ADDRESS has found both ends. */
#ifdef __CUDACC__
DBL_EXECUTOR int dbl_take_copy(uint64_t to, uint64_t from, uint64_t len_bytes)
{
	/* Eight loads are in flight at a time, each of which takes about as long as a round trip to the CPU's memory. */
	enum { LOADS = 8 };

	if (((to | from) & 15) == 0) {
		for (; len_bytes >= LOADS * 16; len_bytes -= LOADS * 16, to += LOADS * 16, from += LOADS * 16) {
			uint64_t words[LOADS][2];
#pragma unroll
			for (int at = 0; at < LOADS; at++)
				dbl_load_16(words[at], (const void *)(from + 16 * at));
#pragma unroll
			for (int at = 0; at < LOADS; at++)
				dbl_store_16((void *)(to + 16 * at), words[at]);
		}
		for (; len_bytes >= 16; len_bytes -= 16, to += 16, from += 16) {
			uint64_t words[2];
			dbl_load_16(words, (const void *)from);
			dbl_store_16((void *)to, words);
		}
	}
	for (; len_bytes > 0; len_bytes--, to++, from++)
		*(volatile uint8_t *)to = *(const volatile uint8_t *)from;
	return 1;
}
#else
DBL_EXECUTOR int dbl_take_copy(uint64_t to, uint64_t from, uint64_t len_bytes)
{
	/* Page by page: each may have been registered by itself. */
	const uint64_t page = 4096;
	uint64_t part;
	void *into;
	const void *source;

	for (; len_bytes > 0; len_bytes -= part, to += part, from += part) {
		part = len_bytes;
		if (part > page - to % page)
			part = page - to % page;
		if (part > page - from % page)
			part = page - from % page;
		into = DBL_MAP_ADDRESS(to, part);
		source = DBL_MAP_ADDRESS(from, part);
		if (!into || !source)
			return 0;
		memcpy(into, source, part);
	}
	return 1;
}
#endif

/* Takes the message of `words` words, those of a struct dbl_take and its slices. */
DBL_EXECUTOR_CALLED enum dbl_take_end dbl_take_message(const uint64_t *body, uint32_t words)
{
	struct dbl_message_header header;
	struct dbl_take_slice slice;
	struct dbl_taken *result;
	struct dbl_take take;
	uint64_t header_words[4], capacity = 0, from, left;
	uint32_t at, slice_count, next;
	const uint8_t *slot;
	int is_eager, is_good;
	uint8_t *wqe;

	if (words < DBL_TAKE_WORDS || (words - DBL_TAKE_WORDS) % DBL_TAKE_SLICE_WORDS != 0)
		return DBL_TAKE_MALFORMED;
	slice_count = (words - DBL_TAKE_WORDS) / DBL_TAKE_SLICE_WORDS;
	if (slice_count > DBL_TAKE_SLICES_MAX)
		return DBL_TAKE_MALFORMED;
	memcpy(&take, body, sizeof(take));
	body += DBL_TAKE_WORDS;
	slot = (const uint8_t *)DBL_MAP_ADDRESS(take.slot, sizeof(header));
	result = (struct dbl_taken *)DBL_MAP_ADDRESS(take.result, sizeof(*result));
	if (!slot || !result)
		return DBL_TAKE_UNREACHABLE;
	next = take.number + 1;
	if (dbl_load_dword(&result->skip) == next)
		return DBL_TAKE_REFUSED;
	dbl_load_16(header_words, slot);
	dbl_load_16(header_words + 2, slot + 16);
	memcpy(&header, header_words, sizeof(header));
	for (at = 0; at < slice_count; at++) {
		memcpy(&slice, body + DBL_TAKE_SLICE_WORDS * at, sizeof(slice));
		capacity += slice.len_bytes;
	}
	is_eager = header.kind == DBL_MESSAGE_EAGER;
	is_good = header.number == take.number && header.len_bytes <= capacity &&
		  (is_eager ? header.len_bytes <= take.eager_bytes :
			      header.kind == DBL_MESSAGE_RENDEZVOUS && header.len_bytes > take.eager_bytes && take.wqe);
	if (is_good && is_eager) {
		from = take.slot + sizeof(header);
		left = header.len_bytes;
		for (at = 0; at < slice_count && left > 0; at++) {
			memcpy(&slice, body + DBL_TAKE_SLICE_WORDS * at, sizeof(slice));
			if (slice.len_bytes > left)
				slice.len_bytes = left;
			if (!dbl_take_copy(slice.addr, from, slice.len_bytes))
				return DBL_TAKE_UNREACHABLE;
			from += slice.len_bytes;
			left -= slice.len_bytes;
		}
	} else if (is_good) {
		wqe = (uint8_t *)DBL_MAP_ADDRESS(take.wqe, DBL_WQEBB_BYTES);
		if (!wqe)
			return DBL_TAKE_UNREACHABLE;
		dbl_wqe_read_over_nop(wqe, 0, take.index, take.qpn, header.addr, header.rkey,
				      (uint32_t)header.len_bytes);
	}
	dbl_store_16(&result->header, header_words);
	dbl_store_16((uint8_t *)&result->header + 16, header_words + 2);
	/* The message, and the READ that the stream rings for next. */
	dbl_fence_release();
	if (is_good)
		dbl_store_dword(&result->taken, next);
	/* Behind `taken`: the host takes what is seen and not taken for refused. */
	dbl_store_dword_release(&result->seen, next);
	return is_good ? DBL_TAKE_DONE : DBL_TAKE_REFUSED;
}

#endif
