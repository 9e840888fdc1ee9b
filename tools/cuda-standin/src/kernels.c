/* Kernels in C, for those that a device runs compiled from the same source. Each is a function
 *
 *     int name(const void *const arguments[], uint64_t thread)
 *
 * with an entry in kernels.rs: a pointer to each argument, the thread's place in the grid, and a CUresult back. */
#include <stdint.h>
#include <string.h>

/* Memory at a device address; null if the device reaches none there, which is CUDA_ERROR_ILLEGAL_ADDRESS. */
void *doorbell_cuda_standin_reach(uint64_t address, uint64_t len_bytes);
/* Whether the kernel is to end: its context was destroyed, or other work of it failed. A loop that waits asks. */
int doorbell_cuda_standin_over(void);

/* The same for a loop that waits: the longer it has, the longer this takes. Streams that wait outnumber the cores. */
int doorbell_cuda_standin_pause(uint32_t turn);

/* The library's own interpreter, as a GPU runs it. */
#define DBL_MAP_ADDRESS(address, len_bytes) doorbell_cuda_standin_reach(address, len_bytes)
#define DBL_PAUSE(turn) doorbell_cuda_standin_pause(turn)
#include <doorbell/trigger.h>
#define DBL_TURN() ((void)doorbell_cuda_standin_over())
#include <doorbell/detail/replay.h>
#include <reduce.h>
#include <step.h>
#include "../../../tools/gpu-check/src/measured.h"

enum { SUCCESS = 0, ILLEGAL_ADDRESS = 700 };

/* doorbell_execute_short(batch), doorbell_execute_long(batch): a batch is the address of a control block, a number of words, the words. */
int doorbell_execute(const void *const arguments[], uint64_t thread)
{
    const uint64_t *batch = arguments[0];
    struct dbl_control *control = doorbell_cuda_standin_reach(batch[0], sizeof *control);

    (void)thread;
    if (!control || dbl_execute(batch + 2, (uint32_t)batch[1], control) == DBL_END_UNREACHABLE)
        return ILLEGAL_ADDRESS;
    return SUCCESS;
}

static void work(uint64_t ns)
{
    const uint64_t start_ns = dbl_now_ns();
    uint32_t turn;

    for (turn = 0; dbl_now_ns() - start_ns < ns && !doorbell_cuda_standin_over(); turn++)
        /* A GPU would not take a core of the CPU. */
        if (ns - (dbl_now_ns() - start_ns) > 200000)
            doorbell_cuda_standin_pause(turn);
}

static int reach(uint64_t *address, uint64_t len_bytes)
{
    if (*address)
        *address = (uint64_t)(uintptr_t)doorbell_cuda_standin_reach(*address, len_bytes);
    return *address != 0;
}

/* The headers take the addresses of a queue as they are: here they are made ones of the CPU. */
static int reach_queue(struct doorbell_queue_view *queue)
{
    /* By their first bytes: what lies on several pages may be several registrations, side by side. */
    int reached = reach(&queue->state, sizeof(struct dbl_queue_state)) && reach(&queue->control, sizeof(struct dbl_queue_control)) &&
                  reach(&queue->marks, 4) && reach(&queue->ring, 64);

    if (queue->record)
        reached = reached && reach(&queue->record, 4) && reach(&queue->uar[0], 8) && reach(&queue->uar[1], 8) &&
                  reach(&queue->completions, 64) && reach(&queue->cq_record, 4);
    else
        reached = reached && reach(&queue->doorbells, 8);
    return reached;
}

/* doorbell_put_step(queue, step) */
int doorbell_put_step(const void *const arguments[], uint64_t thread)
{
    struct doorbell_queue_view queue;
    struct dbl_step step;
    int found;

    (void)thread;
    memcpy(&queue, arguments[0], sizeof queue);
    memcpy(&step, arguments[1], sizeof step);
    if (!reach_queue(&queue) || !reach(&step.code, 4))
        return ILLEGAL_ADDRESS;
    work(step.work_ns);
    found = dbl_step_put(&queue, &step);
    if (found != DOORBELL_OK)
        dbl_store_dword((void *)(uintptr_t)step.code, (uint32_t)found);
    return SUCCESS;
}

