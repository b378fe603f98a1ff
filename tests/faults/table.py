"""Faults of one worker, their places, and the expected ends of all workers.

A fault is planted in one worker at one place of its program: see jobs.py, which has
what it does, and the places. Here is what must come of it.
"""

import dataclasses
import random

# How long the others may take to end, after a fault that somebody can see; after one
# that nobody can, when their timeout has passed.
NOTICED_SECONDS = 30
# The timeout of workers of which one falls silent. On a busy machine the others need
# nearly as long to start and to compile.
TIMEOUT_SECONDS = 12

# The places of a program. In the first ones a fault comes from a thread, a random time
# after a random number of rounds; in all but the first of these an exception can be
# raised, too.
ROUNDS = (
    *("start", "making variables", "fit", "validation", "reading data", "evaluate"),
    *("predict", "run", "reduce", "gather", "saving", "ModelCheckpoint"),
    *("BackupAndRestore",),
)
# What engines call when they trace, or in each step.
CALLED = (
    *("train_step", "test_step", "predict_step", "loss", "metric", "layer"),
    *("run's function", "own rows", "on_epoch_end"),
)
# Where each worker exchanges values with each other one, not only with the chief, as in
# `evaluate` on torch.
BETWEEN_ALL = ("fit", "run", "reduce")
# What the chief alone calls, in the middle of a save.
OF_CHIEF = ("save_own_variables",)
# An exception here is sent to all workers before it is raised, and they raise it too:
# the first of them ends the others.
TOLD = ("reading data", "own rows", *OF_CHIEF)

EXIT_CLUSTER_NOT_FORMED, EXIT_OTHER_WORKER_FAILED = 69, 76
GONE = "{victim} disconnected without notice"
# Before it has joined, nobody has known it.
NOT_THERE = f"{{victim}} has not arrived within {TIMEOUT_SECONDS} s"
DIFFER = r"All workers must .*(differ|Received|different)"
# Where values would travel.
OTHER_SIZES = r"`.*` needs values whose"


@dataclasses.dataclass(frozen=True)
class Fault:
    """Event in a worker, and its expected result.

    Attributes:
        name: What happens.
        places: Where it can.
        says: What each other worker must say: a regular expression, in which `{victim}`
            stands for the worker's name.
        status: The exit status of the worker itself; None where it does not end by
            itself.
        others: The exit statuses that the others may have.
        silent: Whether nobody can see it until the timeout has passed.
        stopped: True if the worker can do nothing until it receives SIGCONT.
        on_machines: Whether each worker has a simulated machine of its own.
        survived: Whether training may continue, and therefore ends.
        seconds: How long the others may take to end, if not as long as usual.
    """

    name: str
    places: tuple[str, ...]
    says: str
    status: tuple[int, ...] | None
    others: tuple[int, ...] = (EXIT_OTHER_WORKER_FAILED,)
    silent: bool = False
    stopped: bool = False
    on_machines: bool = False
    survived: bool = False
    seconds: float | None = None


def _gone(name: str, status: int) -> Fault:
    places = (*ROUNDS, *OF_CHIEF)
    return Fault(name, places, f"{GONE}|{NOT_THERE}", (status,))


def _raises(name: str, words: str = "") -> Fault:
    error = f"{name}: {words}" if words else name
    # Keras puts words of its own in front of what a layer raises, and TensorFlow raises
    # another error of what a generator raises.
    says = (
        f"{{victim}} raised {name}: (Exception encountered|{words})"
        f"|'{{victim}}' could not read .*[ :]{error}|{{victim}} failed in .*: {error}"
    )
    return Fault(name, (*ROUNDS[1:], *CALLED, *OF_CHIEF), says, (1,))


def _differs(name: str, says: str = DIFFER) -> Fault:
    # Each worker detects it, or another reports it first.
    return Fault(
        name,
        ("fit",),
        says,
        (1, EXIT_OTHER_WORKER_FAILED),
        (1, EXIT_OTHER_WORKER_FAILED),
    )


def _loses_network(name: str) -> Fault:
    return Fault(
        name,
        ROUNDS,
        f"{GONE}|{NOT_THERE}",
        (EXIT_OTHER_WORKER_FAILED,),
        on_machines=True,
    )


def _slows_network(name: str) -> Fault:
    return Fault(name, ("two fits",), "", (0,), (0,), on_machines=True, survived=True)


