"""Groups of processes, as torchrun starts them."""

import errno
import os
import pickle
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import doorbell
import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def free_port() -> int:
    """A port whose successor, which the group takes, is free: below those that systems give to outgoing connections."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
        return port


def start(size: int, program: list[str], stdin: int | None = None) -> list[subprocess.Popen[str]]:
    """Starts ranks with the environment of torchrun."""
    port = free_port()
    ranks = []
    for rank in range(size):
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("DOORBELL_", "OMPI_", "PMI", "SLURM_"))}
        environment |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        process = subprocess.Popen(
            [sys.executable, *program], env=environment, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        ranks.append(process)
    return ranks


def outputs(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        ended = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, ended, strict=True)]


def test_the_ring_of_the_example() -> None:
    pytest.importorskip("torch", reason="torch is not installed: apt-get install python3-torch on Debian")
    ranks = outputs(start(3, [str(EXAMPLES / "ring.py"), "5", "10000"]))
    assert [status for status, _, _ in ranks] == [0, 0, 0], ranks
    for rank, (_, said, _) in enumerate(ranks):
        assert said == f"rank {rank} of 3: 5 rounds, all items right\n"


def test_torchrun_starts_the_example(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: apt-get install python3-torch on Debian")
    # A port of its own: `--standalone` of torch 1.13 takes port 29400 for every job of the host.
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    # With Python 3.11, torch 1.13 knows neither no redirection nor that of both outputs.
    redirection = ["-r", "1", "-t", "1", "--log_dir", str(tmp_path)]
    launcher = ["-m", "torch.distributed.run", *rendezvous, "--nproc_per_node", "3", *redirection]
    [(status, said, errors)] = outputs([subprocess.Popen(
        [sys.executable, *launcher, str(EXAMPLES / "ring.py"), "5", "10000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )])
    assert status == 0, errors
    for rank in range(3):
        assert f"rank {rank} of 3: 5 rounds, all items right\n" in said, said


def test_the_gradients_of_the_example_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: apt-get install python3-torch on Debian")
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    ranks = outputs(start(4, [str(EXAMPLES / "data_parallel.py"), "5", *(["--gloo"] if gloo else [])]))
    assert [status for status, _, _ in ranks] == [0] * 4, ranks
    for rank, (_, said, _) in enumerate(ranks):
        assert said.splitlines()[-1].startswith(f"rank {rank} of 4: 5 steps, 1539 gradients, as torch's"), said


def test_digits_are_learned_with_the_bits_of_one_process() -> None:
    pytest.importorskip("torch", reason="torch is not installed: apt-get install python3-torch on Debian")
    file = EXAMPLES.parent / "target" / "digits.csv"
    fetched = subprocess.run([EXAMPLES.parent / "scripts" / "digits", file], capture_output=True, text=True)
    if fetched.returncode != 0:
        pytest.skip(f"the digits cannot be fetched: {fetched.stderr}")
    ranks = outputs(start(3, [str(EXAMPLES / "train_digits.py"), str(file)]))
    assert [status for status, _, _ in ranks] == [0] * 3, ranks
    said = ranks[0][1]
    found = re.fullmatch(r"3 ranks, 17226 weights, 184 steps with the bits of one process; (\d+) of 552 sums .* loss 2\.\d+ -> (0\.\d+); ([\d.]+)% of 360 digits\n", said)
    assert found, said
    assert int(found[1]) > 0 and float(found[2]) < 0.2 and float(found[3]) > 95, said


MEMBER = """
import doorbell, sys
with doorbell.Group.from_environment("softcx", config=doorbell.EndpointConfig(send_depth=16), timeout=60.0) as group:
    assert group.size == 2 and group.gather(bytes([group.rank])) == [b"\\x00", b"\\x01"]
    peer = 1 - group.rank
    endpoint = group.endpoint(peer)
    assert endpoint is group.endpoint(peer) and endpoint.send_room() == 16
    region = group.domain.register(bytearray(8), doorbell.Access.ALL)
    group.set(f"region of {group.rank}", bytes(region.remote))
    remote = doorbell.RemoteRegion(group.get(f"region of {peer}"))
    stream = doorbell.HostStream()
    stream.queue_write(endpoint, group.domain.register(bytes([group.rank + 7]) * 4), remote[0:4])
    stream.wait_send(endpoint)
    stream.synchronize(30)
    group.barrier()
    group.check()
    assert bytes(memoryview(region)) == bytes([peer + 7]) * 4 + bytes(4)
    further = group.endpoints([(peer, 5), (peer, 6), (group.rank, 5)], doorbell.EndpointConfig(send_depth=8))
    assert [it.send_room() for it in further] == [8, 8, 8]
    for it, byte in zip(further, (1, 2, 3)):
        it.post_recv(region[byte:byte + 1])
    group.barrier()
    for it, byte in zip(further, (1, 2, 3)):
        it.post_send(group.domain.register(bytes([byte]) * 1))
    for it in further:
        it.wait_recv(30)
    assert bytes(memoryview(region))[1:4] == bytes([1, 2, 3])
    for wrong in (group.rank, 2):
        try:
            group.endpoint(wrong)
        except doorbell.Error:
            pass
        else:
            raise AssertionError("an endpoint with nobody")
