"""Time fractions from the spans of a trace."""

from collections.abc import Iterable


def compute_and_comm_fractions(
    spans: Iterable[tuple[float, float, bool]],
) -> tuple[float, float] | None:
    """Return the fractions of time in compute and in collectives.

    A collective that overlaps with compute counts as compute, as nothing waits for it.
    The remainder is idle time.

    Args:
        spans: (begin, end, is_collective) of each operation.
    """
    marks: list[tuple[float, int, bool]] = []
    for begin, end, collective in spans:
        marks += [(begin, 1, collective), (end, -1, collective)]
    if not marks:
        return None
    marks.sort(key=lambda mark: mark[0])
    first, last = marks[0][0], marks[-1][0]
    computing = collecting = 0.0
    running = {False: 0, True: 0}
    previous = first
    for time, change, collective in marks:
        if running[False]:
            computing += time - previous
        elif running[True]:
            collecting += time - previous
        running[collective] += change
        previous = time
    total = (last - first) or 1.0
    return computing / total, collecting / total
