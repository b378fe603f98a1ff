"""Loops on torch by hand, on one device or under DistributedDataParallel.

Every rank takes its rows of the same shuffled global batches, DistributedDataParallel
sums the gradients while they are computed, and metrics stay local until the epoch ends.
"""

from collections.abc import Callable
from typing import Any

import keras
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cases import Case, loss, optimizer
from benchmarks.comparisons import CNN, LARGE_MLP, MLP
from benchmarks.programs import Train

# What a loop does with the rows of one step.
Step = Callable[[torch.Tensor, torch.Tensor], Any]


def keras_loop(case: Case, distributed: bool = True, compiled: bool = False) -> Train:
    """Train the same Keras model, optimizer and metrics.

    If `compiled`, torch.compile makes a graph of the forward pass with torch's own
    kernels, as ours on a CPU: that is the fastest there.
    """
    keras.utils.set_random_seed(0)
    model, adam, mean_loss_of = case.build(), optimizer(), loss()
    adam.build(model.trainable_variables)
    metrics = (keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy())
    variables = model.trainable_variables
    device = variables[0].value.device
    module: Any = model
    if distributed:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    forward = torch.compile(module, backend="eager") if compiled else module

    def step(x, y):
        logits = forward(x, training=True)
        value = mean_loss_of(y, logits)
        module.zero_grad()
        value.backward()
        with torch.no_grad():
            adam.apply([v.value.grad for v in variables], variables)
            metrics[0].update_state(value, len(x))
            metrics[1].update_state(y, logits)

    def end():
        for metric in metrics:
            for variable in metric.variables if distributed else ():
                dist.all_reduce(variable.value.data)
            float(metric.result())
            metric.reset_state()

    return _loop(case, step, end, device)


def module_loop(case: Case, compiled: bool = False) -> Train:
    """Train torch's own layers and optimizer, without the cost of Keras."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(_MODULES[case.name](), gradient_as_bucket_view=True)
    forward = torch.compile(ddp) if compiled else ddp
    adam = torch.optim.Adam(ddp.parameters(), 1e-3, eps=1e-7, fused=True)
    sums = torch.zeros(3)

    def step(x, y):
        logits = forward(x)
        value = functional.cross_entropy(logits, y)
        adam.zero_grad()
        value.backward()
        adam.step()
        with torch.no_grad():
            sums[0] += value * len(x)
            sums[1] += (logits.argmax(dim=-1) == y).sum()
            sums[2] += len(x)

    def end():
        dist.all_reduce(sums)
        (sums[:2] / sums[2]).tolist()
        sums.zero_()

    return _loop(case, step, end, torch.device("cpu"))


def _loop(
    case: Case, step: Step, end: Callable[[], None], device: torch.device
) -> Train:
    """Train an epoch over this rank's rows of the shuffled global batches."""
    rank, ranks = 0, 1
    if dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()

    def train(steps: int) -> None:
        x, y = (torch.from_numpy(array) for array in case.rows(steps * case.batch))
        y = y.long()
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(x), generator=generator)
        for rows in order.view(steps, ranks, -1)[:, rank]:
            step(x[rows].to(device), y[rows].to(device))
        end()

    return train


def _mlp() -> torch.nn.Module:
    nn = torch.nn
    return nn.Sequential(
        *(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()),
        nn.Linear(256, 10),
    )


def _cnn() -> torch.nn.Module:
    nn = torch.nn
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),  # one channel; the rows' own last dimension is 1
        nn.Flatten(3),
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 10)),
    )


_MODULES = {MLP: _mlp, LARGE_MLP: _mlp, CNN: _cnn}
