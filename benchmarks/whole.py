"""Memory of a device on JAX where N does not divide all dimensions of the weights.

    KERAS_BACKEND=jax python -m benchmarks.whole

The share of the bytes of the trained weights, and so of Adam's slots, in models whose
widths are those that people use.
"""

import math

import keras
from keras import applications, layers

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
    "a transformer as GPT-2 small": gpt2,
    "ResNet50": lambda: applications.ResNet50(weights=None),
    "MobileNetV3Large": lambda: applications.MobileNetV3Large(weights=None),
}


def main() -> None:
    """Measure and print."""
    print(f"| model | weights | {' | '.join(f'N = {n}' for n in REPLICAS)} |")
    print("| --- |" + " --- |" * (1 + len(REPLICAS)))
    for name, make in MODELS.items():
        with keras.StatelessScope():  # in which weights get no values
            model = make()
        shapes = [tuple(v.shape) for v in model.trainable_variables]
        size = sum(map(math.prod, shapes))
        shares = []
        for replicas in REPLICAS:
            kept = [
                math.prod(s) / ShardSpec.for_shape(s, replicas).num_shards
                for s in shapes
            ]
            shares.append(f"{sum(kept) / size:.1%}")
        print(f"| {name} | {size:,} | {' | '.join(shares)} |", flush=True)
    ideal = (f"{1 / replicas:.1%}" for replicas in REPLICAS)
    print(f"| all in N parts | | {' | '.join(ideal)} |")


if __name__ == "__main__":
    main()
