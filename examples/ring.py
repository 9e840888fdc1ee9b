"""A ring of processes: in each step every rank hands the tensor that it got last to the next rank, all of it queued on a stream.

torchrun starts it, or plain shells do:

    torchrun --nproc-per-node 4 examples/ring.py

    for rank in 0 1 2 3; do
        RANK=$rank WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python3 examples/ring.py 10 65536 &
    done; wait

The arguments are the number of rounds, and the items of a tensor.
"""

import sys

import torch

import doorbell


def ring(rounds: int, items: int) -> None:
    with doorbell.Group.from_environment() as group:
        rank, size = group.rank, group.size
        following, previous = group.endpoint((rank + 1) % size), group.endpoint((rank - 1) % size)
        # One row for each rank. The rows are registered where they are, and nothing is copied.
        blocks = torch.zeros(size, items)
        region = group.domain.register(blocks)
        stream = doorbell.HostStream("ring")

        def row(step: int) -> doorbell.Slice:
            origin = (rank - step) % size
            return region[origin * items : (origin + 1) * items]

        for number in range(rounds):
            # In place of a kernel.
            stream.launch(lambda: blocks[rank].fill_(number * size + rank))
            for step in range(1, size):
                previous.post_recv(row(step))
            tickets = []
            for step in range(1, size):
                tickets.append(stream.queue_send(following, row(step - 1)))
                tickets.append(stream.wait_send(following))
                tickets.append(stream.wait_recv(previous))
            try:
                stream.synchronize(timeout=30)
                for ticket in tickets:
                    ticket.wait(timeout=30)
            except doorbell.Error:
                # If a rank has ended, this names it.
                group.check()
                raise
            expected = torch.arange(number * size, (number + 1) * size, dtype=torch.float32)
            assert torch.equal(blocks, expected.unsqueeze(1).expand(size, items)), f"round {number}"
            # No rank fills its row for the next round while another one has yet to look.
            group.barrier()
    print(f"rank {rank} of {size}: {rounds} rounds, all items right")


if __name__ == "__main__":
    ring(*(int(argument) for argument in sys.argv[1:3] or ("10", "65536")))
