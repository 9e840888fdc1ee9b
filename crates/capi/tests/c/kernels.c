/* Trigger streams in C: WITH_CUDA says whether the library was built with the feature, WITH_KERNEL whether there is a kernel to execute
 * triggers: the stand-in for the driver has one of that name. */
#include "driver.h"
#include "expect.h"

struct CUmod_st;
struct CUfunc_st;

struct kernel {
	struct CUmod_st *module;
	struct CUfunc_st *function;
	int (*launch)(struct CUfunc_st *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
		      unsigned block_z, unsigned shared_bytes, struct CUstream_st *stream, void **parameters, void **extra);
	int (*synchronize)(struct CUstream_st *stream);
	struct CUstream_st *stream;
	uint64_t code;
};

static void everywhere(struct rig *rig)
{
	doorbell_stream *stream = rig->stream;
	doorbell_trigger trigger;

	FAILS(DOORBELL_EINVAL, "UTF-8", doorbell_stream_create_trigger("\xff", &stream));
	EXPECT(stream == NULL);
	FAILS(DOORBELL_EINVAL, "`stream`", doorbell_stream_create_trigger(NULL, NULL));
	FAILS(DOORBELL_ESTATE, "not a trigger stream", doorbell_stream_take_trigger(rig->stream, &trigger));
	FAILS(DOORBELL_EINVAL, "`trigger`", doorbell_stream_take_trigger(rig->stream, NULL));
	FAILS(DOORBELL_EINVAL, "`stream`", doorbell_stream_take_trigger(NULL, &trigger));
	FAILS(DOORBELL_ESTATE, "not a trigger stream", doorbell_stream_discard_triggers(rig->stream));
}

/* Has a kernel execute it: doorbell_step(trigger, work_ns, timeout_ns, code). */
static int execute(const struct driver *driver, const struct kernel *kernel, const doorbell_trigger *trigger)
{
	doorbell_trigger copy = *trigger;
	uint64_t work_ns = 1000, timeout_ns = 20000000000u, code = kernel->code;
	void *parameters[4];
	int found = 77;

	parameters[0] = &copy;
	parameters[1] = &work_ns;
	parameters[2] = &timeout_ns;
	parameters[3] = &code;
	DRIVER(kernel->launch(kernel->function, 1, 1, 1, 1, 1, 1, 0, kernel->stream, parameters, NULL));
	DRIVER(kernel->synchronize(kernel->stream));
	DRIVER(driver->to_host(&found, kernel->code, sizeof found));
	return found;
}

static void transfers(const struct driver *driver, const struct kernel *kernel, struct rig *rig, doorbell_stream *stream, int value)
{
	unsigned char *memory = doorbell_region_pointer(rig->region);
	const doorbell_slice from = {rig->region, 0, 64};
	doorbell_ticket *sent, *waited;
	doorbell_trigger trigger;
	doorbell_remote remote;

	memset(memory, value, 64);
	memset(memory + 4096, 0, 64);
	WORKS(doorbell_region_remote(rig->region, &remote));
	WORKS(doorbell_stream_queue_write(stream, rig->a, &from, 1, remote.addr + 4096, remote.rkey, &sent));
	WORKS(doorbell_stream_wait_cq(stream, rig->a, DOORBELL_QUEUE_SEND, SOON_MS, &waited));
	WORKS(doorbell_stream_write_value32(stream, rig->region, 8192, (uint32_t)value, NULL));
	FAILS(DOORBELL_ESTATE, "taken", doorbell_stream_synchronize(stream, SOON_MS));
	GIVES(0, doorbell_stream_query(stream));
	GIVES(1, doorbell_stream_take_trigger(stream, &trigger));
	EXPECT(trigger.word_count > 0 && trigger.word_count <= DOORBELL_TRIGGER_WORDS && trigger.control && trigger.turn);
	EXPECT(memory[4096] == 0);
	EXPECT(execute(driver, kernel, &trigger) == DOORBELL_OK);
	EXPECT(memory[4096] == value && memory[4096 + 63] == value);
	/* What is left, if it was more than one takes. */
	while (doorbell_stream_take_trigger(stream, &trigger) == 1)
		EXPECT(execute(driver, kernel, &trigger) == DOORBELL_OK);
	EXPECT(trigger.word_count == 0);
	EXPECT(execute(driver, kernel, &trigger) == DOORBELL_OK);
	EXPECT(memory[8192] == value);
	WORKS(doorbell_stream_synchronize(stream, SOON_MS));
	GIVES(1, doorbell_stream_query(stream));
	GIVES(DOORBELL_STATUS_COMPLETE, doorbell_ticket_status(sent, NULL));
	GIVES(DOORBELL_STATUS_COMPLETE, doorbell_ticket_status(waited, NULL));
	WORKS(doorbell_ticket_destroy(sent));
	WORKS(doorbell_ticket_destroy(waited));
}

static void note(void *argument)
{
	(void)argument;
}

