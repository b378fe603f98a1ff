"""What layers and models keep on themselves during a step belongs to one replica."""

import collections

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategy as ks
from tests.equality.compare import assert_equal, largest, scope, train

BACKEND = keras.backend.backend()
RANDOM = np.random.RandomState(3)
X = RANDOM.randn(21, 4).astype("float32")
Y = RANDOM.randn(21, 1).astype("float32")


class Keeper(keras.Model):
    """Keeps what it adds back later on itself, as many residual blocks do.

    In every way at once: as an attribute, in a list, a dict and a dict of another kind
    that are always the same ones, on another layer, and as a loss, which Keras keeps on
    layers.
    """

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(4, activation="tanh")
        # Keras refuses it off TensorFlow, outside of a scope.
        synchronized = ks.has_strategy()
        self.normalize = keras.layers.BatchNormalization(synchronized=synchronized)
        self.last = keras.layers.Dense(1)
        self.skip = None
        self.skips = []
        self.by_name = {}
        self.ordered = collections.OrderedDict()

    def keep(self, x):
        self.skip = x
        self.skips.clear()
        self.skips.append(2 * x)
        self.by_name["x"] = 3 * x
        self.ordered["x"] = 5 * x
        self.first.skip = 7 * x
        self.add_loss(ops.mean(ops.square(x)) * 0.1)

    def kept(self):
        of_the_layer = self.first.skip
        del self.first.skip
        all_of_it = [
            *(self.skip, self.skips[0], self.by_name["x"], self.ordered["x"]),
            of_the_layer,
        ]
        return sum(all_of_it) / 18

    def call(self, x, training=False):
        self.keep(x)
        # The replicas meet here, and another one goes on.
        y = self.normalize(self.first(x), training=training)
        return self.last(y + self.kept())


def fitted(strategy):
    keras.utils.set_random_seed(1)
    with scope(strategy):
        model = Keeper()
        model.compile("adam", "mse", metrics=["mae"])
    history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [*history.history["loss"], *history.history["mae"], *model.get_weights()]


@pytest.mark.full(keep_on="torch")
@pytest.mark.needs_patch(
    "Layer.__setattr__", "keras_patches.layers Layer.add_loss", backend="torch"
)
def test_layer_attributes_are_per_replica(mirrored, audit_mode):
    audit_mode("off")  # or it would run whole if they were not
    one = fitted(None)
    three, again = fitted(mirrored(3)), fitted(mirrored(3))
    assert largest(one, three) < 2e-5
    assert largest(three, again) == 0


