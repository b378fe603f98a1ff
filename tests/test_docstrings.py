"""The examples of public docstrings run as they stand."""

import importlib
import inspect
import re

import keras
import pytest

import keras_strategy as ks
from keras_strategy.testing import WarmStarter

EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)


MODULES = "callbacks", "config", "cluster_resolver", "coordinator", "experimental"
LAUNCH = "launcher", "local_cluster", "processes"
# They start processes, which are the same on every backend: on torch.
ONCE = "launch.", "testing.WorkerRunner", "testing.WarmStarter"


def documented():
    """Public objects, and the public methods of public classes."""
    public = {name: getattr(ks, name) for name in ks.__all__ if name != "__version__"}
    modules = [*(public[name] for name in MODULES), ks.experimental.partitioners]
    modules += [importlib.import_module(f"keras_strategy.launch.{n}") for n in LAUNCH]
    modules.append(importlib.import_module("keras_strategy.testing"))
    for module in modules:
        # Some make their names when they are asked for.
        for name in sorted({*vars(module), *getattr(module, "__all__", ())}):
            value = getattr(module, name)
            if not name.startswith("_") and callable(value):
                public[f"{module.__name__.partition('.')[2]}.{name}"] = value
    for name in ks.tpu.experimental.__all__:
        public[f"tpu.experimental.{name}"] = getattr(ks.tpu.experimental, name)
    for name, value in list(public.items()):
        if str(getattr(value, "__module__", "")).startswith("tensorflow"):
            del public[name]
        elif inspect.isclass(value):
            # With what it inherits of this package's.
            ours = [c for c in value.__mro__ if c.__module__.startswith("keras_str")]
            for method, function in ((m, f) for c in ours for m, f in vars(c).items()):
                # What has no `__get__` is the default of a field.
                if not method.startswith("_") and hasattr(function, "__get__"):
                    public.setdefault(f"{name}.{method}", function)
    return public


def examples():
    seen = set()
    for name, value in documented().items():
        text = inspect.cleandoc(getattr(value, "__doc__", None) or "")
        for number, code in enumerate(EXAMPLE.findall(text)):
            if code not in seen:
                seen.add(code)
                once = name.startswith(ONCE) and keras.backend.backend() != "torch"
                mark = pytest.mark.skipif(once, reason="the same: it runs on torch")
                yield pytest.param(code, id=f"{name}-{number}", marks=mark)


@pytest.mark.parametrize("code", examples())
def test_example(code, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for variable in ("TF_CONFIG",):
        monkeypatch.delenv(variable, raising=False)
    # For a program of a user's it imports Keras, which takes seven seconds.
    monkeypatch.setattr(WarmStarter.__init__, "__defaults__", (("numpy",),))
    exec(compile(code, "<example>", "exec"), {})
