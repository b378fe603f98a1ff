"""One process that trains on a slow source; peers do not import `keras_strategy`."""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 32  # of all workers
ROWS = 512
EPOCHS = 4  # the first of which builds and compiles
SECONDS = 0.005
FEATURES = 64


class SlowRows:
    """Rows of which each takes its time."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.float32]:
        began = time.perf_counter()
        text = " ".join(str((index * i) % 256) for i in range(FEATURES))
        x = np.array(text.split(), "float32") / 255
        time.sleep(max(0.0, SECONDS - (time.perf_counter() - began)))
        return x, np.float32(x.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("ours", "keras", "ddp"))
    parser.add_argument("--out", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--at-once", type=int, required=True)
    options = parser.parse_args()
    train = {"ours": _ours, "keras": _keras, "ddp": _ddp}[options.side]
    ended: list[float] = []
    is_chief = train(options.workers, options.at_once, ended)
    if options.side != "ours" and "keras_strategy" in sys.modules:
        raise RuntimeError("A peer must not import keras_strategy.")
    if is_chief:
        seconds = float(np.median(np.diff(ended[-EPOCHS:])))
        Path(options.out).write_text(json.dumps(ROWS / seconds))


def _ours(workers: int, threads: int, ended: list[float]) -> bool:
    import keras_strategy as ks

    class Batches(ks.IndexedDataset):
        def on_epoch_end(self):
            super().on_epoch_end()
            ended.append(time.perf_counter())

    if workers > 1:
        strategy: Any = ks.MultiWorkerMirroredStrategy()
    else:
        strategy = ks.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        model = _model()
    data = Batches(SlowRows(), BATCH, shuffle=True, threads=threads)
    model.fit(data, epochs=EPOCHS, verbose=0)
    return workers == 1 or strategy.extended.cluster.is_chief


def _keras(workers: int, at_once: int, ended: list[float]) -> bool:
    import keras

    rows = SlowRows()

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return ROWS // BATCH

        def __getitem__(self, index):
            some = [rows[index * BATCH + i] for i in range(BATCH)]
            x, y = zip(*some, strict=True)
            return np.stack(x), np.stack(y)

        def on_epoch_end(self):
            ended.append(time.perf_counter())

    _model().fit(Batches(workers=at_once), epochs=EPOCHS, verbose=0)
    return True


def _model() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(64, "relu"),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse")
    return model


def _ddp(workers: int, processes: int, ended: list[float]) -> bool:
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    nn = torch.nn
    net = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 1))
    ddp = nn.parallel.DistributedDataParallel(net)
    adam = torch.optim.Adam(ddp.parameters())
    rows: Any = SlowRows()
    sampler = DistributedSampler(rows, shuffle=True)
    loader = DataLoader(
        rows,
        batch_size=BATCH // workers,
        sampler=sampler,
        num_workers=processes,
        persistent_workers=processes > 0,
    )

    for number in range(EPOCHS):
        sampler.set_epoch(number)
        for x, y in loader:
            adam.zero_grad()
            nn.functional.mse_loss(ddp(x)[:, 0], y).backward()
            adam.step()
        ended.append(time.perf_counter())
    return os.environ["RANK"] == "0"


if __name__ == "__main__":
    main()
