"""The examples of docstrings run as they stand."""

import inspect
import re

import pytest

from keras_strategy.commands import launcher, local_cluster, processes

DOCUMENTED = [
    local_cluster.LocalCluster,
    launcher.Launcher,
    local_cluster.free_ports,
    processes.WorkerProcess,
]


@pytest.mark.parametrize("documented", DOCUMENTED, ids=lambda value: value.__name__)
def test_example(documented):
    text = inspect.cleandoc(documented.__doc__ or "")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "<example>", "exec"), {})