if len(sys.argv) == 1:
    try:
        group.barrier()
    except doorbell.StateError as error:
        assert error.kind == "Disconnected"
    endpoint.qpn
print("done")
"""


def test_ranks_exchange_regions_and_write_to_each_other() -> None:
    ranks = outputs(start(2, ["-c", MEMBER]))
    assert [(status, said) for status, said, _ in ranks] == [(0, "done\n")] * 2, ranks


MESSAGES = """
import doorbell
with doorbell.Group.from_environment("softcx") as group:
    rank, size, peers = group.rank, group.size, [peer for peer in range(group.size) if peer != group.rank]
    config = doorbell.MessageConfig(slots=4)
    queue = group.message_queue(peers[0], 7 + rank + peers[0], config) if rank < 2 else None
    if queue:
        queue.send_now(bytes([rank]), 60)
        into = bytearray(1)
        assert queue.recv_now(into, 60) == 1 and into == bytes(peers[:1])
    queues = group.message_queues([(peer, 1) for peer in peers])
    communicator = group.communicator(tag=2)
    two = group.communicator(ranks=[1, 0], tag=3, config=config) if rank < 2 else None
    assert two is None or (two.rank, two.size) == (1 - rank, 2)
    stream = doorbell.HostStream()
    region = group.domain.register(bytearray([rank + 1]) * 1000, doorbell.Access.ALL)
    operation = communicator.all_reduce(region)
    communicator.match_ahead(operation, 60)
    for _ in range(3):
        communicator.launch(stream, operation).wait(60)
    total = sum(range(size + 1))
    assert bytes(memoryview(region)) == bytes([total * size**2 % 256]) * 1000
    matcher = group.matcher(tag=4, config=doorbell.MatcherConfig(receives=8))
    matcher.send_now(bytes([rank]), (rank + 1) % size, tag=rank, timeout=60)
    assert matcher.recv_now(bytearray(1), timeout=60).tag == (rank - 1) % size
    for it in filter(None, [queue, *queues, communicator, two, matcher]):
        it.finish(60)
    group.barrier()
print("done")
"""


def test_ranks_have_queues_and_communicators() -> None:
    ranks = outputs(start(3, ["-c", MESSAGES]))
    assert [(status, said) for status, said, _ in ranks] == [(0, "done\n")] * 3, ranks


DROPS = """
import doorbell, gc, random, sys, time, weakref
class Watched(bytearray):
    pass
