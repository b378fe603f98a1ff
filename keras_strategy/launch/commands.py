"""Output of each subcommand other than `run`."""

import argparse
import json
import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from keras_strategy.launch import doctor, local_cluster, scaling

# Other processes' share of the machine from which a measured ratio is unreliable.
_MAX_OTHER_LOAD = 0.05

_COMPLETION = """\
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


def _info(options: argparse.Namespace) -> int:
    from keras_strategy.launch import info  # it imports Keras

    if options.json:
        print(json.dumps(info.data(), indent=2))
        return 0
    console = Console(soft_wrap=True)
    for name, value in info.rows():
        console.print(f"[bold]{name:<18}[/]{escape(value)}", highlight=False)
    console.print("\nLooked for a cluster:", style="bold")
    console.print(escape(info.detection_report()), highlight=False)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    console = Console(soft_wrap=True)
    status = 0
    for finding in doctor.findings(options.timeout_seconds):
        mark = "[green]well [/]" if finding.ok else "[red]wrong[/]"
        detail = f"[bold]{finding.check}[/]: {escape(finding.detail)}"
        console.print(f"{mark} {detail}", highlight=False)
        if not finding.ok:
            console.print(f"      {escape(finding.advice)}", highlight=False)
            status = 1
    return status


def _scaling(options: argparse.Namespace) -> int:
    if options.png is not None and (problem := scaling.png_problem(options.png)):
        print(f"keras-strategy scaling: argument --png: {problem}", file=sys.stderr)
        return 2
    command = [options.program, *options.arguments]
    try:
        measured = list(
            scaling.measure(command, options.workers, options.devices_per_worker)
        )
    except scaling.NoEpochsError as error:
        Console(stderr=True, soft_wrap=True).print(escape(str(error)), style="red")
        return 1
    cores = local_cluster.available_cores()
    title = f"{options.program}, {cores} cores"
    model = scaling.prediction(measured, cores)
    table = Table(
        *("workers", "ms per step", "steps per second", "efficiency", "predicted"),
        title=escape(title),
    )
    for index, row in enumerate(measured):
        table.add_row(
            str(row.workers),
            f"{1000 * row.step_seconds:.2f}",
            f"{1 / row.step_seconds:.1f}",
            f"{row.efficiency(measured[0]):.0%}",
            "" if model is None or index < 2 else _range(*model.efficiency(row)),
        )
    Console().print(table)
    text = str(model or scaling.NOTHING_TO_PREDICT)
    Console(soft_wrap=True).print(text, highlight=False, markup=False)
    if options.png is not None:
        try:
            scaling.draw_chart(options.png, title, measured, model)
        except OSError as error:
            print(f"{options.png!r} cannot be written: {error}", file=sys.stderr)
            return 1
    return 0


def _range(low: float, high: float) -> str:
    ends = f"{low:.0%}", f"{high:.0%}"
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _bench(options: argparse.Namespace) -> int:
    from keras_strategy.launch import bench  # it imports Keras

    try:
        result = bench.measure(options)
    except (RuntimeError, ValueError) as error:  # no such devices, or no such backend
        print(f"keras-strategy bench: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    quartiles = "{:.2f} to {:.2f}".format(*result["quartiles"])
    devices = ", ".join(result["devices"])
    is_quiet = result["others"] < _MAX_OTHER_LOAD
    advice = "" if is_quiet else ": measure again on an idle machine"
    for line in (
        f"Keras {result['keras']} on {result['backend']}; {result['machine']}",
        f"A model of {result['weights']:,} weights ({result['model']}), Adam, "
        f"{result['batch_size']} rows a step; {result['rounds']} rounds of "
        f"{result['steps']} steps, in turn",
        "",
        f"  Keras alone       {result['keras_alone']:10.1f} steps per second",
        f"  MirroredStrategy  {result['with_strategy']:10.1f} on {devices}",
        f"  ratio             {result['ratio']:10.2f} (quartiles {quartiles})",
        "",
        f"Other processes took {result['others']:.0%} of the machine{advice}.",
    ):
        print(line)
    return 0


def _port(options: argparse.Namespace) -> int:
    from keras_strategy.launch import port  # it imports Keras

    try:
        with open(options.file, encoding="utf-8", newline="") as file:
            source = file.read()
        ported = port.port(source)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        message = f"{options.file!r} cannot be read as a Python program: {error}"
        print(message, file=sys.stderr)
        return 1
    print(port.diff(source, ported, options.file), end="")
    if ported.text == source:
        print("No name of tf.distribute changes.", file=sys.stderr)
    for note in ported.notes:
        print(note, file=sys.stderr)
    return 0


def _completion(options: argparse.Namespace) -> int:
    cases = "\n".join(
        f'        {name}) words="{" ".join(_words(parser))}" ;;'
        for name, parser in options.commands.items()
    )
    if options.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print(_COMPLETION.format(cases=cases, commands=" ".join(options.commands)), end="")
    return 0


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """Return a command's options and the choices of its arguments."""
    words: list[str] = []
    for action in parser._actions:
        words += action.option_strings or map(str, action.choices or ())
    return words


COMMANDS = {
    "info": _info,
    "doctor": _doctor,
    "scaling": _scaling,
    "bench": _bench,
    "port": _port,
    "completion": _completion,
}
