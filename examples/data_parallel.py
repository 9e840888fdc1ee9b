"""A data-parallel step: each rank has a part of the batch, and the gradients are averaged over all ranks, in place.

torchrun starts it, or plain shells do:

    torchrun --nproc-per-node 4 examples/data_parallel.py

    for rank in 0 1 2 3; do
        RANK=$rank WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python3 examples/data_parallel.py &
    done; wait

The argument is the number of steps. Each step is compared with torch: the gradients with the mean of what every rank has computed, and the weights with
those of a model that has seen the whole batch. With `--gloo`, torch's own process group, gloo, reduces the same gradients, and the two results are compared.
"""

import argparse
from typing import Any

import torch

import doorbell

# Of which some versions of torch have no types.
all_reduce_by_torch: Any = torch.distributed.all_reduce
backward: Any = torch.autograd.backward

ITEMS_PER_RANK = 16
FEATURES = 20


def model() -> torch.nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3)).double()


def flatten_gradients(module: torch.nn.Module) -> torch.Tensor:
    """One tensor for all gradients, of which each parameter's is a view: so one operation reduces all of them, and nothing is copied."""
    parameters = list(module.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=parameters[0].dtype)
    at = 0
    for parameter in parameters:
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    return flat


def train(steps: int, with_gloo: bool) -> None:
    with doorbell.Group.from_environment() as group:
        rank, size = group.rank, group.size
        if with_gloo:
            torch.distributed.init_process_group("gloo")
        ours, whole = model(), model()
        gradients = flatten_gradients(ours)
        optimizers = [torch.optim.SGD(it.parameters(), lr=0.1) for it in (ours, whole)]
        # Prepared once: the tensor is registered where it is, and each launch reduces what is in it then.
        communicator = group.communicator()
        average = communicator.all_reduce(gradients, op=doorbell.ReduceOp.AVERAGE)
        # The messages are written straight into place.
        communicator.match_ahead(average, timeout=60)
        stream = doorbell.HostStream("gradients")
        for step in range(steps):
            torch.manual_seed(100 + step)
            batch, wanted = torch.randn(size * ITEMS_PER_RANK, FEATURES).double(), torch.randn(size * ITEMS_PER_RANK, 3).double()
            own = slice(rank * ITEMS_PER_RANK, (rank + 1) * ITEMS_PER_RANK)
            gradients.zero_()
            backward(torch.nn.functional.mse_loss(ours(batch[own]), wanted[own]))
            before = gradients.clone()
            ticket = communicator.launch(stream, average)
            try:
                ticket.wait(timeout=60)
            except doorbell.Error:
                # If a rank has ended, this names it.
                group.check()
                raise
            if with_gloo:
                # The comparison, which copies.
                all_reduce_by_torch(before)
                assert torch.allclose(gradients, before / size), step
            optimizers[0].step()
            optimizers[1].zero_grad()
            backward(torch.nn.functional.mse_loss(whole(batch), wanted))
            expected = torch.cat([parameter.grad.flatten() for parameter in whole.parameters() if parameter.grad is not None])
            assert torch.allclose(gradients, expected), step
            optimizers[1].step()
            for mine, theirs in zip(ours.parameters(), whole.parameters(), strict=True):
                assert torch.allclose(mine, theirs), step
        # Each rank has the same bits.
        digests = group.gather(bytes(gradients.numpy().tobytes()))
        assert len(set(digests)) == 1
        communicator.finish(timeout=60)
        group.barrier()
        if with_gloo:
            torch.distributed.destroy_process_group()
    print(f"rank {rank} of {size}: {steps} steps, {gradients.numel()} gradients, as torch's{' and gloo' if with_gloo else ''}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int, nargs="?", default=20)
    parser.add_argument("--gloo", action="store_true", help="also reduce by torch's gloo and compare")
    options = parser.parse_args()
    train(options.steps, options.gloo)
