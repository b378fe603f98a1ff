"""A Keras model under Hugging Face Accelerate.

It follows https://huggingface.co/docs/accelerate/quicktour: `prepare` the model and the
loader, `backward` by the accelerator, and metrics of what `gather_for_metrics` returns,
which leaves out the rows that the last batch repeats. `split_batches=True` keeps the
global batch size.
"""

from typing import Any

import keras
import torch
from accelerate import Accelerator, DataLoaderConfiguration

from conformance.program import Program
from conformance.systems.torch_loop import Rows, check, train
from conformance.systems.training import Outcome, build


def run(program: Program, replicas: int, initial: Any) -> Outcome:
    """Train in a loop with the accelerator."""
    check(program)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    assert accelerator.num_processes == replicas
    model = build(program, initial)
    loader = torch.utils.data.DataLoader(Rows(program), program.batch_size)
    wrapped, loader = accelerator.prepare(model, loader)

    def gather(batch: Any) -> Any:
        loss, *others = batch
        arrays = [a for a in keras.tree.flatten(others) if a is not None]
        gathered = iter(accelerator.gather_for_metrics(arrays))
        others = keras.tree.map_structure(
            lambda a: None if a is None else next(gathered), others
        )
        return accelerator.reduce(loss, "mean"), *others

    how = accelerator.backward, accelerator.reduce, gather
    return train(program, model, wrapped, loader, *how)
