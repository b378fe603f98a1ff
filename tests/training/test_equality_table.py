"""The equality table in its small form: two replicas, and one uneven number of rows.

`python -m tests.equality` runs it in full.
"""

import keras
import pytest

from tests.equality.__main__ import mirrored, run
from tests.equality.cases import all_cases, execution, layer, own
from tests.equality.compare import assert_equal

pytestmark = pytest.mark.full(keep=6)

BACKEND = keras.backend.backend()
CASES = all_cases(briefly=True)
# The models of other rows are small ones, whose predictions follow from their weights.
PREDICTING = {case.name for rows in (layer, own, execution) for case in rows.cases()}
# Batches of 8, 8 and 1, or 8, 8 and 5: the second replica has no rows in the last one,
# or fewer than the first.
ROWS = (17, 21)
# One batch: how predict splits the others does not depend on the row of the table.
PREDICTED = 8


@pytest.mark.needs_patch(
    "Loss.__call__", backend="torch", case="reduction sum, sample weights"
)
@pytest.mark.needs_patch("Layer.zero_grad", backend="torch", case="shuffle")
@pytest.mark.needs_patch(
    "backends.tensorflow.patches Optimizer._apply_weight_decay",
    "Optimizer._overwrite_model_variables_with_average_value",
    "Optimizer._backend_increment_gradient_accumulators",
    backend="tensorflow",
    case="clipping, decay, EMA and accumulation at once",
)
@pytest.mark.needs_patch(
    "Optimizer._backend_update_step",
    "keras.src.losses.loss.unscale_loss_for_distribution",
    backend="tensorflow",
    case="reduction sum, sample weights",
)
@pytest.mark.needs_patch(
    "LossScaleOptimizer._tf_apply",
    backend="tensorflow",
    case="LossScaleOptimizer over EMA, overwriting every 2 steps",
)
@pytest.mark.needs_patch(
    "keras.src.losses.loss.scale_loss_for_distribution",
    backend="tensorflow",
    case="kernel and bias regularizers",
)
@pytest.mark.parametrize("index", range(len(CASES)), ids=[c.name for c in CASES])
def test_two_replicas_equal_one_device(index):
    case, rows = CASES[index], ROWS[index % 2]
    if BACKEND in case.not_on:
        pytest.skip(case.not_on[BACKEND])
    predicted = PREDICTED if case.name in PREDICTING else 0
    one = run(case, rows, None, predicted, eagerly=BACKEND == "tensorflow")
    many = run(case, rows, mirrored(2), predicted)
    assert_equal(one, many, case.weights, case.logs, case.predictions)