/* doorbell_replay(replay) */
int doorbell_replay(const void *const arguments[], uint64_t thread)
{
    struct dbl_replay replay;
    int reached;

    (void)thread;
    memcpy(&replay, arguments[0], sizeof replay);
    reached = reach(&replay.fault, 4) && reach(&replay.cell, sizeof(struct dbl_replay_cell)) &&
              reach(&replay.report, sizeof(struct dbl_replay_report)) && (!replay.awaited || reach(&replay.awaited, sizeof(struct dbl_replay_cell)));
    if (replay.queue.state)
        reached = reached && reach_queue(&replay.queue) && reach(&replay.recv, sizeof(struct dbl_replay_recv)) && reach(&replay.recv_ring, 16) &&
                  reach(&replay.recv_record, 4) && reach(&replay.recv_completions, 64) && reach(&replay.recv_cq_record, 4);
    if (replay.kind == DBL_REPLAY_STORE || replay.kind == DBL_REPLAY_WAIT_WORD)
        reached = reached && reach(&replay.words[0], replay.is_wide ? 8 : 4);
    if (replay.kind == DBL_REPLAY_PAGES)
        reached = reached && reach(&replay.words[DBL_PAGES_TABLE], 8 * (uint64_t)replay.segments) && reach(&replay.words[DBL_PAGES_COUNT], 4);
    if (!reached)
        return ILLEGAL_ADDRESS;
    (void)dbl_replay_execute(&replay);
    return SUCCESS;
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t left_of_page(uint64_t address)
{
    return 4096 - address % 4096;
}

/* Between memory that the device reaches and bytes of this thread. Returns whether it is reached. */
static int transfer(uint64_t address, uint8_t *bytes, uint64_t len_bytes, int stores)
{
    uint64_t part;
    void *place;

    for (; len_bytes > 0; len_bytes -= part, address += part, bytes += part) {
        part = least(left_of_page(address), len_bytes);
        place = doorbell_cuda_standin_reach(address, part);
        if (!place)
            return 0;
        memcpy(stores ? place : bytes, stores ? bytes : place, part);
    }
    return 1;
}

/* At most DBL_REDUCE_BYTES, over the end of a page. */
static int reduce_over_pages(const struct dbl_reduce *reduce)
{
    uint8_t into[DBL_REDUCE_BYTES], first[DBL_REDUCE_BYTES], second[DBL_REDUCE_BYTES];
    struct dbl_reduce part = *reduce;

    if (!transfer(reduce->first, first, reduce->len_bytes, 0) || (reduce->second && !transfer(reduce->second, second, reduce->len_bytes, 0)))
        return 0;
    part.into = (uint64_t)(uintptr_t)into;
    part.first = (uint64_t)(uintptr_t)first;
    part.second = reduce->second ? (uint64_t)(uintptr_t)second : 0;
    dbl_reduce_share(&part, 0, 1);
    return transfer(reduce->into, into, reduce->len_bytes, 1);
}

/* doorbell_reduce(reduce), the work of all threads: page by page, each of which may have been registered by itself. */
int doorbell_reduce(const void *const arguments[], uint64_t thread)
{
    struct dbl_reduce reduce, part;
    uint64_t at, len_bytes;

    (void)thread;
    memcpy(&reduce, arguments[0], sizeof reduce);
    for (at = 0; at < reduce.len_bytes; at += len_bytes) {
        part = reduce;
        part.into += at;
        part.first += at;
        if (part.second)
            part.second += at;
        len_bytes = least(left_of_page(part.into), least(left_of_page(part.first), left_of_page(part.second)));
        len_bytes = least(len_bytes / DBL_REDUCE_BYTES * DBL_REDUCE_BYTES, reduce.len_bytes - at);
        if (len_bytes == 0) {
            part.len_bytes = len_bytes = least(DBL_REDUCE_BYTES, reduce.len_bytes - at);
            if (!reduce_over_pages(&part))
                return ILLEGAL_ADDRESS;
            continue;
        }
        part.len_bytes = len_bytes;
        if (!reach(&part.into, len_bytes) || !reach(&part.first, len_bytes) || (part.second && !reach(&part.second, len_bytes)))
            return ILLEGAL_ADDRESS;
        dbl_reduce_share(&part, 0, 1);
    }
    return SUCCESS;
}

/* Those of tools/gpu-check/src/measured.cu. */
int gpu_check_mark(const void *const arguments[], uint64_t thread)
{
    uint64_t word;

    (void)thread;
    memcpy(&word, arguments[0], sizeof word);
    if (!reach(&word, 4))
        return ILLEGAL_ADDRESS;
    *(uint32_t *)(uintptr_t)word = 7;
    return SUCCESS;
}

int gpu_check_ring(const void *const arguments[], uint64_t thread)
{
    struct measured_doorbells doorbells;
    int code;

    (void)thread;
    memcpy(&doorbells, arguments[0], sizeof doorbells);
    if (!reach(&doorbells.go, 4) || !reach(&doorbells.data, 4) || !reach(&doorbells.flag, 8) || !reach(&doorbells.code, 4))
        return ILLEGAL_ADDRESS;
    if (doorbells.triggers && !reach(&doorbells.triggers, sizeof(struct doorbell_trigger) * doorbells.rounds))
        return ILLEGAL_ADDRESS;
    code = measured_ring(&doorbells);
    dbl_store_dword((void *)(uintptr_t)doorbells.code, (uint32_t)code);
    return SUCCESS;
}

int gpu_check_put(const void *const arguments[], uint64_t thread)
{
    struct measured_puts puts;
    struct doorbell_queue_view queue;

    memcpy(&puts, arguments[0], sizeof puts);
    if (!reach(&puts.queues, sizeof queue * puts.queue_count) || !reach(&puts.codes, 4 * (thread + 1)))
        return ILLEGAL_ADDRESS;
    memcpy(&queue, (struct doorbell_queue_view *)(uintptr_t)puts.queues + thread % puts.queue_count, sizeof queue);
    if (!reach_queue(&queue))
        return ILLEGAL_ADDRESS;
    ((int *)(uintptr_t)puts.codes)[thread] = measured_put(&puts, &queue, (uint32_t)thread);
    return SUCCESS;
}

int gpu_check_look(const void *const arguments[], uint64_t thread)
{
    struct measured_looks looks;

    (void)thread;
    memcpy(&looks, arguments[0], sizeof looks);
    if (!reach(&looks.word, 4) || !reach(&looks.took_ns, 8))
        return ILLEGAL_ADDRESS;
    *(uint64_t *)(uintptr_t)looks.took_ns = measured_looked(&looks);
    return SUCCESS;
}

int gpu_check_time(const void *const arguments[], uint64_t thread)
{
    struct measured_times times;

    (void)thread;
    memcpy(&times, arguments[0], sizeof times);
    if (!reach(&times.host, 4) || !reach(&times.gpu, 4) || !reach(&times.ping, 4) || !reach(&times.pong, 4) || !reach(&times.code, 4) ||
        !reach(&times.took_ns, 8 * MEASURED_TIMES))
        return ILLEGAL_ADDRESS;
    dbl_store_dword((void *)(uintptr_t)times.code, (uint32_t)measured_time(&times));
    return SUCCESS;
}

int gpu_check_flood(const void *const arguments[], uint64_t thread)
{
    struct measured_flood flood;
    struct doorbell_queue_view queue;

    memcpy(&flood, arguments[0], sizeof flood);
    if (!reach(&flood.queues, sizeof queue * flood.queue_count) || !reach(&flood.codes, 4 * (thread + 1)))
        return ILLEGAL_ADDRESS;
    memcpy(&queue, (struct doorbell_queue_view *)(uintptr_t)flood.queues + thread / flood.threads % flood.queue_count, sizeof queue);
    if (!reach_queue(&queue))
        return ILLEGAL_ADDRESS;
    ((int *)(uintptr_t)flood.codes)[thread] = measured_flooded(&flood, &queue);
    return SUCCESS;
}

/* Its threads one after the other: those of a warp as if each were alone, and for a block the last one. */
int gpu_check_post(const void *const arguments[], uint64_t thread)
{
    struct measured_posts posts;
    struct doorbell_queue_view queue;
    uint64_t threads, first, at, upto_thread = thread + 1;
    uint32_t round, upto;
    int code = DOORBELL_OK;

    memcpy(&posts, arguments[0], sizeof posts);
    threads = (uint64_t)posts.blocks * posts.threads;
    if (!reach(&posts.queues, sizeof queue * posts.queue_count) || !reach(&posts.codes, 4 * threads) || !reach(&posts.data, 8 * threads + 8) ||
        !reach(&posts.arrived, 8 * (threads + 1 + posts.blocks)))
        return ILLEGAL_ADDRESS;
    memcpy(&queue, (struct doorbell_queue_view *)(uintptr_t)posts.queues + thread / posts.threads % posts.queue_count, sizeof queue);
    if (!reach_queue(&queue))
        return ILLEGAL_ADDRESS;
    if (posts.how != MEASURED_BLOCKS) {
        ((int *)(uintptr_t)posts.codes)[thread] = measured_post_lane(&posts, &queue, (uint32_t)thread);
        return SUCCESS;
    }
    if (upto_thread % posts.threads != 0)
        return SUCCESS;
    first = upto_thread - posts.threads;
    for (round = 0; round < posts.rounds && code == DOORBELL_OK; round++) {
        for (at = first; at < upto_thread; at++)
            measured_store(&posts, round, (uint32_t)at);
        code = doorbell_device_put_signal(&queue, measured_local(posts.local_addr + 8 * first, posts.lkey, 8 * posts.threads),
                                          measured_remote(posts.remote_addr + 8 * first, posts.rkey, 8 * posts.threads),
                                          measured_remote(measured_counter(&posts) + 8 + 8 * (thread / posts.threads), posts.rkey, 8),
                                          DOORBELL_SIGNAL_SET, round + 1, MEASURED_BOUND_NS, &upto);
        if (code == DOORBELL_OK)
            code = doorbell_device_wait(&queue, upto, MEASURED_BOUND_NS);
        for (at = first; at < upto_thread && code == DOORBELL_OK; at++)
            code = measured_look(&posts, round, (uint32_t)at);
    }
    for (at = first; at < upto_thread; at++)
        ((int *)(uintptr_t)posts.codes)[at] = code;
    return SUCCESS;
}

int gpu_check_full(const void *const arguments[], uint64_t thread)
{
    struct measured_full full;
    struct doorbell_queue_view queue;
    uint32_t first = 0, slot;

    (void)thread;
    memcpy(&full, arguments[0], sizeof full);
    if (!reach(&full.queue, sizeof queue) || !reach(&full.codes, 4 * 6) || !reach(&full.took_ns, 8))
        return ILLEGAL_ADDRESS;
    memcpy(&queue, (struct doorbell_queue_view *)(uintptr_t)full.queue, sizeof queue);
    if (!reach_queue(&queue))
        return ILLEGAL_ADDRESS;
    measured_fill(&full, &queue, &first);
    ((int *)(uintptr_t)full.codes)[3] = doorbell_device_reserve(&queue, 32, full.bound_ns, &slot);
    measured_drain(&full, &queue, first);
    return SUCCESS;
}

/* Its threads one after the other: the last one has the trigger. */
int gpu_check_group(const void *const arguments[], uint64_t thread)
{
    struct measured_group group;
    uint64_t threads, at;
    int code;

    memcpy(&group, arguments[0], sizeof group);
    threads = group.is_warp ? 32 : 256;
    if (!reach(&group.data, 4 * threads) || !reach(&group.codes, 4 * threads))
        return ILLEGAL_ADDRESS;
    ((uint32_t *)(uintptr_t)group.data)[thread] = group.value + (uint32_t)thread;
    if (thread + 1 < threads)
        return SUCCESS;
    code = doorbell_device_trigger(&group.trigger, MEASURED_BOUND_NS);
    for (at = 0; at < threads; at++)
        ((int *)(uintptr_t)group.codes)[at] = code;
    return SUCCESS;
}

int gpu_check_emit(const void *const arguments[], uint64_t thread)
{
    struct measured_emits emits;

    memcpy(&emits, arguments[0], sizeof emits);
    if (!reach(&emits.ring, 64 * (thread + 1)))
        return ILLEGAL_ADDRESS;
    measured_emit(&emits, (uint32_t)thread);
    return SUCCESS;
}

/* doorbell_step(trigger, work_ns, timeout_ns, code) */
int doorbell_step(const void *const arguments[], uint64_t thread)
{
    const struct doorbell_trigger *trigger = arguments[0];
    uint64_t work_ns, timeout_ns, address;
    int32_t *code = NULL;
    int found;

    (void)thread;
    memcpy(&work_ns, arguments[1], sizeof work_ns);
    memcpy(&timeout_ns, arguments[2], sizeof timeout_ns);
    memcpy(&address, arguments[3], sizeof address);
    if (address && !(code = doorbell_cuda_standin_reach(address, sizeof *code)))
        return ILLEGAL_ADDRESS;
    work(work_ns);
    found = doorbell_device_trigger(trigger, timeout_ns);
    if (found == DOORBELL_EINVAL)
        return ILLEGAL_ADDRESS;
    if (code)
        dbl_store_dword(code, (uint32_t)found);
    return SUCCESS;
}

/* doorbell_standin_wait(uint32_t *word, uint32_t value): until the word has the value. For the tests of the stand-in. */
int doorbell_standin_wait(const void *const arguments[], uint64_t thread)
{
    uint64_t address;
    uint32_t value, *word;

    (void)thread;
    memcpy(&address, arguments[0], sizeof address);
    memcpy(&value, arguments[1], sizeof value);
    word = doorbell_cuda_standin_reach(address, sizeof *word);
    if (!word)
        return ILLEGAL_ADDRESS;
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value && !doorbell_cuda_standin_over())
        ;
    return SUCCESS;
}
