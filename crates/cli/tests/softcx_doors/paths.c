/* Every call of the C library by which programs look for RDMA devices, on every kind of path, one line each: what it answers. The
 * lines are the same behind both doors. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

static const char *path;

static void say(const char *call, int failed, const char *detail)
{
	printf("%s %s: %s%s\n", call, path, failed ? strerrorname_np(errno) : "ok", failed ? "" : detail);
}

static void descriptor(const char *call, int fd)
{
	char detail[64] = "";
	struct stat found;
	if (fd >= 0 && fstat(fd, &found) == 0)
		snprintf(detail, sizeof detail, " type %o flags %d", found.st_mode & S_IFMT, fcntl(fd, F_GETFD));
	say(call, fd < 0, detail);
	if (fd >= 0) close(fd);
}

static void attributes(const char *call, int done, const struct stat *found)
{
	char detail[64];
	snprintf(detail, sizeof detail, " mode %o links %ju rdev %d:%d", found->st_mode, (uintmax_t)found->st_nlink, major(found->st_rdev),
		minor(found->st_rdev));
	say(call, done, detail);
}

static int by_name(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

static void listing(const char *call, DIR *dir)
{
	char *names[64], detail[1024] = "";
	int count = 0;
	if (!dir) { say(call, 1, ""); return; }
	for (struct dirent *entry; count < 64 && (entry = readdir(dir));) names[count++] = strdup(entry->d_name);
	qsort(names, count, sizeof *names, by_name);
	for (int i = 0; i < count; i++) {
		strncat(detail, " ", sizeof detail - strlen(detail) - 1);
		strncat(detail, names[i], sizeof detail - strlen(detail) - 1);
		free(names[i]);
	}
	closedir(dir);
	say(call, 0, detail);
}

static void stream(const char *mode)
{
	char call[32], detail[128] = " ";
	snprintf(call, sizeof call, "fopen(%s)", mode);
	FILE *file = fopen(path, mode);
	if (file && *mode == 'r' && !fgets(detail + 1, sizeof detail - 1, file)) strcpy(detail, " nothing");
	detail[strcspn(detail, "\n")] = 0;
	/* What the node says to a read is no business of the paths. */
	say(call, !file, strstr(path, "uverbs0") ? "" : detail);
	if (file) fclose(file);
}

static void link_of(const char *call, ssize_t len, char *target)
{
	if (len >= 0) target[len] = 0;
	say(call, len < 0, target);
}

static void ask(const char *asked)
{
	static const struct { const char *name; int flags; } opens[] = {
		{ "open(RDONLY)", O_RDONLY }, { "open(RDWR|CLOEXEC)", O_RDWR | O_CLOEXEC }, { "open(WRONLY)", O_WRONLY },
		{ "open(WRONLY|CREAT|TRUNC)", O_WRONLY | O_CREAT | O_TRUNC }, { "open(RDWR|CREAT|EXCL)", O_RDWR | O_CREAT | O_EXCL },
		{ "open(RDONLY|TRUNC)", O_RDONLY | O_TRUNC }, { "open(DIRECTORY)", O_RDONLY | O_DIRECTORY | O_CLOEXEC },
		{ "open(NOFOLLOW|NONBLOCK)", O_RDONLY | O_NOFOLLOW | O_NONBLOCK }, { "open(PATH)", O_PATH },
		{ "open(PATH|DIRECTORY)", O_PATH | O_DIRECTORY },
	};
	static const struct { const char *name; int mode; } modes[] = { { "F", F_OK }, { "R", R_OK }, { "W", W_OK }, { "X", X_OK },
		{ "RW", R_OK | W_OK }, { "8", 8 } };
	char call[64], target[PATH_MAX], *name;
	struct stat found;
	struct statx more;
	struct dirent **entries;
	path = asked;
	for (unsigned i = 0; i < sizeof opens / sizeof *opens; i++) {
		descriptor(opens[i].name, open(path, opens[i].flags, 0600));
		snprintf(call, sizeof call, "openat:%s", opens[i].name);
		descriptor(call, openat(AT_FDCWD, path, opens[i].flags, 0600));
	}
	stream("r"); stream("re"); stream("r+"); stream("w"); stream("wx"); stream("a");
	listing("opendir", opendir(path));
	int count = scandir(path, &entries, NULL, alphasort);
	snprintf(target, sizeof target, " %d", count);
	say("scandir", count < 0, target);
	for (int i = 0; i < count; i++) free(entries[i]);
	if (count >= 0) free(entries);
	for (unsigned i = 0; i < sizeof modes / sizeof *modes; i++) {
		const char *letters = modes[i].name;
		int mode = modes[i].mode;
		snprintf(call, sizeof call, "access(%s)", letters);
		say(call, access(path, mode), "");
		snprintf(call, sizeof call, "faccessat(%s)", letters);
		say(call, faccessat(AT_FDCWD, path, mode, 0), "");
		snprintf(call, sizeof call, "faccessat(%s, EACCESS)", letters);
		say(call, faccessat(AT_FDCWD, path, mode, AT_EACCESS), "");
		snprintf(call, sizeof call, "eaccess(%s)", letters);
		if (mode < 8) say(call, eaccess(path, mode), "");
		snprintf(call, sizeof call, "euidaccess(%s)", letters);
		if (mode < 8) say(call, euidaccess(path, mode), "");
	}
	link_of("readlink", readlink(path, target, sizeof target - 1), target);
	link_of("readlinkat", readlinkat(AT_FDCWD, path, target, sizeof target - 1), target);
	name = realpath(path, NULL);
	say("realpath(NULL)", !name, name ? name : "");
	free(name);
	name = realpath(path, target);
	say("realpath", !name, target);
	name = canonicalize_file_name(path);
	say("canonicalize_file_name", !name, name ? name : "");
	free(name);
	say("getxattr", getxattr(path, "user.x", target, sizeof target) < 0, "");
	say("lgetxattr", lgetxattr(path, "security.selinux", target, sizeof target) < 0, "");
	say("listxattr", listxattr(path, target, sizeof target) < 0, "");
	say("llistxattr", llistxattr(path, target, sizeof target) < 0, "");
	attributes("stat", stat(path, &found), &found);
	attributes("lstat", lstat(path, &found), &found);
	attributes("fstatat", fstatat(AT_FDCWD, path, &found, AT_NO_AUTOMOUNT), &found);
	int done = statx(AT_FDCWD, path, 0, STATX_BASIC_STATS, &more);
	snprintf(target, sizeof target, " mode %o rdev %u:%u", more.stx_mode, more.stx_rdev_major, more.stx_rdev_minor);
	say("statx", done, target);
}

