"""Share of the trained weights that a device of JAX keeps, by the number of devices.

    KERAS_BACKEND=jax python -m benchmarks.shard_sizes

The shares of Adam's slots are the same. JAX needs equal shards, and the number of
devices does not divide all dimensions of these models.
"""

import math

import keras
from keras import applications, layers

from benchmarks.tables import markdown
from keras_strategy.training.sharding import ShardSpec

REPLICAS = 2, 4, 8, 16, 3, 5, 6, 7, 12, 24


def gpt2() -> keras.Model:
    """Return a transformer of the size of GPT-2 small, with an odd vocabulary."""
    width, heads = 768, 12
    words = keras.Input((1024,), dtype="int32")
    x = layers.Embedding(50_257, width)(words)
    for _ in range(12):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, width // heads)(y, y)
        y = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(y)
    return keras.Model(words, layers.Dense(50_257)(layers.LayerNormalization()(x)))


MODELS = {
    "a transformer as GPT-2 small, of 50,257 words": gpt2,
    "ResNet50": lambda: applications.ResNet50(weights=None),
    "MobileNetV3Large": lambda: applications.MobileNetV3Large(weights=None),
}


def main() -> None:
    lines = []
    for name, build in MODELS.items():
        with keras.StatelessScope():  # in which weights get no values
            model = build()
        shapes = [tuple(v.shape) for v in model.trainable_variables]
        line = [name]
        for count in REPLICAS:
            specs = [ShardSpec.for_shape(shape, count) for shape in shapes]
            pairs = zip(shapes, specs, strict=True)
            kept = sum(math.prod(shape) / spec.num_shards for shape, spec in pairs)
            line.append(f"{kept / sum(map(math.prod, shapes)):.1%}")
        lines.append(line)
    lines.append(["all in N parts", *(f"{1 / count:.1%}" for count in REPLICAS)])
    print(markdown(["", *(f"N = {count}" for count in REPLICAS)], lines))


if __name__ == "__main__":
    main()
