"""The examples of public docstrings run as they stand."""

import inspect
import re

import pytest

import keras_strategy as ks

EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def documented():
    """Public objects, and the public methods of public classes."""
    public = {name: getattr(ks, name) for name in ks.__all__ if name != "__version__"}
    for module in ("config", "cluster_resolver", "experimental"):
        if module in public:
            for name, value in vars(public[module]).items():
                if not name.startswith("_") and callable(value):
                    public[f"{module}.{name}"] = value
    for name in ks.tpu.experimental.__all__:
        public[f"tpu.experimental.{name}"] = getattr(ks.tpu.experimental, name)
    for name, value in list(public.items()):
        if str(getattr(value, "__module__", "")).startswith("tensorflow"):
            del public[name]
        elif inspect.isclass(value):
            for method, function in vars(value).items():
                # What has no `__get__` is the default of a field.
                if not method.startswith("_") and hasattr(function, "__get__"):
                    public[f"{name}.{method}"] = function
    return public


def examples():
    for name, value in documented().items():
        text = inspect.cleandoc(getattr(value, "__doc__", None) or "")
        for number, code in enumerate(EXAMPLE.findall(text)):
            yield pytest.param(code, id=f"{name}-{number}")


@pytest.mark.parametrize("code", examples())
def test_example(code, monkeypatch):
    for variable in ("TF_CONFIG",):
        monkeypatch.delenv(variable, raising=False)
    exec(compile(code, "<example>", "exec"), {})
