/*
 * `in_memory TAIL ONE TWO`: a program that writes its own work requests and reads completions in memory, as UCX's transports do, and calls
 * `ucp_worker_progress`. The device's thread is stopped at that time, so only this call can do the device's work. The arguments are libraries over
 * libraries with UCX's names: TAIL and ONE over the first, TWO over the second, each with a return to itself but for TAIL.
 *
 * `in_memory unclear TAIL TWO`: a call of which the preload door cannot know whose it is.
 */
#define _GNU_SOURCE
#include "pair.h"
#include "worker.h"
#include <dirent.h>
#include <dlfcn.h>
#include <infiniband/mlx5dv.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#define ROUNDS 20
#define DEPTH 16u
/* Far longer than the device's thread sleeps when a client could ring. */
#define QUIET_US 20000
/* Stops of the thread at a place where it holds the device, before the test gives up. It holds it for a small part of the time. */
#define STOPS 1000

static struct mlx5dv_qp queue;
static struct mlx5dv_cq completions;
static struct ibv_mr *memory;
static uint32_t qpn, posted, polled;

/* A WRITE of the first eight bytes of the memory to the next ones. */
static void post(uint64_t value)
{
	const uint32_t index = posted % queue.sq.wqe_cnt;
	struct mlx5_wqe_ctrl_seg *ctrl = (void *)((char *)queue.sq.buf + index * queue.sq.stride);
	struct mlx5_wqe_raddr_seg *remote = (void *)(ctrl + 1);
	struct mlx5_wqe_data_seg *local = (void *)(remote + 1);
	uint64_t *words = memory->addr;

	words[0] = value;
	mlx5dv_set_ctrl_seg(ctrl, (uint16_t)posted, MLX5_OPCODE_RDMA_WRITE, 0, qpn, MLX5_WQE_CTRL_CQ_UPDATE, 3, 0, 0);
	*remote = (struct mlx5_wqe_raddr_seg){ .raddr = htobe64((uintptr_t)(words + 1)), .rkey = htobe32(memory->rkey) };
	mlx5dv_set_data_seg(local, sizeof(*words), memory->lkey, (uintptr_t)words);
	posted++;
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	__atomic_store_n(queue.dbrec + MLX5_SND_DBR, htobe32(posted & 0xffff), __ATOMIC_RELEASE);
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	*(volatile uint64_t *)((char *)queue.bf.reg + posted % 2 * queue.bf.size) = *(uint64_t *)ctrl;
}

static unsigned poll_memory(void)
{
	const uint32_t index = polled % completions.cqe_cnt;
	const struct mlx5_cqe64 *entry = (void *)((char *)completions.buf + (index + 1) * completions.cqe_size - 64);
	const uint8_t op_own = __atomic_load_n(&entry->op_own, __ATOMIC_ACQUIRE);

	if (op_own >> 4 == MLX5_CQE_INVALID || (op_own & 1) != !!(polled & completions.cqe_cnt))
		return 0;
	CHECK(op_own >> 4 == MLX5_CQE_REQ);
	polled++;
	__atomic_store_n(completions.dbrec, htobe32(polled & 0xffffff), __ATOMIC_RELEASE);
	return 1;
}

