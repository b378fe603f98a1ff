"""Gradients that leave during backward are summed exactly, or made anew."""

import keras
import pytest

import keras_strategy as ks
from keras_strategy.testing import WorkerRunner

if keras.backend.backend() != "torch":
    pytest.skip("for the torch backend", allow_module_level=True)


import contextlib  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from typing import Any  # noqa: E402

import keras  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from keras_strategy.backends.torch.gradient_buckets import GradientBuckets  # noqa: E402
from tests.distributed.jobs import digits, in_charge, weights  # noqa: E402
from tests.distributed.test_training import equal  # noqa: E402

OPTIONS = ks.experimental.CommunicationOptions(bytes_per_pack=64)


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count gradients sent during backward: used ones, and discarded ones."""
    seen = {"early": 0, "unused": 0}
    end = GradientBuckets.end

    def counting_end(self: GradientBuckets, *args: Any) -> Any:
        sent = len(self.early)
        buffer = end(self, *args)
        seen["early" if buffer is not None else "unused"] += sent
        return buffer

    GradientBuckets.end = counting_end
    ks.config.audit("off")  # whose steps have gradients, too
    try:
        yield seen
    finally:
        GradientBuckets.end = end
        ks.config.audit()


class Stepwise(keras.Model):
    """A small model with a step of its own.

    Attributes:
        kind: What is special about the step.
        step: How many steps there were.
    """

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.step = kind, 0
        penalty = keras.regularizers.L2(0.01) if kind == "added" else None
        layers = keras.layers
        self.first = layers.Dense(8, "tanh", kernel_regularizer=penalty)
        self.middle = self.other = layers.Dense(8, "tanh")
        if kind == "branches":
            self.other = layers.Dense(8, "tanh")
        self.last = layers.Dense(3)
        # The losses of a step that gradients are not applied of at once.
        self.waiting = False

    def build(self, shape: Any) -> None:
        """Builds all layers, whichever are used."""
        self.first.build(shape)
        for layer in dict.fromkeys((self.middle, self.other, self.last)):
            layer.build((None, 8))

    def call(self, x: Any, training: bool = False) -> Any:
        """Goes another way in some steps, where the model is of that kind."""
        y = self.first(x)
        if self.kind == "added":
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(y)))
        goes_on = self.kind != "branches" or self.step % 3
        return self.last((self.middle if goes_on else self.other)(y))

    def train_step(self, data: Any) -> Any:
        """One of several kinds."""
        self.step += 1
        x, y = data
        replica = ks.get_replica_context()
        number = 0 if replica is None else replica.replica_id_in_sync_group
        if self.kind in ("keras", "added", "branches"):
            if number and len(x) == 1:  # a replica without rows: its stand-in row
                x = x * float("nan")
            return super().train_step((x, y))
        variables = self.trainable_variables
        if self.kind == "delayed":  # gradients of the last step, with rows of this one
            if self.waiting:
                self._apply([v.value.grad for v in variables])
            self.waiting = True
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True))
        loss.backward()
        if self.kind == "twice":
            self.compute_loss(x, y, self(x, training=True)).backward()
        if self.kind == "halved" or (self.kind == "one halves" and number):
            with torch.no_grad():
                for v in variables:
                    # The last worker changes them without changing what comes out.
                    v.value.grad.mul_(0.5 if self.kind == "halved" else 1.0)
        gradients = [v.value.grad for v in variables]
        if self.kind == "others" and self.step % 3 == 0:
            gradients = [gradient * 2.0 for gradient in gradients]
        if self.kind != "delayed":
            self._apply(gradients)
        return {"loss": loss.detach()}

    def _apply(self, gradients: Any) -> None:
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_variables)


class Adversaries(keras.Model):
    """Two networks with optimizers of their own, the second in the first one's way."""

    def __init__(self) -> None:
        super().__init__()
        layers = keras.layers
        self.maker = keras.Sequential(
            [keras.Input((6,)), layers.Dense(7, "tanh"), layers.Dense(4)]
        )
        self.judge = keras.Sequential(
            [keras.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(1)]
        )
        self.by_judge = keras.optimizers.Adam(0.01, global_clipnorm=0.1)
        self.by_judge.build(self.judge.trainable_variables)
        self.built = True

    def call(self, x: Any) -> Any:
        """Return the judge's opinion of the maker's output."""
        return self.judge(self.maker(x))

    def train_step(self, data: Any) -> Any:
        """Trains the judge, then the maker."""
        x, y = data
        real = torch.nn.functional.one_hot(y.long(), 4).float()
        for network, optimizer in (
            (self.judge, self.by_judge),
            (self.maker, self.optimizer),
        ):
            self.zero_grad()
            loss = keras.ops.mean(keras.ops.softplus(-self.judge(self.maker(x))))
            if network is self.judge:
                loss = keras.ops.mean(keras.ops.softplus(-self.judge(real))) - loss
            loss.backward()
            variables = network.trainable_variables
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in variables], variables)
        return {}


