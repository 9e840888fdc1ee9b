/* A verbs program without libibverbs: opens the device and issues its ioctl. Static, so that no preloaded library gets at it.
 * Each command prints what went wrong and exits with 1; 0 if nothing did. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <pthread.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/mlx5-abi.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#define NODE "/dev/infiniband/uverbs0"
#define EXPECT(what) do { if (!(what)) { printf("line %d: %s (errno %d)\n", __LINE__, #what, errno); exit(1); } } while (0)

static int open_node(void)
{
	int fd = open(NODE, O_RDWR | O_CLOEXEC);
	EXPECT(fd >= 0);
	return fd;
}

/* libibverbs' question whether the kernel has this ioctl: a command without room for its answer. */
static int ask(int fd)
{
	struct { struct ib_uverbs_ioctl_hdr header; struct ib_uverbs_attr attrs[1]; } command = { 0 };
	command.header.length = sizeof command;
	command.header.object_id = UVERBS_OBJECT_DEVICE;
	command.header.method_id = UVERBS_METHOD_INVOKE_WRITE;
	command.header.driver_id = RDMA_DRIVER_MLX5;
	command.header.num_attrs = 1;
	command.attrs[0].attr_id = UVERBS_ATTR_WRITE_CMD;
	command.attrs[0].flags = UVERBS_ATTR_F_MANDATORY;
	command.attrs[0].len = sizeof(uint64_t);
	command.attrs[0].data = IB_USER_VERBS_CMD_QUERY_DEVICE;
	return ioctl(fd, RDMA_VERBS_IOCTL, &command) ? errno : 0;
}

/* GET_CONTEXT as libmlx5 does it: the descriptor of asynchronous events. */
static int get_context(int fd)
{
	struct ib_uverbs_get_context_resp out = { 0 };
	struct ib_uverbs_get_context in = { .response = (uintptr_t)&out };
	struct mlx5_ib_alloc_ucontext_req_v2 driver_in = { .total_num_bfregs = 16, .num_low_latency_bfregs = 4, .max_cqe_version = 1,
		.lib_caps = MLX5_LIB_CAP_4K_UAR | MLX5_LIB_CAP_DYN_UAR };
	struct mlx5_ib_alloc_ucontext_resp driver_out = { 0 };
	struct { struct ib_uverbs_ioctl_hdr header; struct ib_uverbs_attr attrs[5]; } command = { 0 };
	command.header.length = sizeof command;
	command.header.object_id = UVERBS_OBJECT_DEVICE;
	command.header.method_id = UVERBS_METHOD_INVOKE_WRITE;
	command.header.driver_id = RDMA_DRIVER_MLX5;
	command.header.num_attrs = 5;
	command.attrs[0] = (struct ib_uverbs_attr){ .attr_id = UVERBS_ATTR_WRITE_CMD, .flags = UVERBS_ATTR_F_MANDATORY, .len = 8, .data = IB_USER_VERBS_CMD_GET_CONTEXT };
	command.attrs[1] = (struct ib_uverbs_attr){ .attr_id = UVERBS_ATTR_CORE_OUT, .flags = UVERBS_ATTR_F_MANDATORY, .len = sizeof out, .data = (uintptr_t)&out };
	command.attrs[2] = (struct ib_uverbs_attr){ .attr_id = UVERBS_ATTR_UHW_IN, .flags = UVERBS_ATTR_F_MANDATORY, .len = sizeof driver_in, .data = (uintptr_t)&driver_in };
	command.attrs[3] = (struct ib_uverbs_attr){ .attr_id = UVERBS_ATTR_UHW_OUT, .flags = UVERBS_ATTR_F_MANDATORY, .len = sizeof driver_out, .data = (uintptr_t)&driver_out };
	command.attrs[4] = (struct ib_uverbs_attr){ .attr_id = UVERBS_ATTR_CORE_IN, .flags = UVERBS_ATTR_F_MANDATORY, .len = sizeof in, .data = in.response };
	EXPECT(ioctl(fd, RDMA_VERBS_IOCTL, &command) == 0);
	return (int)out.async_fd;
}

