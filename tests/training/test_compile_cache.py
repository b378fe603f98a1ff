"""`run` runs the function that it is given, whatever it ran before."""

import functools
import gc
import itertools
import logging
import math
import types
import weakref

import keras
import numpy as np
import pytest

import keras_strategy as ks

BETA = 1.0
SCALES: dict[str, float] = {}
ONE = (np.float32(1),)
compiles = keras.backend.backend() != "torch"


def value(strategy, fn, args=ONE):
    return float(strategy.reduce("mean", strategy.run(fn, args)))


def values(strategy, outputs):
    return [float(x) for x in strategy.experimental_local_results(outputs)]


@pytest.fixture
def module():
    """What a script or a notebook defines its names in."""
    return types.ModuleType("script")


def execute(module, source):
    exec(source, vars(module))


def test_redefined_function_is_recompiled(two, module):
    for module.beta in (0.0, 0.5, 1.0):
        execute(module, "def step(x): return x * beta")
        assert value(two, module.step) == module.beta
    seen = []
    for beta in (0.0, 0.5, 1.0):

        def step(x):
            return x * beta  # noqa: B023

        seen.append(value(two, step))
    assert seen == [0.0, 0.5, 1.0]


def test_lambda_with_changed_closure_is_recompiled(two):
    numbers, nested = {"beta": 0.0}, {"a": [0.0]}
    array = np.zeros((), "float32")
    seen = []
    for beta in (0.0, 0.5, 1.0):
        numbers["beta"] = nested["a"][0] = beta
        array[...] = beta
        seen.append(
            [
                value(two, lambda x: x * numbers["beta"]),
                value(two, lambda x: x * nested["a"][0]),
                value(two, lambda x: keras.ops.multiply(x, array)),
                value(two, lambda x, b=beta: x * b),
                value(two, lambda x, *, b=beta: x * b),
                value(two, functools.partial(lambda b, x: x * b, beta)),
            ]
        )
    assert seen == [[0.0] * 6, [0.5] * 6, [1.0] * 6]


def test_changed_global_is_recompiled(two, module):
    """A global, a dict, a module's attribute, and what its helper reads."""
    config = module.config = types.ModuleType("config")
    module.table, module.factor = {}, lambda: 1.0
    execute(
        module,
        "def helper(): return beta\n"
        "def step(x): return x + beta, x + table['b'], x + config.b, x + helper(), "
        "x + (lambda: beta)(), x + factor()\n",
    )
    for beta in (0.0, 0.5, 0.5, 1.0, 0.0):
        module.beta = module.table["b"] = config.b = beta
        module.factor = eval(f"lambda: {beta}")
        out = two.reduce("mean", two.run(module.step, ONE))
        assert [float(x) for x in out] == [1 + beta] * 6


def test_changed_closure_variable_is_recompiled(two):
    beta = 0.0

    def step(x):
        return x * beta

    assert value(two, step) == 0.0
    beta = 0.5
    assert value(two, step) == 0.5


def test_equal_numbers_of_other_types_are_distinct(two, module):
    execute(module, "def step(x): return x / beta")
    infinite = [float("inf"), -float("inf")]
    for beta, expected in zip((0.0, -0.0), infinite, strict=True):
        module.beta = beta
        assert value(two, module.step) == expected
    execute(module, "def step(x): return x if flag is True else -x")
    for flag, expected in ((True, 1.0), (1, -1.0)):
        module.flag = flag
        assert value(two, module.step) == expected


def test_reexecuted_notebook_cell_reuses_program(two, module):
    """Also where the code is the same, and what it names is an object of its own."""
    module.layer = types.SimpleNamespace(rate=1.0)
    for rate in (1.0, 2.0):
        module.layer.rate = rate
        execute(module, "def step(x): return x * layer.rate")
        assert value(two, module.step) == rate
    with two.scope():
        for start in (3.0, 4.0):
            module.v = keras.Variable(start)
            execute(module, "def step(x): return x * v")
            assert value(two, module.step) == start


@pytest.mark.full(keep_on="torch")
def test_methods_partials_and_callable_objects_are_cached(two, module):
    class Model:
        def __init__(self, scale):
            self.scale = scale

        def step(self, x):
            return x * self.scale

        def __call__(self, x):
            return x + self.scale

    for scale in (2.0, 3.0):
        model = Model(scale)
        assert value(two, model.step) == scale
        assert value(two, model) == 1 + scale
        assert value(two, functools.partial(model.step)) == scale
        del model
        gc.collect()  # so that the next one may be where it was


def counting(strategy, fn, calls=6):
    """How often the functions that `fn` returns are traced, on one replica."""
    traced = []
    for _ in range(calls):
        strategy.run(fn(traced), ONE)
    # JAX traces replicas together, and again when it has met a variable.
    return len(traced) / (strategy.num_replicas_in_sync if not jax else 1)


