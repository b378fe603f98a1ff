"""The link that explains what was measured."""

from benchmarks.scaling.model import Link


def fitted_link(workers: int, times: dict[int, float]) -> Link:
    """Return the link that explains measured all-reduces best.

    Least squares of the relative errors, so that small arrays count as large ones do.

    Args:
        workers: How many took part.
        times: The seconds of an all-reduce by the bytes of its array, of two sizes or
            more.
    """
    if len(times) < 2:
        raise ValueError(
            "Argument `times` must have two sizes or more, for a latency and a "
            f"bandwidth. Received: times={times!r}"
        )
    # times = a + b * size, each equation divided by its time.
    rows = [(1 / t, size / t) for size, t in times.items()]
    aa = sum(x * x for x, _ in rows)
    ab = sum(x * y for x, y in rows)
    bb = sum(y * y for _, y in rows)
    a_, b_ = sum(x for x, _ in rows), sum(y for _, y in rows)
    determinant = aa * bb - ab * ab
    fixed = (a_ * bb - b_ * ab) / determinant
    per_byte = (b_ * aa - a_ * ab) / determinant
    rounds = 2 * (workers - 1)
    return Link(latency=fixed / rounds, bandwidth=rounds / workers / per_byte)
