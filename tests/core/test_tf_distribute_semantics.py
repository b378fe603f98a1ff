"""Behaviour on which programs for tf.distribute rely, beside the native one.

Each case was recorded with native tf.distribute (TensorFlow 2.21, two logical CPUs). On
TensorFlow the native strategy answers the same questions in the same test; where its
error is an accident (a bare AssertionError, an AttributeError), ours is asked alone.
"""

import keras
import numpy as np
import pytest

import keras_strategy as ks
from tests.core.conftest import TENSORFLOW, Api, plain, tensor

REDUCE = {
    "sum": (lambda a: a.s.reduce("SUM", a.two_rows, axis=None), [4.0, 7.0]),
    "mean": (lambda a: a.s.reduce("MEAN", a.two_rows, axis=None), [2.0, 3.5]),
    "sum over rows": (lambda a: a.s.reduce("SUM", a.two_rows, axis=0), 11.0),
    "mean over rows": (lambda a: a.s.reduce("MEAN", a.two_rows, axis=0), 2.75),
    "mean over rows that differ": (
        lambda a: a.s.reduce("MEAN", a.partial, axis=0),
        3.5,
    ),
    "sum over rows that differ": (lambda a: a.s.reduce("SUM", a.partial, axis=0), 21.0),
    "mean with an empty replica": (
        lambda a: a.s.reduce("MEAN", a.per_replica([1.0, 2.0], []), axis=0),
        1.5,
    ),
    "lower case": (lambda a: a.s.reduce("sum", a.two_rows, axis=None), [4.0, 7.0]),
    "mixed case": (lambda a: a.s.reduce("Mean", a.two_rows, axis=None), [2.0, 3.5]),
    "the enum": (
        lambda a: a.s.reduce(a.module.ReduceOp.SUM, a.two_rows, axis=None),
        [4.0, 7.0],
    ),
    "mean of what is not distributed": (
        lambda a: a.s.reduce("MEAN", tensor([1.0, 2.0]), axis=None),
        [1.0, 2.0],
    ),
    "sum over rows of what is not distributed": (
        # Every replica has it.
        lambda a: a.s.reduce("SUM", tensor([1.0, 2.0]), axis=0),
        6.0,
    ),
    "mean over rows of what is not distributed": (
        lambda a: a.s.reduce("MEAN", tensor([1.0, 2.0]), axis=0),
        1.5,
    ),
    "mean of a number": (lambda a: a.s.reduce("MEAN", 2, axis=None), 2),
    "mean of whole numbers": (
        lambda a: a.s.reduce("MEAN", a.per_replica(1, 2, dtype="int32"), axis=None),
        1.5,
    ),
    "mean over rows of whole numbers": (
        lambda a: a.s.reduce(
            "MEAN", a.per_replica([1, 2], [4, 6], dtype="int32"), axis=0
        ),
        3.25,
    ),
    "structure": (
        lambda a: a.s.reduce("SUM", {"x": a.two_rows, "y": (a.scalars,)}, axis=None),
        {"x": [4.0, 7.0], "y": (4.0,)},
    ),
    "of the default strategy": (
        lambda a: a.module.get_strategy().reduce("SUM", tensor([1.0, 2.0]), axis=0),
        3.0,
    ),
    "gather": (lambda a: a.s.gather(a.two_rows, axis=0), [1.0, 2.0, 3.0, 5.0]),
    "gather rows that differ": (
        lambda a: a.s.gather(a.partial, axis=0),
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    ),
    "gather columns": (
        lambda a: a.s.gather(
            a.per_replica([[1.0], [1.0]], [[0.0, 0.0], [0.0, 0.0]]), axis=1
        ),
        [[1.0, 0.0, 0.0]] * 2,
    ),
    "gather depth": (
        lambda a: a.s.gather(a.per_replica([[[1.0], [2.0]]], [[[3.0], [4.0]]]), axis=2),
        [[[1.0, 3.0], [2.0, 4.0]]],
    ),
    "sum over columns": (
        lambda a: a.s.reduce("SUM", a.per_replica([[1.0, 2.0]], [[3.0, 4.0]]), axis=1),
        [10.0],
    ),
    "gather what is not distributed": (
        lambda a: a.s.gather(tensor([1.0, 2.0]), axis=0),
        [1.0, 2.0],
    ),
}


