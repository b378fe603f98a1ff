"""Looking at processes of this machine."""

import pathlib
import time


def runs(pid: int) -> bool:
    """Return True if a process exists and is no zombie, which awaits its parent."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition, seconds: float = 120.0):
    """Waits for a condition to be true and returns what it gave."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "the time limit passed"
        time.sleep(0.01)
    return result


def wait_until_gone(*pids: int):
    wait_until(lambda: not any(map(runs, pids)))


def wait_for_pids(folder, count: int) -> list[int]:
    """The process ids in the files `pids0`, `pids1`, ..., when all are there."""
    files = [pathlib.Path(folder, f"pids{index}") for index in range(count)]
    wait_until(lambda: all(file.exists() for file in files))
    return [int(pid) for file in files for pid in file.read_text().split()]
