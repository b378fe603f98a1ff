"""`plan`: a step's bytes, found before anything is trained."""

import functools
import random
import resource
import tracemalloc

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategy as ks
from benchmarks import memory, worker_memory
from keras_strategy.core.registry import get_engine
from keras_strategy.testing import WorkerRunner

BACKEND = keras.backend.backend()
SHARDS = [
    shard
    for shard in (None, "optimizer", "parameters")
    if shard is None or get_engine().sharding_unsupported_reason(shard) is None
]
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.AdamW(use_ema=True),
    "sgd": lambda: keras.optimizers.SGD(momentum=0.9, gradient_accumulation_steps=2),
    "lamb": keras.optimizers.Lamb,
    "adafactor": keras.optimizers.Adafactor,
    "muon": lambda: keras.optimizers.Muon(0.01),
}


def small(optimizer="adam", policy="float32"):
    with_policy = functools.partial(layers.Dense, dtype=policy)
    model = keras.Sequential(
        [
            keras.Input((12,)),
            with_policy(35, "gelu"),
            layers.BatchNormalization(dtype=policy),
            layers.Dropout(0.1, dtype=policy),
            with_policy(7),
        ]
    )
    model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


def transformer(optimizer="adam", width=700, words=900):
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(words, width)(tokens)
    x = x + layers.MultiHeadAttention(4, width // 4)(x, x)
    x = layers.LayerNormalization()(x)
    x = x + layers.Dense(width)(layers.Dense(4 * width, "gelu")(x))
    model = keras.Model(tokens, layers.Dense(words, use_bias=False)(x))
    model.compile(OPTIMIZERS[optimizer](), "sparse_categorical_crossentropy")
    return model


def assert_equals_report(build, replicas):
    plan = ks.plan(build, batch_size=8, devices=replicas)
    by_shard = {choice.shard: choice for choice in plan.choices}
    cpus = [f"cpu:{index}" for index in range(replicas)]
    for shard in SHARDS:
        strategy = ks.MirroredStrategy(cpus, shard=shard)
        with strategy.scope():
            model = build()
            model.optimizer.build(model.trainable_variables)
        report, choice = strategy.memory_report(model), by_shard[shard]
        for kind in ("parameters", "slots", "others"):
            assert getattr(choice, kind) == max(getattr(report, kind)), (shard, kind)


@pytest.mark.full(keep=5, keep_on="tensorflow")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_bytes_equal_memory_report(optimizer, replicas):
    assert_equals_report(lambda: small(optimizer), replicas)


@pytest.mark.full(keep_on="tensorflow")
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_bytes_of_units_equal_memory_report(optimizer):
    """With more weights than one unit on torch."""
    assert_equals_report(lambda: transformer(optimizer), 4)


class MixedAdam(keras.optimizers.Adam):
    """Adam for bfloat16 weights, with float32 moments and a float32 copy of them."""

    def build(self, variables):
        super().build(variables)
        self.copies = self.add_optimizer_variables(variables, "copy")

    def add_variable_from_reference(self, reference_variable, *args, **kwargs):
        weight = reference_variable
        stand_in = keras.Variable("zeros", weight.shape, "float32", name=weight.name)
        return super().add_variable_from_reference(stand_in, *args, **kwargs)


def in_bfloat16():
    dense = layers.Dense(512, use_bias=False, dtype="bfloat16")
    model = keras.Sequential([keras.Input((512,), dtype="bfloat16"), dense])
    model.compile(MixedAdam(), "mse")
    return model


@pytest.mark.full(keep_on="tensorflow")
@pytest.mark.parametrize("devices", [1, 2, 8, 64])
def test_states_equal_zero_table(devices):
    """Rajbhandari et al., 2020, figure 1, for K = 12; stage 2 is no choice of ours."""
    per_weight = {
        choice.shard: 2 * choice.parameters + choice.slots  # with the gradients
        for choice in ks.plan(in_bfloat16, 8, devices).choices
        if choice.parameters
    }
    expected = {None: 16, "optimizer": 4 + 12 / devices, "parameters": 16 / devices}
    if BACKEND != "jax":  # which alone shards slots of the user's optimizers
        expected["optimizer"] = 16
        expected.pop("parameters")
    for shard, size in expected.items():
        # The learning rate and the number of iterations count, too.
        assert per_weight[shard] / 512**2 == pytest.approx(size, rel=1e-3)


@pytest.mark.skipif(BACKEND == "jax", reason="JAX shards any optimizer's slots")
def test_unshardable_optimizer_is_reported():
    plan = ks.plan(in_bfloat16, 8, 2)
    choice = plan.choices[2]
    assert choice.fits is False and "parameters" in choice.note
    assert choice.note in str(plan)


@pytest.mark.full(keep_on="jax")
def test_model_larger_than_memory_allocates_nothing():
    plan = functools.partial(ks.plan, batch_size=8, devices=512, memory=35e9)
    plan(small)  # imports what planning needs
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = plan(functools.partial(transformer, "adam", 11_200, 40_000))
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.choices[0].parameters > 4 * 2e9
    assert kilobytes < 300_000 and peak < 300e6
    assert result.choices[0].fits is False


def dense(width):
    hidden = [layers.Dense(width, "tanh") for _ in range(memory.LAYERS)]
    model = keras.Sequential([keras.Input((width,)), *hidden])
    model.compile("adam", "mse")
    return model


@pytest.mark.full
@pytest.mark.skipif(BACKEND != "torch", reason="others do not count their CPUs' memory")
def test_peak_is_measured_peak(starter):
    """By torch's profiler, as for the tables of docs/memory.md."""
    build = functools.partial(dense, 1100)
    (choice,) = ks.plan(build, memory.ROWS, 2, shard=None).choices
    with WorkerRunner(2, timeout_seconds=120, starter=starter) as runner:
        found = runner.run(worker_memory.measure_worker, 1100, None)
    _, slots, peak = map(max, zip(*[sizes for sizes, _ in found], strict=True))
    assert choice.slots == slots
    assert choice.peak == pytest.approx(peak, rel=0.02)


@pytest.mark.skipif(BACKEND != "jax", reason="the compiler reports it on JAX")
@pytest.mark.parametrize("shard", SHARDS)
def test_peak_is_that_of_the_program_of_fit(shard):
    build = functools.partial(dense, 500)
    (choice,) = ks.plan(build, memory.ROWS, 4, shard).choices
    with ks.MirroredStrategy([f"cpu:{i}" for i in range(4)], shard=shard).scope():
        model = build()
        model.optimizer.build(model.trainable_variables)
        found = memory.compile_fit(model, 500).memory_analysis()
    most = found.argument_size_in_bytes + found.temp_size_in_bytes
    most += found.output_size_in_bytes - found.alias_size_in_bytes
    assert choice.peak == pytest.approx(most, rel=0.02)


@pytest.mark.skipif(BACKEND != "jax", reason="the compiler needs the devices on JAX")
def test_peak_needs_the_devices():
    (choice,) = ks.plan(small, 64, 64, "parameters").choices
    assert choice.peak is None and "compiles the step for 64 devices" in choice.note


@pytest.mark.full(keep_on="jax")
@pytest.mark.skipif(BACKEND == "tensorflow", reason="it measures no peak")
def test_peak_is_that_of_fullest_device():
    build = functools.partial(dense, 64)

    def step(rows, devices):
        (choice,) = ks.plan(build, rows, devices, shard=None).choices
        return choice.peak

    by_rows = [step(rows, 1) for rows in (2, 3)]
    assert by_rows[0] < by_rows[1]
    assert step(9, 4) == step(12, 4) > step(8, 4)


@pytest.mark.full(keep_on="torch")
def test_cheapest_choice_fits():
    build = functools.partial(transformer, width=128)
    plan = ks.plan(build, 8, 4)
    assert all(choice.fits is None for choice in plan.choices if choice.parameters)
    assert plan.cheapest == plan.choices[0]
    peaks = [choice.peak for choice in plan.choices]
    if BACKEND == "tensorflow":
        assert peaks == [None] * 3 and "peak  " not in str(plan)
        plan = ks.plan(build, 8, 4, memory=plan.choices[0].parameters)
        assert plan.cheapest is None and "fits: nothing" in str(plan)
    elif BACKEND == "torch":
        assert peaks[0] and peaks[1:] == [None] * 2 and "shard=None only" in str(plan)
        assert ks.plan(build, 8, 4, memory=peaks[0]).choices[0].fits is True
        plan = ks.plan(build, 8, 4, memory=peaks[0] - 1)
        assert [choice.fits for choice in plan.choices] == [False, None, None]
        assert plan.cheapest == plan.choices[1]
        assert ks.plan(build, 8, 4, memory=plan.choices[2].slots).cheapest is None
    else:
        plan = ks.plan(build, 8, 4, memory=min(peaks))
        assert plan.cheapest == plan.choices[peaks.index(min(peaks))]
        assert [choice.fits for choice in plan.choices].count(True) == 1
        assert ks.plan(build, 8, 4, memory=min(peaks) - 1).cheapest is None


def test_plan_changes_nothing():
    state, draws = random.getstate(), np.random.get_state()[1].tolist()
    before = keras.random.normal((3,))
    keras.utils.set_random_seed(0)
    state = random.getstate()
    ks.plan(small, 8, 4)
    assert random.getstate() == state
    assert np.random.get_state()[1].tolist() == draws
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(before),
        keras.ops.convert_to_numpy(keras.random.normal((3,))),
    )