/* By a directory's descriptor, as programs go through a tree. */
static void from(const char *base, const char *rest)
{
	struct stat found;
	char target[PATH_MAX];
	int directory = open(base, O_RDONLY | O_DIRECTORY);
	path = rest;
	if (directory < 0) { say(base, 1, ""); return; }
	attributes("fstatat from", fstatat(directory, rest, &found, AT_SYMLINK_NOFOLLOW), &found);
	say("faccessat from", faccessat(directory, rest, R_OK, 0), "");
	link_of("readlinkat from", readlinkat(directory, rest, target, sizeof target - 1), target);
	descriptor("openat from", openat(directory, rest, O_RDONLY));
	close(directory);
}

int main(void)
{
	static const char *const paths[] = {
		"/dev/infiniband/uverbs0", "/dev/./infiniband/../infiniband//uverbs0", "dev/infiniband/uverbs0", "/dev/infiniband",
		"/dev/infiniband/", "/dev/infiniband/umad0", "/dev/infiniband/uverbs0/x", "/sys/class/infiniband", "sys/class/infiniband",
		"/sys/class/infiniband/mlx5_0", "/sys/class/infiniband/mlx5_0/node_type", "/sys/class/infiniband/mlx5_0/device",
		"/sys/class/infiniband/mlx5_0/device/../node_guid", "/sys/class/infiniband/mlx5_0/ports/1/gids/0",
		"/sys/class/infiniband/mlx5_1", "/sys/class/infiniband_verbs", "/sys/class/infiniband_verbs/uverbs0/ibdev",
		"/sys/class/misc/rdma_cm", "/sys/class/misc/rdma_cm/abi_version",
		"/sys/class/infiniband_mad", "/sys/class/infiniband/mlx5_0/node_type/x", "/nowhere/infiniband",
		"/sys/class/infiniband/mlx5_0/device/../../pci5c0f:00/5c0f:00:00.0/irq", "/sys/bus/pci/devices",
		"/sys/bus/pci/devices/5c0f:00:00.0", "/sys/bus/pci/devices/5c0f:00:00.0/vendor", "/proc/version", "",
	};
	if (chdir("/")) return 1;
	for (unsigned i = 0; i < sizeof paths / sizeof *paths; i++) ask(paths[i]);
	from("/dev", "infiniband/uverbs0");
	from("/dev/infiniband", "uverbs0");
	from("/sys/class/infiniband", "mlx5_0");
	from("/sys/class", "infiniband/mlx5_0/node_type");
	from("/sys/class/infiniband/mlx5_0/ports", "1/state");
	from("/proc/self", "infiniband");
	return 0;
}