@pytest.mark.parametrize("case", REDUCE)
def test_reduce_and_gather(case, api):
    question, answer = REDUCE[case]
    assert plain(question(api)) == answer


RUN = {
    "ids": (
        lambda a: lambda: tensor(0, "int32") + a.rc().replica_id_in_sync_group,
        [0, 1],
    ),
    "number of replicas": (lambda a: lambda: a.rc().num_replicas_in_sync, [2, 2]),
    "all_reduce": (
        lambda a: lambda: a.rc().all_reduce("SUM", a.mine),
        [[4.0, 7.0]] * 2,
    ),
    "all_reduce mean": (
        lambda a: lambda: a.rc().all_reduce("mean", a.mine),
        [[2.0, 3.5]] * 2,
    ),
    "all_reduce of a structure": (
        lambda a: lambda: a.rc().all_reduce("SUM", {"k": a.mine, "l": [a.mine * 2]}),
        [{"k": [4.0, 7.0], "l": [[8.0, 14.0]]}] * 2,
    ),
    "all_gather": (
        lambda a: lambda: a.rc().all_gather(a.mine, axis=0),
        [[1.0, 2.0, 3.0, 5.0]] * 2,
    ),
    "all_gather of a structure": (
        lambda a: lambda: a.rc().all_gather({"k": a.mine, "l": [a.mine[:1]]}, axis=0),
        [{"k": [1.0, 2.0, 3.0, 5.0], "l": [[1.0, 3.0]]}] * 2,
    ),
    "all_gather of columns": (
        lambda a: lambda: a.rc().all_gather(a.mine[:, None], axis=1),
        [[[1.0, 3.0], [2.0, 5.0]]] * 2,
    ),
    "all_reduce of whole numbers": (
        lambda a: lambda: a.rc().all_reduce("SUM", keras.ops.cast(a.mine, "int32")),
        [[4, 7]] * 2,
    ),
    "all_reduce of no rows": (
        lambda a: lambda: a.rc().all_reduce("SUM", a.mine[:0]),
        [[]] * 2,
    ),
    "values of merge_call": (
        lambda a: (
            lambda: a.rc().merge_call(
                lambda s, v, k: {"v": v, "sum": s.reduce("SUM", k[0], axis=0)},
                args=(a.mine,),
                kwargs={"k": [a.mine]},
            )
        ),
        [{"v": [1.0, 2.0], "sum": 11.0}, {"v": [3.0, 5.0], "sum": 11.0}],
    ),
    "merge_call twice": (
        lambda a: (
            lambda: (
                a.rc().merge_call(lambda s, v: s.reduce("MEAN", v, axis=0), (a.mine,))
                + a.rc().merge_call(lambda s: 1.0)
            )
        ),
        [3.75, 3.75],
    ),
    "merge_call": (
        lambda a: (
            lambda: a.rc().merge_call(
                lambda strategy, v: strategy.reduce("SUM", v, axis=None), args=(a.mine,)
            )
        ),
        [[4.0, 7.0]] * 2,
    ),
    "contexts": (
        lambda a: (
            lambda: (
                a.module.in_cross_replica_context(),
                a.module.get_strategy() is a.s,
                a.rc().strategy is a.s,
            )
        ),
        [(False, True, True)] * 2,
    ),
    "nothing": (lambda a: lambda: None, [None, None]),
    "a constant": (lambda a: lambda: 5, [5, 5]),
    "a structure": (
        lambda a: lambda: {"a": a.mine, "b": [a.mine + 1, None], "c": ("s", 3)},
        [
            {"a": [1.0, 2.0], "b": [[2.0, 3.0], None], "c": ("s", 3)},
            {"a": [3.0, 5.0], "b": [[4.0, 6.0], None], "c": ("s", 3)},
        ],
    ),
}


