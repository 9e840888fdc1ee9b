/* A program with an mmap and a munmap of its own, as a memory monitor puts them in place of libc's: which threads call them while it opens and closes the device?
 * Prints what went wrong and exits with 1; 0 if nothing did. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static int by_program, by_others;

static void count(void)
{
	__atomic_fetch_add(syscall(SYS_gettid) == getpid() ? &by_program : &by_others, 1, __ATOMIC_RELAXED);
}

void *mmap(void *start, size_t len, int rights, int flags, int fd, off_t offset)
{
	count();
	return (void *)syscall(SYS_mmap, start, len, rights, flags, fd, offset);
}

int munmap(void *start, size_t len)
{
	count();
	return (int)syscall(SYS_munmap, start, len);
}

/* Whether pages of the device are mapped here. */
static int is_mapped(void)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];
	int found = 0;

	while (maps && fgets(line, sizeof(line), maps))
		found |= strstr(line, "memfd:uverbs") != NULL;
	if (maps)
		fclose(maps);
	return found;
}

int main(void)
{
	int was_mapped = 0;

	for (int i = 0; i < 20; i++) {
		const int fd = open("/dev/infiniband/uverbs0", O_RDWR | O_CLOEXEC);
		if (fd < 0) {
			perror("open");
			return 1;
		}
		was_mapped += is_mapped();
		close(fd);
	}
	/* A thread of the device's releases them soon after. */
	for (int tries = 0; is_mapped() && tries < 3000; tries++)
		usleep(10000);
	if (was_mapped != 20 || is_mapped()) {
		printf("pages were mapped after %d of 20 opens, and %s in the end\n", was_mapped, is_mapped() ? "are" : "are not");
		return 1;
	}
	/* The hooks work: this call comes here. */
	munmap(mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 4096);
	if (by_program < 2 || by_others > 0) {
		printf("%d calls by the program, %d by other threads\n", by_program, by_others);
		return 1;
	}
	return 0;
}
