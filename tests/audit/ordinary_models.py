"""Audits ordinary models, none of which may raise an alarm.

    python -m tests.audit.ordinary_models [--replicas 2,3,8] [--only NAME]
    python -m tests.audit.ordinary_models --workers 2

The models are the rows of the equality table, and some large ones of
`keras.applications`; each in float32 and in mixed precision.
"""

import argparse
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import keras_strategy as ks
from conformance.equality.__main__ import mirrored
from conformance.equality.cases import Case, all_cases
from keras_strategy.audit import policy as row_policy
from keras_strategy.audit.verify import AuditReport, verify
from keras_strategy.testing import WorkerRunner

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
BACKEND = keras.backend.backend()
# Keras's layers that draw from generators of the process, so their steps run whole.
DRAW_BY_THEMSELVES = "AugMix", "RandomElasticTransform"
# Small inputs, and a width that trains in seconds.
LARGE: dict[str, Callable[[], keras.Model]] = {
    name: functools.partial(
        getattr(keras.applications, name), weights=None, classes=10, **options
    )
    for name, options in {
        "MobileNetV2": {"input_shape": (32, 32, 3), "alpha": 0.35},
        "MobileNetV3Small": {"input_shape": (32, 32, 3), "alpha": 0.75},
        "EfficientNetB0": {"input_shape": (32, 32, 3)},
        "ConvNeXtTiny": {"input_shape": (32, 32, 3)},
        "DenseNet121": {"input_shape": (32, 32, 3)},
        "ResNet50V2": {"input_shape": (32, 32, 3)},
    }.items()
}


def audit(case: Case, replicas: int, policy: str) -> AuditReport:
    """Audit a row of the equality table on its first batch."""
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(1)
    try:
        with mirrored(replicas).scope():
            model = case.make()
        rows = max(3 * replicas + 1, 21)
        x, y = case.data(rows)
        fit = case.fit(rows)
        return verify(model, x, y, fit.get("sample_weight"))
    finally:
        keras.config.set_dtype_policy(previous)


def audit_large(name: str, replicas: int, policy: str) -> AuditReport:
    """Audit a model of `keras.applications` on random images."""
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(1)
    try:
        devices = [f"cpu:{index}" for index in range(replicas)]
        with ks.MirroredStrategy(devices).scope():
            model = LARGE[name]()
            model.compile("adam", "sparse_categorical_crossentropy")
        rng, rows = np.random.RandomState(0), 3 * replicas + 1
        images = rng.uniform(0, 255, (rows, 32, 32, 3)).astype("float32")
        return verify(model, images, rng.randint(0, 10, rows))
    finally:
        keras.config.set_dtype_policy(previous)


def audit_on_workers(
    only: str, stride: int, policies: list[str]
) -> dict[str, list[str]]:
    """Fit each model of the table in this worker, and count the reports."""
    ks.MultiWorkerMirroredStrategy()  # TensorFlow connects before it computes
    # Else models of Keras's own parts are not audited.
    row_policy.find_user_code = lambda objects: "any model"
    reports: list[Any] = []
    audit_step = row_policy.audit_step

    def record_report(*args):
        reports.append(audit_step(*args))
        return reports[-1]

    row_policy.audit_step = record_report

    def fit(case: Case, replicas: int, policy: str) -> AuditReport:
        keras.config.set_dtype_policy(policy)
        keras.utils.set_random_seed(1)
        with ks.MultiWorkerMirroredStrategy().scope():
            model = case.make()
        x, y = case.data(21)
        reports.clear()
        model.fit(x, y, verbose=0, **{"batch_size": 8, **case.fit(21), "epochs": 1})
        return reports.pop()  # there is none if nothing was audited

    cases = [c for c in all_cases() if BACKEND not in c.not_on and only in c.name]
    table = [(case.name, functools.partial(fit, case)) for case in cases[::stride]]
    return group_results(table, [2], policies)


def group_results(
    table: list[tuple[str, Callable[[int, str], AuditReport]]],
    replicas: list[int],
    policies: list[str],
) -> dict[str, list[str]]:
    """Return lines that describe the audits, by result."""
    results: dict[str, list[str]] = {}
    for name, run in table:
        for count in replicas:
            for policy in policies:
                result = _result(run, count, policy)
                line = f"{name}, N = {count}, {policy}: {result}"
                results.setdefault(result.split(":")[0], []).append(line)
                if result != "equal":
                    print(line, flush=True)
    return results


def tables(only: str) -> Iterator[tuple[str, Callable[[int, str], AuditReport]]]:
    """Yield the name of each model, and the function that audits it."""
    for case in all_cases():
        is_ordinary = not case.name.startswith(DRAW_BY_THEMSELVES)
        if BACKEND not in case.not_on and only in case.name and is_ordinary:
            yield case.name, functools.partial(audit, case)
    for name in LARGE:
        if only in name:
            yield name, functools.partial(audit_large, name)


def main() -> int:
    """Print the alarms; return 1 if there are some."""
    parser = argparse.ArgumentParser(prog="python -m tests.audit.ordinary_models")
    parser.add_argument("--replicas", default="2,3,8")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--stride", type=int, default=1, help="every how many models")
    parser.add_argument("--workers", type=int, help="processes, with a replica each")
    options = parser.parse_args()
    policies = options.policies.split(",")
    start = time.perf_counter()
    if options.workers:
        from tests.audit.ordinary_models import audit_on_workers  # not of __main__

        with WorkerRunner(options.workers, timeout_seconds=3600) as runner:
            args = options.only, options.stride, policies
            results = runner.run(audit_on_workers, *args)[0]
        for result, lines in results.items():  # workers' output is not shown
            print(*lines if result != "equal" else (), sep="\n")
    else:
        counts = [int(text) for text in options.replicas.split(",")]
        ks.config.set_logical_devices("cpu", max(counts))
        logging.getLogger("keras_strategy").setLevel(logging.ERROR)
        table = list(tables(options.only))[:: options.stride]
        results = group_results(table, counts, policies)
    counted = {result: len(lines) for result, lines in results.items()}
    print(counted, f"{time.perf_counter() - start:.0f} s")
    return 1 if results.keys() - {"equal"} else 0


def _result(run: Callable[[int, str], AuditReport], replicas: int, policy: str) -> Any:
    try:
        report = run(replicas, policy)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return f"alarm: {report.message}" if report.differs else "equal"


if __name__ == "__main__":
    sys.exit(main())