FAULTS = {
    fault.name: fault
    for fault in (
        _gone("SIGKILL", -9),
        _gone("SIGTERM", -15),
        _gone("os._exit(0)", 0),
        _gone("os._exit(3)", 3),
        _gone("segmentation fault", -11),
        _gone("abort", -6),
        # Either end may detect it first, and report it.
        Fault(
            "its connection is cut",
            ROUNDS[1:],
            rf"{GONE}|worker 0 disconnected without notice",
            (EXIT_OTHER_WORKER_FAILED,),
        ),
        Fault(
            "it sends an invalid message",
            ROUNDS[1:],
            "{victim} sent a message that cannot be understood",
            (EXIT_OTHER_WORKER_FAILED,),
        ),
        Fault(
            "SIGINT",
            ROUNDS[1:],
            "{victim} raised KeyboardInterrupt",
            (130,),
        ),
        Fault(
            "SIGSTOP",
            ROUNDS[1:],
            "{victim} (did not reach|does not answer)",
            (EXIT_OTHER_WORKER_FAILED,),
            silent=True,
            stopped=True,
        ),
        Fault(
            "it hangs",
            (*ROUNDS[1:], "on_epoch_end"),
            # TensorFlow calls a generator in a thread of its own.
            rf"{{victim}} did not reach `.*` within {TIMEOUT_SECONDS} s; "
            ".*(time.sleep|iterator_get_next)",
            (EXIT_OTHER_WORKER_FAILED,),
            silent=True,
        ),
        _raises("ValueError", "the disk is full"),
        _raises("MemoryError"),
        Fault(
            "sys.exit(3)",
            (*ROUNDS[1:], *CALLED, *OF_CHIEF),
            "{victim} ended while .* was waiting for it in",
            (3, EXIT_OTHER_WORKER_FAILED),
        ),
        Fault(
            "it never comes",
            ("start",),
            NOT_THERE,
            None,
            (69,),
            silent=True,
        ),
        Fault("a foreign program connects", ("start",), "", (0,), (0,), survived=True),
        Fault(
            "a callback of its own waits for all",
            ("fit",),
            DIFFER,
            (1, EXIT_OTHER_WORKER_FAILED),
        ),
        Fault(
            "it ends early",
            ("run", "evaluate", "reduce"),
            "{victim} ended while .* was waiting for it in",
            (0, EXIT_OTHER_WORKER_FAILED),
        ),
        _differs("another optimizer"),
        _differs("another schedule"),
        _differs("another batch size"),
        _differs("another loss"),
        _differs("other rows"),
        _differs("batches of other rows"),
        _differs("another model", f"{OTHER_SIZES}|{DIFFER}"),
        Fault(
            "another shape",
            ("reduce",),
            f"{OTHER_SIZES}|{DIFFER}",
            (1, EXIT_OTHER_WORKER_FAILED),
            (1, EXIT_OTHER_WORKER_FAILED),
        ),
        Fault(
            "another call",
            ("reduce",),
            DIFFER,
            (1, EXIT_OTHER_WORKER_FAILED),
            (1, EXIT_OTHER_WORKER_FAILED),
        ),
        _loses_network("its machine is cut off"),
        _loses_network("its machine cannot send"),
        _loses_network("its machine cannot receive"),
        Fault(
            "another worker and it are cut off from each other",
            BETWEEN_ALL,
            # The chief reaches both, so it cannot see whose link has failed.
            "{victim}|all workers reached `.*`, and it did not end within",
            (EXIT_OTHER_WORKER_FAILED,),
            silent=True,
            on_machines=True,
        ),
        _slows_network("the network delays by 50 ms"),
        _slows_network("the network loses 2 %"),
        Fault(
            "the wrong interface",
            ("start",),
            "{victim}, at .* cannot connect to|cannot connect to {victim} at ",
            (0, EXIT_CLUSTER_NOT_FORMED, EXIT_OTHER_WORKER_FAILED),
            (0, EXIT_CLUSTER_NOT_FORMED, EXIT_OTHER_WORKER_FAILED),
            on_machines=True,
            survived=True,
            seconds=10,
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Planted:
    """A fault, where and when.

    Attributes:
        fault: Its name.
        place: Where in the program.
        victim: The rank of the worker.
        workers: How many there are.
        round: Which time that the program comes there.
        delay: How many seconds later.
    """

    fault: str
    place: str
    victim: int
    workers: int = 2
    round: int = 1
    delay: float = 0.0

    def __str__(self) -> str:
        return f"{self.fault}, in {self.place}, worker {self.victim} of {self.workers}"


# What `make test` plants: a fault of each kind, and all others by `make faults`.
SAMPLE = (
    Planted("SIGKILL", "fit", 1, workers=3, round=2, delay=0.01),
    Planted("SIGKILL", "fit", 0, round=3),
    Planted("SIGKILL", "save_own_variables", 0, round=2),
    Planted("segmentation fault", "gather", 1),
    Planted("SIGTERM", "reduce", 1),
    Planted("its connection is cut", "predict", 1),
    Planted("SIGINT", "evaluate", 1),
    Planted("it hangs", "fit", 1),
    Planted("ValueError", "train_step", 0),
    Planted("MemoryError", "reading data", 1),
    Planted("sys.exit(3)", "run", 1),
    Planted("it never comes", "start", 1),
    Planted("batches of other rows", "fit", 1),
    Planted("its machine is cut off", "fit", 1, workers=3, delay=0.01),
    Planted("the network loses 2 %", "two fits", 1),
    Planted("its machine cannot send", "reduce", 1),
    Planted("its machine cannot receive", "evaluate", 0, workers=3),
    Planted("the network delays by 50 ms", "two fits", 0, workers=3),
    Planted("another worker and it are cut off from each other", "fit", 1, workers=3),
    Planted("the wrong interface", "start", 1),
)


def draw(count: int, seed: int) -> list[Planted]:
    """Faults at random: each of the table once, then any."""
    among = random.Random(seed)
    cells = [(f.name, place) for f in FAULTS.values() for place in f.places]
    among.shuffle(cells)
    first: dict[str, tuple[str, str]] = {}
    for cell in cells:
        first.setdefault(cell[0], cell)
    rest = [cell for cell in cells if cell not in first.values()]
    return [planted(*cell, among) for cell in [*first.values(), *rest][: max(count, 1)]]


def planted(fault: str, place: str, among: random.Random) -> Planted:
    """A fault at a place, at a random moment in a random worker."""
    # A third worker where one can hear what the second does not.
    workers = 3 if among.random() < 0.1 else 2
    victim = among.randrange(workers)
    if FAULTS[fault].places == BETWEEN_ALL:
        workers, victim = 3, among.choice((1, 2))
    return Planted(
        fault,
        place,
        0 if place in OF_CHIEF else victim,
        workers,
        round=1 if place in ("start", *CALLED) else among.randint(1, 4),
        delay=round(among.random() * (1.5 if place == "start" else 0.05), 4),
    )
