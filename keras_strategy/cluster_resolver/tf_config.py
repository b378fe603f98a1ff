"""`TFConfigClusterResolver`: the cluster in the TF_CONFIG variable."""

from __future__ import annotations

import json
import os
from typing import Any

from keras_strategy.cluster_resolver.cluster_spec import ClusterSpec, task_index
from keras_strategy.cluster_resolver.environment import (
    ClusterDescription,
    EnvironmentClusterResolver,
)

TF_CONFIG = "TF_CONFIG"


class TFConfigClusterResolver(EnvironmentClusterResolver):
    """Cluster of the environment variable TF_CONFIG.

    TF_CONFIG is a JSON object. Its `"cluster"` maps job names to the addresses
    of their tasks; its `"task"` has the `"type"` and `"index"` of this process.
    The variable is read again on every call.

    Args:
        task_type: Overrides the task's type.
        task_id: Overrides the task's index.
        rpc_layer: Overrides the `"rpc_layer"`.
        environment: The value of the property `environment`.

    Example:
    ```python
    import json
    import os

    from keras_strategy.cluster_resolver import TFConfigClusterResolver

    os.environ["TF_CONFIG"] = json.dumps({
        "cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]},
        "task": {"type": "worker", "index": 1},
    })
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec().num_tasks("worker") == 2
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    del os.environ["TF_CONFIG"]
    ```
    """

    _task_hint = f'"task" of the environment variable {TF_CONFIG}'

    def _describe(self) -> ClusterDescription:
        config = _object(_load(), "")
        cluster = _cluster(_object(config.get("cluster", {}), "cluster"))
        task = _object(config.get("task", {}), "task")
        task_type = _optional_text(task, "type", "task.type")
        task_id = None
        if "index" in task:
            try:
                task_id = task_index(task["index"], "the index")
            except ValueError:
                raise _invalid("task.index", "an integer >= 0", task["index"]) from None
        if task_type in cluster.jobs and task_id is not None:
            indices = cluster.task_indices(task_type)
            if task_id not in indices:
                raise _invalid(
                    "task.index",
                    f"one of cluster.{task_type}'s indices {indices}",
                    task_id,
                )
        return ClusterDescription(
            cluster,
            task_type,
            task_id,
            _optional_text(config, "rpc_layer", "rpc_layer"),
            _optional_text(config, "session_master", "session_master"),
        )


def _load() -> Any:
    text = os.environ.get(TF_CONFIG) or "{}"
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(
            f"Expected the environment variable {TF_CONFIG} to be JSON of a cluster. "
            "Received: JSON nested too deeply"
        ) from None
    except ValueError as error:
        # A JSONDecodeError, or the refusal of a number with thousands of digits.
        raise ValueError(
            f"Expected the environment variable {TF_CONFIG} to be valid JSON. "
            f"Received: {_truncate(text)} ({error})"
        ) from None


def _cluster(jobs: dict[str, Any]) -> ClusterSpec:
    try:
        spec = ClusterSpec(jobs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{TF_CONFIG}: {error}") from None
    for job in spec.jobs:
        for index in spec.task_indices(job):
            if not spec.task_address(job, index):
                raise _invalid(f"cluster.{job}[{index}]", 'an address "host:port"', "")
    return spec


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid(place, "an object", value)
    return value


def _optional_text(parent: dict[str, Any], key: str, place: str) -> str | None:
    value = parent.get(key)
    # An explicit null counts as absent, except for the task's type, which would
    # silently be the type "None" in TensorFlow.
    if value is None and not (key in parent and key == "type"):
        return None
    if not isinstance(value, str):
        raise _invalid(place, "a string", value)
    return value


def _invalid(place: str, expected: str, value: Any) -> ValueError:
    where = f"{TF_CONFIG}: {place}" if place else TF_CONFIG
    return ValueError(
        f"Expected {where} to be {expected}. Received: {_truncate(repr(value))}"
    )


def _truncate(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."