class ReadsValues(layers.Layer):
    def call(self, x):
        raise TypeError("it needs values")


def test_unknown_peak_has_a_reason():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.reads = layers.Dense(3), ReadsValues()

        def build(self, input_shape):
            self.dense.build(input_shape)

        def call(self, x):
            return self.reads(self.dense(x))

    def build():
        model = Subclassed()
        model.build((None, 4))
        model.compile("sgd", "mse")
        return model

    (choice,) = ks.plan(build, 8, 2, shard=None).choices
    assert choice.peak is None and choice.parameters == 60
    reason = "TensorFlow allocates" if BACKEND == "tensorflow" else "TypeError: "
    assert f"The peak is unknown: {reason}" in choice.note


@pytest.mark.skipif(BACKEND == "tensorflow", reason="it measures no peak")
def test_unknown_length_is_reported():
    def build():
        model = keras.Sequential([keras.Input((None, 8)), layers.Dense(16)])
        model.compile("adam", "mse")
        return model

    (choice,) = ks.plan(build, 8, 2, shard=None).choices
    assert choice.peak is None and "shape=(None, None, 8)" in choice.note


def unbuilt():
    model = keras.Sequential([layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "`batch_size` must be .* Received: batch_size=0", (small, 0, 2)),
        (ValueError, "`devices` must be an integer .*devices=1.5", (small, 8, 1.5)),
        (ValueError, "`shard` must be None, .*shard='zero'", (small, 8, 2, "zero")),
        (ValueError, "`memory` must be .*memory='1GB'", (small, 8, 2, "all", "1GB")),
        (TypeError, "`build` must return .* returns None", (lambda: None, 8, 2)),
        (TypeError, "`build` must be a function .*build=7", (7, 8, 2)),
        (ValueError, "built=False. Call `model.compile`", (unbuilt, 8, 2)),
        (ValueError, "optimizer=None", (lambda: keras.Sequential(), 8, 2)),
    ],
)
def test_bad_arguments_are_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        ks.plan(*arguments)


def test_plan_in_scope_is_refused(two):
    with two.scope(), pytest.raises(RuntimeError, match="outside of scopes"):
        ks.plan(small, 8, 2)
