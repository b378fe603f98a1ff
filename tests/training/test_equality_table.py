"""The equality table in its small form: two replicas, and one uneven number of rows.

`python -m keras_strategy.testing.equality` runs it in full.
"""

import keras
import pytest

from keras_strategy.testing.equality.__main__ import run
from keras_strategy.testing.equality.cases import all_cases
from keras_strategy.testing.equality.compare import assert_equal

# Batches of 8, 8 and 1: the second replica has no rows in the last one.
ROWS = 17
# One batch: how predict splits the others does not depend on the row of the table.
PREDICTED = 8


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_two_replicas_equal_one_device(case, two):
    backend = keras.backend.backend()
    if backend in case.not_on:
        pytest.skip(case.not_on[backend])
    one = run(case, ROWS, predicted=PREDICTED)
    many = run(case, ROWS, two, predicted=PREDICTED)
    assert_equal(one, many, case.weights, case.logs, case.predictions)
