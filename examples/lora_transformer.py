"""Fine-tune a language model that need not fit on one device, with LoRA.

Each worker stores a shard of the weights, and gathers those of a few layers at a time.
The model is built, loaded, trained and saved in this way, so no worker ever has all of
it. On one machine:

    keras-strategy run --workers 2 examples/lora_transformer.py

With `--size large` it has 87 million weights. TensorFlow shards the optimizer alone.
"""

import argparse
import pathlib
import sys
import tempfile

import keras
import numpy as np

import keras_strategy as ks

SEED = 7
LENGTH, BATCH_SIZE, RANK = 64, 8, 8
# Width, blocks, heads, hidden units and words.
SIZES = {"small": (64, 2, 4, 192, 512), "large": (768, 12, 12, 2048, 16_384)}
FOLDER = pathlib.Path(tempfile.gettempdir(), "lora_transformer")
LICENCE = pathlib.Path(__file__).parents[1] / "LICENSE"


def load_text():
    """Return windows of bytes of a text, and the byte that follows each of theirs."""
    text = np.frombuffer(LICENCE.read_bytes(), np.uint8).astype("int32")
    starts = np.arange(0, 101 * 32, 32)  # 101 rows: the last batch has 5
    windows = text[starts[:, None] + np.arange(LENGTH + 1)]
    return windows[:, :-1], windows[:, 1:]


def build(width, blocks, heads, hidden, words):
    """Return a decoder in the style of Gemma."""
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    embedding = layers.ReversibleEmbedding(words, width, name="embedding")
    x = embedding(tokens)
    for _ in range(blocks):
        y = layers.RMSNormalization()(x)
        attention = layers.GroupQueryAttention(
            width // heads, heads, max(heads // 4, 1)
        )
        x = layers.Add()([x, attention(y, y, use_causal_mask=True)])
        y = layers.RMSNormalization()(x)
        gate = layers.Dense(hidden, "gelu", use_bias=False)(y)
        y = layers.Multiply()([gate, layers.Dense(hidden, use_bias=False)(y)])
        x = layers.Add()([x, layers.Dense(width, use_bias=False)(y)])
    x = layers.RMSNormalization()(x)
    return keras.Model(tokens, embedding(x, reverse=True))


def prepare_for_lora(model):
    """Leave small factors of the dense layers alone to be trained; compile."""
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dense):
            layer.enable_lora(RANK)
        else:
            layer.trainable = False
    model.compile(
        optimizer=keras.optimizers.AdamW(5e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


def main(arguments):
    """Train; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--folder", default=FOLDER, help="that all workers share")
    options = parser.parse_args(arguments)

    backend = keras.backend.backend()
    shard = "optimizer" if backend == "tensorflow" else "parameters"
    strategy = ks.MultiWorkerMirroredStrategy(shard=shard)
    is_chief = strategy.is_chief
    folder = pathlib.Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    pretrained = folder / "pretrained.weights.h5"
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        model = build(*SIZES[options.size])
    # In place of a file that you have downloaded.
    model.save_weights(pretrained)
    model.load_weights(pretrained)
    prepare_for_lora(model)
    # Each worker writes its shards while training goes on.
    checkpoint = ks.callbacks.ShardedCheckpoint(folder / "checkpoints", max_to_keep=1)
    logs = model.fit(
        *load_text(),
        batch_size=BATCH_SIZE,
        epochs=options.epochs,
        callbacks=[checkpoint],
        verbose=2 if is_chief else 0,
    ).history
    if is_chief:
        trained = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
        print(f"{backend} on {strategy.num_replicas_in_sync} devices")
        print(f"{model.count_params():,} weights, {trained:,} trained")
        print(strategy.memory_report(model))
        print(f"tuned: the loss fell to {logs['loss'][-1]:.2f}")
    if not logs["loss"][-1] < logs["loss"][0]:
        print("FAILED: the loss has not fallen")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
