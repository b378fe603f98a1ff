"""Callbacks for `fit`, for models of a strategy."""

from keras_strategy.training.callbacks import BackupAndRestore

__all__ = ["BackupAndRestore"]
