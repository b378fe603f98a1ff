"""Command line `keras-strategy`: its parsers, and the subcommand `run`.

Each other subcommand has a module, which is imported only for it: `run` must not wait
for Keras.
"""

import argparse
import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

_EXIT_CODES = """\
exit codes:
  0    success
  1    a check failed, or the program raised
  2    the command line is invalid
  69   the workers did not find each other
  75   a worker was asked to end, and saved its progress
  76   another worker failed
  130  interrupted (Ctrl-C)
  128+ and the number of another signal that ended it"""

_RUN = """\
Starts a Python program in several workers on this machine. Each worker finds the
cluster in TF_CONFIG. When one fails, the others are ended."""
_RUN_EXAMPLES = """\
examples:
  keras-strategy run --workers 2 train.py --epochs 5
  keras-strategy run --workers auto train.py
  keras-strategy run --workers 4 --max-restarts 3 -m my_package.train"""
_DEVICES = "logical CPU devices of each worker (default: the backend's own)"
_GPUS = "GPUs that each worker sees (default: all GPUs, divided evenly)"
_RESTARTS = "how often to restart all workers when one failed or was preempted"
_MIN_WORKERS = (
    "the others go on while so many are left; for programs that call run_elastic"
)
_FINGERPRINT = "write and print the fingerprint of the trained model's bits"
_GRACE = "time to end after SIGTERM, before SIGKILL"
_INFO_EXAMPLES = """\
examples:
  keras-strategy info
  KERAS_BACKEND=jax keras-strategy info --json"""
_DOCTOR = """\
Trains a step on two replicas, runs a collective in two processes, and reports what is
wrong and how to fix it. With --workers, started as a job with all its workers, checks
that they meet, and compares their names, versions, variables, threads, ports and
clocks."""
_DOCTOR_EXAMPLES = """\
examples:
  keras-strategy doctor
  KERAS_BACKEND=torch keras-strategy doctor --timeout-seconds 300
  srun keras-strategy doctor --workers"""
_VERIFY = """\
Runs a program up to its first `fit`. Compares a step of it on the strategy's replicas
with one device's, and ends the program."""
_VERIFY_EXAMPLES = """\
examples:
  keras-strategy verify train.py
  KERAS_BACKEND=torch keras-strategy verify train.py --epochs 1

exit codes:
  0    the replicas equal one device
  1    they differ, or the program raised or calls no `fit`"""
