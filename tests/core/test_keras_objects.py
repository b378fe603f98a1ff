"""Keras's optimizers, metrics and variables in `run`, with native tf.distribute.

One device gets the sum of the replicas' gradients, or the rows of all replicas.
"""

import keras
import numpy as np
import pytest
from keras import ops

from tests.core.conftest import plain, tensor

SETTINGS = {
    "Nesterov": {"momentum": 0.5, "nesterov": True},
    "weight decay": {"weight_decay": 0.1},
    "average": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3},
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipnorm": {"clipnorm": 1.0},
    "clipvalue": {"clipvalue": 3.5},
    "global_clipnorm": {"global_clipnorm": 1.0},
}
RATES = 0.1, 0.1, 0.1, 0.2


def made(**settings):
    """Return two variables, and an optimizer that decays the first one alone."""
    variables = [keras.Variable([1.0, 2.0]), keras.Variable([3.0, 4.0])]
    optimizer = keras.optimizers.SGD(0.1, **settings)
    optimizer.exclude_from_weight_decay(var_list=variables[1:])
    optimizer.build(variables)
    return variables, optimizer


def numbers(variables):
    return np.array([ops.convert_to_numpy(v) for v in variables])


@pytest.mark.parametrize("name", SETTINGS)
def test_optimizer_settings(name, api):
    """Natively, each replica clips its own gradients before they are added."""

    def step(x, variables):
        optimizer.apply_gradients([(x, variables[0]), (x * 2, variables[1])])

    with api.s.scope():
        variables, optimizer = made(**SETTINGS[name])
    for rate in RATES:
        optimizer.learning_rate = rate
        api.s.run(step, (api.two_rows, variables))
    many, iterations = numbers(variables), plain(optimizer.iterations)
    variables, optimizer = made(**SETTINGS[name])
    for rate in RATES:
        optimizer.learning_rate = rate
        step(tensor([4.0, 7.0]), variables)
    same = np.allclose(many, numbers(variables), atol=1e-6)
    assert same == (api.ours or "clip" not in name)
    assert iterations == plain(optimizer.iterations)


def test_gradients_that_are_missing(api):
    with api.s.scope():
        variables, optimizer = made()
    api.s.run(lambda: optimizer.apply([], []))
    assert plain(optimizer.iterations) == 0
    api.s.run(lambda x: optimizer.apply([x, None], variables), (api.two_rows,))
    np.testing.assert_allclose(numbers(variables), [[0.6, 1.3], [3.0, 4.0]], atol=1e-6)


METRICS = {
    "Precision": lambda: keras.metrics.Precision(),
    "AUC": lambda: keras.metrics.AUC(num_thresholds=9),
    "SensitivityAtSpecificity": lambda: keras.metrics.SensitivityAtSpecificity(0.5),
}
TARGETS = [0, 1, 1, 1], [0, 1]
PREDICTED = [0.9, 0.2, 0.8, 0.7], [0.6, 0.9]
WEIGHTS = [1, 0.5, 2, 1], [3, 1]


@pytest.mark.parametrize("name", METRICS)
def test_metric_counts_rows_of_all_replicas(name, api):
    def update(y, predicted, weights):
        metric.update_state(y, predicted, sample_weight=weights)

    with api.s.scope():
        metric = METRICS[name]()
    alone, columns = METRICS[name](), (TARGETS, PREDICTED, WEIGHTS)
    alone.update_state(*(np.concatenate(column) for column in columns))
    api.s.run(update, [api.per_replica(*column) for column in columns])
    assert 0 < plain(alone.result()) < 1
    assert plain(metric.result()) == pytest.approx(plain(alone.result()))
    metric.reset_state()
    assert plain(metric.result()) == 0


def test_metric_as_function_of_run(api):
    """The function returns the result of the local rows."""
    with api.s.scope():
        metric = keras.metrics.Mean()
    assert api.local(api.s.run(metric, (api.two_rows,))) == [1.5, 4.0]
    assert plain(metric.result()) == 2.75


def test_metric_updates_in_cross_replica_context(api):
    outside = keras.metrics.Mean()
    with api.s.scope():
        for metric in (outside, keras.metrics.Mean()):
            metric.update_state(1)
            metric.update_state(2)
            assert plain(metric.result()) == 1.5


@pytest.mark.parametrize("synchronization", ["auto", "on_read"])
@pytest.mark.parametrize("aggregation", ["none", "sum", "mean", "only_first_replica"])
def test_variable_keeps_its_settings(aggregation, synchronization, api):
    options = {"aggregation": aggregation, "synchronization": synchronization}
    with api.s.scope():
        v = keras.Variable(1.0, trainable=False, **options)
    assert {name: getattr(v, name) for name in options} == options


def test_replicas_read_one_seed(api):
    with api.s.scope():
        generator = keras.random.SeedGenerator(42)
    seeds = api.s.run(lambda: ops.convert_to_tensor(generator.state))
    assert api.local(seeds) == [[42, 0], [42, 0]]