static void is_node(const struct stat *found)
{
	EXPECT(S_ISCHR(found->st_mode));
	EXPECT(major(found->st_rdev) == 231 && minor(found->st_rdev) == 192);
}

/* Every way to name and to look at the device. */
static void ways(void)
{
	struct stat found;
	struct statx more;
	struct open_how how = { .flags = O_RDWR | O_CLOEXEC };
	EXPECT(stat(NODE, &found) == 0);
	is_node(&found);
	EXPECT(statx(AT_FDCWD, NODE, 0, STATX_BASIC_STATS, &more) == 0);
	EXPECT(S_ISCHR(more.stx_mode) && more.stx_rdev_major == 231);
	int dev = open("/dev", O_RDONLY | O_DIRECTORY);
	EXPECT(dev >= 0 && chdir("/") == 0);
	int fds[] = {
		open_node(), open("//dev/./infiniband/../infiniband//uverbs0", O_RDWR), openat(dev, "infiniband/uverbs0", O_RDWR | O_CLOEXEC),
		open("dev/infiniband/uverbs0", O_RDWR), (int)syscall(SYS_openat2, AT_FDCWD, NODE, &how, sizeof how),
#ifdef SYS_open
		(int)syscall(SYS_open, NODE, O_RDWR),
#endif
	};
	for (unsigned i = 0; i < sizeof fds / sizeof *fds; i++) {
		EXPECT(fds[i] >= 0);
		EXPECT(fstat(fds[i], &found) == 0);
		is_node(&found);
		EXPECT(statx(fds[i], "", AT_EMPTY_PATH, STATX_BASIC_STATS, &more) == 0 && S_ISCHR(more.stx_mode));
		EXPECT(ask(fds[i]) == ENOSPC);
		int copy = dup(fds[i]);
		close(fds[i]);
		EXPECT(ask(copy) == ENOSPC);
		close(copy);
		EXPECT(ask(copy) == EBADF);
	}
	EXPECT(fcntl(fds[0] = open_node(), F_GETFD) == FD_CLOEXEC);
	EXPECT(fcntl(fds[1] = open(NODE, O_RDWR), F_GETFD) == 0);
	/* What is none of the device's business is as it was. */
	EXPECT(ask(dev) == ENOTTY);
	EXPECT(ask(-1) == EBADF);
	EXPECT(ioctl(fds[0], 0x5401, &found) == -1 && errno == ENOTTY);
	EXPECT(ioctl(fds[0], RDMA_VERBS_IOCTL, (void *)16) == -1 && errno == EFAULT);
	EXPECT(open("/dev/infiniband/uverbs0/x", O_RDONLY) == -1);
	EXPECT(open(NODE, O_RDONLY | O_DIRECTORY) == -1 && errno == ENOTDIR);
	EXPECT(open((const char *)16, O_RDONLY) == -1 && errno == EFAULT);
	EXPECT(stat("/nowhere", &found) == -1 && errno == ENOENT);
	EXPECT(socket(AF_NETLINK, SOCK_RAW, 20) == -1 && errno == EPROTONOSUPPORT);
	int file = open("/proc/self/exe", O_RDONLY);
	EXPECT(fstat(file, &found) == 0 && S_ISREG(found.st_mode) && found.st_size > 1000);
	/* Programs that read sysfs without libibverbs. */
	char type[16] = "";
	int attribute = open("/sys/class/infiniband/mlx5_0/node_type", O_RDONLY);
	EXPECT(attribute >= 0 && read(attribute, type, sizeof type - 1) > 0 && !strncmp(type, "1: CA", 5));
	EXPECT(stat("/sys/class/infiniband/mlx5_0", &found) == 0 && S_ISDIR(found.st_mode));
	EXPECT(open("/sys/class/infiniband/mlx5_0/nothing", O_RDONLY) == -1 && errno == ENOENT);
}

static void *asks(void *fd)
{
	for (int i = 0; i < 200; i++) EXPECT(ask(*(int *)fd) == ENOSPC);
	return NULL;
}

