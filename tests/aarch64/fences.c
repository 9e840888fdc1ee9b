/* Each barrier of the headers, as threads of a CPU have it, alone in a function: for scripts/aarch64 to disassemble. */
#include <doorbell/queue.h>

#define BARRIER(name)          \
	void fence_##name(void); \
	void fence_##name(void)  \
	{                        \
		name();          \
	}

BARRIER(dbl_fence_release)
BARRIER(dbl_fence_acquire)
BARRIER(dbl_fence_register)
BARRIER(dbl_flush_registers)
BARRIER(dbl_fence_system)
BARRIER(dbl_fence_release_gpu)
BARRIER(dbl_fence_acquire_gpu)
