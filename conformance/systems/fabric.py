"""A Keras model under Lightning Fabric.

It follows https://lightning.ai/docs/fabric/stable/fundamentals/convert.html: `setup`
the model and the loader, `backward` by Fabric, and its `all_gather` and `all_reduce`
for metrics.
"""

import functools
from typing import Any

import keras
import torch
from lightning_fabric import Fabric

from conformance.program import Program
from conformance.systems.torch_loop import Rows, check, train
from conformance.systems.training import Outcome, build


def run(program: Program, replicas: int, initial: Any) -> Outcome:
    """Train in a loop with Fabric, in processes as of torchrun."""
    check(program)
    fabric = Fabric(accelerator="cpu", devices=replicas, strategy="ddp")
    fabric.launch()
    model = build(program, initial)
    loader = torch.utils.data.DataLoader(Rows(program), program.batch_size // replicas)
    loader = fabric.setup_dataloaders(loader)
    wrapped = fabric.setup(model)

    def gather(batch: Any) -> Any:
        loss, *others = batch
        others = keras.tree.map_structure(
            lambda a: None if a is None else fabric.all_gather(a).flatten(0, 1), others
        )
        return fabric.all_reduce(loss, reduce_op="mean"), *others

    add_up = functools.partial(fabric.all_reduce, reduce_op="sum")
    return train(program, model, wrapped, loader, fabric.backward, add_up, gather)
