"""Findings of the checks of `keras-strategy doctor`."""

from collections.abc import Iterable
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape


class Finding(NamedTuple):
    """Result of a check, and how to fix a failure."""

    ok: bool | None  # None warns
    detail: str
    advice: str = ""


def report(checks: Iterable[tuple[str, Finding]]) -> int:
    """Print the findings; return 1 if a check failed, else 0."""
    console = Console(soft_wrap=True)
    status = 0
    for check, finding in checks:
        failed = "[yellow]WARN [/]" if finding.ok is None else "[red]FAIL [/]"
        mark = "[green]OK   [/]" if finding.ok else failed
        lines = escape(finding.detail).replace("\n", "\n      ")
        detail = f"[bold]{check}[/]: {lines}"
        console.print(f"{mark} {detail}", highlight=False)
        if not finding.ok:
            console.print(f"      Fix: {escape(finding.advice)}", highlight=False)
            status = max(status, finding.ok is False)
    return status
