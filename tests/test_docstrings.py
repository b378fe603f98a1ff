"""Public docstrings are complete, and their examples run as they stand."""

import importlib
import inspect
import pathlib
import re

import keras
import pytest

import keras_strategy as ks

EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)


MODULES = "callbacks", "config", "cluster_resolver", "coordinator", "errors"
MODULES += ("experimental",)
# They start processes, which are the same on every backend: on torch.
ONCE = "testing.WorkerRunner", "testing.WorkerFailed", "testing.WorkerTimeout"


def documented():
    """Public objects, and the public methods of public classes."""
    public = {name: getattr(ks, name) for name in ks.__all__ if name != "__version__"}
    modules = [*(public[name] for name in MODULES), ks.experimental.partitioners]
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


@pytest.mark.full
@pytest.mark.parametrize("code", examples())
def test_example(code, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for variable in ("TF_CONFIG",):
        monkeypatch.delenv(variable, raising=False)
    exec(compile(code, "<example>", "exec"), {})


def is_ours(name, value):
    """Return False for what modules import."""
    module = getattr(getattr(value, "fget", value), "__module__", "") or ""
    ours = module.startswith("keras_strategy")
    return ours and module != "keras_strategy.core.registry"


def is_override(name, public):
    """Return True for a method that a base class describes."""
    owner, _, method = name.rpartition(".")
    classes = getattr(public.get(owner), "__mro__", ())
    return sum(method in vars(each) for each in classes) > 1


def find_gaps(value):
    """List what the docstring of a public object lacks."""
    text = inspect.cleandoc(value.__doc__ or "")
    if not text:
        return ["a docstring"]
    if isinstance(value, property):
        return []
    function = getattr(value, "__func__", value)
    gaps = []
    if inspect.isclass(value):
        function = vars(value).get("__init__")
    if function is None or not inspect.isfunction(function):
        return gaps
    section = re.search(r"^(?:Args|Attributes):\n((?: +.*\n|\n)*)", f"{text}\n", re.M)
    described = re.findall(r"^ {4}\*{0,2}(\w+)", section[1], re.M) if section else []
    for parameter in inspect.signature(function).parameters.values():
        private = parameter.name.startswith("_") or parameter.name in ("self", "cls")
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not private and not variadic and parameter.name not in described:
            gaps.append(f"Args: {parameter.name}")
    returned = function.__annotations__.get("return")
    summary = text.partition("\n")[0].lower()
    describes_result = re.search(r"^(Returns|Yields):", text, re.M) or any(
        word in summary for word in ("return", "yield", "context manager")
    )
    if (
        not inspect.isclass(value)
        and returned not in (None, "None")
        and not describes_result
    ):
        gaps.append("Returns")
    return gaps


# Users do not create these.
RETURNED = {
    *("DistributedDataset", "DistributedIterator", "ReplicaContext"),
    "testing.WorkerFailed",
}


def test_public_docstrings_are_complete():
    public = documented()
    gaps = {
        name: found
        for name, value in public.items()
        if is_ours(name, value)
        and name not in RETURNED
        and not is_override(name, public)
        and (found := find_gaps(value))
    }
    assert not gaps


# They are for other modules of this package, or replaced by other names.
WITHOUT_EXAMPLE = {
    *("config.apply_environment", "config.logical_cpus"),
    *("experimental.CollectiveCommunication", "experimental.CollectiveHints"),
    *("experimental.MultiWorkerMirroredStrategy", "experimental.TPUStrategy"),
    # It needs servers in other processes.
    *("ParameterServerStrategy", "experimental.ParameterServerStrategy"),
}


def list_top_level():
    """Return the public classes and functions."""
    public = documented()
    return {
        name: value
        for name, value in public.items()
        if callable(value)
        and is_ours(name, value)
        and not inspect.isclass(public.get(name.rpartition(".")[0]))
        and name not in WITHOUT_EXAMPLE
    }


def test_public_names_have_an_example():
    lacking = {n for n, v in list_top_level().items() if not EXAMPLE.search(v.__doc__)}
    assert lacking == set()


def test_reference_lists_all_public_names():
    page = (pathlib.Path(__file__).parents[1] / "docs" / "api.md").read_text()
    listed = set(re.findall(r"^::: keras_strategy\.(.+)$", page, re.MULTILINE))
    spans = set(re.findall(r"`([\w.]+)`", page))
    modules = {name for name in ks.__all__ if inspect.ismodule(getattr(ks, name))}
    assert set(list_top_level()) - listed - spans == set()
    assert set(ks.__all__) - modules - {"__version__"} - listed - spans == set()
    assert {f"experimental.rpc.{name}" for name in ks.experimental.rpc.__all__} <= spans
