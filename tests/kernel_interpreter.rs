//! The interpreter that kernels are made of, `include/doorbell/execute.h`, on the processor: what no stream can be made to show, and, by
//! ThreadSanitizer, that it and its host have no data race.

mod waived;

use std::path::Path;
use std::process::Command;

use waived::waived;

const PROGRAM: &str = r#"
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#define DBL_PAUSE(turn) (sched_yield(), 0)
#include <doorbell/execute.h>

#define CHECK(condition)                                                                                               \
	do {                                                                                                           \
		if (!(condition)) {                                                                                    \
			fprintf(stderr, "%s:%d: %s\n", test, __LINE__, #condition);                                    \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

static const char *test;
static struct dbl_control control;
static uint32_t word, out[2];
static uint64_t block[4];
static uint64_t words[128];
static uint32_t word_count;

static void begin(const char *name, uint64_t lease_ms)
{
	test = name;
	memset(&control, 0, sizeof(control));
	control.lease_ns = lease_ms * 1000000;
	word = out[0] = out[1] = word_count = 0;
	memset(block, 0, sizeof(block));
}

static void add(uint64_t value)
{
	words[word_count++] = value;
}

static void head(uint8_t kind, uint8_t count)
{
	add(kind | (uint64_t)count << 8);
}

static void table(void)
{
	head(DBL_ITEM_TABLE, 3);
	add((uintptr_t)&word);
	add((uintptr_t)out);
	add((uintptr_t)block);
}

static void unit(uint8_t kind, uint8_t role, uint16_t len_bytes, uint32_t target, uint64_t offset, uint64_t value)
{
	add(kind | (uint64_t)role << 8 | (uint64_t)len_bytes << 16 | (uint64_t)target << 32);
	add(offset);
	add(value);
}

static void program(uint64_t number, uint8_t count)
{
	head(DBL_ITEM_PROGRAM, count);
	add(number);
}

static void count(uint64_t number)
{
	head(DBL_ITEM_COUNT, 0);
	add(number);
}

/* A wait and a store behind it, then another store. */
static void wait_and_stores(uint8_t role)
{
	table();
	program(1, 2);
	unit(DBL_POLL_GEQ, role, 4, 0, 0, 1);
	unit(DBL_STORE_DWORD, DBL_ROLE_MEMORY, 4, 1, 0, 5);
	count(1);
	program(2, 1);
	unit(DBL_STORE_DWORD, DBL_ROLE_MEMORY, 4, 1, 4, 6);
	count(0x100000002u);
}

static void *run(void *unused)
{
	(void)unused;
	CHECK(dbl_execute(words, word_count, &control) == DBL_END_DONE);
	return NULL;
}

static void *set_word(void *value)
{
	usleep(20000);
	__atomic_store_n(&word, (uint32_t)(uintptr_t)value, __ATOMIC_RELEASE);
	return NULL;
}

/* Looks at the stream for longer than the lease, then does what is waited for. */
static void *look(void *unused)
{
	int turn;
	(void)unused;
	for (turn = 0; turn < 3000; turn++) {
		__atomic_fetch_add(&control.alive, 1, __ATOMIC_RELAXED);
		usleep(1000);
	}
	__atomic_store_n(&word, 1, __ATOMIC_RELEASE);
	return NULL;
}

static void *release(void *unused)
{
	(void)unused;
	usleep(20000);
	/* As the host: what the failure is before what ends the wait. */
	__atomic_store_n(&control.status, DBL_STATUS_WORK, __ATOMIC_SEQ_CST);
	__atomic_store_n(&control.release, 1, __ATOMIC_RELEASE);
	return NULL;
}

static void beside(void *(*host)(void *), void *argument)
{
	pthread_t stream, other;
	if (pthread_create(&stream, NULL, run, NULL) || pthread_create(&other, NULL, host, argument))
		abort();
	pthread_join(stream, NULL);
	pthread_join(other, NULL);
}

int main(void)
{
	uint32_t at;

	begin("a wait that is met", 60000);
	wait_and_stores(DBL_ROLE_MEMORY);
	beside(set_word, (void *)1);
	CHECK(out[0] == 5 && out[1] == 6 && control.done == 2 && control.status == 0 && control.stop == 0);

	begin("a completion in error", 60000);
	wait_and_stores(DBL_ROLE_COMPLETIONS);
	/* As the owner bit is waited for; the opcode is MLX5_CQE_REQ_ERR. */
	words[6] = (words[6] & ~(uint64_t)0xff) | DBL_POLL_AND;
	beside(set_word, (void *)0xd0000001u);
	CHECK(out[0] == 5 && control.status == DBL_STATUS_WORK && control.released == 0);

	begin("a wait that is released", 60000);
	wait_and_stores(DBL_ROLE_MEMORY);
	beside(release, NULL);
	CHECK(control.released == 1 && word == 0 && out[0] == 5 && out[1] == 6 && control.done == 2);
	CHECK(control.status == DBL_STATUS_WORK && control.stop == 0);

	begin("a release is for no later program", 50);
	control.release = 1;
	table();
	program(2, 1);
	unit(DBL_POLL_GEQ, DBL_ROLE_MEMORY, 4, 0, 0, 1);
	beside(set_word, (void *)1);
	CHECK(control.released == 0 && control.stop == 0);

	begin("a host that looks", 1500);
	wait_and_stores(DBL_ROLE_MEMORY);
	beside(look, NULL);
	CHECK(out[0] == 5 && control.stop == 0 && control.status == 0);

	begin("a host that looks no more", 50);
	wait_and_stores(DBL_ROLE_MEMORY);
	run(NULL);
	CHECK(control.stop == DBL_STOP_ABANDONED && control.stopped == 1 && control.status == DBL_STATUS_WORK);
	CHECK(out[0] == 0 && out[1] == 0 && control.done == 2);
	/* So it is with all that comes later, though the wait would be met now. */
	word = 1;
	control.done = 0;
	run(NULL);
	CHECK(out[0] == 0 && out[1] == 0 && control.done == 2 && control.stopped == 1);

	/* Bounded by who executes: a wait that is not met in time, and one that is. */
	for (at = 0; at < 2; at++) {
		struct dbl_run run;
		begin("a bound", 60000);
		wait_and_stores(DBL_ROLE_MEMORY);
		memset(&run, 0, sizeof(run));
		run.control = &control;
		run.start_ns = dbl_now_ns();
		run.timeout_ns = 30000000;
		word = at;
		CHECK(dbl_execute_bounded(words, word_count, &run) == DBL_END_DONE);
		CHECK(run.waited && !run.failed && control.done == 2);
		if (at == 0) {
			CHECK(dbl_now_ns() - run.start_ns > 30000000 && run.stopped == DBL_STOP_TIMED_OUT);
			CHECK(control.stop == DBL_STOP_TIMED_OUT && control.stopped == 1 && out[0] == 0 && out[1] == 0);
			CHECK(control.status == DBL_STATUS_WORK);
		} else
			CHECK(!run.stopped && control.stop == 0 && out[0] == 5 && out[1] == 6);
	}

	begin("a block", 60000);
	table();
	program(1, 4);
	unit(DBL_COPY_BLOCK, DBL_ROLE_UAR, 32, 2, 0, 0);
	for (at = 0; at < 6; at++)
		add(0x1111111111111111u * (at + 1));
	unit(DBL_STORE_QWORD, DBL_ROLE_UAR, 8, 2, 0, 0x99);
	run(NULL);
	CHECK(block[0] == 0x99 && block[1] == 0x2222222222222222u && block[3] == 0x4444444444444444u);

	/* What makes no sense is not executed, nor is anything behind it. */
	for (at = 0; at < 4; at++) {
		begin("malformed", 60000);
		table();
		program(1, 1);
		if (at == 0)
			unit(99, 0, 4, 0, 0, 1);
		else if (at == 1)
			unit(DBL_STORE_DWORD, DBL_ROLE_MEMORY, 4, 3, 0, 1);
		else if (at == 2)
			unit(DBL_COPY_BLOCK, DBL_ROLE_UAR, 32, 2, 0, 0);
		else
			unit(DBL_COPY_BLOCK, DBL_ROLE_UAR, 12, 2, 0, 0);
		program(2, 1);
		unit(DBL_STORE_DWORD, DBL_ROLE_MEMORY, 4, 1, 0, 5);
		count(2);
		run(NULL);
		CHECK(control.stop == DBL_STOP_MALFORMED && control.stopped == 1 && out[0] == 0 && control.done == 2);
	}
	begin("cut off", 60000);
	table();
	program(1, 2);
	unit(DBL_STORE_DWORD, DBL_ROLE_MEMORY, 4, 1, 0, 5);
	run(NULL);
	CHECK(control.stop == DBL_STOP_MALFORMED && out[0] == 0);
	return 0;
}
"#;

fn compile_and_run(name: &str, sanitizer: &[&str]) -> Option<()> {
    let folder = std::env::temp_dir().join(format!(
        "doorbell-interpreter-{name}-{}",
        std::process::id()
    ));
    std::fs::create_dir_all(&folder).unwrap();
    let (source, program) = (folder.join(format!("{name}.c")), folder.join(name));
    std::fs::write(&source, PROGRAM).unwrap();
    let headers = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let compiled = Command::new("cc")
        .args([
            "-std=gnu11",
            "-O2",
            "-g",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pthread",
        ])
        .args(sanitizer)
        .arg("-I")
        .arg(&headers)
        .arg("-include")
        .arg("string.h")
        .arg("-o")
        .args([&program, &source])
        .output();
    let result = match compiled {
        Err(_) => None,
        Ok(output) if !output.status.success() => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            // Of a sanitizer that is not installed.
            assert!(
                !sanitizer.is_empty() && said.contains("cannot find"),
                "{said}"
            );
            None
        }
        Ok(_) => {
            // A hang is ended.
            let output = Command::new("timeout")
                .arg("60")
                .arg(&program)
                .env("TSAN_OPTIONS", "halt_on_error=1:exitcode=66")
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            // On a kernel that places memory where the sanitizer wants its own.
            if said.contains("unexpected memory mapping") {
                None
            } else {
                assert!(output.status.success(), "{:?} {said}", output.status);
                Some(())
            }
        }
    };
    std::fs::remove_dir_all(&folder).unwrap();
    result
}

#[test]
fn the_interpreter_waits_stops_and_goes_on_as_its_control_block_says() {
    if compile_and_run("plain", &[]).is_none() {
        waived("the_interpreter_waits", "there is no C compiler");
    }
}

#[test]
fn the_interpreter_and_its_host_have_no_data_race() {
    // What the fences order is atomics: gcc warns that its sanitizer knows nothing of fences, and it need not.
    let flags = ["-fsanitize=thread", "-Wno-tsan"];
    if compile_and_run("tsan", &flags).is_none() {
        waived(
            "the_interpreter_and_its_host",
            "there is no ThreadSanitizer",
        );
    }
}
