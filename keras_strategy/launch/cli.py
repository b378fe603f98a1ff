"""Numbers of the command line, and what is said of those that are none.

`keras-strategy completion bash`: what a shell completes.

The words of the command line beside those of `run`.

The command line, `keras-strategy`: `run` here, the others in `subcommands`.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence


def count(text: str) -> int:
    """A whole number, 1 or more."""
    return _whole_number(text, 1)


def count_or_zero(text: str) -> int:
    """A whole number, 0 or more."""
    return _whole_number(text, 0)


def several(text: str) -> int:
    """A whole number, 2 or more."""
    return _whole_number(text, 2)


def _whole_number(text: str, minimum: int) -> int:
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(
            f"Expected a whole number, {minimum} or more. Received: {text!r}"
        )
    return int(text)


def seconds(text: str) -> float:
    """A number of seconds, 0 or more."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(
            f"Expected a number of seconds, 0 or more. Received: {text!r}"
        )
    return number


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers, in their order, each once."""
    found = text.split(",")
    if not all(count.isdecimal() and int(count) > 0 for count in found):
        raise argparse.ArgumentTypeError(
            f"Expected whole numbers with commas between them, such as 1,2,4. "
            f"Received: {text!r}"
        )
    return tuple(sorted({int(count) for count in found}))


SHELLS = ("bash", "zsh")

_BASH = """\
_keras_strategy() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words
    case ${{COMP_WORDS[1]}} in
{cases}
        *) words="{commands}" ;;
    esac
    [ "$COMP_CWORD" -eq 1 ] && words="{commands}"
    COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word"))
}}
complete -o filenames -F _keras_strategy keras-strategy
"""


def script(shell: str, commands: dict[str, argparse.ArgumentParser]) -> str:
    """A script that the shell reads at its start.

    Args:
        shell: One of `SHELLS`.
        commands: The parser of each subcommand.
    """
    cases = "\n".join(
        f'        {name}) words="{" ".join(_words(parser))}" ;;'
        for name, parser in commands.items()
    )
    text = _BASH.format(cases=cases, commands=" ".join(commands))
    if shell == "zsh":
        return f"autoload -U +X bashcompinit && bashcompinit\n{text}"
    return text


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """The options of a command, and what its arguments may be."""
    words: list[str] = []
    for action in parser._actions:
        words += action.option_strings or map(str, action.choices or ())
    return words


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
prints. The program must train two epochs or more with MultiWorkerMirroredStrategy.
Beside the efficiency of more workers stands what a model makes of those of 1 and 2."""
_SCALING_EXAMPLES = """\
examples:
  keras-strategy scaling examples/multi_worker.py
  keras-strategy scaling --workers 1,2,8 --png scaling.png train.py --epochs 3"""
