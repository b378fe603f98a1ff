"""The model of a data-parallel step."""

import pytest

from benchmarks.scaling.model import ANCHORS, Link, Step

LINK = Link(latency=2e-5, bandwidth=1e9)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_ring_all_reduce_rounds(workers):
    """Pass the parts on, one round after another, and count rounds and bytes."""
    held = [[{w} for _ in range(workers)] for w in range(workers)]  # worker, part
    data, rounds, sent = 6000.0, 0, 0.0
    for offset in [*range(workers - 1), *range(-1, workers - 2)]:
        messages = [
            ((w + 1) % workers, (w - offset) % workers, held[w][(w - offset) % workers])
            for w in range(workers)
        ]
        for receiver, part, summed in messages:
            held[receiver][part] = held[receiver][part] | summed
        rounds += 1
        sent += data / workers
    assert all(part == set(range(workers)) for parts in held for part in parts)
    expected = rounds * LINK.latency + sent / LINK.bandwidth
    assert LINK.all_reduce(workers, data) == pytest.approx(expected)


def test_one_worker_has_no_communication():
    step = Step(compute=0.01, gradients=1e6)
    assert step.seconds(1, LINK) == 0.01
    assert step.efficiency(1, LINK) == 1


def test_overlapped_communication_is_free():
    travel = LINK.all_reduce(4, 1e6)
    alone = Step(compute=0.01, gradients=1e6)
    assert alone.seconds(4, LINK) == pytest.approx(0.01 + travel)
    half = Step(compute=0.01, gradients=1e6, overlap=travel / 0.01 / 2)
    assert half.seconds(4, LINK) == pytest.approx(0.01 + travel / 2)
    hidden = Step(compute=0.01, gradients=1e6, overlap=1)
    assert hidden.seconds(4, LINK) == 0.01


def test_workers_sharing_cores_are_serialised():
    step = Step(compute=0.01, gradients=1e6)
    assert step.seconds(4, LINK, 2) == pytest.approx(2 * step.seconds(4, LINK))
    # Fewer workers than cores are not faster for it.
    assert step.seconds(2, LINK, 0.5) == step.seconds(2, LINK)


def test_link_parameters_are_recovered():
    times = {size: LINK.all_reduce(2, size) for size in (4_096, 65_536, 4_194_304)}
    link = Link.fitted(2, times)
    assert link.latency == pytest.approx(LINK.latency)
    assert link.bandwidth == pytest.approx(LINK.bandwidth)


def test_one_message_size_fits_no_link():
    with pytest.raises(ValueError, match="`times` must have two sizes or more"):
        Link.fitted(2, {4096: 1e-3})


@pytest.mark.parametrize("anchor", ANCHORS, ids=lambda a: a.model)
def test_published_measurements_are_predicted(anchor):
    """Between no overlap and gradients that leave as soon as they are known."""
    low, high = anchor.predict(anchor.devices)
    assert low < anchor.efficiency < high
