"""Jobs of test_worker_runner.py; without Keras, so that they start fast."""

import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time


def task() -> dict:
    return json.loads(os.environ["TF_CONFIG"])["task"]


def environment(*names: str) -> dict:
    return {name: os.environ.get(name) for name in names}


class Decorated:
    """Callable object in which a decorator wraps a function."""

    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self):
        return self.function()


@Decorated
def decorated() -> int:
    return 3


def nested(array, scale):
    return {"scaled": [array * scale, {"index": task()["index"]}], "text": "ü"}


def modules() -> list[str]:
    return sorted(sys.modules)


def fail(index: int):
    print("this is printed first")
    if task()["index"] == index:
        raise KeyError("the reason")


def fail_while_others_wait(index: int):
    fail(index)
    time.sleep(300)


def leave_without_result(status: int):
    os._exit(status)


def unpicklable():
    return threading.Lock()


def stuck_in_a_place_with_a_name(folder: str):
    _tell_ids(folder)
    time.sleep(300)


def one_ends_and_others_are_stuck(folder: str):
    if task()["index"] == 2:
        _tell_ids(folder)
    else:
        stuck_in_a_place_with_a_name(folder)


def ignore_all_signals(folder: str):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _tell_ids(folder)
    time.sleep(300)


def own_child(folder: str):
    """Waits, with a child that would outlive it."""
    child = subprocess.Popen(["sleep", "300"])
    _tell_ids(folder, child.pid)
    time.sleep(300)


def _tell_ids(folder: str, *others: int):
    name = pathlib.Path(folder, f"pids{task()['index']}")
    part = name.with_suffix(".part")
    part.write_text(" ".join(map(str, [os.getpid(), *others])))
    part.rename(name)


def child_left_behind() -> int:
    return subprocess.Popen(["sleep", "300"]).pid


def taken_the_first_time(folder: str) -> list[int]:
    """Fails as a server fails whose port somebody took; returns its ports."""
    config = json.loads(os.environ["TF_CONFIG"])
    port = int(config["cluster"]["worker"][config["task"]["index"]].split(":")[1])
    marker = pathlib.Path(folder, f"tried{config['task']['index']}")
    holder = None
    if not marker.exists():
        marker.write_text(str(port))
        holder = socket.create_server(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)):
        assert holder is None
        return [int(marker.read_text()), port]


def start_runner_and_wait(folder: str):
    """The main program of a test whose process is killed."""
    from keras_strategy.testing import WorkerRunner

    with WorkerRunner(workers=2) as runner:
        runner.start(ignore_all_signals, folder)
        runner.wait()
