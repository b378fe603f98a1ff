"""The rows of a run, as a table for people."""

HEAD = ("backend", "case: ours", "peer", "ratio of steps/s", "of steps/CPU-s", "aim")


def table(rows: list[dict]) -> str:
    """A Markdown table: a line for each comparison, with the quartiles of its ratios.

    Args:
        rows: As `python -m benchmarks --json` writes them, the clocks of a comparison
            next to each other.
    """
    lines: dict[tuple[str, str, str], list[str]] = {}
    aims = {}
    for row in rows:
        comparison = row["backend"], row["case"], row["peer_name"]
        low, high = row["spread"]
        ratio = f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"
        lines.setdefault(comparison, []).append(ratio)
        aims[comparison] = "" if row["aim"] is None else str(row["aim"])
    return "\n".join(
        "| " + " | ".join(line) + " |"
        for line in [
            HEAD,
            ("---",) * len(HEAD),
            *((*names, *ratios, aims[names]) for names, ratios in lines.items()),
        ]
    )
