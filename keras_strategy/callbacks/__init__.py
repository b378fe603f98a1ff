"""Callbacks for `fit`, for models of a strategy."""

from keras_strategy.rules.backups import BackupAndRestore

__all__ = ["BackupAndRestore"]