/* Threads use one context at once; a forked child has its own. */
static void family(void)
{
	int fd = open_node(), status;
	pthread_t threads[8];
	for (int i = 0; i < 8; i++) EXPECT(pthread_create(&threads[i], NULL, asks, &fd) == 0);
	for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
	for (int i = 0; i < 8; i++) if (fork() == 0) {
		/* The supervisor serves it; in the process itself nothing of it is left. */
		int inherited = ask(fd);
		EXPECT(inherited == ENOSPC || inherited == EIO);
		int own = open_node();
		EXPECT(ask(own) == ENOSPC);
		/* A grandchild that outlives its parent. */
		if (fork() == 0) {
			usleep(20000);
			own = open_node();
			EXPECT(ask(own) == ENOSPC);
		}
		exit(0);
	}
	for (int i = 0; i < 8; i++) EXPECT(wait(&status) > 0 && status == 0);
	EXPECT(ask(fd) == ENOSPC);
}

static void cycles(int count)
{
	for (int i = 0; i < count; i++) {
		int fd = open_node(), async = get_context(fd);
		EXPECT(async >= 0);
		void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		close(async);
		close(fd);
		if (page != MAP_FAILED) munmap(page, 4096);
	}
}

/* More contexts at once than a process may usually have descriptors for the device's part of. */
static void many(void)
{
	int fds[600];
	for (int i = 0; i < 600; i++) { fds[i] = open_node(); EXPECT(get_context(fds[i]) >= 0); close(fds[i] + 1); }
	for (int i = 0; i < 600; i++) { EXPECT(ask(fds[i]) == ENOSPC); close(fds[i]); }
}

static void nothing(int signal) { (void)signal; }

#define UNINTERRUPTED(call) ({ long result; do result = (call); while (result == -1 && errno == EINTR); result; })

/* Signals that come all the time. Calls are begun again behind a handler that asks for that, and else interrupted before anything of
 * them was done: no descriptor is lost. */
static void storm(void)
{
	struct itimerval often = { { 0, 200 }, { 0, 200 } }, never = { { 0, 0 }, { 0, 0 } };
	for (int round = 0; round < 2; round++) {
		struct sigaction action = { .sa_handler = nothing, .sa_flags = round ? 0 : SA_RESTART };
		int first = dup(0), refused;
		close(first);
		sigaction(SIGALRM, &action, NULL);
		setitimer(ITIMER_REAL, &often, NULL);
		for (int i = 0; i < 300; i++) {
			struct stat found;
			int fd = round ? (int)UNINTERRUPTED(open(NODE, O_RDWR)) : open_node();
			EXPECT(fd >= 0);
			EXPECT((round ? UNINTERRUPTED(stat(NODE, &found)) : stat(NODE, &found)) == 0);
			EXPECT((round ? UNINTERRUPTED(access(NODE, R_OK)) : access(NODE, R_OK)) == 0);
			do refused = ask(fd); while (round && refused == EINTR);
			EXPECT(refused == ENOSPC);
			if (!round) close(get_context(fd));
			close(fd);
		}
		setitimer(ITIMER_REAL, &never, NULL);
		int last = dup(0);
		EXPECT(last == first);
		close(last);
	}
}

static void *goes_on(void *unused)
{
	(void)unused;
	usleep(20000);
	int fd = open_node();
	struct stat found;
	EXPECT(ask(fd) == ENOSPC);
	EXPECT(get_context(fd) >= 0);
	EXPECT(fstat(fd, &found) == 0);
	is_node(&found);
	exit(0);
}

/* The process goes on without its first thread. */
static void headless(void)
{
	pthread_t thread;
	EXPECT(pthread_create(&thread, NULL, goes_on, NULL) == 0);
	pthread_exit(NULL);
}

/* What a program does that is cautious: needs the right to do so. */
static void confined(void)
{
	char folder[] = "/tmp/confined-XXXXXX";
	EXPECT(mkdtemp(folder));
	if (chroot(folder)) { rmdir(folder); puts("no right to"); return; }
	EXPECT(chdir("/") == 0);
	close(open_node());
	int fd = open("dev/infiniband/uverbs0", O_RDWR);
	EXPECT(fd >= 0 && ask(fd) == ENOSPC);
	int attribute = open("/sys/class/infiniband/mlx5_0/node_type", O_RDONLY);
	EXPECT(attribute >= 0);
	EXPECT(setgid(65534) == 0 && setuid(65534) == 0);
	EXPECT(ask(fd) == ENOSPC);
	fd = open_node();
	EXPECT(get_context(fd) >= 0);
}

