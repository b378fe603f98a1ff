"""Effects of importing the package, in processes of their own."""

import ast
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import keras
import pytest

import keras_strategy as ks

# What no adapter has a part in.
on_torch = pytest.mark.skipif(
    keras.backend.backend() != "torch",
    reason="the same on every backend: it runs on torch",
)


SOONEST = "jax" if importlib.util.find_spec("jax") else keras.backend.backend()


def python(code: str, **environment: str) -> str:
    """Runs code in a fresh interpreter and returns the last line it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture
def last_line(program):
    """Runs code where Keras is imported, and gives the last line that it prints."""

    def run(code: str, *arguments: str, **environment: str) -> str:
        end = program(code, *arguments, **environment)
        assert end.exit_status == 0, end.output
        # Triton, which torch may import, reports leaks when Python ends.
        return end.output.partition("nanobind: leaked")[0].splitlines()[-1]

    return run


# Imports of a module by its name, which import-linter does not see: how many a file has
# whose name is not a constant, or is one of this package.
BY_NAME = {
    "__init__.py": 4,  # the lazily loading package
    "coordinator/__init__.py": 1,
    "commands/cli.py": 2,  # the command that runs
    "core/protocols.py": 1,  # the adapter in use
    "core/registry.py": 1,
    # Modules of others.
    "cluster_resolver/base.py": 1,
    "keras_patches/patch.py": 1,
    "testing/worker_call.py": 1,
}


def count_imports_by_name(code: str) -> int:
    tree = ast.parse(code)
    names = {"import_module", "__import__"}
    count = sum(
        getattr(node, "attr", getattr(node, "id", None)) in names
        or isinstance(node, ast.ImportFrom | ast.Import)
        and any(alias.name == "import_module" for alias in node.names)
        for node in ast.walk(tree)
    )
    calls = (
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args
    )
    return count - sum(
        getattr(call.func, "attr", None) == "import_module"
        and isinstance(call.args[0], ast.Constant)
        and str(call.args[0].value).partition(".")[0] not in ("", "keras_strategy")
        for call in calls
    )


@on_torch
def test_layers_import_modules_of_package_by_statement():
    folder = pathlib.Path(ks.__file__).parent
    counts = {
        str(path.relative_to(folder)): count_imports_by_name(path.read_text())
        for path in folder.rglob("*.py")
    }
    assert {path: count for path, count in counts.items() if count} == BY_NAME
    upward = 'importlib.import_module("keras_strategy.strategies.mirrored")'
    assert count_imports_by_name(upward) == 1
    assert count_imports_by_name('importlib.import_module("tensorflow")') == 0


@on_torch
def test_keras_is_imported_lazily():
    code = """
import sys
import keras_strategy as ks
import keras_strategy.commands.cli, keras_strategy.commands.launcher
import keras_strategy.testing, keras_strategy.testing.worker_call
import keras_strategy.cluster.membership
ks.errors.ClusterError, dir(ks), hasattr(ks, "nonsense")
resolver = ks.cluster_resolver.detect().resolver()
resolver = ks.cluster_resolver.TFConfigClusterResolver()
light = not {"keras", "numpy", "jax", "torch", "tensorflow"} & set(sys.modules)
print(light, resolver.num_accelerators(), "keras" in sys.modules)
"""
    # Whichever engine it is: the one that is imported soonest.
    assert python(code, KERAS_BACKEND=SOONEST) == "True {} True"


@pytest.mark.full
@on_torch
def test_any_public_name_can_be_first(last_line):
    """Import each module first, in a process forked from one with the backend."""
    code = """
import json, os, sys
import keras
failed = []
for first, *others in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        import keras_strategy as ks
        for name in (first, *others):
            assert name != first or vars(ks).get(name) is None
            value = getattr(ks, name)
            assert getattr(ks, name) is value
        if first in ("get_strategy", "get_replica_context"):
            assert value().num_replicas_in_sync == 1
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(first)
print(failed)
"""
    homes: dict[str, list[str]] = {}
    for name, home in ks._HOME_OF.items():
        asks = name in ("get_strategy", "get_replica_context")
        alone = asks or home == "keras_strategy"  # a module
        homes.setdefault(name if alone else home, []).append(name)
    assert last_line(code, json.dumps(list(homes.values()))) == "[]"


def test_type_checkers_see_the_same_names():
    stub = pathlib.Path(ks.__file__).with_suffix(".pyi").read_text()
    everything: dict = {}
    exec(stub[stub.index("__all__ =") :], everything)
    assert sorted(everything["__all__"]) == ks.__all__ == dir(ks)
    with pytest.raises(AttributeError, match="'keras_strategy' has no attribute 'no'"):
        ks.no  # noqa: B018
    exec("from keras_strategy import *", everything)
    assert everything["MirroredStrategy"] is ks.MirroredStrategy


@pytest.mark.full(keep_on="tensorflow")
def test_logical_devices_are_created_after_importing_keras(last_line):
    code = """
import keras_strategy as ks
import keras
keras.ops.ones(3)
print(ks.MirroredStrategy().num_replicas_in_sync)
"""
    assert last_line(code, KERAS_STRATEGY_LOGICAL_CPUS="3") == "3"


def test_environment_variable_is_checked(program):
    end = program("import keras_strategy", KERAS_STRATEGY_LOGICAL_CPUS="many")
    assert end.exit_status != 0
    assert "KERAS_STRATEGY_LOGICAL_CPUS='many'" in end.output


@pytest.mark.full(keep=1, keep_on="torch")
def test_no_other_backend_is_imported():
    code = """
import json, sys
def engines():
    return [name for name in ("jax", "torch", "tensorflow") if name in sys.modules]
import keras
alone = engines()
import keras_strategy as ks
ks.OneDeviceStrategy("cpu:0")
print(json.dumps([alone, engines()]))
"""
    alone, with_a_strategy = map(set, json.loads(python(code)))
    assert with_a_strategy == alone | {keras.backend.backend()}


def test_import_changes_nothing_in_keras(last_line):
    code = """
import keras
before = {n: vars(keras.Model).get(n) for n in ("fit", "__new__", "compile")}
apply = keras.optimizers.Optimizer.apply
import keras_strategy
after = {n: vars(keras.Model).get(n) for n in before}
print(before == after and apply is keras.optimizers.Optimizer.apply)
"""
    assert last_line(code) == "True"


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="of a backend of its own: once is enough"
)
@pytest.mark.parametrize("backend", ["numpy"])
def test_numpy_backend_is_refused(backend):
    code = """
import tools.quick_keras
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


@pytest.mark.full(keep=1, keep_on="torch")
def test_model_outside_scopes_is_unaffected(last_line):
    with_strategy = """
import keras_strategy as ks
strategy = ks.MirroredStrategy()
assert strategy.num_replicas_in_sync == 2
import keras
with strategy.scope():
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    other.compile("sgd", "mse")
"""
    plain = last_line(TRAIN)
    beside = last_line(with_strategy + TRAIN, KERAS_STRATEGY_LOGICAL_CPUS="2")
    assert plain == beside


@pytest.mark.full(keep_on="jax")
def test_changed_keras_is_refused_by_name(last_line):
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
    said = last_line(code)
    assert said.startswith(f"True Keras {keras.__version__} changed a function that ")
    assert "`BatchNormalization._moments` is gone. Please upgrade" in said