@pytest.mark.parametrize("case", RUN)
def test_run(case, api):
    question, answer = RUN[case]

    # The replicas of torch run at once, and would share `api`.
    def apart(mine):
        asked = Api.__new__(Api)
        vars(asked).update({**vars(api), "mine": mine})
        return question(asked)()

    assert api.local(api.s.run(apart, args=(api.two_rows,))) == answer


def test_arguments_of_run(api):
    add = lambda x, y: x + y  # noqa: E731
    assert api.local(api.s.run(add, (api.scalars, 1.0))) == [2.0, 4.0]
    assert api.local(api.s.run(add, [api.scalars, api.scalars])) == [2.0, 6.0]
    kwargs = {"y": api.scalars}
    assert api.local(api.s.run(add, (api.scalars,), kwargs)) == [2.0, 6.0]
    nested = api.s.run(lambda xs: xs[0] + xs[1], ([api.scalars, 1.0],))
    assert api.local(nested) == [2.0, 4.0]
    whole = api.s.run(lambda x: x * 2, (tensor([1.0, 2.0]),))
    assert api.local(whole) == [[2.0, 4.0]] * 2
    with api.s.scope():
        assert api.local(api.s.run(lambda: tensor(1.0))) == [1.0, 1.0]
    rows = api.s.run(lambda x: api.rc().all_gather(x, axis=0), (api.partial,))
    assert api.local(rows) == [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]] * 2


VALUES = {
    "arrays": (lambda i: np.float32([i, 1.0]), [[0.0, 1.0], [1.0, 1.0]]),
    "a tuple": (lambda i: (i, i + 1.0), [(0, 1.0), (1, 2.0)]),
    "structures": (
        lambda i: {"x": [tensor(i)], "y": None},
        [{"x": [0.0], "y": None}, {"x": [1.0], "y": None}],
    ),
    "shapes that differ": (lambda i: tensor([1.0] * (i + 1)), [[1.0], [1.0, 1.0]]),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_from_function_are_arguments(case, api):
    make, answer = VALUES[case]
    values = api.s.experimental_distribute_values_from_function(
        lambda context: make(context.replica_id_in_sync_group)
    )
    assert api.local(values) == answer
    assert api.local(api.s.run(lambda x: x, (values,))) == answer


ASSIGNED = {
    # aggregation, synchronization: read outside, the components
    ("mean", "auto"): (2.0, [2.0, 2.0]),
    ("sum", "auto"): (4.0, [4.0, 4.0]),
    ("only_first_replica", "auto"): (1.0, [1.0, 1.0]),
    ("sum", "on_read"): (4.0, [1.0, 3.0]),
    ("mean", "on_read"): (2.0, [1.0, 3.0]),
}


@pytest.mark.parametrize("kind", ASSIGNED, ids="-".join)
def test_assignment_in_replica(kind, api):
    aggregation, synchronization = kind
    value, components = ASSIGNED[kind]
    with api.s.scope():
        v = keras.Variable(
            0.0,
            trainable=False,
            aggregation=aggregation,
            synchronization=synchronization,
        )

    def assign(x):
        v.assign(x)

    api.s.run(assign, args=(api.scalars,))
    assert plain(keras.ops.convert_to_tensor(v)) == value
    native = v if api.module is ks else v.value
    assert api.local(native) == components


def test_on_read_assignment_in_cross_replica_context(api):
    with api.s.scope():
        v = keras.Variable(
            0.0, trainable=False, aggregation="sum", synchronization="on_read"
        )
    v.assign(10.0)
    assert plain(keras.ops.convert_to_tensor(v)) == 10.0
    assert api.local(v if api.module is ks else v.value) == [5.0, 5.0]


def test_outside_variable_is_readable_in_run(api):
    v = keras.Variable(1.0)
    assert api.local(api.s.run(lambda: v + 1.0)) == [2.0, 2.0]
    assert not api.s.extended.variable_created_in_scope(
        v if api.module is ks else v.value
    )


def test_context_queries_match_native(api):
    module, s = api.module, api.s
    context = module.get_replica_context()
    assert (context.num_replicas_in_sync, context.replica_id_in_sync_group) == (1, 0)
    assert not module.in_cross_replica_context() and not module.has_strategy()
    assert module.get_strategy().num_replicas_in_sync == 1
    with s.scope():
        assert module.get_replica_context() is None
        assert module.in_cross_replica_context() and module.has_strategy()
        with s.scope():
            assert module.get_strategy() is s
    module.experimental_set_strategy(s)
    assert module.get_strategy() is s
    module.experimental_set_strategy(None)
    assert not module.has_strategy()


def test_merge_call_of_default_context(api):
    module = api.module

    def merge(strategy, x):
        assert module.in_cross_replica_context() and not module.has_strategy()
        assert module.get_replica_context() is None
        assert strategy is module.get_strategy()
        return x + 1

    assert module.get_replica_context().merge_call(merge, args=(1,)) == 2
    assert not module.in_cross_replica_context()


def fit_and_read_strategy(api, parts, rate=0.1):
    """Fit a model whose parts check their strategy; return the weights."""
    calls = []

    def check(name):
        calls.append(name)
        strategy = api.module.get_strategy()
        assert strategy is api.s and api.module.has_strategy(), name
        return strategy.num_replicas_in_sync

    class Layer(keras.layers.Layer):
        def call(self, x):
            check("layer")
            return x

    class Model(keras.Model):  # unbuilt, so that `fit` builds it
        def __init__(self):
            super().__init__()
            self.parts = [Layer(), keras.layers.Dense(1)]

        def call(self, x):
            check("model")
            return self.parts[1](self.parts[0](x))

    def loss(y_true, y_pred):
        squares = keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)
        return squares / check("loss") if "loss" in parts else squares

    class Metric(keras.metrics.MeanSquaredError):
        def update_state(self, y_true, y_pred, sample_weight=None):
            check("metric")
            return super().update_state(y_true, y_pred, sample_weight)

    keras.utils.set_random_seed(1)
    with api.s.scope():
        layers = [keras.Input((4,)), Layer(), keras.layers.Dense(1)]
        model = Model() if "model" in parts else keras.Sequential(layers)
        metrics = [Metric()] if "metric" in parts else None
        model.compile(keras.optimizers.SGD(rate), loss, metrics=metrics)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    model.evaluate(x, x[:, :1], batch_size=8, verbose=0)
    model.predict(x, batch_size=8, verbose=0)
    assert set(calls) >= set(parts)
    return keras.ops.convert_to_numpy(model.trainable_variables[0].value)


