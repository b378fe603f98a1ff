"""The equality table in its small form: two replicas, and one uneven number of rows.

`python -m tests.equality` runs it in full.
"""

import keras
import pytest

from tests.equality.__main__ import mirrored, run
from tests.equality.cases import all_cases, execution, layer, own
from tests.equality.compare import assert_equal

BACKEND = keras.backend.backend()
CASES = all_cases(briefly=True)
# The models of other rows are small ones, whose predictions follow from their weights.
PREDICTING = {case.name for rows in (layer, own, execution) for case in rows.cases()}
# Batches of 8, 8 and 1, or 8, 8 and 5: the second replica has no rows in the last one,
# or fewer than the first.
ROWS = (17, 21)
# One batch: how predict splits the others does not depend on the row of the table.
PREDICTED = 8


@pytest.mark.parametrize("index", range(len(CASES)), ids=[c.name for c in CASES])
def test_two_replicas_equal_one_device(index):
    case, rows = CASES[index], ROWS[index % 2]
    if BACKEND in case.not_on:
        pytest.skip(case.not_on[BACKEND])
    predicted = PREDICTED if case.name in PREDICTING else 0
    one = run(case, rows, None, predicted, eagerly=BACKEND == "tensorflow")
    many = run(case, rows, mirrored(2), predicted)
    assert_equal(one, many, case.weights, case.logs, case.predictions)
