/*
 * `leaving return|handler|thread`: ends while threads poll, by a return from main, by `exit` in a signal's handler that has
 * interrupted a poll, or by `exit` in another thread. What the program does at its end still has the device, but for the handler's.
 */
#include "pair.h"
#include <pthread.h>
#include <signal.h>

static struct device device;

static void *polls(void *cq)
{
	struct ibv_wc completion;
	for (;;)
		CHECK(ibv_poll_cq(cq, 1, &completion) == 0);
	return NULL;
}

static void *leaves(void *unused)
{
	(void)unused;
	exit(0);
}

static void on_alarm(int signal)
{
	(void)signal;
	exit(0);
}

static void last_words(void)
{
	int count = 0;
	struct ibv_device **list = ibv_get_device_list(&count);
	struct ibv_port_attr port;
	CHECK(list && count == 1);
	CALL(ibv_query_port(device.context, 1, &port));
	ibv_free_device_list(list);
}

int main(int argc, char **argv)
{
	const char *how = argc > 1 ? argv[1] : "return";
	pthread_t thread;
	sigset_t alarms;
	/* Not in a handler: what it has interrupted may be the device's work, as `exit` there may interrupt an allocation. */
	if (strcmp(how, "handler"))
		atexit(last_words);
	device = open_device();
	sigemptyset(&alarms);
	sigaddset(&alarms, SIGALRM);
	pthread_sigmask(SIG_BLOCK, &alarms, NULL);
	for (int i = 0; i < 2; i++)
		CHECK(pthread_create(&thread, NULL, polls, new_cq(&device, 16)) == 0);
	usleep(5000);
	if (!strcmp(how, "thread")) {
		CHECK(pthread_create(&thread, NULL, leaves, NULL) == 0);
		polls(new_cq(&device, 16));
	} else if (!strcmp(how, "handler")) {
		/* Before the alarm: `exit` in a handler that has interrupted a command, which takes locks and allocates, may hang. */
		struct ibv_cq *cq = new_cq(&device, 16);
		signal(SIGALRM, on_alarm);
		pthread_sigmask(SIG_UNBLOCK, &alarms, NULL);
		ualarm(5000, 0);
		polls(cq);
	}
	return 0;
}