@pytest.mark.parametrize("part", ["layer", "model", "metric"])
def test_parts_of_model_are_in_their_strategy(part, api, caplog):
    fit_and_read_strategy(api, {part})
    assert "one device" not in caplog.text


def test_loss_reads_number_of_replicas(api, caplog):
    """Native divides the loss. Ours is that of one device, on which the number is 1."""
    divided = fit_and_read_strategy(api, {"layer", "loss"})
    rate = 0.1 if api.ours else 0.05
    np.testing.assert_allclose(
        divided, fit_and_read_strategy(api, {"layer"}, rate), rtol=1e-5
    )


LOCAL = {
    "a number": (lambda a: 3, (3,)),
    "a structure of constants": (
        lambda a: {"x": 3, "y": [None]},
        ({"x": 3, "y": [None]},) * 2,
    ),
    "constants of replicas": (
        lambda a: a.s.run(lambda: {"x": 1.5, "y": ()}),
        ({"x": 1.5, "y": ()},) * 2,
    ),
    "other constants beside tensors": (
        lambda a: a.s.run(lambda x: (x, {"y": 2}), (a.scalars,)),
        ((1.0, {"y": 2}), (3.0, {"y": 2})),
    ),
    "keys by replica": (
        lambda a: a.s.run(lambda x: {"x": x, "y": x + 1}, (a.scalars,)),
        ({"x": 1.0, "y": 2.0}, {"x": 3.0, "y": 4.0}),
    ),
    "a tensor": (lambda a: tensor(1.0), (1.0,)),
    "nothing": (lambda a: [], ([], [])),
}


@pytest.mark.parametrize("case", LOCAL)
def test_local_results(case, api):
    question, answer = LOCAL[case]
    assert plain(api.s.experimental_local_results(question(api))) == answer


