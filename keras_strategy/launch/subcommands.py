"""The words of the command line beside those of `run`."""

import argparse

from keras_strategy.launch import completion

EXIT_CODES = """\
exit codes:
  0    all went well
  1    something is not well, or the program raised
  2    the command line was not understood
  69   the workers did not come together
  75   a worker was told to end, and saved what it had done
  76   another worker failed
  130  it was interrupted (Ctrl-C)
  128+ and the number of another signal that ended it"""

_INFO = """\
examples:
  keras-strategy info
  KERAS_BACKEND=jax keras-strategy info --json"""
_DOCTOR = """\
Trains a step on two replicas, has two processes add up, and says in words what is
wrong and what helps."""
_DOCTOR_EXAMPLES = """\
examples:
  keras-strategy doctor
  KERAS_BACKEND=torch keras-strategy doctor --timeout-seconds 300

exit codes:
  0    all is well
  1    something is not"""
_SCALING = """\
Runs a program with 1, 2 and 4 workers, and compares the times of a step that Keras
prints. The program must train two epochs or more with MultiWorkerMirroredStrategy."""
_SCALING_EXAMPLES = """\
examples:
  keras-strategy scaling examples/multi_worker.py
  keras-strategy scaling --workers 1,2,8 train.py --epochs 3"""
_PORT = """\
Prints which names of a program change from tf.distribute to this package, as a diff,
and on the standard error what must be done by hand. The file stays as it is."""
_PORT_EXAMPLES = """\
examples:
  keras-strategy port train.py
  keras-strategy port train.py | patch train.py"""
_COMPLETION_EXAMPLES = """\
examples:
  source <(keras-strategy completion bash)
  source <(keras-strategy completion zsh)"""


def add_to(commands) -> None:
    """Adds the subcommands to a parser.

    Args:
        commands: What `add_subparsers` gave.
    """

    def add(name: str, short: str, description: str, epilog: str):
        return commands.add_parser(
            name,
            help=short,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    shows = "versions, devices and the cluster that was found"
    info = add("info", f"show {shows}", f"Shows {shows}.", _INFO)
    info.add_argument("--json", action="store_true", help="for programs")
    look = add("doctor", "try whether training works here", _DOCTOR, _DOCTOR_EXAMPLES)
    look.add_argument(
        "--timeout-seconds",
        type=float,
        default=180.0,
        metavar="S",
        help="how long a trial may take (default: 180)",
    )
    scale = add(
        "scaling", "time a program on more workers", _SCALING, _SCALING_EXAMPLES
    )
    scale.add_argument(
        "--workers",
        type=_counts,
        default=(1, 2, 4),
        metavar="N,N",
        help="the numbers of workers (default: 1,2,4)",
    )
    scale.add_argument("--devices-per-worker", type=int, metavar="M", help="as for run")
    scale.add_argument("program", help="the Python script to run")
    scale.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the arguments of the program"
    )
    moves = add(
        "port", "print what tf.distribute's names become", _PORT, _PORT_EXAMPLES
    )
    moves.add_argument("file", help="a Python program that uses tf.distribute")
    completes = "what a shell completes"
    complete = add(
        "completion", f"print {completes}", f"Prints {completes}.", _COMPLETION_EXAMPLES
    )
    complete.add_argument("shell", choices=completion.SHELLS)
    complete.set_defaults(commands=commands.choices)


def _counts(text: str) -> tuple[int, ...]:
    counts = text.split(",")
    if not all(count.isdecimal() and int(count) > 0 for count in counts):
        raise argparse.ArgumentTypeError(
            f"Expected whole numbers with commas between them, such as 1,2,4. "
            f"Received: {text!r}"
        )
    return tuple(sorted({int(count) for count in counts}))