static uint64_t now_us(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* 0 if it has no name yet, because it begins just now. */
static pid_t device_thread(void)
{
	DIR *threads = opendir("/proc/self/task");
	struct dirent *entry;
	char path[300], name[32] = "";
	pid_t thread = 0;
	CHECK(threads);
	while ((entry = readdir(threads))) {
		FILE *file;
		snprintf(path, sizeof(path), "/proc/self/task/%s/comm", entry->d_name);
		if (entry->d_name[0] == '.' || !(file = fopen(path, "r")))
			continue;
		CHECK(fgets(name, sizeof(name), file));
		fclose(file);
		if (!strcmp(name, "softcx-engine\n"))
			thread = atoi(entry->d_name);
	}
	closedir(threads);
	return thread;
}

/* A child that stops and continues a thread of this process, at a byte each. It answers by one. */
static int orders, answers;

static void stopper(pid_t thread, int from, int to)
{
	char byte;
	int status;
	while (read(from, &byte, 1) == 1) {
		if (byte == 's' &&
		    (ptrace(PTRACE_SEIZE, thread, 0, 0) || ptrace(PTRACE_INTERRUPT, thread, 0, 0) || waitpid(thread, &status, __WALL) != thread))
			_exit(1);
		if (byte == 'c' && ptrace(PTRACE_DETACH, thread, 0, 0))
			_exit(2);
		if (write(to, &byte, 1) != 1)
			_exit(3);
	}
	_exit(0);
}

static void start_stopper(void)
{
	int there[2], back[2];
	pid_t child, thread;
	for (int i = 0; !(thread = device_thread()); i++) {
		CHECK(i < LIMIT_S * 1000);
		usleep(1000);
	}
	CHECK(pipe(there) == 0 && pipe(back) == 0);
	CHECK((child = fork()) >= 0);
	if (child == 0) {
		char byte;
		close(there[1]);
		close(back[0]);
		/* When the parent has allowed it. */
		if (read(there[0], &byte, 1) == 1)
			stopper(thread, there[0], back[1]);
		_exit(0);
	}
	close(there[0]);
	close(back[1]);
	orders = there[1];
	answers = back[0];
	prctl(PR_SET_PTRACER, child, 0, 0, 0);
	CHECK(write(orders, "", 1) == 1);
}

static void order(char byte)
{
	char answer = 0;
	CHECK(write(orders, &byte, 1) == 1 && read(answers, &answer, 1) == 1 && answer == byte);
}

static unsigned (*progress)(struct worker *);
static struct worker worker = { .poll = poll_memory };

/* Whether calls completed the request. They do not if the thread was stopped while it held the device. */
static int completes(int calls)
{
	const uint64_t begun = now_us();
	unsigned found = 0;
	while (!found && now_us() - begun < QUIET_US)
		found = calls ? progress(&worker) : poll_memory();
	return found != 0;
}

static void *function(void *library, const char *name)
{
	void *found = dlsym(library, name);
	CHECK(found);
	return found;
}

static void *load(const char *path)
{
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!library)
		fprintf(stderr, "%s\n", dlerror());
	CHECK(library);
	return library;
}

int main(int argc, char **argv)
{
	struct mlx5dv_obj objects = { .qp = { .out = &queue }, .cq = { .out = &completions } };
	unsigned held = 0, in_calls = 0;
	struct address own;
	int (*arm)(struct worker *);

	CHECK(argc == 4);
	if (!strcmp(argv[1], "unclear")) {
		progress = function(load(argv[2]), "user_progress");
		load(argv[3]);
		progress(&worker);
		printf("answered by %d\n", worker.asked);
		return 1;
	}
	struct device device = open_device();
	struct ibv_cq *cq = new_cq(&device, DEPTH);
	struct ibv_qp *qp = new_qp(&device, IBV_QPT_RC, cq, DEPTH);
	memory = register_memory(&device, 4096, EVERY_ACCESS);
	own = address_of(&device, qp);
	qpn = qp->qp_num;
	to_init(qp);
	join(&device, qp, &own, PATIENT);
	objects.qp.in = qp;
	objects.cq.in = cq;
	CALL(mlx5dv_init_obj(&objects, MLX5DV_OBJ_QP | MLX5DV_OBJ_CQ));
	progress = function(load(argv[1]), "user_progress");
	start_stopper();

	while (in_calls < ROUNDS) {
		order('s');
		post(posted + 1);
		/* Else the thread is not stopped, and the rest would say nothing. */
		CHECK(!completes(0));
		if (completes(1)) {
			in_calls++;
		} else {
			CHECK(++held < STOPS);
			order('c');
			for (const uint64_t begun = now_us(); !progress(&worker);)
				CHECK(now_us() - begun < LIMIT_S * 1000000ull);
			order('s');
		}
		order('c');
		CHECK(((volatile uint64_t *)memory->addr)[1] == posted && polled == posted);
		CHECK(worker.asked == 1);
	}

	/* Which library a call is passed on to. */
	void *one = load(argv[2]), *two = load(argv[3]);
	for (int round = 0; round < ROUNDS; round++) {
		const int which = round % 2 + 1;
		progress = function(which == 1 ? one : two, "user_progress");
		*(void **)&arm = function(which == 1 ? one : two, "user_arm");
		CHECK(progress(&worker) == 0 && worker.asked == which);
		CHECK(arm(&worker) == (which == 1 ? 0 : -15) && worker.armed == which);
	}
	printf("%u in calls, %u while the thread held the device\n", in_calls, held);
	return 0;
}
