"""Whatever becomes of a worker, the others end soon, say why, and leave nothing."""

import dataclasses

import pytest

from tests.faults.harness import plant
from tests.faults.table import SAMPLE, draw

pytestmark = pytest.mark.full(keep=3)


def pytest_generate_tests(metafunc):
    count = metafunc.config.getoption("faults", 0)
    faults = draw(count, metafunc.config.getoption("seed", 0)) if count else SAMPLE
    metafunc.parametrize("planted", faults, ids=str)


@pytest.mark.full(keep_on="torch")
@pytest.mark.needs_patch(
    "keras.src.saving.saving_lib.get_temp_dir",
    backend="torch",
    case="SIGKILL, in save_own_variables, worker 0 of 2",
)
def test_fault_ends_all_workers(planted, starter, tmp_path, record_property):
    for name, value in dataclasses.asdict(planted).items():
        record_property(name, value)
    outcome = plant(planted, tmp_path, starter)
    record_property("seconds", outcome.seconds)
    record_property("message", outcome.message)
    assert not outcome.wrong, f"{planted!r}\n" + "\n".join(outcome.wrong)
