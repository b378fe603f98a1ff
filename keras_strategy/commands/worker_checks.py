"""Checks of `keras-strategy doctor --workers`, which each worker of a job runs.

The workers meet as for training, exchange facts about their machines and compare them,
so all have the same findings. The chief prints them. No backend is imported.
"""

import concurrent.futures
import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import keras_strategy
from keras_strategy.cluster import membership, network, rendezvous
from keras_strategy.cluster.membership import Cluster
from keras_strategy.cluster_resolver import detect
from keras_strategy.cluster_resolver.cluster_spec import join_host_port, split_host_port
from keras_strategy.commands.findings import Finding, report
from keras_strategy.errors import ClusterError
from keras_strategy.options import CommunicationOptions

# Variables that must agree, as those of this package, except for the last two. The
# secret is never sent.
_SHARED = "JAX_ENABLE_X64", "NVIDIA_TF32_OVERRIDE", "TF_ENABLE_ONEDNN_OPTS", "XLA_FLAGS"
_MAY_DIFFER = network.INTERFACE_VARIABLE, rendezvous.SECRET_VARIABLE
_ADVICE = {
    "names": "correct /etc/hosts, or the DNS, on the machines that differ",
    "versions": "install the same versions for all workers",
    "variables": "set the variable to the same value for all workers",
}
_NO_ADDRESS, _LOOPBACK = "no address", "the loopback"
TIMEOUT_SECONDS = 30.0  # by default
_CLOCK_ROUNDS, _MAX_CLOCK_SECONDS = 3, 1.0


def main(timeout_seconds: float) -> int:
    detection = detect()
    if not detection:
        detail = f"none was found. Looked for:\n{detection}"
        advice = (
            "start this command as your program: with srun, mpirun, torchrun or "
            "keras-strategy run, or with TF_CONFIG set on each machine"
        )
        return report([("cluster", Finding(False, detail, advice))])
    advice = "correct what the message names"
    try:
        resolver: Any = detection.resolver()
        workers = membership.find_workers(resolver)
        if workers is None:
            return report([("cluster", Finding(True, "this process trains alone"))])
        _, names, addresses = workers
        host, port = rendezvous.rendezvous_address(addresses, resolver.job_identity)
        own = [f"{a} ({i})" for a, i in network.find_interfaces().items() if i != "lo"]
        meet = (
            f"start this command in all {len(names)} workers at the same time, with "
            f"the same {rendezvous.SECRET_VARIABLE}. On every machine, {host} must "
            f"stand for an address of {names[0]}'s machine, whose firewall must accept "
            f"connections to port {port}. Here, on {socket.gethostname()} with "
            f"{', '.join(own)}, it stands for {_look_up(host)}"
        )
        options = CommunicationOptions(timeout_seconds=timeout_seconds)
        cluster = membership.join_cluster(resolver, options)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, ClusterError):
            advice = meet
        return report([("cluster", Finding(False, str(error), advice))])
    assert cluster is not None
    facts = cluster.exchange("facts", _collect_facts(cluster))
    ports = _connect_all(cluster, facts[0]["backend"])
    # The replies of an exchange arrive at about the same time.
    clocks = [cluster.exchange("clocks", time.time()) for _ in range(_CLOCK_ROUNDS + 1)]
    found = ("ports", ports), ("clocks", compare_clocks(cluster, clocks[1:]))
    checks = [*compare(cluster, facts), *found]
    status = report(checks if cluster.is_chief else [])
    # Launchers end all workers when one fails: not before the chief has printed.
    cluster.exchange("the end", None)
    membership.leave_cluster()
    return max(status, *(not finding.ok for _, finding in checks))