class Counter(keras.Model):
    """Counts its steps in Python."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.steps = 0
        self.seen = []

    def call(self, x):
        return self.dense(x)

    def train_step(self, *args):
        self.steps += 1
        self.seen.append(self.steps)
        return super().train_step(*args)


@pytest.mark.full(keep_on="tensorflow")
def test_counter_attribute_counts_batches(mirrored):
    def counted(strategy):
        with scope(strategy):
            model = Counter()
            # Elsewhere Python runs when a step is compiled, on one device too.
            model.compile("sgd", "mse", run_eagerly=BACKEND != "torch")
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        return model.steps, list(model.seen)

    expected = 6, [1, 2, 3, 4, 5, 6]
    assert counted(None) == counted(mirrored(2)) == counted(mirrored(3)) == expected


def each(strategy, *values):
    return ks.PerReplica([ops.convert_to_tensor(np.float32(v)) for v in values])


EAGER = ks.RunOptions(compile=False)


def numbers(strategy, value):
    return [float(part) for part in strategy.experimental_local_results(value)]


def test_attributes_stay_per_replica(two):
    with two.scope():
        layer = keras.layers.Identity()
        layer.total = 0.0

    def add(x):
        layer.total = layer.total + x
        layer.calls = getattr(layer, "calls", 0) + 1
        return ks.get_replica_context().all_reduce("sum", x) * 0 + layer.total

    for expected in ([1.0, 2.0], [2.0, 4.0]):
        totals = two.run(add, (each(two, 1, 2),), options=EAGER)
        assert numbers(two, totals) == expected
        # Outside of the replicas there is no one value of it.
        assert isinstance(layer.total, ks.PerReplica)
        assert numbers(two, layer.total) == expected
        with pytest.raises(ValueError, match=r"set Identity\.total to different"):
            bool(layer.total)
        for use in (float, list, np.asarray):
            with pytest.raises(ValueError, match=r"set Identity\.total to different"):
                use(layer.total)
    assert layer.calls == 2
    layer.total = 5.0  # what is set outside is every replica's
    totals = two.run(add, (each(two, 1, 2),), options=EAGER)
    assert numbers(two, totals) == [6.0, 7.0]


def test_failed_run_restores_attributes(two):
    with two.scope():
        layer = keras.layers.Identity()
        layer.kept, layer.list = 1, [1]

    def fail():
        layer.kept = 2
        layer.list.append(2)
        layer.new = 3
        ks.get_replica_context().all_reduce("sum", 1.0)
        raise ArithmeticError("boom")

    with pytest.raises(ArithmeticError, match="boom"):
        two.run(fail, options=EAGER)
    assert (layer.kept, layer.list, hasattr(layer, "new")) == (1, [1], False)


class Listed(keras.metrics.Mean):
    """Counts its updates by a list."""

    def __init__(self):
        super().__init__()
        self.updates = []

    def update_state(self, *args, **kwargs):
        self.updates.append(1)
        return super().update_state(*args, **kwargs)


@pytest.mark.needs_patch("Metric.__init__", backend="torch")
def test_lists_of_metrics_stay_per_replica(two):
    with two.scope():
        metric = Listed()

    def update(x):
        metric.update_state(x)
        x = ks.get_replica_context().all_reduce("sum", x)
        return x * 0 + len(metric.updates)

    for expected in ([1.0, 1.0], [2.0, 2.0]):
        counts = two.run(update, (each(two, 1, 2),), options=EAGER)
        assert numbers(two, counts) == expected
    assert metric.updates == [1, 1]


class Alternating(keras.Model):
    """Trains its first layer, then its last, as the two halves of a GAN."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(3, activation="tanh")
        self.last = keras.layers.Dense(1)

    def build(self, shape):
        self.first.build(shape)
        self.last.build((None, 3))

    def call(self, x):
        return self.last(self.first(x))

    def train_step(self, data):
        x, y = data
        for trained, frozen in ((self.first, self.last), (self.last, self.first)):
            trained.trainable, frozen.trainable = True, False
            loss, gradients = ks.value_and_grad(
                lambda: ops.mean(ops.square(self(x) - y)), self.trainable_variables
            )()
            self.optimizer.apply(gradients, self.trainable_variables)
        self.last.trainable = False
        return {"loss": loss}


@pytest.mark.skipif(BACKEND == "jax", reason="its train_step is given the variables")
def test_trainable_is_switched_in_train_step(mirrored):
    def make():
        model = Alternating()
        model.build((None, 4))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        model.optimizer.build(model.trainable_variables)
        return model

    one = train(None, make, X, Y, predicted=0)
    many = train(mirrored(3), make, X, Y, predicted=0)
    assert_equal(one, many)
    assert len(many.model.trainable_variables) == 0


@pytest.mark.needs_patch("Variable.trainable", backend="torch", case="eager")
@pytest.mark.parametrize("options", [None, EAGER], ids=["compiled", "eager"])
def test_replicas_find_variables_trainable(options, two):
    with two.scope():
        layer = keras.layers.Dense(1)
        layer.build((None, 2))
        bias = keras.Variable(0.0)
    found = []

    def freeze():
        found.append([len(layer.trainable_variables), bias.trainable])
        layer.trainable = bias.trainable = False
        found.append([len(layer.trainable_variables) + 2, not bias.trainable])

    two.run(freeze, options=options)
    assert all(seen == [2, True] for seen in found)
    assert not (layer.kernel.trainable or layer.trainable or bias.trainable)


class Settings:
    rate = 1.0


class Rated(keras.layers.Layer):
    """A layer with a property that sets an attribute of another object."""

    def __init__(self):
        super().__init__()
        self.settings = Settings()
        self.rate = Settings.rate

    @property
    def rate(self):
        return self._rate

    @rate.setter
    def rate(self, value):
        self._rate = self.settings.rate = value


@pytest.mark.parametrize("options", [None, EAGER], ids=["compiled", "eager"])
def test_setter_of_property_is_called(options, two):
    with two.scope():
        layer = Rated()
    found = []

    def change():
        layer.rate = Settings.rate
        found.append(layer.settings.rate)
        layer.rate = 2.0

    two.run(change, options=options)
    assert set(found) == {1.0}
    assert layer.rate == layer.settings.rate == 2.0
