"""The examples of docstrings run as they stand."""

import inspect
import re

import pytest

from keras_strategy.launch import environment, launcher, ports, processes

DOCUMENTED = [
    environment.LocalCluster,
    launcher.Launcher,
    ports.free_ports,
    processes.WorkerProcess,
]


@pytest.mark.parametrize("documented", DOCUMENTED, ids=lambda value: value.__name__)
def test_example(documented):
    text = inspect.cleandoc(documented.__doc__ or "")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "<example>", "exec"), {})