_COMPARE = """\
Compares the bits of two models that were trained with the same virtual replicas. Names
the first variable that differs, and the conditions that do."""
_COMPARE_EXAMPLES = """\
examples:
  keras-strategy run --workers 2 --fingerprint two.json train.py
  keras-strategy run --workers 4 --fingerprint four.json train.py
  keras-strategy compare two.json four.json

exit codes:
  0    all bits are equal
  1    the models differ
  2    a file is not a report"""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line, by default this process's; return the exit status."""
    options = _parser().parse_args(args)
    is_run = options.subcommand == "run"
    is_script = "program" in options and not getattr(options, "module", False)
    if is_script and not os.path.exists(options.program):
        options.fail(
            f"argument program: there is no file {options.program!r}. Give the path of "
            f"a Python script{', or -m and the name of a module' * is_run}"
        )
    if not is_run:
        return _import_command(options.subcommand).main(options)

    from keras_strategy.commands.elastic import ElasticLauncher
    from keras_strategy.commands.launcher import Launcher
    from keras_strategy.commands.local_cluster import count_workers

    kind = Launcher
    try:
        options.workers = count_workers(options.workers, options.gpus_per_worker)
    except ValueError as error:
        options.fail(str(error))
    if options.min_workers is not None:
        if options.min_workers > options.workers:
            options.fail(
                f"argument --min-workers: expected at most --workers {options.workers}"
                f". Received: {options.min_workers}"
            )
        kind = functools.partial(ElasticLauncher, min_workers=options.min_workers)
    program = ["-m", options.program] if options.module else [options.program]
    try:
        return kind(
            (sys.executable, *program, *options.arguments),
            options.workers,
            options.devices_per_worker,
            options.max_restarts,
            options.grace_seconds,
            options.fingerprint,
            options.gpus_per_worker,
        ).run()
    except BrokenPipeError:
        # Nobody reads the output: Python would complain again when it flushes.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _import_command(name: str) -> Any:
    """Import a command without the lines that TensorFlow prints when it starts."""
    module = f"keras_strategy.commands.{name}"
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        return importlib.import_module(module)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # Some are printed at any level: github.com/tensorflow/tensorflow/issues/100442
    stderr = os.dup(2)
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), 2)
    try:
        return importlib.import_module(module)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _parser() -> argparse.ArgumentParser:
    style: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(
        prog="keras-strategy",
        description="Distributed training for Keras 3.",
        epilog=_EXIT_CODES,
        **style,
    )
    commands = parser.add_subparsers(
        dest="subcommand",
        required=True,
        metavar="{run,info,doctor,verify,compare}",
    )

    def add(name: str, summary: str, description: str, epilog: str, **settings: Any):
        texts = {"help": summary, "description": description, "epilog": epilog}
        return commands.add_parser(name, **texts, **style, **settings)

    epilog = f"{_RUN_EXAMPLES}\n\n{_EXIT_CODES}"
    summary = "start a program in several local workers"
    run = add("run", summary, _RUN, epilog, allow_abbrev=False)
    run.add_argument(
        "--workers",
        type=lambda text: text if text == "auto" else _int_from(1)(text),
        required=True,
        metavar="N",
        help="number of workers to start, or auto for one on each GPU",
    )
    _add_options(
        run,
        ("devices-per-worker", _int_from(1), None, "M", _DEVICES),
        ("gpus-per-worker", _int_from(0), None, "G", _GPUS),
        ("max-restarts", _int_from(0), 0, "R", _RESTARTS),
        ("min-workers", _int_from(1), None, "N", _MIN_WORKERS),
        ("grace-seconds", _seconds, 30, "S", _GRACE),
        ("fingerprint", str, None, "FILE", _FINGERPRINT),
    )
    run.add_argument(
        "-m",
        dest="module",
        action="store_true",
        help="the program is the name of a module, as for python -m",
    )
    _add_program(run)

    shows = "versions, devices and the detected cluster"
    info = add("info", f"show {shows}", f"Shows {shows}.", _INFO_EXAMPLES)
    info.add_argument("--json", action="store_true", help="print JSON")

    doctor = add("doctor", "check that training works here", _DOCTOR, _DOCTOR_EXAMPLES)
    limit = "time limit of each check (default: 180; 30 with --workers)"
    _add_options(doctor, ("timeout-seconds", _seconds, None, "S", limit))
    doctor.add_argument(
        "--workers", action="store_true", help="check the workers of this job"
    )

    summary = "compare a program's replicas with one device"
    _add_program(add("verify", summary, _VERIFY, _VERIFY_EXAMPLES))

    summary = "compare the fingerprints of two trained models"
    compare = add("compare", summary, _COMPARE, _COMPARE_EXAMPLES)
    compare.add_argument(
        "files", nargs=2, metavar="FILE", help="a report of run --fingerprint"
    )
    return parser


def _add_options(
    parser: argparse.ArgumentParser,
    *options: tuple[str, Callable[[str], Any], float | str | None, str, str],
) -> None:
    """Add options, each with its name, parser, default, metavar and help."""
    for name, kind, default, metavar, text in options:
        shown = text if default is None else f"{text} (default: {default})"
        parser.add_argument(
            f"--{name}", type=kind, default=default, metavar=metavar, help=shown
        )


def _add_program(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", help="the Python script to run")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the arguments of the program"
    )
    parser.set_defaults(fail=parser.error)


def _int_from(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(
                f"Expected a whole number, {minimum} or more. Received: {text!r}"
            )
        return int(text)

    return parse


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(
            f"Expected a number of seconds, 0 or more. Received: {text!r}"
        )
    return number


if __name__ == "__main__":
    sys.exit(main())
