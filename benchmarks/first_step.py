"""CPU seconds of the first step of `fit`, in which programs are traced and audited.

    python -m benchmarks.first_step --backends tensorflow --replicas 2

Each is measured in a process of its own: Keras alone, native tf.distribute on
TensorFlow, and this package without and with the audit. A model with its own
`train_step` is audited; one of Keras's parts is not.
"""

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import time

SIDES = ("keras", "native", "audit off", "audit warn")


def measure(side: str, name: str, has_own_step: bool, replicas: int) -> float:
    """Return the CPU seconds of a `fit` of one batch in this process."""
    import keras

    scope = _scope(side, replicas)
    from benchmarks.cases import CASES, loss, optimizer

    class OwnStep(keras.Model):
        def train_step(self, *args):
            return super().train_step(*args)

    case = next(case for case in CASES if case.name == name)
    x, y = case.rows(case.batch)
    with scope:
        model = case.build()
        if has_own_step:
            model = OwnStep(model.inputs, model.outputs)
        model.compile(optimizer(), loss(), metrics=["accuracy"])
    begin = time.process_time()
    model.fit(x, y, batch_size=case.batch, verbose=0)
    return time.process_time() - begin


def _scope(side: str, replicas: int):
    if side == "keras":
        return contextlib.nullcontext()
    if side == "native":
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration()] * replicas
        tf.config.set_logical_device_configuration(cpu, logical)
        devices = [f"CPU:{index}" for index in range(replicas)]
        return tf.distribute.MirroredStrategy(devices).scope()
    import keras_strategy as ks

    ks.config.set_logical_devices("cpu", replicas)
    if hasattr(ks.config, "audit"):
        ks.config.audit(side.split()[1])
    devices = [f"cpu:{index}" for index in range(replicas)]
    return ks.MirroredStrategy(devices).scope()


def _measure_alone(side: str, backend: str, case: list[str], replicas: int) -> str:
    """Measure in a process of its own; return the seconds, or "" if there is none."""
    if side == "native" and backend != "tensorflow":
        return ""
    command = [sys.executable, "-m", "benchmarks.first_step"]
    command += ["--replicas", str(replicas), "--one", side, *case]
    environment = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return "failed"
    return done.stdout.split()[-1]


def main() -> None:
    """Measure all that the command line asks for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--backends", nargs="+", default=["jax", "torch", "tensorflow"])
    add("--models", nargs="+", default=["MLP, batch 128", "CNN", "transformer"])
    add("--sides", nargs="+", default=SIDES)
    add("--replicas", type=int, default=2)
    add("--one", nargs=3, metavar=("SIDE", "MODEL", "STEP"))
    options = parser.parse_args()
    if options.one:
        side, name, step = options.one
        print(f"{measure(side, name, step == 'own', options.replicas):.2f}")
        return
    print(f"| backend | model | step | {' | '.join(options.sides)} |")
    print("| --- " * (3 + len(options.sides)) + "|")
    for backend, *case in itertools.product(
        options.backends, options.models, ("Keras's", "own")
    ):
        cells = [
            _measure_alone(side, backend, case, options.replicas)
            for side in options.sides
        ]
        print(f"| {' | '.join([backend, *case, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