/* A descriptor over exec, and opens of a child that borrows its parent's memory. */
static void spawned(char *own)
{
	char number[16];
	int status, fd = open(NODE, O_RDWR);
	EXPECT(fd >= 0 && ask(fd) == ENOSPC);
	snprintf(number, sizeof number, "%d", fd);
	for (int i = 0; i < 20; i++) {
		pid_t child = vfork();
		if (child == 0) {
			if (open(NODE, O_RDWR) < 0) _exit(1);
			execl(own, own, "inherited", number, NULL);
			_exit(2);
		}
		EXPECT(child > 0 && waitpid(child, &status, 0) == child && status == 0);
	}
	EXPECT(ask(fd) == ENOSPC);
}

/* A program that can write where the supervisor reads can store any value there. */
static void trapped(void)
{
	char path[256];
	snprintf(path, sizeof path, "%s/class/infiniband/mlx5_0/pipe", getenv("SYSFS_PATH"));
	EXPECT(mkfifo(path, 0600) == 0);
	for (int i = 0; i < 8; i++) {
		int fd = open("/sys/class/infiniband/mlx5_0/pipe", O_RDONLY);
		if (fd >= 0) close(fd);
	}
	EXPECT(unlink(path) == 0);
	snprintf(path, sizeof path, "%s/class/infiniband/mlx5_0/link", getenv("SYSFS_PATH"));
	EXPECT(symlink("/etc/passwd", path) == 0);
	EXPECT(open("/sys/class/infiniband/mlx5_0/link", O_RDONLY) == -1 && errno == ELOOP);
	EXPECT(unlink(path) == 0);
	EXPECT(ask(open_node()) == ENOSPC);
}

static void *opens_and_closes(void *unused)
{
	(void)unused;
	for (;;) {
		int fd = open(NODE, O_RDWR | O_CLOEXEC);
		if (fd < 0) continue;
		ask(fd);
		void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		close(fd);
		ask(fd);
		if (page != MAP_FAILED) munmap(page, 4096);
	}
	return NULL;
}

/* Processes that die at any point of any call; and what one thread closes another one uses. */
static void deaths(int count)
{
	for (int i = 0; i < count; i++) {
		int status;
		pid_t child = fork();
		EXPECT(child >= 0);
		if (child == 0) {
			pthread_t thread;
			for (int t = 0; t < 3; t++) pthread_create(&thread, NULL, opens_and_closes, NULL);
			opens_and_closes(NULL);
		}
		usleep(500 + 137 * i % 5000);
		kill(child, SIGKILL);
		EXPECT(waitpid(child, &status, 0) == child);
	}
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	setvbuf(stdout, NULL, _IONBF, 0);
	if (!strcmp(what, "ways")) ways();
	else if (!strcmp(what, "family")) family();
	else if (!strcmp(what, "many")) many();
	else if (!strcmp(what, "storm")) storm();
	else if (!strcmp(what, "headless")) headless();
	else if (!strcmp(what, "confined")) confined();
	else if (!strcmp(what, "spawned")) spawned(argv[0]);
	else if (!strcmp(what, "inherited")) EXPECT(ask(atoi(argv[2])) == ENOSPC);
	else if (!strcmp(what, "trapped")) trapped();
	else if (!strcmp(what, "deaths")) {
		char line[32];
		while (fgets(line, sizeof line, stdin)) { deaths(atoi(line)); puts("done"); }
	} else if (!strcmp(what, "cycles")) {
		/* A number of cycles for each line that is read, and a line when they are done. */
		char line[32];
		while (fgets(line, sizeof line, stdin)) { cycles(atoi(line)); puts("done"); }
	} else if (!strcmp(what, "hold")) {
		int fd = open_node();
		EXPECT(get_context(fd) >= 0);
		/* One write: others say the same to the same pipe, and unbuffered puts makes two. */
		EXPECT(write(1, "held\n", 5) == 5);
		pause();
	} else return 2;
	return 0;
}