_BENCH = """\
Trains a small model with Keras alone and with MirroredStrategy, in turn, and prints
the ratio of their speeds."""
_BENCH_EXAMPLES = """\
examples:
  keras-strategy bench
  KERAS_BACKEND=jax keras-strategy bench --devices 2 --json
  keras-strategy bench --units 4096 --batch-size 8192

exit codes:
  0    it was measured
  1    it could not be
  2    the command line was not understood"""
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
        type=seconds,
        default=180.0,
        metavar="S",
        help="how long a trial may take (default: 180)",
    )
    scale = add(
        "scaling", "time a program on more workers", _SCALING, _SCALING_EXAMPLES
    )
    scale.add_argument(
        "--workers",
        type=counts,
        default=(1, 2, 4),
        metavar="N,N",
        help="the numbers of workers (default: 1,2,4)",
    )
    scale.add_argument(
        "--devices-per-worker", type=count, metavar="M", help="as for run"
    )
    scale.add_argument(
        "--png",
        metavar="FILE",
        help="draw it, too; needs the extra keras-strategy[plot]",
    )
    scale.add_argument("program", help="the Python script to run")
    scale.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the arguments of the program"
    )
    bench = add("bench", "time a strategy beside Keras alone", _BENCH, _BENCH_EXAMPLES)
    for name, kind, default, metavar, about in (
        ("devices", count, None, "N", "that many logical CPU devices"),
        ("units", count, 256, "U", "width of the model's two hidden layers"),
        ("batch-size", count, 1024, "R", "rows of the global batch"),
        ("rounds", several, 9, "K", "how often each is timed"),
        ("seconds", seconds, 0.25, "S", "about how long each time"),
    ):
        otherwise = "all devices of one kind" if default is None else default
        bench.add_argument(
            f"--{name}",
            type=kind,
            default=default,
            metavar=metavar,
            help=f"{about} (default: {otherwise})",
        )
    bench.add_argument("--json", action="store_true", help="for programs")
    moves = add(
        "port", "print what tf.distribute's names become", _PORT, _PORT_EXAMPLES
    )
    moves.add_argument("file", help="a Python program that uses tf.distribute")
    completes = "what a shell completes"
    complete = add(
        "completion", f"print {completes}", f"Prints {completes}.", _COMPLETION_EXAMPLES
    )
    complete.add_argument("shell", choices=SHELLS)
    complete.set_defaults(commands=commands.choices)


_RUN = """\
Starts a Python program in several workers on this machine. Each worker finds the
cluster in TF_CONFIG. When one fails, the others are ended."""
_EXAMPLES = """\
examples:
  keras-strategy run --workers 2 train.py --epochs 5
  keras-strategy run --workers 4 --max-restarts 3 -m my_package.train"""


def main(given: Sequence[str] | None = None) -> int:
    """Does what the command line says.

    Args:
        given: The arguments after the program's name; None takes this process's.

    Returns:
        The exit status.
    """
    parser, run = _parsers()
    options = parser.parse_args(given)
    # What a subcommand needs is imported when it is asked for: `run` must not wait
    # for Keras.
    if options.subcommand != "run":
        from keras_strategy.launch.commands import DOES

        return DOES[options.subcommand](options)

    if not options.module and not os.path.exists(options.program):
        run.error(
            f"argument program: there is no file {options.program!r}. Give the path of "
            "a Python script, or -m and the name of a module"
        )

    from keras_strategy.launch.launcher import Launcher

    program = ["-m", options.program] if options.module else [options.program]
    try:
        return Launcher(
            (sys.executable, *program, *options.arguments),
            options.workers,
            options.devices_per_worker,
            options.max_restarts,
            options.grace_seconds,
        ).run()
    except BrokenPipeError:
        # Nobody reads any more. Python would complain again when it flushes at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(
        prog="keras-strategy",
        description="Distributed training for Keras 3.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        dest="subcommand",
        required=True,
        metavar="{run,info,doctor,scaling,bench,port,completion}",
    )
    run = commands.add_parser(
        "run",
        help="start a program in several local workers",
        description=_RUN,
        epilog=f"{_EXAMPLES}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument(
        "--workers",
        type=count,
        required=True,
        metavar="N",
        help="how many workers to start",
    )
    run.add_argument(
        "--devices-per-worker",
        type=count,
        metavar="M",
        help="logical CPU devices of each worker (default: the backend's own)",
    )
    run.add_argument(
        "--max-restarts",
        type=count_or_zero,
        default=0,
        metavar="R",
        help="how often all workers are started again when one failed or was preempted "
        "(default: 0)",
    )
    run.add_argument(
        "--grace-seconds",
        type=seconds,
        default=30.0,
        metavar="S",
        help="time to end after SIGTERM, before SIGKILL (default: 30)",
    )
    run.add_argument(
        "-m",
        dest="module",
        action="store_true",
        help="the program is the name of a module, as for python -m",
    )
    run.add_argument("program", type=str, help="the Python script to run")
    run.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the arguments of the program"
    )
    add_to(commands)
    return parser, run


if __name__ == "__main__":
    sys.exit(main())