def _look_up(host: str) -> str:
    """Return the addresses that a name stands for on this machine."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return _NO_ADDRESS
    addresses = sorted({str(address[0]) for *_, address in found})
    is_local = all(map(network.is_loopback, addresses))
    return _LOOPBACK if is_local else ", ".join(addresses)


def _collect_facts(cluster: Cluster) -> dict[str, Any]:
    file = pathlib.Path(os.environ.get("KERAS_HOME") or "~/.keras", "keras.json")
    settings: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        settings = json.loads(file.expanduser().read_text())
    backend = os.environ.get("KERAS_BACKEND") or settings.get("backend", "tensorflow")
    # TensorFlow's distribution has several names.
    distributions = importlib.metadata.packages_distributions()
    keras_version, backend_version = (
        importlib.metadata.version(distributions[package][0])
        if package in distributions
        else "not installed"
        for package in ("keras", backend)
    )
    variables = {
        name: value
        for name, value in os.environ.items()
        if name in _SHARED or name.startswith("KERAS_STRATEGY_")
        if name not in _MAY_DIFFER
    }
    hosts = {split_host_port(address)[0]: None for address in cluster.addresses}
    hosts = [socket.gethostname(), *filter(None, hosts)]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        found = list(pool.map(_look_up, hosts))
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    cores = sorted(affinity(0))
    limit = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(limit) if limit.isdecimal() else len(cores)
    interface = network.find_interfaces().get(cluster.host, "unknown interface")
    return {
        "machine": f"{hosts[0]} ({found[0]}), reached at {cluster.host} ({interface}); "
        f"threads: {threads}, cores: {len(cores)}",
        "names": dict(zip(hosts[1:], found[1:], strict=True)),
        "versions": {
            "Python": ".".join(platform.python_version_tuple()[:2]),
            "Keras": keras_version,
            "backend": f"{backend} {backend_version}",
            "keras_strategy": keras_strategy.__version__,
        },
        "variables": variables,
        "backend": backend,
        "cores": cores,
        "threads": threads,
    }


def compare(
    cluster: Cluster, facts: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, Finding]]:
    """Compare the facts of all workers."""
    for name, fact in zip(cluster.names, facts, strict=True):
        yield name, Finding(True, fact["machine"])
    for topic, advice in _ADVICE.items():
        same = []
        for key in sorted({key for fact in facts for key in fact[topic]}):
            values = [fact[topic].get(key, "not set") for fact in facts]
            # On its own machine a name may stand for the loopback.
            different = set(values) - {_LOOPBACK}
            if len(different) > 1 or _NO_ADDRESS in different:
                detail = f"{key} ({cluster.format_by_value(values)})"
                yield topic, Finding(False, detail, advice)
            elif key not in different:  # an address stands for itself
                same.append(f"{key} {next(iter(different), _LOOPBACK)}")
        if same:
            yield topic, Finding(True, ", ".join(same))
    for host in dict.fromkeys(cluster.hosts):
        there = [f for h, f in zip(cluster.hosts, facts, strict=True) if h == host]
        cores = len(set().union(*(fact["cores"] for fact in there)))
        threads = sum(fact["threads"] for fact in there)
        if 1 < len(there) < threads > cores:
            detail = f"{len(there)} workers at {host} have {threads} for {cores} cores"
            advice = f"set OMP_NUM_THREADS={max(1, cores // len(there))}"
            yield "threads", Finding(False, detail, advice)


def _connect_all(cluster: Cluster, backend: str) -> Finding:
    """Connect every worker to the others, at ports as the backend will use."""
    if backend == "tensorflow":
        listener, own = cluster.listen_at_own_address()
    else:
        listener = cluster.listen()
        own = join_host_port(cluster.host, listener.getsockname()[1])
    with listener:
        try:
            addresses = cluster.exchange_addresses(backend, own)
        except ClusterError as error:
            detail, _, advice = str(error).rpartition("\n")
            return Finding(False, detail, advice)
    if cluster.is_local:
        return Finding(True, "all workers are on this machine")
    where = network.describe_ports(addresses)
    return Finding(True, f"all workers can connect to each other at {where}")


def compare_clocks(cluster: Cluster, rounds: Sequence[Sequence[float]]) -> Finding:
    """Compare the workers' times, which they read at the same moments."""
    apart = [
        min((times[rank] - times[0] for times in rounds), key=abs)
        for rank in range(cluster.size)
    ]
    found = cluster.format_by_value(f"{seconds:+.1f} s" for seconds in apart)
    if max(map(abs, apart)) > _MAX_CLOCK_SECONDS:
        advice = "synchronize the machines' clocks, for example with chrony"
        return Finding(False, f"they differ from the chief's ({found})", advice)
    return Finding(True, f"at most {max(map(abs, apart)):.3f} s from the chief's")
