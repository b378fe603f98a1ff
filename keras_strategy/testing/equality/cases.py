"""The rows of the equality table: what Keras does in a training step."""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers, losses, metrics, optimizers

from keras_strategy.testing.equality import models
from keras_strategy.testing.equality.compare import LOGS, WEIGHTS
from keras_strategy.testing.equality.models import compiled, mlp

# Rounding in half floats differs by more when the rows are only reordered. Predictions
# are half floats themselves: one unit in the last place, for values from 1 to 2.
FLOAT16: dict[str, Any] = {"weights": 5e-3, "logs": 2e-3, "predictions": 2**-10}
BFLOAT16: dict[str, Any] = {"weights": 5e-3, "logs": 2e-3, "predictions": 2**-7}


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: Its name.
        make: Returns a compiled model.
        data: Returns inputs and targets of a number of rows.
        fit: Returns further arguments of `fit` for a number of rows.
        weights: The largest difference allowed in a weight.
        logs: The largest difference allowed in a log.
        predictions: The largest difference allowed in a prediction.
        not_on: The backends on which one device cannot do it, with the reason.
        policy: The global dtype policy.
    """

    name: str
    make: Callable[[], keras.Model]
    data: Callable[[int], tuple[Any, Any]] = models.regression
    fit: Callable[[int], dict[str, Any]] = field(default=lambda rows: {})
    weights: float = WEIGHTS
    logs: float = LOGS
    predictions: float = LOGS
    not_on: dict[str, str] = field(default_factory=dict)
    policy: str = "float32"


def all_cases() -> list[Case]:
    """Every row of the table, in the order of the table."""
    return [
        *optimizer_cases(),
        *beside_the_rule(),
        *loss_cases(),
        *layer_cases(),
        *metric_cases(),
        *execution_cases(),
    ]


def shipped(module: Any, base: type, without: set[str]) -> Iterator[type]:
    """The classes that a module of Keras offers, each once, by name."""
    found = {}
    for name, value in sorted(vars(module).items()):
        if inspect.isclass(value) and issubclass(value, base) and value is not base:
            found.setdefault(value, name)
    return (cls for cls, name in found.items() if name not in without)


# These are made of other optimizers.
_OPTIMIZERS_OF_OTHERS = {"LossScaleOptimizer", "MultiOptimizer"}


def optimizer_cases() -> Iterator[Case]:
    """Every optimizer that Keras ships."""

    def built(cls):
        model = compiled(optimizer=cls(learning_rate=0.01))
        # Built while it is traced, ScheduleFreeAdamW would on TensorFlow copy the
        # weights into its averages in every step, on one device.
        model.optimizer.build(model.trainable_variables)
        return model

    for cls in shipped(optimizers, optimizers.Optimizer, _OPTIMIZERS_OF_OTHERS):
        yield Case(f"optimizer {cls.__name__}", functools.partial(built, cls))


def beside_the_rule() -> Iterator[Case]:
    """What optimizers do beside their rule."""
    adam = functools.partial(optimizers.Adam, 0.01)
    options: dict[str, dict[str, Any]] = {
        "clipnorm": {"clipnorm": 0.1},
        "global_clipnorm": {"global_clipnorm": 0.1},
        "clipvalue": {"clipvalue": 0.01},
        "weight_decay": {"weight_decay": 0.1},
        "EMA": {"use_ema": True},
        "EMA, overwriting every 2 steps": {
            "use_ema": True,
            "ema_overwrite_frequency": 2,
        },
        "accumulation over 2 steps": {"gradient_accumulation_steps": 2},
        "accumulation over 3 steps": {"gradient_accumulation_steps": 3},
        "loss_scale_factor": {"loss_scale_factor": 8.0},
    }
    for name, arguments in options.items():
        yield Case(
            name,
            lambda arguments=arguments: compiled(optimizer=adam(**arguments)),
        )
    yield Case(
        "learning rate schedule",
        lambda: compiled(
            optimizer=optimizers.Adam(
                optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
            )
        ),
    )
    yield Case(
        "LossScaleOptimizer, NaN on one replica",
        lambda: compiled(
            mlp(models.NotANumberAtZero),
            optimizers.LossScaleOptimizer(adam(), initial_scale=2.0**10),
        ),
        data=models.with_a_row_of_zeros,
    )
    yield Case(
        "mixed_float16",
        # A replica's gradients, of means over its rows alone, are larger than those
        # of the batch before they are weighted. From this scale neither overflows.
        lambda: compiled(
            optimizer=optimizers.LossScaleOptimizer(adam(), initial_scale=2.0**8)
        ),
        policy="mixed_float16",
        **FLOAT16,
    )
    yield Case("mixed_bfloat16", compiled, policy="mixed_bfloat16", **BFLOAT16)


def loss_cases() -> Iterator[Case]:
    """Losses, their reductions, weights, masks and what layers add."""

    def weighted(rows):
        return {"sample_weight": models.weights_of(rows)}

    for reduction in ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight"):
        yield Case(
            f"reduction {reduction}, sample weights",
            lambda reduction=reduction: compiled(
                optimizer=optimizers.SGD(0.01),
                loss=losses.MeanSquaredError(reduction=reduction),
            ),
            fit=weighted,
        )
    yield Case(
        "reduction none, reduced in compute_loss",
        lambda: compiled(models.OwnReduction(), loss=None),
    )
    yield Case(
        "loss function that returns a scalar",
        lambda: compiled(loss=lambda t, p: keras.ops.mean(keras.ops.abs(t - p))),
    )
    yield Case(
        "several outputs with loss weights",
        lambda: compiled(
            models.two_outputs(),
            loss={"p": "mse", "q": "mae"},
            loss_weights={"p": 1.0, "q": 0.5},
        ),
        data=_for_two_outputs,
    )
    yield Case(
        "class weights",
        lambda: compiled(
            mlp(outputs=models.CLASSES),
            loss=losses.SparseCategoricalCrossentropy(from_logits=True),
        ),
        data=models.classes,
        fit=lambda rows: {"class_weight": {0: 1.0, 1: 0.5, 2: 3.0}},
    )
    masked = functools.partial(layers.Embedding, models.WORDS, 4, mask_zero=True)
    yield Case(
        "mask of an Embedding",
        lambda: compiled(
            models.sequences(masked()),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        ),
        data=models.words,
    )
    yield Case(
        "mask and sample weights",
        lambda: compiled(
            models.sequences(masked()),
            loss="sparse_categorical_crossentropy",
            weighted_metrics=["accuracy"],
        ),
        data=models.words,
        fit=lambda rows: {"sample_weight": models.weights_of((rows, models.STEPS))},
        not_on={
            "torch": "Keras's loss scales the sample weights in place there, before "
            "its metrics see them: one device logs a wrong accuracy"
        },
    )
    yield Case("add_loss", lambda: compiled(mlp(models.AddedLoss)))
    yield Case(
        "activity regularizer",
        lambda: compiled(mlp(lambda: layers.Dense(8, activity_regularizer="l2"))),
    )
    yield Case(
        "kernel regularizer",
        lambda: compiled(mlp(lambda: layers.Dense(8, kernel_regularizer="l1"))),
    )


def _for_two_outputs(rows):
    x, y = models.regression(rows)
    return x, {"p": y, "q": y * 3}


def layer_cases() -> Iterator[Case]:
    """Normalizations and layers with state of their own."""
    yield Case(
        "BatchNormalization, synchronized",
        # On one device there is nothing to synchronize, and Keras refuses to.
        lambda: compiled(
            mlp(lambda: layers.BatchNormalization(synchronized=_in_a_scope()))
        ),
    )
    yield Case("LayerNormalization", lambda: compiled(mlp(layers.LayerNormalization)))
    yield Case(
        "GroupNormalization",
        lambda: compiled(mlp(lambda: layers.GroupNormalization(2))),
    )
    yield Case(
        "Normalization, adapted",
        lambda: compiled(mlp(_adapted_normalization)),
    )
    yield Case(
        "SpectralNormalization",
        lambda: compiled(mlp(lambda: layers.SpectralNormalization(layers.Dense(8)))),
    )
    yield Case("LoRA", _lora)
    yield Case(
        "Embedding (sparse gradients on TensorFlow)",
        lambda: compiled(
            models.sequences(layers.Embedding(models.WORDS, 4)),
            loss="sparse_categorical_crossentropy",
        ),
        data=models.words,
    )
    yield Case(
        "convolutions",
        lambda: compiled(
            mlp(
                lambda: layers.Reshape((4, 2)),
                lambda: layers.Conv1D(4, 2, activation="relu"),
                layers.Flatten,
            )
        ),
    )
    yield Case(
        "recurrent layers",
        lambda: compiled(
            mlp(
                lambda: layers.Reshape((4, 2)),
                lambda: layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
                lambda: layers.GRU(4),
            )
        ),
    )
    yield Case(
        "attention",
        lambda: compiled(
            mlp(
                lambda: layers.Reshape((4, 2)),
                lambda: _SelfAttention(),
                layers.Flatten,
            )
        ),
    )


class _SelfAttention(layers.Layer):
    def build(self, shape):
        # The bias of the keys has no gradient but rounding noise.
        self.attention = layers.MultiHeadAttention(2, 2, use_bias=False)
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x)


def _in_a_scope() -> bool:
    import keras_strategy as ks

    return ks.has_strategy()


def _adapted_normalization():
    layer = layers.Normalization()
    layer.adapt(np.repeat(models.regression(64)[0], 2, axis=1))
    return layer


def _lora():
    model = mlp(lambda: layers.Dense(8))
    model.layers[1].enable_lora(2)
    return compiled(model)


# Metrics whose constructor needs arguments, or whose targets are whole numbers.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "IoU": {"num_classes": 2, "target_class_ids": [0, 1]},
    "MeanIoU": {"num_classes": models.CLASSES, "sparse_y_pred": False},
    "OneHotIoU": {"num_classes": models.CLASSES, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": models.CLASSES},
    "MeanRelativeError": {"normalizer": [1.0, 2.0, 3.0]},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "TopKCategoricalAccuracy": {"k": 2},
    "SparseTopKCategoricalAccuracy": {"k": 2},
}
_SPARSE = {
    "MeanIoU",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
}
# Bases, and metrics of a value rather than of targets and predictions.
_NOT_OF_PREDICTIONS = {"Mean", "MeanMetricWrapper", "Sum"}
# These want predicted classes instead of probabilities.
_OWN_DATA = {"IoU", "BinaryIoU"}


def metric_cases() -> Iterator[Case]:
    """Every metric class that Keras ships, in one training of two outputs."""
    by_output: dict[str, list[Any]] = {"onehot": [], "sparse": []}

    def add(output, cls, name):
        by_output[output].append(
            functools.partial(cls, name=name, **_ARGUMENTS.get(cls.__name__, {}))
        )

    without = _NOT_OF_PREDICTIONS | _OWN_DATA
    for cls in shipped(metrics, metrics.Metric, without):
        output = "sparse" if cls.__name__ in _SPARSE else "onehot"
        add(output, cls, f"m_{cls.__name__.lower()}")
    add("onehot", models.Total, "total")

    def make():
        inputs = keras.Input((models.FEATURES,))
        hidden = layers.Dense(8, "tanh")(inputs)
        softmax = layers.Dense(models.CLASSES, "softmax")(hidden)
        outputs = {
            name: layers.Identity(name=name)(softmax) for name in ("onehot", "sparse")
        }
        return compiled(
            keras.Model(inputs, outputs),
            loss={
                "onehot": "categorical_crossentropy",
                "sparse": "sparse_categorical_crossentropy",
            },
            metrics={k: [make() for make in v] for k, v in by_output.items()},
        )

    def data(rows):
        x, y = models.classes(rows)
        return x, {"onehot": keras.utils.to_categorical(y, 3), "sparse": y}

    count = sum(len(made) for made in by_output.values())
    yield Case(f"{count} metrics", make, data)


def execution_cases() -> Iterator[Case]:
    """How Keras executes steps."""
    one_step = {"torch": "Keras has steps_per_execution=1 there"}
    yield Case(
        "steps_per_execution=3",
        lambda: compiled(steps_per_execution=3),
        not_on=one_step,
    )
    yield Case("run_eagerly", lambda: compiled(run_eagerly=True))
    yield Case(
        "jit_compile=True",
        lambda: compiled(jit_compile=True),
        not_on={"torch": "torch.compile is for one replica a process"},
    )
    yield Case("jit_compile=False", lambda: compiled(jit_compile=False))
    yield Case("shuffle", compiled, fit=lambda rows: {"shuffle": True})
    yield Case(
        "validation_data",
        compiled,
        fit=lambda rows: {"validation_data": models.regression(11)},
    )
