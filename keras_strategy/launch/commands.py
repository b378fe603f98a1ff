"""What the command line shows beside `run`: each subcommand, with its options."""

import argparse
import json
import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from keras_strategy.launch import cli, doctor, local_cluster, scaling


def do_info(options: argparse.Namespace) -> int:
    """Shows versions, devices and the cluster."""
    # Keras is imported when it is asked for.
    from keras_strategy.launch import info

    if options.json:
        print(json.dumps(info.data(), indent=2))
        return 0
    console = Console(soft_wrap=True)
    for name, value in info.rows():
        console.print(f"[bold]{name:<18}[/]{escape(value)}", highlight=False)
    console.print("\nLooked for a cluster:", style="bold")
    console.print(escape(info.detection_report()), highlight=False)
    return 0


def do_doctor(options: argparse.Namespace) -> int:
    """Shows what is well and what is wrong, as it is found."""
    console = Console(soft_wrap=True)

    def show(finding: doctor.Finding) -> None:
        mark = "[green]well [/]" if finding.well else "[red]wrong[/]"
        seen = f"[bold]{finding.what}[/]: {escape(finding.seen)}"
        console.print(f"{mark} {seen}", highlight=False)
        if not finding.well:
            console.print(f"      {escape(finding.do)}", highlight=False)

    return doctor.run(options.timeout_seconds, show)


def do_scaling(options: argparse.Namespace) -> int:
    """Shows the time of a step with each number of workers, beside a prediction."""
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
    for place, row in enumerate(measured):
        table.add_row(
            str(row.workers),
            f"{1000 * row.step_seconds:.2f}",
            f"{1 / row.step_seconds:.1f}",
            f"{row.efficiency(measured[0]):.0%}",
            "" if model is None or place < 2 else _range(*model.efficiency(row)),
        )
    Console().print(table)
    said = Console(soft_wrap=True)
    said.print(str(model or scaling.NOTHING_TO_PREDICT), highlight=False, markup=False)
    if options.png is not None:
        try:
            scaling.draw_chart(options.png, title, measured, model)
        except OSError as error:
            print(f"{options.png!r} cannot be written: {error}", file=sys.stderr)
            return 1
    return 0


def _range(low: float, high: float) -> str:
    words = f"{low:.0%}", f"{high:.0%}"
    return words[0] if words[0] == words[1] else " to ".join(words)


# The share of the machine that others may take for a ratio to mean something.
_MUCH = 0.05


def do_bench(options: argparse.Namespace) -> int:
    """Shows a strategy's speed beside that of Keras alone."""
    from keras_strategy.launch import bench

    try:
        told = bench.measure(options)
    except (RuntimeError, ValueError) as error:  # no such devices, or no such engine
        print(f"keras-strategy bench: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(told, indent=2))
        return 0
    quartiles = "{:.2f} to {:.2f}".format(*told["quartiles"])
    devices = ", ".join(told["devices"])
    again = "" if told["others"] < _MUCH else ": measure again when they do not"
    for line in (
        f"Keras {told['keras']} on {told['backend']}; {told['machine']}",
        f"A model of {told['weights']:,} weights ({told['model']}), Adam, "
        f"{told['batch_size']} rows a step; {told['rounds']} rounds of {told['steps']} "
        "steps, in turn",
        "",
        f"  Keras alone       {told['keras_alone']:10.1f} steps per second",
        f"  MirroredStrategy  {told['with_strategy']:10.1f} on {devices}",
        f"  ratio             {told['ratio']:10.2f} (quartiles {quartiles})",
        "",
        f"Other processes took {told['others']:.0%} of the machine meanwhile{again}.",
    ):
        print(line)
    return 0


def do_port(options: argparse.Namespace) -> int:
    """Prints what becomes of a program."""
    from keras_strategy.launch import port

    try:
        with open(options.file, encoding="utf-8", newline="") as file:
            source = file.read()
        ported = port.port(source)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        told = f"{options.file!r} cannot be read as a Python program: {error}"
        print(told, file=sys.stderr)
        return 1
    print(port.diff(source, ported, options.file), end="")
    if ported.text == source:
        print("No name of tf.distribute changes.", file=sys.stderr)
    for note in ported.notes:
        print(note, file=sys.stderr)
    return 0


def do_completion(options: argparse.Namespace) -> int:
    """Prints a script for a shell."""
    print(cli.script(options.shell, options.commands), end="")
    return 0


DOES = {
    "info": do_info,
    "doctor": do_doctor,
    "scaling": do_scaling,
    "bench": do_bench,
    "port": do_port,
    "completion": do_completion,
}