chance = random.Random(int(sys.argv[1]))
config = doorbell.MessageConfig(endpoint=doorbell.EndpointConfig(wait_timeout=0.2))
group = doorbell.Group.from_environment("softcx", config=doorbell.EndpointConfig(wait_timeout=0.2))
chance.seed(f"{sys.argv[1]} {group.rank}")
peer = 1 - group.rank
arrays = [Watched(5000) for _ in range(4)]
gone = [weakref.ref(array) for array in arrays]
endpoint, queue, communicator = group.endpoint(peer), group.message_queue(peer, config=config), group.communicator(tag=1, config=config)
region, stream = group.domain.register(arrays[0], doorbell.Access.ALL), doorbell.HostStream()
kept = [group, endpoint, queue, communicator, region, stream, *arrays]
group.barrier()
for step in (
    lambda: endpoint.post_recv(region),
    lambda: stream.queue_send(endpoint, region[0:100]),
    lambda: stream.wait_recv(endpoint),
    lambda: queue.start_send(stream, arrays[1]),
    lambda: queue.recv(stream, arrays[2]),
    lambda: communicator.launch(stream, communicator.all_reduce(arrays[3], dtype="u8")),
    lambda: stream.record(),
):
    try:
        kept.append(step())
    except doorbell.Error:
        # The peer has begun to drop.
        pass
del step
chance.shuffle(kept)
del group, endpoint, queue, communicator, region, stream, arrays
while kept:
    kept.pop()
    time.sleep(chance.choice((0, 0, 0.002)))
end = time.monotonic() + 60
while any(array() is not None for array in gone) and time.monotonic() < end:
    gc.collect()
    doorbell.Device.list()
    time.sleep(0.005)
print(sum(array() is not None for array in gone))
"""


@pytest.mark.parametrize("seed", range(6))
def test_a_group_is_dropped_before_and_after_what_it_made(seed: int) -> None:
    seed += 6 * random.randrange(1 << 20)
    ranks = outputs(start(2, ["-c", DROPS, str(seed)]))
    assert [(status, said) for status, said, _ in ranks] == [(0, "0\n")] * 2, (seed, ranks)


WAITS = """
import doorbell, os, signal, sys, threading
# The shell that has begun this in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
group = doorbell.Group.from_environment("softcx", timeout=100.0)
group.barrier()
if group.rank == 0:
    waits = {
        "barrier": group.barrier,
        "get": lambda: group.get("never"),
        "gather": lambda: group.gather(b""),
        "communicator": lambda: group.communicator(tag=5),
        "queues": lambda: group.message_queue(1, 9),
    }
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        waits[sys.argv[1]]()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    os._exit(0)
try:
    while True:
        group.check()
except doorbell.RankError as error:
    print(error.rank)
"""


@pytest.mark.parametrize("wait", ["barrier", "get", "gather", "communicator", "queues"])
def test_an_interrupt_ends_the_waits_of_a_group(wait: str) -> None:
    ranks = outputs(start(2, ["-c", WAITS, wait]))
    assert [said for _, said, _ in ranks] == ["interrupted\n", "0\n"], ranks


STAYS = """
import doorbell, os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
group = doorbell.Group.from_environment("softcx", timeout=100.0)
group.barrier()
if group.rank == 0:
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    try:
        if sys.argv[1] == "leave":
            interrupt.start()
            group.leave()
        with group:
            interrupt.start()
            group.barrier()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    # The process goes on.
    sys.stdin.read()
elif sys.argv[1] == "leave":
    sys.stdin.read()
    group.leave()
    print("left", flush=True)
else:
    try:
        while True:
            group.check()
    except doorbell.RankError as error:
        print(error.rank, flush=True)
"""


def test_an_interrupt_ends_a_leave_that_waits_for_another_rank() -> None:
    ranks = start(2, ["-c", STAYS, "leave"], stdin=subprocess.PIPE)
    # The other rank leaves only after that.
    assert ranks[0].stdout is not None and ranks[0].stdout.readline() == "interrupted\n"
    assert ranks[1].poll() is None
    # The leave has gone on.
    assert outputs(ranks[::-1])[0][1] == "left\n"


def test_a_rank_that_an_interrupt_takes_out_of_its_group_has_failed_while_its_process_goes_on() -> None:
    ranks = start(2, ["-c", STAYS, "exit"], stdin=subprocess.PIPE)
    assert ranks[1].stdout is not None and ranks[1].stdout.readline() == "0\n"
    assert ranks[0].poll() is None
    assert outputs(ranks)[0][1] == "interrupted\n"


RETRIES = """
import doorbell, os, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
group = doorbell.Group.from_environment("softcx", timeout=100.0)
if group.rank == 0:
    other = int(group.get("pid"))
    while open(f"/proc/{other}/stat").read().rsplit(")", 1)[1].split()[0] != "T":
        time.sleep(0.01)
    try:
        for _ in range(2):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                group.endpoint(1)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
    finally:
        os.kill(other, signal.SIGCONT)
    # Now the threads of the interrupted calls take the endpoint.
    group.get("connected")
    time.sleep(0.5)
