"""Callbacks for models of a strategy, to be passed to `fit`."""

from keras_strategy.rules.backups import BackupAndRestore

__all__ = ["BackupAndRestore"]
