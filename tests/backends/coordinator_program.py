"""Programs of a coordinator: native's and ours behave the same."""

import http.client
import json
import os
import pathlib
import signal
import time

import keras_strategy as ks

told = {}


def error_of(fn, *args):
    try:
        fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def shared(coordinator, function, fails, dataset_fn, add, kill, many):
    """The behaviour that native's coordinator was recorded with."""
    told["same"] = (
        ks.coordinator.ClusterCoordinator(coordinator.strategy) is coordinator
    )
    values = [coordinator.schedule(add) for _ in range(20)]
    coordinator.join()
    told["done"] = [coordinator.done(), int(values[7].fetch()), int(values[7].get())]
    told["fetch"] = [int(x) for x in coordinator.fetch([values[0], 7])]
    told["remote"] = isinstance(values[0], ks.coordinator.RemoteValue)
    told["no function"] = error_of(coordinator.schedule, 3)
    told["index"] = error_of(ks.coordinator.experimental_get_current_worker_index)
    coordinator.schedule(function(fails))
    told["error"] = error_of(coordinator.join)
    told["after it"] = error_of(coordinator.join)
    rows = coordinator.create_per_worker_dataset(dataset_fn)
    told["next here"] = error_of(lambda: next(iter(rows)))
    step = function(lambda iterator: next(iterator))
    drawn = coordinator.schedule(step, args=(iter(rows),))
    coordinator.join()
    told["drawn"] = int(drawn.fetch())
    values = [coordinator.schedule(add) for _ in range(many)]
    values[20].fetch()
    kill()
    coordinator.join()
    told["killed"] = sum(int(x.fetch()) for x in values)
    return told


def listening_addresses():
    """The addresses at which this process, and those that it has started, listen."""
    import psutil

    this = psutil.Process()
    return [
        connection.laddr
        for process in (this, *this.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]


def told_to_strangers(address):
    """Return the result of a client that shows no certificate."""
    connection = http.client.HTTPConnection(*address, timeout=60)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return "nothing"


def of_page(strategy):
    """Return the steps of the page's program, and True if its loss is finite."""
    import numpy as np

    page = pathlib.Path(__file__).parents[2] / "docs" / "coordinator.md"
    program = page.read_text().split("```python\n")[1].split("```")[0]
    for line, instead in (
        ("strategy = ks.MirroredStrategy()\n", ""),
        ("cluster=4", "cluster=2"),
        ("range(50)", "range(3)"),
    ):
        assert line in program
        program = program.replace(line, instead)
    names = {"__name__": "__main__", "strategy": strategy}
    exec(program, names)
    return [int(names["optimizer"].iterations), bool(np.isfinite(names["loss"]))]


def ours():
    """On Dask's workers."""
    import keras
    import numpy as np

    strategy = ks.OneDeviceStrategy("cpu:0")
    coordinator = ks.coordinator.ClusterCoordinator(strategy, cluster=2)

    def add():
        return keras.ops.convert_to_tensor(3)

    def fails():
        raise ValueError("the disk is full")

    def kill():
        pid = coordinator.schedule(os.getpid).fetch()
        os.kill(pid, signal.SIGKILL)

    coordinator.schedule(add).fetch()  # a worker is there
    addresses = listening_addresses()
    told["listens"] = sorted({address.ip for address in addresses})
    told["strangers"] = sorted({str(told_to_strangers(x)) for x in addresses})
    shared(coordinator, lambda fn: fn, fails, lambda: range(100), add, kill, 200)

    with strategy.scope():
        w = keras.Variable(np.float32([1, 2]))
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    def scaled(v, by, more):
        return {"v": v * by + more["x"], "kind": keras.ops.is_tensor(v)}

    two = coordinator.schedule(lambda: (keras.ops.ones(2), 5))
    two.fetch()
    late = coordinator.schedule(scaled, (w, 2.0), {"more": {"x": keras.ops.ones(2)}})
    value = late.fetch()
    told["arguments"] = [value["v"].tolist(), value["kind"], type(value["v"]).__name__]
    told["get"] = keras.ops.is_tensor(late.get()["v"])
    chained = coordinator.schedule(lambda pair: pair[0] + pair[1], (two,)).fetch()
    told["chained"] = chained.tolist()
    told["model"] = error_of(coordinator.schedule, lambda: model(np.ones((1, 2))))
    told["variable"] = error_of(coordinator.schedule, lambda: w + 1)
    told["lock"] = error_of(coordinator.schedule, lambda: coordinator.done())
    failing = coordinator.schedule(fails)
    told["fetched"] = error_of(failing.fetch)
    told["scheduled"] = error_of(coordinator.schedule, add)
    told["again"] = int(coordinator.schedule(add).fetch())

    def index_of(own, iterator):
        index = ks.coordinator.experimental_get_current_worker_index()
        return index, own, next(iterator) // 10

    def own_rows():
        index = ks.coordinator.experimental_get_current_worker_index()
        return range(10 * index, 10 * index + 10)

    own = ks.coordinator.PerWorkerValue([0, 1])
    iterator = iter(coordinator.create_per_worker_dataset(own_rows))
    values = [coordinator.schedule(index_of, (own, iterator)) for _ in range(6)]
    told["own"] = sorted({len(set(x)) for x in coordinator.fetch(values)})
    told["page"] = of_page(strategy)
    short = iter(coordinator.create_per_worker_dataset(lambda: []))
    coordinator.schedule(next, (short,))
    told["ended"] = error_of(coordinator.join)
    told["cluster"] = error_of(ks.coordinator.ClusterCoordinator, strategy, 3)
    print(json.dumps(told), flush=True)
    for _ in range(4):
        coordinator.schedule(time.sleep, (0.5,))  # under way when the program ends


if __name__ == "__main__":
    ours()
