"""keras-hub's models, made of small configurations: nothing is downloaded."""

import keras
import numpy as np

from conformance.ports.keras_io_supervised import IMAGES, LABELS
from conformance.ports.port import (
    LOGITS_LOSS,
    ROWS,
    SENTIMENT,
    TEXT,
    compiled,
    fitted,
    port,
    sgd,
    stepped,
)

GUIDES = "keras-team/keras-io: guides/keras_hub"
HUB = {"needs": "keras_hub"}
TRANSFORMER = {
    "vocabulary_size": 9,
    "max_sequence_length": 6,
    "num_layers": 1,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
    "dropout": 0.1,
}
# Rows of different lengths.
MASK = np.arange(6) < 2 + np.arange(ROWS)[:, np.newaxis] % 5


@port(f"{GUIDES}/getting_started.py, BERT", **HUB)
def bert_text_classifier(strategy):
    import keras_hub

    def make():
        backbone = keras_hub.models.BertBackbone(**TRANSFORMER)
        model = keras_hub.models.BertTextClassifier(backbone, 2, dropout=0.1)
        return compiled(model, sgd(), LOGITS_LOSS, metrics=["accuracy"])

    inputs = {
        "token_ids": TEXT * MASK,
        "segment_ids": np.zeros_like(TEXT),
        "padding_mask": MASK,
    }
    return fitted(strategy, make, inputs, SENTIMENT, validation_split=0.2)


@port(f"{GUIDES}/transformer_pretraining.py, masked words", **HUB)
def bert_masked_lm(strategy):
    import keras_hub

    def make():
        backbone = keras_hub.models.BertBackbone(**TRANSFORMER)
        model = keras_hub.models.BertMaskedLM(backbone)
        return compiled(model, sgd(), LOGITS_LOSS, weighted_metrics=["accuracy"])

    positions = np.stack([np.arange(ROWS) % 6, (np.arange(ROWS) + 2) % 6], axis=1)
    inputs = {
        "token_ids": TEXT,
        "segment_ids": np.zeros_like(TEXT),
        "padding_mask": np.ones_like(TEXT),
        "mask_positions": positions,
    }
    targets = np.take_along_axis(TEXT, positions, axis=1)
    # Some rows have one masked word alone.
    weights = np.stack([np.ones(ROWS), np.arange(ROWS) % 3 > 0], axis=1)
    return fitted(strategy, make, inputs, targets, sample_weight=weights)


@port(
    "keras-team/keras-io: examples/generative/gpt2_text_generation_with_keras_hub.py",
    **HUB,
)
def gpt2_causal_lm(strategy):
    import keras_hub

    def make():
        backbone = keras_hub.models.GPT2Backbone(**TRANSFORMER)
        model = keras_hub.models.GPT2CausalLM(backbone)
        schedule = keras.optimizers.schedules.PolynomialDecay(0.05, 6)
        optimizer = keras.optimizers.SGD(schedule, momentum=0.9)
        return compiled(model, optimizer, LOGITS_LOSS, weighted_metrics=["accuracy"])

    inputs = {"token_ids": TEXT, "padding_mask": np.ones_like(TEXT)}
    targets = np.roll(TEXT, -1, axis=1)
    weights = MASK.astype("float32")
    return fitted(strategy, make, inputs, targets, sample_weight=weights)


COLOURED = np.repeat(IMAGES, 3, axis=-1)


@port(f"{GUIDES}/classification_with_keras_hub.py, ViT", **HUB)
def vit_image_classifier(strategy):
    import keras_hub

    def make():
        backbone = keras_hub.models.ViTBackbone(
            image_shape=(8, 8, 3),
            patch_size=4,
            num_layers=1,
            num_heads=2,
            hidden_dim=8,
            mlp_dim=16,
        )
        model = keras_hub.models.ViTImageClassifier(backbone, 10)
        return compiled(model, sgd(), LOGITS_LOSS, metrics=["accuracy"])

    return fitted(strategy, make, COLOURED, LABELS, validation_split=0.2)


@port(f"{GUIDES}/classification_with_keras_hub.py, ResNet", **HUB)
def resnet_image_classifier(strategy):
    import keras_hub

    def make():
        sizes = [64], [3], [64, 8], [1, 1], [1, 2]
        backbone = keras_hub.models.ResNetBackbone(
            *sizes, "basic_block", image_shape=(8, 8, 3)
        )
        model = keras_hub.models.ResNetImageClassifier(backbone, 10)
        optimizer = keras.optimizers.SGD(0.01)
        return compiled(model, optimizer, LOGITS_LOSS, metrics=["accuracy"])

    return fitted(strategy, make, COLOURED, LABELS)


# Drawn, since BatchNormalization of the edges of digits, all black, amplifies rounding.
PHOTOS = np.random.RandomState(4).rand(13, 32, 32, 3).astype("float32")


def pyramid():
    """Return a ResNet whose outputs have 1/4 and 1/8 of an image's size."""
    import keras_hub

    sizes = [64], [3], [64, 8], [1, 1], [1, 2]
    return keras_hub.models.ResNetBackbone(
        *sizes, "basic_block", image_shape=(32, 32, 3)
    )


@port(f"{GUIDES}/object_detection_retinanet.py", **HUB)
def retinanet(strategy):
    """Divide the loss by the positive anchors of a batch."""
    import keras_hub

    def make():
        backbone = keras_hub.models.RetinaNetBackbone(
            pyramid(), min_level=3, max_level=3, use_p5=False, image_shape=(32, 32, 3)
        )
        model = keras_hub.models.RetinaNetObjectDetector(
            backbone, 2, bounding_box_format="xyxy", pre_logits_num_conv_layers=1
        )
        return compiled(model, optimizer=keras.optimizers.SGD(0.001))

    moved = np.random.RandomState(3).uniform(0, 5, (13, 2, 2))
    boxes = np.concatenate([moved, moved + 26], axis=-1).astype("float32")
    # Some images have one object alone.
    labels = np.stack([np.arange(13) % 2, np.arange(13) % 3 - 1], 1).astype("float32")
    boxes[labels < 0] = -1
    # On TensorFlow, one device cannot predict with it.
    return stepped(strategy, make, PHOTOS, {"boxes": boxes, "labels": labels})


@port(f"{GUIDES}/semantic_segmentation_deeplab_v3.py", **HUB)
def deeplab_v3(strategy):
    import keras_hub

    def make():
        backbone = keras_hub.models.DeepLabV3Backbone(
            pyramid(),
            spatial_pyramid_pooling_key="P3",
            upsampling_size=2,
            dilation_rates=[2, 4],
            low_level_feature_key="P2",
            projection_filters=4,
            image_shape=(32, 32, 3),
        )
        model = keras_hub.models.DeepLabV3ImageSegmenter(backbone, 3, "softmax")
        iou = keras.metrics.MeanIoU(3, sparse_y_true=False, sparse_y_pred=False)
        metrics = [iou, keras.metrics.CategoricalAccuracy()]
        loss = keras.losses.CategoricalCrossentropy()
        return compiled(model, keras.optimizers.SGD(0.001), loss, metrics=metrics)

    masks = keras.utils.to_categorical(np.digitize(PHOTOS[..., 0], (0.3, 0.7)), 3)
    return fitted(strategy, make, PHOTOS, masks, validation_split=0.2)
