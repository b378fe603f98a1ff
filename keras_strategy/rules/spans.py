"""What share of the time something was done, from when it began and ended."""

from collections.abc import Iterable


def shares(spans: Iterable[tuple[float, float, bool]]) -> tuple[float, float] | None:
    """The shares of computing and of collectives in the time of some operations.

    The time goes from the beginning of the first one to the end of the last. Where a
    device computes while a collective is under way, it counts as computing: nobody
    waits for the collective then.

    Args:
        spans: The beginning and the end of each operation, and whether it is a
            collective.

    Returns:
        The two shares; what is missing to 1 is time in which nothing was done. None
        where there are no operations.
    """
    marks: list[tuple[float, int, bool]] = []
    for begin, end, collective in spans:
        marks += [(begin, 1, collective), (end, -1, collective)]
    if not marks:
        return None
    marks.sort(key=lambda mark: mark[0])
    first, last = marks[0][0], marks[-1][0]
    computing = collecting = 0.0
    open_ones = {False: 0, True: 0}
    before = first
    for at, change, collective in marks:
        if open_ones[False]:
            computing += at - before
        elif open_ones[True]:
            collecting += at - before
        open_ones[collective] += change
        before = at
    whole = (last - first) or 1.0
    return computing / whole, collecting / whole
