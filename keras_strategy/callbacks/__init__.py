"""Callbacks for `fit`, for models of a strategy, and their checkpoints."""

from keras_strategy.keras_patches.resume import load_checkpoint
from keras_strategy.training.callbacks import BackupAndRestore, ShardedCheckpoint

__all__ = ["BackupAndRestore", "ShardedCheckpoint", "load_checkpoint"]