else:
    group.set("pid", str(os.getpid()).encode())
    # A process that is stopped does not answer; one that runs does, whatever its program does.
    os.kill(os.getpid(), signal.SIGSTOP)
endpoint = group.endpoint(1 - group.rank)
assert group.endpoint(1 - group.rank) is endpoint
if group.rank == 1:
    group.set("connected", b"")
region = group.domain.alloc(8)
if group.rank == 0:
    ticket = endpoint.post_recv(region)
    group.barrier()
    ticket.wait(30)
    print(bytes(memoryview(region)))
else:
    memoryview(region)[:] = b"survived"
    group.barrier()
    endpoint.post_send(region).wait(30)
group.barrier()
group.leave()
"""


def test_an_endpoint_outlives_the_interrupt_of_its_call() -> None:
    ranks = outputs(start(2, ["-c", RETRIES]))
    assert [said for _, said, _ in ranks] == ["interrupted\ninterrupted\nb'survived'\n", ""], ranks


ENDS = """
import doorbell, os
group = doorbell.Group.from_environment()
endpoint = group.endpoint(1 - group.rank)
stream = doorbell.HostStream()
endpoint.post_recv(group.domain.alloc(8))
wait = stream.wait_recv(endpoint)
group.barrier()
if group.rank == 1:
    os._exit(3)
try:
    wait.wait(60)
except doorbell.WorkError as error:
    print(error.cause)
try:
    for _ in range(1000):
        group.check()
except doorbell.RankError as error:
    print(error.rank, bool(error.reason))
"""

RAISES = """
import doorbell
try:
    with doorbell.Group.from_environment() as group:
        group.barrier()
        if group.rank == 1:
            raise ValueError("of this rank")
        group.get("what nobody sets")
except doorbell.RankError as error:
    print(error.rank)
except ValueError as error:
    print(error)
"""


def test_a_rank_that_ends_is_named() -> None:
    ranks = outputs(start(2, ["-c", ENDS]))
    assert ranks[1][0] == 3
    assert ranks[0][0] == 0 and ranks[0][1].splitlines()[-1] == "1 True", ranks
    ranks = outputs(start(2, ["-c", RAISES]))
    assert [said for _, said, _ in ranks] == ["1\n", "of this rank\n"], ranks


def test_without_a_launcher_the_error_names_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("RANK", "WORLD_SIZE", "OMPI_", "PMI", "SLURM_", "DOORBELL_RANK")):
            monkeypatch.delenv(name)
    with pytest.raises(doorbell.StateError, match="DOORBELL_RANK") as caught:
        doorbell.Group.from_environment("softcx")
    assert caught.value.kind == "Environment"
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(doorbell.RangeError) as rank:
        doorbell.Group.from_environment()
    assert rank.value.argument == "rank"


def test_an_address_of_another_host_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "192.0.2.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    with pytest.raises(doorbell.SystemCallError) as caught:
        doorbell.Group.from_environment(timeout=1.0)
    assert caught.value.operation.startswith("bind") and caught.value.errno == errno.EADDRNOTAVAIL
    # As an executor passes it to another process.
    passed = pickle.loads(pickle.dumps(caught.value))
    assert (type(passed), str(passed)) == (doorbell.SystemCallError, str(caught.value))
    assert (passed.operation, passed.errno) == (caught.value.operation, errno.EADDRNOTAVAIL)


def test_a_group_of_one_leaves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(free_port()))):
        monkeypatch.setenv(name, value)
    group = doorbell.Group.from_environment("softcx,path=proxy")
    assert (group.rank, group.size) == (0, 1) and group.domain.device.name.startswith("softcx")
    group.leave()
    with pytest.raises(doorbell.StateError):
        group.leave()
