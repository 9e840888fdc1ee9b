"""Trains a network on handwritten digits, on several ranks. The gradients of a layer are summed over the ranks while torch computes those of the layers before it.

    scripts/digits                                       # fetches target/digits.csv
    torchrun --nproc-per-node 2 examples/train_digits.py target/digits.csv

Rank 0 trains the same network in one process, too, which sees the whole batch: after each step its weights have the same bits, because the sums are formed in the order of the ranks. The
last line of rank 0 has the loss and the accuracy on digits that were not trained on.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from data_parallel import flatten_gradients

import doorbell

# Of which some versions of torch have no types.
backward: Any = torch.autograd.backward

BATCH = 64
# Each of so many images is held out.
HELD_OUT = 5


def read(file: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of 64 pixels from 0 to 1, and the digits on them."""
    with open(file) as lines:
        rows = torch.tensor([[int(value) for value in line.split(",")] for line in lines])
    return rows[:, :-1] / 16, rows[:, -1]


def network() -> torch.nn.Sequential:
    """The same weights on every rank."""
    torch.manual_seed(1)
    parts = [torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)]
    return torch.nn.Sequential(*parts)


def layers_of(net: torch.nn.Sequential) -> list[torch.nn.Linear]:
    return [part for part in net if isinstance(part, torch.nn.Linear)]


def call_when_accumulated(layer: torch.nn.Linear, call: Callable[[], None]) -> list[Any]:
    """Has each backward pass call this when the gradients of all parameters of the layer are complete, while it goes on with the layers before. The result has to be kept."""
    parameters = list(layer.parameters())
    complete = 0

    def accumulated(*_: object) -> None:
        nonlocal complete
        complete += 1
        if complete == len(parameters):
            complete = 0
            call()

    # The nodes of torch that add to `grad`: hooks of a tensor come before that.
    nodes: list[Any] = [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in parameters]  # type: ignore[union-attr, unused-ignore]
    for node in nodes:
        node.register_hook(accumulated)
    return nodes


def loss_of(net: torch.nn.Sequential, images: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
    """So that the sum over all shares of a batch is the mean over the batch."""
    loss: torch.Tensor = torch.nn.functional.cross_entropy(net(images), digits, reduction="sum").div(BATCH)
    return loss


class OneProcess:
    """The same training without the library."""

    def __init__(self) -> None:
        self.net = network()
        self.gradients = [flatten_gradients(layer) for layer in layers_of(self.net)]
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def step(self, shares: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Returns the loss before the step."""
        sums, loss = [torch.zeros_like(flat) for flat in self.gradients], 0.0
        for number, share in enumerate(shares):
            for flat in self.gradients:
                flat.zero_()
            part = loss_of(self.net, *share)
            backward(part)
            loss += part.item()
            # Minus zero is another zero.
            sums = [flat.clone() if number == 0 else total + flat for total, flat in zip(sums, self.gradients, strict=True)]
        for flat, total in zip(self.gradients, sums, strict=True):
            flat.copy_(total)
        self.optimizer.step()
        return loss


def train(file: str, epochs: int) -> None:
    # Other threads of torch would take the cores of other ranks, and the order of its sums depends on their number.
    torch.set_num_threads(1)
    images, digits = read(file)
    held_out = torch.arange(len(digits)).remainder(HELD_OUT).eq(0)
    with doorbell.Group.from_environment() as group:
        ours, whole = network(), OneProcess() if group.rank == 0 else None
        gradients = [flatten_gradients(layer) for layer in layers_of(ours)]
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
        # Prepared once for each layer: its gradients are registered where they are.
        communicator = group.communicator()
        sums = [communicator.all_reduce(flat, algorithm="parameter-server") for flat in gradients]
        for total in sums:
            communicator.match_ahead(total, timeout=60)
        stream = doorbell.HostStream("gradients")
        tickets: list[doorbell.CollectiveTicket] = []
        kept = [
            call_when_accumulated(layer, lambda total=total: tickets.append(communicator.launch(stream, total)))  # type: ignore[misc]
            for layer, total in zip(layers_of(ours), sums, strict=True)
        ]
        epoch_loss = first_loss = 0.0
        steps = early = reduced = 0
        for epoch in range(epochs):
            torch.manual_seed(100 + epoch)
            order = torch.nonzero(held_out.logical_not()).flatten()
            order = order[torch.randperm(len(order))]
            epoch_loss = 0.0
            for batch in order.split(BATCH):
                shares = [(images[part], digits[part]) for part in batch.tensor_split(group.size)]
                for flat in gradients:
                    flat.zero_()
                backward(loss_of(ours, *shares[group.rank]))
                early += sum(ticket.done() for ticket in tickets)
                reduced += len(tickets)
                for ticket in tickets:
                    ticket.wait(timeout=60)
                tickets.clear()
                optimizer.step()
                if whole is not None:
                    loss = whole.step(shares)
                    first_loss = first_loss if steps else loss
                    epoch_loss += loss * BATCH / len(order)
                    for mine, theirs in zip(ours.parameters(), whole.net.parameters(), strict=True):
                        assert torch.equal(mine, theirs), f"epoch {epoch}"
                steps += 1
        del kept
        # Each rank has the same bits.
        weights = torch.cat([parameter.detach().flatten() for parameter in ours.parameters()])
        assert len(set(group.gather(weights.numpy().tobytes()))) == 1
        communicator.finish(timeout=60)
        group.barrier()
    right = int((ours(images[held_out]).argmax(1) == digits[held_out]).sum())
    count = int(held_out.sum())
    if group.rank == 0:
        print(
            f"{group.size} ranks, {weights.numel()} weights, {steps} steps with the bits of one process; "
            f"{early} of {reduced} sums were complete before backward had ended; loss {first_loss:.3f} -> {epoch_loss:.3f}; {right / count:.1%} of {count} digits"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("file", help="what scripts/digits writes")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    train(options.file, options.epochs)