def trained(
    kind: str, alone: bool = False, in_pieces: bool = True
) -> tuple[list, dict[str, int]]:
    """Weights after training by steps of a kind, and what was counted."""
    keras.utils.set_random_seed(17)
    options = {"communication_options": OPTIONS} if in_pieces and not alone else {}
    _, scope = in_charge(alone, **options)
    with scope:
        model: Any = Adversaries() if kind == "two optimizers" else Stepwise(kind)
        model.build((None, 6))
        model.compile(
            keras.optimizers.Adam(
                0.01,
                global_clipnorm=0.5,
                gradient_accumulation_steps=2 if kind == "added" else None,
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            run_eagerly=True,
        )
    x, y = digits(29)  # the last batches are of 5 rows, and of 1
    with counted() as seen:
        for rows in (29, 25, 29):
            model.fit(x[:rows], y[:rows], 8, epochs=2, shuffle=False, verbose=0)
        if kind == "keras":
            model.first.trainable = False
            model.compile(model.optimizer, model.loss, run_eagerly=True)
            model.fit(x, y, 8, epochs=2, shuffle=False, verbose=0)
    found = weights(model)
    if kind == "two optimizers":
        found += [keras.ops.convert_to_numpy(v) for v in model.by_judge.variables]
    return found, seen


def sparse(strategy: Any = None) -> list:
    """Weights after training an embedding whose gradients are sparse."""
    keras.utils.set_random_seed(17)
    strategy = strategy or ks.MultiWorkerMirroredStrategy(communication_options=OPTIONS)
    with strategy.scope():
        embedding = torch.nn.Embedding(9, 4, sparse=True)
        model = keras.Sequential(
            [
                keras.Input((2,), dtype="int64"),
                keras.layers.TorchModuleWrapper(embedding),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
    x, y = np.arange(14).reshape(7, 2) % 9, np.ones((7, 2, 4), "float32")
    model.fit(x, y, 4, epochs=2, shuffle=False, verbose=0)
    return weights(model)


def different_gradients(strategy: Any = None) -> str:
    """Each replica has a gradient for another one of two variables."""
    strategy = strategy or ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = [keras.Variable(np.zeros(3, "float32")) for _ in range(2)]
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(variables)

    def step():
        gradients: list[Any] = [None, None]
        replica = ks.get_replica_context().replica_id_in_sync_group
        gradients[replica] = keras.ops.ones(3)
        with torch.no_grad():
            optimizer.apply(gradients, variables)

    try:
        strategy.run(step)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return f"no error, but {[keras.ops.convert_to_numpy(v) for v in variables]}"


def _sum_of_squares(model: Any, x: Any, y: Any) -> torch.Tensor:
    return keras.ops.mean(keras.ops.square(model(x) - y))


def runs(alone: bool = False) -> tuple[list, dict[str, int]]:
    """A loop with `run`, of which a step fails half way through backward.

    At the end one worker's gradients are on their way for nobody.
    """
    keras.utils.set_random_seed(17)
    strategy, scope = in_charge(
        alone, **({} if alone else {"communication_options": OPTIONS})
    )
    strategy = strategy or ks.OneDeviceStrategy("cpu:0")
    with scope:
        model: Any = keras.Sequential(
            [keras.Input((6,)), *(keras.layers.Dense(6) for _ in range(3))]
        )
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
    fails = [False]

    def fail(gradient):
        if fails[0]:
            raise ArithmeticError("half way")

    model.layers[0].kernel.value.register_hook(fail)
    x = digits(8)[0]

    def step(applies=True):
        model.zero_grad()
        loss = _sum_of_squares(model, torch.from_numpy(x), 1.0)
        (loss / strategy.num_replicas_in_sync).backward()  # gradients are added up
        if applies:
            variables = model.trainable_variables
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in variables], variables)

    with counted() as seen:
        for number in range(12):
            fails[0] = number in (5, 8)
            with contextlib.suppress(ArithmeticError):
                strategy.run(step)
        fails[0] = False
        # Outside of a run nothing is anybody's.
        _sum_of_squares(model, torch.from_numpy(x), 1.0).backward()
        strategy.run(step)
    if not alone and strategy.extended.cluster.is_chief:
        strategy.run(step, args=(False,))
    variables = [*model.variables, *optimizer.variables]
    return [keras.ops.convert_to_numpy(v) for v in variables], seen


def end_in_backward(how: str) -> None:
    """Trains until worker 1 is killed, or raises, when some gradients have left."""
    strategy = ks.MultiWorkerMirroredStrategy(communication_options=OPTIONS)
    with strategy.scope():
        model = Stepwise("keras")
        model.build((None, 6))
        model.compile(
            "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )

    def end(gradient):
        if model.step == 20 and strategy.extended.cluster.rank == 1:
            if how == "raises":
                raise ValueError("the disk is full")
            os.kill(os.getpid(), signal.SIGKILL)

    model.first.kernel.value.register_hook(end)
    x, y = digits(8)
    model.fit(np.repeat(x, 100, axis=0), np.repeat(y, 100), batch_size=8, verbose=0)


# True where gradients that leave early count, and where some are discarded.
KINDS = {
    # With a replica without rows, and a layer that is frozen later.
    "keras": (True, False),
    "added": (True, False),  # regularisers and `add_loss`, with accumulation
    "two optimizers": (True, False),
    "branches": (True, False),  # each has buckets of its own
    "twice": (False, True),  # two backward passes
    "halved": (False, True),
    "one halves": ((True, False), (False, True)),  # on the second worker alone
    "others": (True, True),  # in every third step
    "delayed": (True, True),  # where the next batch has another weight
}


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("kind", KINDS)
def test_workers_equal_one_process(kind, two_workers):
    if kind == "delayed":
        # One device has no weights of rows that could be those of another step.
        expected, seen = two_workers.run(trained, kind, in_pieces=False)[0]
        assert not any(seen.values())
    else:
        expected, _ = trained(kind, alone=True)
    counts = KINDS[kind]
    for rank, (result, seen) in enumerate(two_workers.run(trained, kind)):
        assert equal(result, expected), seen
        counted = bool(seen["early"]), bool(seen["unused"])
        assert counted == (counts[rank] if kind == "one halves" else counts), seen


def test_loop_with_failing_steps(two_workers):
    expected, _ = runs(alone=True)
    for result, seen in two_workers.run(runs):
        assert equal(result, expected), seen
        assert seen["early"] and seen["unused"]


def test_gradients_of_other_variables_are_refused(two_workers, two):
    name = "optimizer.apply without gradients of variables [1]"
    assert f"0: {name}" in different_gradients(two)
    for said in two_workers.run(different_gradients):
        assert f"worker 0: `{name}`" in said


def test_sparse_gradients(two_workers, mirrored):
    expected = sparse(ks.OneDeviceStrategy("cpu:0"))
    assert equal(sparse(mirrored(3)), expected)
    for result in two_workers.run(sparse):
        assert equal(result, expected)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", "worker 1 disconnected without notice"),
        ("raises", "worker 1 raised ValueError: the disk is full"),
    ],
)
def test_worker_ending_in_backward_is_named(how, said, starter):
    # Who does not notice waits for 600 s.
    with WorkerRunner(2, timeout_seconds=280, starter=starter) as runner:
        runner.start(end_in_backward, how)
        other, _ = runner.wait()
    assert other.exit_status != 0
    assert said in other.output
