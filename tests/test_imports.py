"""What importing the package does to a process, in processes of its own."""

import json
import os
import subprocess
import sys

import keras
import pytest

BACKENDS = ("jax", "torch", "tensorflow")


def python(code: str, **environment: str) -> str:
    """Runs code in a new process and returns the last line it prints."""
    inherited = {k: v for k, v in os.environ.items() if "KERAS_STRATEGY" not in k}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_no_other_engine_is_imported():
    listing = "import sys, json; print(json.dumps([m for m in %r if m in sys.modules]))"
    alone = json.loads(python(f"import keras; {listing % (BACKENDS,)}"))
    code = (
        "import keras_strategy as ks; s = ks.OneDeviceStrategy('cpu:0');"
        f"{listing % (BACKENDS,)}"
    )
    assert set(json.loads(python(code))) == {*alone, keras.backend.backend()}


def test_importing_alone_changes_nothing_in_keras():
    code = """
import keras
before = {n: vars(keras.Model).get(n) for n in ("fit", "__new__", "compile")}
apply = keras.optimizers.Optimizer.apply
import keras_strategy
after = {n: vars(keras.Model).get(n) for n in before}
print(before == after and apply is keras.optimizers.Optimizer.apply)
"""
    assert python(code) == "True"


@pytest.mark.parametrize("backend", ["numpy"])
def test_a_backend_that_cannot_train(backend):
    code = """
import keras_strategy as ks
try:
    ks.MirroredStrategy()
except ks.errors.UnsupportedBackendError as error:
    print(str(error))
"""
    assert "in use is 'numpy'" in python(code, KERAS_BACKEND=backend)


TRAIN = """
import keras, numpy as np
keras.utils.set_random_seed(5)
model = keras.Sequential([
    keras.Input((6,)), keras.layers.Dense(8, "relu"),
    keras.layers.BatchNormalization(), keras.layers.Dropout(0.3),
    keras.layers.Dense(3, "softmax"),
])
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
x = np.random.RandomState(0).randn(37, 6).astype("float32")
y = np.random.RandomState(1).randint(0, 3, 37)
history = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history
print([w.tobytes().hex() for w in model.get_weights()], history)
"""


def test_a_model_outside_of_scopes_is_as_if_the_package_were_not_there():
    with_strategy = """
import keras_strategy as ks
strategy = ks.MirroredStrategy()
assert strategy.num_replicas_in_sync == 2
import keras
with strategy.scope():
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    other.compile("sgd", "mse")
"""
    plain = python(TRAIN)
    beside = python(with_strategy + TRAIN, KERAS_STRATEGY_LOGICAL_CPUS="2")
    assert plain == beside


def test_a_keras_that_changed_is_refused_by_name():
    code = """
import keras
del keras.layers.BatchNormalization._moments
fit, apply = keras.Model.fit, keras.optimizers.Optimizer.apply
import keras_strategy as ks
try:
    ks.MirroredStrategy(["cpu:0"])
except ks.errors.KerasVersionError as error:
    untouched = keras.Model.fit is fit and keras.optimizers.Optimizer.apply is apply
    print(untouched, error)
"""
    said = python(code)
    assert said.startswith(f"True Keras {keras.__version__} changed a function that ")
    assert "`BatchNormalization._moments` is gone. Please upgrade" in said