jax = keras.backend.backend() == "jax"


if compiles:

    def test_equal_functions_are_compiled_once(two):
        scale, sizes = 2.0, (1, "two", None)

        def helper(x):
            return keras.ops.sum(x) * scale

        def fresh(traced):
            def step(x, power=2):
                traced.append(1)
                return helper(x) ** power + BETA + len(sizes)

            return step

        assert counting(two, fresh) == 1
        assert counting(two, lambda traced: functools.partial(fresh(traced))) == 1

    def test_function_is_compiled_once(two, module):
        class Model:
            def step(self, x):
                self.traced.append(1)
                return x

        model = Model()

        def of(traced):
            model.traced = traced
            return model.step

        assert counting(two, of) == 1
        made = {}

        def lazily(traced):
            if "step" not in made:

                def step(x):
                    traced.append(1)
                    made.setdefault("weight", 3.0)
                    return x * made["weight"]

                made["step"] = step
            return made["step"]

        assert counting(two, lazily) == 1

    def test_possible_change_recompiles_and_warns_once(two, caplog):
        model = types.SimpleNamespace(rate=1.0)
        said = []

        def fresh(traced):
            said.append(len(caplog.messages))
            return lambda x: (traced.append(1), x * model.rate)[1]

        with caplog.at_level(logging.WARNING, "keras_strategy"):
            assert counting(two, fresh, 8) == 8
        assert said == [0] * 5 + [1] * 3
        (message,) = caplog.messages
        assert (
            "again in every call" in message and "`model`, a SimpleNamespace" in message
        )

    def test_number_changing_in_every_call_is_named(two, module, caplog):
        execute(module, "def step(x): return x + count")
        with caplog.at_level(logging.WARNING, "keras_strategy"):
            for module.count in range(7):
                two.run(module.step, ONE)
        (message,) = caplog.messages
        assert "`count` was 3 in the previous call, and is 4 now" in message

    def test_alternating_functions_do_not_warn(two, module, caplog):
        execute(module, "def step(x): return x + beta")
        with caplog.at_level(logging.WARNING, "keras_strategy"):
            for _ in range(4):
                for module.beta in (0.0, 1.0, 2.0):
                    two.run(module.step, ONE)
        assert not caplog.messages

    @pytest.mark.full(keep_on="tensorflow")
    def test_old_functions_are_evicted(two):
        class Big:
            scale = 2.0

        big = Big()
        gone = weakref.ref(big)

        def enclosing(big):
            return lambda x: x * big.scale

        kept = [enclosing(big)]
        two.run(kept[0], ONE)
        kept.clear()
        del big
        for i in range(40):
            two.run(lambda x, i=i: x + i, ONE)
        gc.collect()
        assert gone() is None


ALIKE = [1, True, 1.0, 0, False, 0.0, -0.0, 1]


def kind_of(x):
    numbers = {bool: 1.0, int: 2.0, float: 3.0}
    return keras.ops.convert_to_tensor(math.copysign(numbers[type(x)], x))


def test_equal_arguments_of_other_types_are_distinct(two):
    found = [values(two, two.run(kind_of, (x,))) for x in ALIKE]
    expected = [2.0, 1.0, 3.0, 2.0, 1.0, 3.0, -3.0, 2.0]
    assert found == [[value, value] for value in expected]


def test_arguments_keep_their_positions(two):
    """Whatever a program that is known is called with, and in which order."""

    def step(a, b, *, more):
        return a + 10 * b + 100 * more["y"][0] + 1000 * more["x"]

    def call(a, b, x, y):
        for more in ({"y": [y], "x": x}, {"x": x, "y": [y]}):
            found = values(two, two.run(step, (a, b), {"more": more}))
            assert found == [float(step(a, b, more=more))] * 2

    n1, n2, n3, n4, n5 = map(keras.ops.convert_to_tensor, np.arange(1.0, 6.0))
    call(n1, n1, n2, n1)
    for shift in (0, 1, 1):
        call(n1 + shift, n2, n3, n4)
    call(n3, n1, n5, n1)
    call(n5, n4, n2, n3)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="they are arrays there")
def test_equal_per_replica_numbers_of_other_types_are_distinct(two):
    pairs = list(itertools.pairwise(ALIKE))
    found = [values(two, two.run(kind_of, (ks.PerReplica(pair),))) for pair in pairs]
    assert found == [[float(kind_of(x)) for x in pair] for pair in pairs]


@pytest.mark.skipif(
    keras.backend.backend() == "jax", reason="one program, whose constants are equal"
)
def test_equal_outputs_of_other_types_are_distinct(two):
    def output():
        return (1, 1.0)[ks.get_replica_context().replica_id_in_sync_group]

    out = two.run(output)

    assert [type(x) for x in two.experimental_local_results(out)] == [int, float]
