"""Subcommand `verify`: an audit of the first `fit` of a program."""

import argparse
from typing import Any

import keras_strategy as ks
from keras_strategy.commands.first_fit import first_batch, run_to_first_fit


def main(options: argparse.Namespace) -> int:
    def check(arguments: dict[str, Any]) -> int:
        report = ks.verify(arguments["self"], *first_batch(arguments))
        print(report)
        return int(report.differs)

    return run_to_first_fit(options, check)
