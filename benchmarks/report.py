"""The rows of a run, as a table for people."""

HEAD = ("backend", "replicas", "case", "peer", "ours", "peer's", "ratio", "quartiles")


def table(rows: list[dict]) -> str:
    """A Markdown table, a line for each row; aims that are missed are marked."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for row in rows:
        low, high = row["spread"]
        missed = row["aim"] is not None and row["ratio"] < row["aim"]
        ratio = f"{row['ratio']:.3f}" + (f" (aim {row['aim']})" if missed else "")
        lines.append(
            (
                row["backend"],
                str(row["replicas"]),
                row["case"],
                row["peer_name"],
                f"{row['ours']:.1f} {row['unit']}",
                f"{row['peer']:.1f}",
                ratio,
                f"{low:.3f} to {high:.3f}",
            )
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
