"""A Keras model in `torch.nn.parallel.DistributedDataParallel`, by hand.

It follows https://keras.io/guides/distributed_training_with_torch/: a process for each
replica, `DistributedSampler` without shuffling, and the wrapper in the loop.
"""

from typing import Any

import torch

from conformance.program import Program
from conformance.systems.torch_loop import Rows, check, train
from conformance.systems.training import Outcome, build


def run(program: Program, replicas: int, initial: Any) -> Outcome:
    """Train in the guide's loop; metrics are added up over the processes."""
    check(program)
    torch.distributed.init_process_group("gloo")
    model = build(program, initial)
    rows = Rows(program)
    sampler = torch.utils.data.distributed.DistributedSampler(rows, shuffle=False)
    loader = torch.utils.data.DataLoader(
        rows, sampler=sampler, batch_size=program.batch_size // replicas
    )
    wrapped = torch.nn.parallel.DistributedDataParallel(model)

    def add_up(value: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(value)
        return value

    return train(program, model, wrapped, loader, torch.Tensor.backward, add_up)
