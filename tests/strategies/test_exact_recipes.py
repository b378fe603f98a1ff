"""The recipes of docs/whole_steps.md on one device and on two replicas.

13 rows by 8: the replicas share the last batch as 3 and 2 rows.
"""

import pathlib
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategy as ks
from conformance.compare import assert_equal, differences, largest, train
from tests.pages import blocks_of
from tests.training.shared import logged

BACKEND = keras.backend.backend()
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "whole_steps.md"
RECIPES = PAGE.read_text().partition("\n## Recipes\n")[2]


def run_page(strategy=None, until=None, replaced=("", "")):
    """Return the names of the page's program, up to a block with some text."""
    x = np.random.default_rng(0).normal(size=(13, 4)).astype("float32")
    names = {"keras": keras, "np": np, "ks": ks, "x": x}
    names |= {"__name__": "page", "strategy": strategy or ks.MirroredStrategy()}
    for block in blocks_of(RECIPES):
        if not block.backends or BACKEND in block.backends:
            exec(block.code.replace(*replaced) if until else block.code, names)
            if strategy is not None:
                names["strategy"] = strategy
        if until is not None and until in block.code:
            break
    return SimpleNamespace(**names)


@pytest.fixture(scope="module")
def page():
    return run_page()


def dense():
    return [keras.Input((4,)), layers.Dense(1)]


def compiled(model, **options):
    model.compile(keras.optimizers.SGD(0.01), **options)
    return model


def towers(page, name):
    return lambda: compiled(getattr(page, name)())


def with_metric(page, name):
    return lambda: compiled(
        keras.Sequential(dense()), loss="mse", metrics=[getattr(page, name)()]
    )


def summed_by_step(page):
    return compiled(page.Summed(dense()))


def clipped_by_step(page):
    model = page.Clips()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


# As people write it, exactly, and what the audit warns of.
PROGRAMS = {
    "contrastive": (
        lambda page: towers(page, "TwoTowers"),
        lambda page: towers(page, "GatheredTwoTowers"),
        "It begins with `TwoTowers.compute_loss`: its value",
    ),
    "clipping": (
        lambda page: lambda: clipped_by_step(page),
        lambda page: page.clipped,
        "It begins with the gradients of `Clips.train_step`: they are not means",
    ),
    "sum": (
        lambda page: lambda: summed_by_step(page),
        lambda page: page.summed,
        "It begins with `Summed.compute_loss`: its value",
    ),
    "maximum": (
        lambda page: with_metric(page, "LocalLargest"),
        lambda page: with_metric(page, "Largest"),
        "It begins with the metric 'largest': the state that replicas compute",
    ),
}


def trained(page, name, make, strategy):
    x = (page.x, page.x[:, ::-1].copy()) if name == "contrastive" else page.x
    return train(strategy, make, x, page.y, shuffle=False, predicted=0)


@pytest.mark.full(keep_on="jax")
@pytest.mark.parametrize("name", PROGRAMS)
def test_exact_program_equals_one_device(page, two, caplog, name):
    make = PROGRAMS[name][1](page)
    one = trained(page, name, make, None)
    assert_equal(one, trained(page, name, make, two))
    assert not logged(caplog)


@pytest.mark.full(keep_on="tensorflow")
@pytest.mark.skipif(BACKEND == "jax", reason="`fit` computes the global batch")
@pytest.mark.parametrize("name", PROGRAMS)
def test_usual_program_warns_and_equals_one_device(page, two, caplog, name):
    of_page, _, warning = PROGRAMS[name]
    make = of_page(page)
    one = trained(page, name, make, None)
    assert_equal(one, trained(page, name, make, two))
    assert warning in " ".join(logged(caplog))
    assert "runs whole" in " ".join(logged(caplog))
    assert warning in " ".join(PAGE.read_text().split())


@pytest.mark.full(keep_on="torch")
def test_batch_statistics_equal_one_device(page, two):
    one = trained(page, "statistics", page.normalized, None)
    assert_equal(one, trained(page, "statistics", page.normalized, two))
    if BACKEND != "jax":
        local = ks.MirroredStrategy(["cpu:0", "cpu:1"], batch_statistics="local")
        fast = trained(page, "statistics", page.normalized, local)
        assert differences(one, fast)["weights"] > 1e-3


@pytest.mark.full(keep_on="jax")
@pytest.mark.parametrize("is_exact", [True, False])
def test_gan_loop_equals_one_device(two, is_exact):
    end = "experimental_distribute_dataset"
    usual = ("average = ks.compute_average_loss", "")
    results = []
    for strategy in (ks.OneDeviceStrategy("cpu:0"), two):
        keras.utils.set_random_seed(1)
        names = run_page(strategy, end, ("", "") if is_exact else usual)
        variables = [*names.generator.variables, *names.critic.variables]
        results.append([ops.convert_to_numpy(v) for v in variables])
    difference = largest(*results)
    assert difference < 2e-5 if is_exact else difference > 1e-3