def test_scope_of_another_strategy(api):
    s = api.s
    calls = (
        lambda: s.run(lambda: tensor(1.0)),
        lambda: s.reduce("SUM", api.scalars, axis=None),
        lambda: s.gather(api.two_rows, axis=0),
        lambda: s.scope().__enter__(),
    )
    with api.module.MirroredStrategy(["CPU:0"]).scope():
        for call in calls:
            with pytest.raises(RuntimeError, match="Mixing different"):
                call()
    assert not api.module.has_strategy()


def test_variable_created_in_run(api):
    made = lambda: keras.Variable(1.0) + 1.0  # noqa: E731
    if TENSORFLOW:
        assert api.local(api.s.run(made)) == [2.0, 2.0]
    else:
        with pytest.raises(ValueError, match="create a variable"):
            api.s.run(made)


def test_distributed_values_match_native(api):
    s = api.s
    assert s.experimental_local_results(3) == (3,)
    assert plain(s.experimental_local_results(tensor(1.0))) == (1.0,)
    assert api.local({"a": api.scalars}) == [{"a": 1.0}, {"a": 3.0}]
    contexts = s.experimental_distribute_values_from_function(
        lambda c: tensor([c.replica_id_in_sync_group, c.num_replicas_in_sync])
    )
    assert api.local(contexts) == [[0.0, 2.0], [1.0, 2.0]]
    structure = s.experimental_distribute_values_from_function(
        lambda c: {"i": tensor(c.replica_id_in_sync_group)}
    )
    assert api.local(structure) == [{"i": 0.0}, {"i": 1.0}]
    same = s.experimental_distribute_values_from_function(lambda c: 1)
    assert isinstance(same, api.value_types) and api.local(same) == [1, 1]


