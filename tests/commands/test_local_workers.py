"""Workers of this machine: their addresses, ports and processes."""

import os
import sys

from keras_strategy.commands.launcher import Launcher
from keras_strategy.commands.local_cluster import LocalCluster, free_ports
from keras_strategy.commands.processes import WorkerProcess

EXITS_WITH_3 = sys.executable, "-c", "exit(3)"


def test_launcher_returns_exit_status():
    assert Launcher(EXITS_WITH_3, workers=1).run() == 3


def test_local_cluster_describes_workers():
    cluster = LocalCluster((12345, 12346), 12347)
    assert "127.0.0.1:12346" in cluster.variables(0)["TF_CONFIG"]
    assert cluster.name(1) == "worker 1"


def test_free_ports_are_different():
    assert len(set(free_ports(3))) == 3


def test_worker_process_ends_with_status():
    assert WorkerProcess("worker 0", [*EXITS_WITH_3], os.environ).wait() == 3
