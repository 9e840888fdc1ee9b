/* GDS_OPTION_REGISTER_ON_USE, as it is at first: the first wait or store registers memory that was not registered. */
#define _POSIX_C_SOURCE 200809L

#include "rig.h"

int main(void)
{
	CUstream stream = new_stream();
	const uint32_t words[3] = {7, 8, 9};
	void *at_page;
	uint32_t *page;
	int turn;
	EXPECT(posix_memalign(&at_page, 4096, 3 * 4096) == 0);
	page = (uint32_t *)at_page;
	for (turn = 0; turn < 3; turn++) {
		memset(page, 0, 3 * 4096);
		/* A store, and another one and a wait of the same page. */
		WORKS(gds_stream_post_poke_dword(stream, page + 3, 7, GDS_MEMORY_HOST));
		WORKS(gds_stream_post_poke_dword(stream, page + 1023, 8, GDS_MEMORY_HOST));
		WORKS(gds_stream_post_poll_dword(stream, page + 3, 7, GDS_WAIT_COND_GEQ, GDS_MEMORY_HOST));
		/* Over the end of a page. */
		WORKS(gds_stream_post_inline_copy(stream, page + 2046, (void *)(uintptr_t)words, sizeof(words), GDS_MEMORY_HOST));
		sync_stream(stream);
		EXPECT(page[3] == 7 && page[1023] == 8 && page[2045] == 0);
		EXPECT(memcmp(page + 2046, words, sizeof(words)) == 0);
		/* A page that was asked for once is registered once. */
		WORKS(gds_unregister_mem(page, 4096));
		GIVES(EINVAL, gds_unregister_mem(page, 4096));
		WORKS(gds_unregister_mem(page + 1024, 2 * 4096));
		GIVES(EINVAL, gds_unregister_mem(page + 1024, 2 * 4096));
	}
	/* A registration takes the page over: the last gds_unregister_mem ends it, and what is mapped there later is registered anew. */
	for (turn = 0; turn < 2; turn++) {
		WORKS(gds_stream_post_poke_dword(stream, page, 1, GDS_MEMORY_HOST));
		sync_stream(stream);
		WORKS(gds_register_mem(page, 4096, GDS_MEMORY_HOST, NULL));
		WORKS(gds_register_mem(page + 1, 4, GDS_MEMORY_HOST, NULL));
		WORKS(gds_stream_post_poke_dword(stream, page, 2, GDS_MEMORY_HOST));
		sync_stream(stream);
		EXPECT(page[0] == 2);
		WORKS(gds_unregister_mem(page + 1, 4));
		WORKS(gds_unregister_mem(page, 4096));
		GIVES(EINVAL, gds_unregister_mem(page, 4096));
	}
	/* What a use has registered contains what the program has registered before; each ends by itself. */
	WORKS(gds_register_mem(page + 1024, 4096, GDS_MEMORY_HOST, NULL));
	WORKS(gds_register_mem(page + 8, 64, GDS_MEMORY_HOST, NULL));
	WORKS(gds_unregister_mem(page + 1024, 4096));
	WORKS(gds_stream_post_poke_dword(stream, page + 100, 3, GDS_MEMORY_HOST));
	WORKS(gds_unregister_mem(page + 8, 64));
	WORKS(gds_set_option(GDS_OPTION_REGISTER_ON_USE, 0));
	WORKS(gds_stream_post_poke_dword(stream, page + 101, 4, GDS_MEMORY_HOST));
	sync_stream(stream);
	EXPECT(page[100] == 3 && page[101] == 4);
	WORKS(gds_unregister_mem(page, 4096));
	/* Memory that starts at any byte, and its aligned words. */
	WORKS(gds_register_mem((char *)page + 2, 62, GDS_MEMORY_HOST, NULL));
	WORKS(gds_stream_post_poke_dword(stream, page + 1, 5, GDS_MEMORY_HOST));
	GIVES(EFAULT, gds_stream_post_poke_dword(stream, page + 16, 5, GDS_MEMORY_HOST));
	sync_stream(stream);
	EXPECT(page[1] == 5);
	WORKS(gds_unregister_mem((char *)page + 2, 62));
	GIVES(EINVAL, gds_unregister_mem((char *)page + 2, 62));
	WORKS(gds_set_option(GDS_OPTION_REGISTER_ON_USE, 1));
	/* An address that is not mapped is not registered. */
	EXPECT(gds_stream_post_poke_dword(stream, (uint32_t *)(uintptr_t)4096, 1, GDS_MEMORY_HOST) != 0);
	GIVES(EINVAL, gds_stream_post_poke_dword(stream, NULL, 1, GDS_MEMORY_HOST));
	sync_stream(stream);
	free(page);
	end_stream(stream);
	puts("done");
	return 0;
}
