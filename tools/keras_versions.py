"""Run a selection of the tests on other versions of Keras, once per backend.

Each version is installed into a folder of its own under build/, without what it depends
on: the engines stay those of the virtual environment. In the subprocess, this file is
the pytest plugin that refuses any other Keras than the one that was asked for.

    python tools/keras_versions.py [pytest arguments]

Arguments without a dash replace the selection. The environment variables KERAS_VERSIONS
("3.12 nightly") and BACKENDS pick from the table.
"""

import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

import package_folders
import run_tests

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = "KERAS_VERSIONS_FOLDER"

# What pip is asked for. "==3.12.*" is the newest patch release.
REQUIREMENTS = {
    "3.12": ["keras==3.12.*"],
    "3.13": ["keras==3.13.*"],
    "3.14": ["keras==3.14.*"],
    "3.15": ["keras==3.15.*"],
    "nightly": ["--pre", "keras-nightly"],
}

# What a version of Keras can break: how fit and its like are called, what the hooks
# replace, and that two replicas still equal one device. A test of each is enough.
SELECTION = [
    "tests/keras_patches/test_patch.py",
    *(
        f"tests/core/test_custom_loop.py::{test}"
        for test in (
            "test_custom_loop_equals_one_device[partial last-False-2]",
            "test_custom_loop_equals_one_device[partial first-True-4]",
            "test_uneven_replicas_assign_variables[mean-on_read-3.3333333333333335-components5]",
            "test_dropout_with_uneven_replicas",
        )
    ),
    *(
        f"tests/training/test_entry_points.py::{test}"
        for test in (
            "test_kinds_of_models[functional]",
            "test_kinds_of_models[Subclass]",
            "test_compile_and_fit_inside_and_outside_scope",
            "test_optimizer_and_metric_from_outside_scope",
            "test_on_batch_methods",
            "test_evaluate_and_predict",
            "test_predict_without_training[deferred]",
            "test_model_call",
            "test_reading_and_setting_weights",
            "test_one_device",
            "test_steps_per_execution",
        )
    ),
    *(
        f"tests/training/test_equality.py::{test}"
        for test in (
            "test_training_equals_one_device[mlp]",
            "test_synchronized_batch_normalization",
        )
    ),
    # Rows whose names do not count what a version of Keras has.
    *(
        "tests/training/test_equality_table.py"
        f"::test_two_replicas_equal_one_device[{row}]"
        for row in (
            "clipping, decay, EMA and accumulation at once",
            "LossScaleOptimizer over accumulation, NaN on one replica",
            "loss function that returns a scalar",
            "mask and sample weights",
            "reduction mean_with_sample_weight, sample weights",
            "several outputs with loss weights",
            "kernel and bias regularizers",
            "Mean and Sum, of rows and of scalars",
            "run_eagerly",
            "RandomElasticTransform, no seed",
        )
    ),
    "tests/training/test_per_replica_attributes.py::test_layer_attributes_are_per_replica",
    # Keras's order of the rows: of a training that goes on, and on each of the workers.
    "tests/training/test_resume.py::test_training_resumes[2-killed1-2-6]",
    "tests/distributed/test_training.py::test_fit_equals_one_device[3x1]",
    # What is kept of an optimizer's variables.
    "tests/training/test_sharding.py::test_files_hold_full_variables[optimizer]",
    *(
        f"tests/training/test_per_replica_state.py::{test}"
        for test in (
            "test_random_layers_are_reproducible_with_one_devices_seeds",
            "test_replicas_draw_different_numbers[Dropout]",
            "test_distributions_are_reproducible[gamma]",
            "test_unsynchronized_batch_normalization_statistics",
            "test_custom_logs_are_row_weighted",
        )
    ),
    *(
        f"tests/training/test_saving.py::{test}"
        for test in (
            "test_saved_model_loads[True-True-model.keras]",
            "test_saved_model_loads[True-True-model.weights.h5]",
            "test_training_continues_on_other_devices",
        )
    ),
]

# The adapters' own tests of what differs between versions.
OF_BACKEND = {
    "jax": ["tests/backends/test_jax.py::test_indivisible_batches_warn"],
    "torch": ["tests/backends/test_torch.py"],
    "tensorflow": [],
}


def pytest_configure(config):
    """End the run unless the imported Keras is the one in the folder."""
    import keras

    folder = os.environ[EXPECTED]
    if not Path(keras.__file__).is_relative_to(folder):
        raise RuntimeError(f"Keras was imported from {keras.__file__}, not {folder}")
    found, expected = keras.__version__, version_in(Path(folder))
    if found != expected:
        raise RuntimeError(f"This is Keras {found}, where {expected} was installed")
    print(f"Keras {found} on {keras.config.backend()}", flush=True)


def version_in(folder: Path) -> str:
    """Return the version of the one distribution in `folder`."""
    (distribution,) = importlib.metadata.distributions(path=[str(folder)])
    return distribution.version


def install(name: str) -> Path:
    """Install a version of Keras, if it is not there, and return its folder."""
    return package_folders.install(f"keras-{name}", REQUIREMENTS[name])


def main(arguments: list[str]) -> int:
    """Print a table: a line for each version, a column for each backend."""
    names = os.environ.get("KERAS_VERSIONS", "").split() or list(REQUIREMENTS)
    chosen = all(argument.startswith("-") for argument in arguments)
    table = []
    bad = False
    for name in names:
        folder = install(name)
        version = version_in(folder)
        print(f"\n##### Keras {version} #####", flush=True)
        environment = {
            EXPECTED: str(folder),
            # Both this plugin's folder and Keras's come before what is installed.
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "tools")]),
        }
        row = [version]
        for backend in run_tests.BACKENDS:
            tests = [*SELECTION, *OF_BACKEND[backend]] if chosen else []
            with tempfile.TemporaryDirectory() as reports:
                result = run_tests.run(
                    backend,
                    ["-q", "-p", "keras_versions", *tests, *arguments],
                    Path(reports) / "report.xml",
                    environment,
                )
            bad = bad or bool(result.failed) or not result.passed
            note = f" ({result.note})" if result.note else ""
            row.append(f"{result.passed} / {result.failed} / {result.skipped}{note}")
        table.append(row)
    print("\npassed / failed / skipped\n")
    print("| Keras | " + " | ".join(run_tests.BACKENDS) + " |")
    print("| --- |" + " --- |" * len(run_tests.BACKENDS))
    for row in table:
        print("| " + " | ".join(row) + " |", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