/* Ends of a trigger stream, and the codes that kernels get. */
static void ends(const struct driver *driver, const struct kernel *kernel, struct rig *rig)
{
	doorbell_trigger trigger;
	doorbell_stream *stream;
	doorbell_ticket *waited;
	doorbell_failure failure;
	uint64_t word = 0;
	int status = 1;

	/* A wait that misses its deadline is one code of the kernel, and the stream goes on. */
	WORKS(doorbell_stream_create_trigger("of the test", &stream));
	WORKS(doorbell_stream_status_word(stream, &word));
	EXPECT(word != 0);
	FAILS(DOORBELL_ESTATE, "trigger stream", doorbell_stream_launch(stream, note, NULL));
	WORKS(doorbell_post_recv(rig->b, 7, &(doorbell_slice){rig->region, 0, 8}, 1, NULL));
	WORKS(doorbell_stream_wait_cq(stream, rig->b, DOORBELL_QUEUE_RECV, 50, &waited));
	GIVES(1, doorbell_stream_take_trigger(stream, &trigger));
	EXPECT(execute(driver, kernel, &trigger) == DOORBELL_EWORK);
	EXPECT(execute(driver, kernel, &trigger) == DOORBELL_ESTATE);
	GIVES(DOORBELL_EASYNC, doorbell_stream_synchronize(stream, SOON_MS));
	EXPECT(doorbell_stream_take_fault(stream, &failure, NULL, 0) > 0);
	EXPECT(failure.cause == DOORBELL_CAUSE_DEADLINE);
	GIVES(DOORBELL_STATUS_FAILED, doorbell_ticket_status(waited, &failure));
	EXPECT(failure.cause == DOORBELL_CAUSE_DEADLINE);
	WORKS(doorbell_ticket_destroy(waited));
	WORKS(doorbell_stream_status(stream, &status));
	EXPECT(status == DOORBELL_EWORK);
	WORKS(doorbell_stream_clear_status(stream));
	WORKS(doorbell_endpoint_reset(rig->a));
	WORKS(doorbell_endpoint_reset(rig->b));
	rig_connect(rig);
	transfers(driver, kernel, rig, stream, 5);
	WORKS(doorbell_stream_abort(stream));
	FAILS(DOORBELL_EASYNC, "aborted", doorbell_stream_take_trigger(stream, &trigger));
	WORKS(doorbell_stream_destroy(stream));

	/* What is given up. */
	WORKS(doorbell_stream_create_trigger(NULL, &stream));
	WORKS(doorbell_stream_write_value32(stream, rig->region, 8192, 9, &waited));
	GIVES(1, doorbell_stream_take_trigger(stream, &trigger));
	WORKS(doorbell_stream_discard_triggers(stream));
	GIVES(DOORBELL_STATUS_DISCARDED, doorbell_ticket_status(waited, NULL));
	EXPECT(execute(driver, kernel, &trigger) == DOORBELL_ESTATE);
	FAILS(DOORBELL_EASYNC, "given up", doorbell_stream_synchronize(stream, SOON_MS));
	WORKS(doorbell_ticket_destroy(waited));
	WORKS(doorbell_stream_destroy(stream));
}

static int with_the_feature(struct rig *rig)
{
	int (*load)(struct CUmod_st **module, const void *image);
	int (*function)(struct CUfunc_st **function, struct CUmod_st *module, const char *name);
	struct driver driver;
	struct kernel kernel;
	struct CUctx_st *context;
	doorbell_stream *stream;
	uint32_t control;
	int device, value;

	if (!driver_load(&driver))
		return 0;
	FAILS(DOORBELL_ESTATE, "context", doorbell_stream_create_trigger(NULL, &stream));
	DRIVER(driver.device_get(&device, 0));
	DRIVER(driver.ctx_retain(&context, device));
	DRIVER(driver.ctx_set(context));
	WORKS(doorbell_stream_create_trigger(NULL, &stream));
	WORKS(doorbell_stream_destroy(stream));
	EXPECT(doorbell_endpoint_path(rig->a, &control, NULL, 0) > 0);
	if (!WITH_KERNEL || control == DOORBELL_CONTROL_SYNC) {
		puts("no kernel: the driver's has no function that executes a trigger, or no kernel rings on this path");
		return 0;
	}
	driver_find(&driver, "cuModuleLoadData", &load);
	driver_find(&driver, "cuModuleGetFunction", &function);
	driver_find(&driver, "cuLaunchKernel", &kernel.launch);
	driver_find(&driver, "cuStreamSynchronize", &kernel.synchronize);
	DRIVER(load(&kernel.module, ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry doorbell_step() { ret; }\n"));
	DRIVER(function(&kernel.function, kernel.module, "doorbell_step"));
	/* CU_STREAM_NON_BLOCKING */
	DRIVER(driver.stream_create(&kernel.stream, 1));
	DRIVER(driver.alloc(&kernel.code, 8));
	WORKS(doorbell_stream_create_trigger("of the test", &stream));
	for (value = 1; value < 100; value++)
		transfers(&driver, &kernel, rig, stream, value);
	WORKS(doorbell_stream_destroy(stream));
	ends(&driver, &kernel, rig);
	DRIVER(driver.stream_destroy(kernel.stream));
	DRIVER(driver.free(kernel.code));
	return 1;
}

int main(void)
{
	struct rig rig;
	doorbell_stream *stream;
	int ran = 1;

	rig_make(&rig);
	everywhere(&rig);
	if (WITH_CUDA)
		ran = with_the_feature(&rig);
	else
		FAILS(DOORBELL_EFEATURE, "feature `cuda`", doorbell_stream_create_trigger(NULL, &stream));
	rig_end(&rig);
	if (ran)
		puts("done");
	return 0;
}
