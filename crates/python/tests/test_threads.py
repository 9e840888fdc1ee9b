"""Waits let other threads run, Ctrl-C ends them, and the interpreter ends whatever streams still have."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import doorbell
import pytest
from conftest import Pair


def test_waits_let_other_threads_run(stream: doorbell.HostStream) -> None:
    """Each of these waits ends by what another Python thread does, which takes the interpreter's lock."""
    pair = Pair()
    region, gate = pair.domain.register(bytearray(8)), pair.domain.alloc(4)

    def meanwhile(action: str) -> threading.Thread:
        def run() -> None:
            time.sleep(0.05)
            if action == "send":
                pair.a.post_send(region)
            else:
                memoryview(gate).cast("I")[0] = 1

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    pair.b.post_recv(region)
    thread = meanwhile("send")
    assert pair.b.wait_recv(30).nbytes == 8
    thread.join()
    ticket = pair.b.post_recv(region)
    thread = meanwhile("send")
    ticket.wait(30)
    thread.join()
    for wait in (stream.synchronize, None):
        memoryview(gate).cast("I")[0] = 0
        stream.wait_value(gate, 0, 1, timeout=30)
        event = stream.record()
        thread = meanwhile("open")
        (wait or event.wait)(30)
        thread.join()


def test_a_function_takes_the_lock_while_the_main_thread_waits(stream: doorbell.HostStream) -> None:
    threads = []
    for _ in range(200):
        stream.launch(lambda: threads.append(threading.get_ident()))
    stream.synchronize(30)
    assert len(threads) == 200 and set(threads) != {threading.get_ident()} and len(set(threads)) == 1


def test_a_stream_that_is_dropped_still_calls_its_functions() -> None:
    ran = threading.Event()
    gate = threading.Event()
    stream = doorbell.HostStream("dropped")
    stream.launch(lambda: gate.wait(10))
    stream.launch(ran.set)
    del stream
    gate.set()
    assert ran.wait(10)


def test_threads_share_an_endpoint(stream: doorbell.HostStream) -> None:
    pair = Pair(config=doorbell.EndpointConfig(send_depth=512, recv_depth=512))
    region = pair.domain.register(bytearray(8))
    errors = []

    def post() -> None:
        try:
            for _ in range(100):
                pair.b.post_recv(region)
                pair.a.post_send(region)
        except doorbell.Error as error:
            errors.append(error)

    threads = [threading.Thread(target=post) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sum(pair.b.wait_recv(10).nbytes for _ in range(400)) == 3200


def test_a_signal_ends_a_wait() -> None:
    pair = Pair()
    pair.b.post_recv(pair.domain.alloc(8))

    class Interrupted(Exception):
        pass

    def handler(_number: int, _frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            pair.b.wait_recv()
    finally:
        signal.signal(signal.SIGALRM, before)
    # The endpoint is as it was.
    pair.a.post_send(pair.domain.alloc(8))
    assert pair.b.wait_recv(10).nbytes == 8


def run(program: str, status: int = 0) -> str:
    """Runs a program in a process of its own; a hang is a failure."""
    preamble = "import doorbell, sys, threading, time\n"
    ended = subprocess.run([sys.executable, "-c", preamble + textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == status, ended.stderr
    assert "FATAL" not in ended.stderr and "panicked" not in ended.stderr, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("times", range(3))
def test_the_interpreter_ends_while_functions_run_and_are_queued(times: int) -> None:
    said = run("""
        stream = doorbell.HostStream()
        begun = threading.Event()
        def slow():
            begun.set()
            time.sleep(0.2)
            print("ended", flush=True)
        stream.launch(slow)
        for _ in range(500):
            stream.launch(lambda: time.sleep(0.05))
        begun.wait()
    """)
    assert said == "ended\n"


def test_the_interpreter_ends_with_a_stream_that_waits() -> None:
    run("""
        domain = doorbell.Device().domain()
        a = domain.endpoint()
        b = domain.endpoint()
        a.connect(b.address); b.connect(a.address)
        region = domain.register(bytearray(64))
        stream = doorbell.HostStream()
        b.post_recv(region)
        stream.wait_recv(b)
        stream.launch(lambda: print("not called"))
        ticket = stream.queue_send(a, region)
        event = stream.record()
    """)


def test_the_interpreter_ends_while_daemon_threads_wait() -> None:
    run("""
        domain = doorbell.Device().domain()
        gate = domain.alloc(4)
        stream = doorbell.HostStream()
        stream.wait_value(gate, 0, 1)
        for wait in (stream.synchronize, stream.record().wait):
            threading.Thread(target=wait, daemon=True).start()
        time.sleep(0.1)
    """)


def test_functions_at_exit_are_called_before_the_package_ends_and_refused_after_it() -> None:
    # `atexit` calls what was registered last first, and the package registers with its import.
    said = run("""
        import atexit
        stream = doorbell.HostStream()
        def late():
            stream.launch(lambda: print("called", flush=True))
            stream.synchronize(10)
        atexit.register(late)
    """)
    assert said == "called\n"
    program = """
import atexit
def late():
    stream.launch(lambda: print("called", flush=True))
    try:
        stream.synchronize(10)
    except doorbell.AsynchronousError as error:
        print("interpreter has ended" in error.reason)
atexit.register(late)
import doorbell
stream = doorbell.HostStream()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


def test_os_exit_in_a_function_is_the_end() -> None:
    run("import os; stream = doorbell.HostStream(); stream.launch(lambda: os._exit(7)); stream.synchronize(30)", status=7)
    assert os.getpid() > 0


def test_a_child_of_fork_ends_while_a_function_runs_in_its_parent() -> None:
    said = run("""
        import os, sys
        stream = doorbell.HostStream()
        stream.launch(lambda: time.sleep(1))
        time.sleep(0.2)
        child = os.fork()
        if child == 0:
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """)
    assert said == "3\n"


def test_an_interrupt_ends_the_wait_for_functions_at_the_end() -> None:
    program = """
import os, signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
import doorbell
stream = doorbell.HostStream()
begun = threading.Event()
def runs():
    begun.set()
    threading.Event().wait()
stream.launch(runs)
begun.wait()
timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
timer.daemon = True
timer.start()
print("ends", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "ends\n" and "KeyboardInterrupt" in ended.stderr, ended
