"""Load of other processes on the machine."""

import os
import types

import pytest

from benchmarks import paired_timing


def test_other_processes_cpu_share(tmp_path, monkeypatch):
    """Work and what the machine's owner kept count, idling and waiting do not."""
    second = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"

    def write(user, idle, iowait, steal):
        ticks = (user, 0, 0, idle, iowait, 0, 0, steal)
        stat.write_text(f"cpu  {' '.join(str(t * second) for t in ticks)} 0 0\n")

    seconds = iter([100.0, 110.0])
    monkeypatch.setattr(paired_timing, "_PROC_STAT", stat)
    clock = types.SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr(paired_timing, "time", clock)
    write(user=50, idle=30, iowait=1, steal=2)
    others = paired_timing.OtherLoad()
    write(user=53, idle=90, iowait=9, steal=3)
    cores = os.cpu_count() or 1
    # 3 s and 1 s, of which 2.5 s were ours.
    assert others.share(own=2.5) == pytest.approx(1.5 / (10 * cores))
