"""Two ranks of MPI, whose messages go through UCX, and transfers of this package between the same arrays, in one process each. MPI carries the addresses.

mpirun -n 2 python beside_mpi.py [ROUNDS]; scripts/test-python runs it behind a door.
"""

import sys

import doorbell
import numpy as np
from mpi4py import MPI

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
ITEMS = 5000

comm = MPI.COMM_WORLD
assert comm.size == 2
peer = 1 - comm.rank

# Rows: what MPI sends, what it receives, and what this package writes and reads.
rows = np.zeros((4, ITEMS), np.int64)
domain = doorbell.Device("verbs:mlx5_0").domain()
endpoint = domain.endpoint()
region = domain.register(rows, doorbell.Access.ALL)
address, remote = comm.sendrecv((endpoint.address, bytes(region.remote)), dest=peer, source=peer)
endpoint.connect(address)
theirs = doorbell.RemoteRegion(remote, rows.itemsize)
stream = doorbell.HostStream()


def row(memory, number):
    return memory[number * ITEMS : (number + 1) * ITEMS]


for number in range(ROUNDS):
    rows[0] = np.arange(ITEMS) + 1_000_000 * number + comm.rank
    # MPI's message is under way while this package reads the same memory from the peer, which MPI has filled in the last round.
    requests = [comm.Irecv(rows[1], source=peer, tag=number), comm.Isend(rows[0], dest=peer, tag=number)]
    written = stream.queue_write(endpoint, row(region, 0), row(theirs, 2))
    stream.wait_send(endpoint)
    MPI.Request.Waitall(requests)
    written.wait(timeout=30)
    comm.Barrier()
    expected = np.arange(ITEMS) + 1_000_000 * number + peer
    assert (rows[1] == expected).all(), f"round {number}: MPI"
    assert (rows[2] == expected).all(), f"round {number}: written by the peer"
    # Back from the peer: what MPI has placed there is what this rank has sent.
    endpoint.post_read(row(region, 3), row(theirs, 1)).wait(timeout=30)
    assert (rows[3] == rows[0]).all(), f"round {number}: read from the peer"
    comm.Barrier()

stream.synchronize()
total = comm.allreduce(int(rows[3].sum()), op=MPI.SUM)
if comm.rank == 0:
    print(f"{ROUNDS} rounds on {MPI.Get_library_version().split(':')[0].strip()}, sum {total}")
