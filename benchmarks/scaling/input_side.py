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
ROWS = 128
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
    epoch, is_chief = train(options.workers, options.at_once)
    epoch()  # builds and compiles
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        epoch()
        seconds.append(time.perf_counter() - began)
    if options.side != "ours" and "keras_strategy" in sys.modules:
        raise RuntimeError("A peer must not import keras_strategy.")
    if is_chief:
        Path(options.out).write_text(json.dumps(ROWS / min(seconds)))


def _ours(workers: int, threads: int):
    import keras_strategy as ks

    strategy: Any = ks.OneDeviceStrategy("cpu:0")
    if workers > 1:
        strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = _model()
    data = ks.IndexedDataset(SlowRows(), BATCH, shuffle=True, threads=threads)
    is_chief = workers == 1 or strategy.extended.cluster.is_chief
    return lambda: model.fit(data, verbose=0), is_chief


def _keras(workers: int, at_once: int):
    import keras

    rows = SlowRows()

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return ROWS // BATCH

        def __getitem__(self, index):
            some = [rows[index * BATCH + i] for i in range(BATCH)]
            x, y = zip(*some, strict=True)
            return np.stack(x), np.stack(y)

    model, data = _model(), Batches(workers=at_once)
    return lambda: model.fit(data, verbose=0), True


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


def _ddp(workers: int, processes: int):
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

    def epoch():
        for x, y in loader:
            adam.zero_grad()
            nn.functional.mse_loss(ddp(x)[:, 0], y).backward()
            adam.step()

    return epoch, os.environ["RANK"] == "0"


if __name__ == "__main__":
    main()
