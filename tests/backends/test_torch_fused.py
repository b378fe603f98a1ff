"""Adam's step by torch's own kernel, in the place of Keras's."""

import keras
import numpy as np
import pytest

torch = pytest.importorskip("torch")
if keras.backend.backend() != "torch":
    pytest.skip("for the torch backend", allow_module_level=True)

import keras_strategy as ks  # noqa: E402
from keras_strategy.backends.torch import patches_optimizers  # noqa: E402

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.1),
    "amsgrad": lambda: keras.optimizers.Adam(0.1, amsgrad=True, epsilon=0.3),
    "amsgrad, as a number": lambda: keras.optimizers.Adam(0.1, amsgrad=1),
    "betas": lambda: keras.optimizers.Adam(0.1, beta_1=0.5, beta_2=0.6),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1, clipnorm=0.5),
    "schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
    "accumulation": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "average": lambda: keras.optimizers.Adam(0.1, use_ema=True),
}


@pytest.fixture
def calls(mirrored, monkeypatch):
    """How often the kernel was called."""
    mirrored(2)  # which installs the hook, and tries the kernel
    seen = []
    kernel = patches_optimizers._adam

    def counted(*args, **kwargs):
        seen.append(args)
        kernel(*args, **kwargs)

    monkeypatch.setattr(patches_optimizers, "_adam", counted)
    return seen


def trained(strategy, make, dtype="float32", transposed=False):
    """Variables and slots after some steps, of the same gradients on each replica."""
    with strategy.scope():
        first = torch.arange(12.0).reshape(3, 4)
        variables = [
            keras.Variable(first, dtype=dtype),
            keras.Variable([1.0], dtype=dtype),
        ]
        optimizer = make()
        optimizer.build(variables)
    if transposed:
        variables[0].value.data = variables[0].value.data.t().contiguous().t()
    share = strategy.num_replicas_in_sync

    def step(number):
        gradients = [torch.sin(v.value.detach() + number) / share for v in variables]
        optimizer.apply(gradients, variables)

    for number in range(5):
        strategy.run(step, args=(float(number),))
    return [keras.ops.convert_to_numpy(v) for v in [*variables, *optimizer.variables]]


@pytest.mark.needs_patch("Adam._parallel_update_step", backend="torch")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_update_matches_keras(name, mirrored, calls):
    expected = trained(ks.OneDeviceStrategy("cpu:0"), OPTIMIZERS[name])
    assert not calls
    found = trained(mirrored(2), OPTIMIZERS[name])
    assert calls
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dtype, rtol", [("float64", 1e-12), ("bfloat16", 0.02)])
def test_fused_update_supports_other_dtypes(dtype, rtol, mirrored, calls):
    expected = trained(ks.OneDeviceStrategy("cpu:0"), keras.optimizers.Adam, dtype)
    found = trained(mirrored(2), keras.optimizers.Adam, dtype)
    assert calls
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(
            a.astype("float64"), b.astype("float64"), rtol=rtol, atol=rtol
        )


def test_non_contiguous_memory_uses_keras(mirrored, calls):
    make = OPTIMIZERS["adam"]
    expected = trained(ks.OneDeviceStrategy("cpu:0"), make, transposed=True)
    found = trained(mirrored(2), make, transposed=True)
    assert not calls
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


def test_changed_keras_formula_is_kept(monkeypatch):
    assert patches_optimizers._is_keras_adam()
    original = patches_optimizers.Adam._parallel_update_step

    def half(self, grads, variables, learning_rate):
        original(self, grads, variables, learning_rate / 2)

    monkeypatch.setattr(patches_optimizers.Adam, "_parallel_update_step", half)
    assert not patches_optimizers._is_keras_adam()


def test_fused_update_keeps_variable_names():
    def number():
        name = keras.optimizers.Adam().name
        return int(name.rpartition("_")[2]) if "_" in name else 0

    first, second = number(), number()  # equal in Keras 3.13, which counts none
    patches_optimizers._is_keras_adam()
    assert number() - second == second - first


def test_fused_update_in_stateless_scope(two, calls):
    with two.scope():
        variable = keras.Variable([1.0])
        adam = keras.optimizers.Adam(0.5)
        adam.build([variable])
    slots = [v for v in adam.variables if v.shape == (1,)]

    def step():
        held = [(v, torch.full((1,), 4.0 if v is variable else 0.0)) for v in slots]
        value = torch.full((1,), 4.0)
        with keras.StatelessScope(state_mapping=[*held, (variable, value)]):
            adam.apply([torch.ones(1)], [variable])
        return value

    values = two.run(step).values
    assert [float(value) for value in values] == pytest.approx([3.5, 3.5], 1e-5)
    assert float(variable.value) == 1.0
    assert not calls
