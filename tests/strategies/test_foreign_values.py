"""Values and variables of one strategy, given to another of more or fewer replicas."""

import keras
import numpy as np
import pytest

import keras_strategy as ks
from tests.core.apis import number, per_replica, results

NUMBERS = {1: [1.0], 2: [1.0, 2.0], 3: [1.0, 2.0, 4.0]}
UNCOMPILED = ks.RunOptions(compile=False)


@pytest.fixture
def strategies(mirrored):
    return {1: ks.OneDeviceStrategy("cpu:0"), 2: mirrored(2), 3: mirrored(3)}


def variable(strategy, **kwargs):
    with strategy.scope():
        return keras.Variable(np.float32([0.0]), **kwargs)


def value_of(strategy):
    numbers = NUMBERS[strategy.num_replicas_in_sync]
    return per_replica(strategy, *([number] for number in numbers))


def on_read(strategy):
    """A variable of which each replica holds its own number."""
    v = variable(
        strategy, synchronization="on_read", aggregation="sum", trainable=False
    )

    def assign(x):
        v.assign(x)

    strategy.run(assign, (value_of(strategy),))
    return v


def update(strategy, value):
    own = variable(
        strategy, synchronization="on_read", aggregation="sum", trainable=False
    )
    strategy.extended.update(own, lambda c, x: c.assign(x), (value,))


USES = {
    "run": lambda s, value: s.run(lambda x: x, (value,)),
    "run with keywords": lambda s, value: s.run(lambda x: x, kwargs={"x": [value]}),
    "run uncompiled": lambda s, value: s.run(lambda x: x, (value,), options=UNCOMPILED),
    "reduce": lambda s, value: s.reduce("sum", {"a": value}),
    "reduce axis": lambda s, value: s.reduce("mean", value, axis=0),
    "gather": lambda s, value: s.gather(value, axis=0),
    "reduce_to": lambda s, value: s.extended.reduce_to("sum", value, "cpu:0"),
    "reduce_to it": lambda s, value: s.extended.reduce_to("mean", 1.0, value),
    "reduce_to, several": lambda s, value: s.extended.batch_reduce_to(
        "sum", [(value, "cpu:0")]
    ),
    "update": update,
    "experimental_local_results": lambda s, value: s.experimental_local_results(
        [value, 3]
    ),
}


@pytest.mark.parametrize("use", USES)
def test_value_of_another_strategy(strategies, use):
    for of, to in [(3, 2), (2, 3), (3, 1)]:
        value = value_of(strategies[of])
        with pytest.raises(ValueError) as caught:
            USES[use](strategies[to], value)
        said = str(caught.value)
        assert f"`{use.split()[0].strip(',')}` received a value of another" in said
        assert f"it has {of} component(s)" in said and f"has {to} replica(s)" in said


@pytest.mark.parametrize("use", USES)
def test_value_of_recreated_strategy(strategies, use, mirrored):
    """As in tf.distribute, it matters how many components there are, not whose."""
    USES[use](strategies[2], value_of(strategies[2]))
    USES[use](mirrored(2), value_of(strategies[2]))
    USES[use](ks.MirroredStrategy(["cpu:2", "cpu:3"]), value_of(strategies[2]))


@pytest.mark.parametrize("options", [None, UNCOMPILED])
def test_foreign_value_in_merge_call(strategies, options):
    foreign = value_of(strategies[3])

    def reduce():
        context = ks.get_replica_context()
        return context.merge_call(lambda strategy: strategy.reduce("sum", foreign))

    def give_back():
        return ks.get_replica_context().merge_call(lambda strategy: foreign)

    with pytest.raises(ValueError, match="`reduce` received a value of another str"):
        strategies[2].run(reduce, options=options)
    if keras.backend.backend() != "jax" or options is not None:
        with pytest.raises(ValueError, match="`merge_call` received a value of ano"):
            strategies[2].run(give_back, options=options)


def test_foreign_value_assignment_is_refused(strategies):
    two = strategies[2]
    v = variable(two)
    for value in (value_of(two), value_of(strategies[3])):

        def assign(value=value):
            v.assign(value)

        expected = rf"is not a tensor: it has {value.count} component\(s\)"
        with pytest.raises(TypeError, match=expected):
            v.assign(value)
        with pytest.raises(TypeError, match=expected):
            two.run(assign)
        with pytest.raises(TypeError, match=expected):
            two.run(assign, options=UNCOMPILED)
        with pytest.raises(TypeError, match=expected):
            two.extended.update(v, lambda c, value=value: c.assign(value))
    assert results(two, v) == [[0.0], [0.0]]


def test_components_of_another_strategy(strategies):
    for of, to in [(3, 2), (2, 3)]:
        v, s = on_read(strategies[of]), strategies[to]
        for use in USES:
            if not use.startswith("run") and use != "reduce_to it":
                with pytest.raises(
                    ValueError, match="received a value of another strat"
                ):
                    USES[use](s, v)
        for options in (None, UNCOMPILED):
            with pytest.raises(ValueError, match="but a function that .* runs uses it"):
                s.run(lambda v=v: v + 1.0, options=options)
            with pytest.raises(ValueError, match="but a function that .* runs uses it"):
                s.run(lambda v: v + 1.0, (v,), options=options)
        assert results(strategies[of], v) == [[x] for x in NUMBERS[of]]


def test_mirrored_variable_of_another_strategy(strategies):
    """It is the same everywhere: nothing is lost."""
    for of, to in [(3, 2), (2, 3)]:
        v, s = variable(strategies[of]), strategies[to]

        def add(v=v):
            v.assign_add([1.0])

        strategies[of].run(add)
        for options in (None, UNCOMPILED):
            assert results(s, s.run(lambda v=v: v + 1.0, options=options)) == [[2]] * to
        strategies[of].run(add)
        assert number(s.reduce("mean", v)) == [2.0]
        own = variable(s)
        s.extended.update(own, lambda c, x: c.assign(x), (v,))
        assert results(s, own) == [[2.0]] * to
        with pytest.raises(ValueError, match="`experimental_local_results` received"):
            s.experimental_local_results(v)