REFUSED = {
    "reduce with an unknown op": (
        lambda a: a.s.reduce("max", a.two_rows, axis=None),
        ValueError,
    ),
    "sum of what is not distributed": (
        lambda a: a.s.reduce("SUM", tensor([1.0, 2.0]), axis=None),
        ValueError,
    ),
    "sum of a number": (lambda a: a.s.reduce("SUM", 2.0, axis=None), ValueError),
    "sum of an array": (
        lambda a: a.s.reduce("SUM", np.array([1.0, 2.0]), axis=None),
        ValueError,
    ),
    "sum of nothing": (lambda a: a.s.reduce("SUM", None, axis=None), ValueError),
    "sum of a list": (lambda a: a.s.reduce("SUM", [1.0, 2.0], axis=None), ValueError),
    "sum of a text": (lambda a: a.s.reduce("SUM", "abc", axis=None), ValueError),
    "scalars over rows": (
        lambda a: a.s.reduce("SUM", a.scalars, axis=0),
        ValueError,
    ),
    "arguments that are a tensor": (
        lambda a: a.s.run(lambda x: x, args=a.scalars),
        ValueError,
    ),
    "something that is no function": (lambda a: a.s.run(3), TypeError),
    "reduce in a replica": (
        lambda a: a.s.run(lambda: a.s.reduce("SUM", tensor(1.0), axis=None)),
        RuntimeError,
    ),
    "gather in a replica": (
        lambda a: a.s.run(lambda: a.s.gather(tensor([1.0]), axis=0)),
        RuntimeError,
    ),
    "run in a replica": (
        lambda a: a.s.run(lambda: a.s.run(lambda: tensor(1.0))),
        RuntimeError,
    ),
    "a scope in a replica": (
        lambda a: a.s.run(lambda: a.s.scope().__enter__()),
        RuntimeError,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_match_native(case, api):
    question, error = REFUSED[case]
    with pytest.raises(error):
        question(api)
    # Nothing is left behind: the next collective works.
    assert not api.module.has_strategy()
    total = api.s.run(lambda x: api.rc().all_reduce("SUM", x), (api.scalars,))
    assert api.local(total) == [4.0, 4.0]


OURS = {
    "sum of zero": (lambda a: a.s.reduce("SUM", 0, axis=None), ValueError),
    "numbers over rows": (
        lambda a: a.s.reduce("SUM", ks.PerReplica([1.0, 2.0]), axis=0),
        ValueError,
    ),
    "gather of lists": (
        lambda a: a.s.gather(ks.PerReplica([[1], [2]]), axis=0),
        ValueError,
    ),
    "gather of scalars": (lambda a: a.s.gather(a.scalars, axis=0), ValueError),
    "reduce with None": (lambda a: a.s.reduce(None, a.two_rows), ValueError),
    "sum of rows that differ": (
        lambda a: a.s.reduce("SUM", a.partial, axis=None),
        ValueError,
    ),
    "a distributed text": (
        lambda a: a.s.reduce("SUM", ks.PerReplica(["a", "b"])),
        ValueError,
    ),
    "gather of other sizes": (
        lambda a: a.s.gather(a.per_replica([[1.0]], [[0.0, 0.0]]), axis=0),
        ValueError,
    ),
}


@pytest.mark.parametrize("case", OURS)
def test_refuses_where_native_fails_accidentally(case, two):
    question, error = OURS[case]
    api = Api(ks, two, ks.DistributedValues)
    with pytest.raises(error, match="Received"):
        question(api)
    total = two.run(lambda x: api.rc().all_reduce("SUM", x), (api.scalars,))
    assert api.local(total) == [4.0, 4.0]


SPARSE = {
    "ReductionToOneDevice": lambda module: module.ReductionToOneDevice(),
    "accumulation_fn": lambda module: module.ReductionToOneDevice(
        accumulation_fn=lambda values: values[0]
    ),
    "HierarchicalCopyAllReduce": lambda module: module.HierarchicalCopyAllReduce(),
    "NcclAllReduce": lambda module: module.NcclAllReduce(),
}


@pytest.mark.skipif(not TENSORFLOW, reason="only TensorFlow has them")
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("choice", SPARSE)
def test_indexed_slices_stay_sparse(choice, op, api):
    import tensorflow as tf

    module = api.module
    rows = api.s.experimental_distribute_values_from_function(
        lambda c: tf.IndexedSlices(
            tensor([[1.0], [2.0]]) * (c.replica_id_in_sync_group + 1),
            tf.constant([0, 1 + c.replica_id_in_sync_group]),
            tf.constant([4, 1]),
        )
    )
    ops, operation = SPARSE[choice](module), module.ReduceOp[op]
    results = [
        ops.reduce(operation, rows, "cpu:0"),
        *ops.batch_reduce(operation, [(rows, "cpu:0"), (rows, rows)]),
    ]
    if choice == "accumulation_fn":  # as a strategy's option, too
        devices = ["cpu:0", "cpu:1"] if api.ours else ["CPU:0", "CPU:1"]
        strategy = module.MirroredStrategy(devices, ops)
        results.append(strategy.run(lambda x: api.rc().all_reduce(op, x), (rows,)))
    for result in results:
        for part in api.s.experimental_local_results(result):
            assert isinstance(part, tf.IndexedSlices)
            expected = np.array([[3.0], [2.0], [4.0], [0.0]])
            expected /= 2 if op == "MEAN" else 1
            assert plain(tf.convert_to_tensor(part)) == expected.tolist()


FIRST, LAST = [[0, 1], [2, 3]], [[4], [5]]
ITERATION = {
    "enumerated": (lambda d: [batch for _, batch in enumerate(d)], [FIRST, LAST]),
    "twice": (lambda d: [*d, *d], [FIRST, LAST] * 2),
    "two iterators": (
        lambda d: (lambda i, j: [next(i), next(j), next(i)])(iter(d), iter(d)),
        [FIRST, FIRST, LAST],
    ),
    "an iterator": (lambda d: list(iter(d)), [FIRST, LAST]),
    "the rest": (lambda d: [list(i) for i in [iter(d)] if next(i)][0], [LAST]),
    "after the end": (
        lambda d: [next(i, None) for i in [iter(d)] * 3][2:],
        [[None, None]],
    ),
    "optional": (
        lambda d: [
            o.get_value() if o.has_value() else None
            for o in (i.get_next_as_optional() for i in [iter(d)] * 3)
        ],
        [FIRST, LAST, [None, None]],
    ),
}


@pytest.mark.parametrize("case", ITERATION)
def test_iteration(case, api):
    tf = pytest.importorskip("tensorflow")
    read, answer = ITERATION[case]
    dataset = tf.data.Dataset.range(6).batch(4)
    batches = read(api.s.experimental_distribute_dataset(dataset))
    assert [api.local(batch) for batch in batches] == answer


@pytest.mark.skipif(not TENSORFLOW, reason="a tf.function takes no such dataset")
@pytest.mark.parametrize("read", ["dataset", "iterator"])
def test_enumerate_in_tf_function_raises(read, api):
    import tensorflow as tf

    data = api.s.experimental_distribute_dataset(tf.data.Dataset.range(6).batch(4))

    @tf.function
    def total(data):
        result = tf.constant(0, tf.int64)
        for _, batch in enumerate(data):
            result += api.s.reduce("SUM", batch, axis=0)
        return result

    with pytest.raises(NotImplementedError, match="enumerate"):
        total(data if read == "dataset" else iter(data))


@pytest.mark.skipif(not TENSORFLOW, reason="only TensorFlow has them")
def test_native_variable_as_value(api):
    import tensorflow as tf

    with api.s.scope():
        variable = tf.Variable(2.0)
    mean = api.s.reduce("MEAN", variable, axis=None)
    operation = api.module.ReduceOp.SUM
    total = api.module.ReductionToOneDevice().reduce(operation, variable, "cpu:0")
    assert (plain(mean), plain(total)) == (2.0, 4.0)
    assert not isinstance(mean, tf.distribute.DistributedValues)
    variable.assign(5.0)
    if api.ours:  # native returns the component
        assert plain(mean) == 2.0


def test_element_specs_are_equal(api):
    tf = pytest.importorskip("tensorflow")

    def distribute(dtype):
        x = tf.data.Dataset.range(6).map(lambda x: {"x": tf.cast(x, dtype), "y": x})
        return api.s.experimental_distribute_dataset(x.batch(4))

    data, equal, other = map(distribute, ["float32", "float32", "int32"])
    spec = data.element_spec
    assert spec == data.element_spec == equal.element_spec == iter(data).element_spec
    assert spec != other.element_spec
    assert spec["x"] != spec["y"] and len({spec["x"], equal.element_spec["x"]}) == 1
    assert spec["x"] != api.two_rows


def test_element_spec_as_input_signature(api):
    if not TENSORFLOW:
        pytest.skip("a tf.function takes values of TensorFlow alone")
    import tensorflow as tf

    data = api.s.experimental_distribute_dataset(tf.data.Dataset.range(6).batch(4))
    kinds = []

    @tf.function(input_signature=[data.element_spec])
    def double(x):
        kinds.append(type(x))
        return api.s.run(lambda x: 2 * x, (x,))

    assert [api.local(double(x)) for x in data] == [[[0, 2], [4, 6]], [[8], [10]]]
    assert kinds == [type(next(iter(data)))]


@pytest.mark.parametrize("kept", ["the cache", "the order", "nothing"])
def test_second_epoch_of_shuffled_rows(kept, api):
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.range(12)
    dataset = dataset.shuffle(12, 1, None if kept != "the order" else False)
    dataset = (dataset.cache() if kept == "the cache" else dataset).batch(5)
    dataset = api.s.experimental_distribute_dataset(dataset)
    first, second = ([api.local(batch) for batch in dataset] for _ in range(2))
    assert (first == second) == (kept != "nothing")
    assert sorted(sum(sum(second, []), [])) == [*range(12)]


def test_value_fn_runs_in_cross_replica_context(two):
    make = two.experimental_distribute_values_from_function
    with pytest.raises(RuntimeError, match="called inside one\\."):
        two.run(lambda: make(lambda context: 1))


def test_numbers_native_does_not_reduce(two):
    numbers = ks.PerReplica([1.0, 2.0])
    assert plain(two.reduce("SUM", numbers, axis=None)) == 3.0
    assert plain(
        two.run(lambda: ks.get_replica_context().all_reduce("SUM", 1.0)).values
    ) == (
        2.0,
        2.0,
    )
