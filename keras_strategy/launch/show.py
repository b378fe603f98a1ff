"""What the command line shows beside `run`: each subcommand, with its options."""

import argparse
import json
import os
import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from keras_strategy.launch import completion, doctor, scaling


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
    console.print(escape(info.looked_for()), highlight=False)
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
    """Shows the time of a step with each number of workers."""
    console = Console()
    table = Table(
        *("workers", "ms per step", "steps per second", "efficiency"),
        title=f"{options.program}, {os.cpu_count()} cores",
    )
    one: scaling.Measured | None = None
    command = [options.program, *options.arguments]
    try:
        for measured in scaling.measure(
            command, options.workers, options.devices_per_worker
        ):
            one = one or measured
            table.add_row(
                str(measured.workers),
                f"{1000 * measured.step_seconds:.2f}",
                f"{1 / measured.step_seconds:.1f}",
                f"{measured.efficiency(one):.0%}",
            )
    except scaling.NoEpochsError as error:
        Console(stderr=True, soft_wrap=True).print(escape(str(error)), style="red")
        return 1
    console.print(table)
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
    print(completion.script(options.shell, options.commands), end="")
    return 0


DOES = {
    "info": do_info,
    "doctor": do_doctor,
    "scaling": do_scaling,
    "port": do_port,
    "completion": do_completion,
}
