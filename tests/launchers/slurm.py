"""A Slurm cluster of one node, which is this machine."""

import contextlib
import getpass
import os
import pathlib
import socket
import subprocess
import time
from collections.abc import Iterator

from tests.launchers.recipes import free_port

NODE = socket.gethostname().partition(".")[0]
CONF = """\
ClusterName=tests
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MailProg=/bin/true
ReturnToService=2
NodeName={node} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP
"""


@contextlib.contextmanager
def start_cluster(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """Start munged, slurmctld and slurmd; yield the variables of Slurm's commands."""
    for name in "state", "spool":
        (folder / name).mkdir()
    key, conf = folder / "munge.key", folder / "slurm.conf"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    conf.write_text(
        CONF.format(
            folder=folder,
            node=NODE,
            user=getpass.getuser(),
            controller_port=free_port(),
            node_port=free_port(),
        )
    )
    munge = [
        f"--{option}={folder}/munge.{name}"
        for option, name in (
            *(("socket", "socket"), ("key-file", "key"), ("pid-file", "pid")),
            *(("log-file", "log"), ("seed-file", "seed")),
        )
    ]
    variables = {"SLURM_CONF": str(conf)}
    with contextlib.ExitStack() as stack:

        def start(name: str, *arguments: str) -> None:
            output = stack.enter_context(open(folder / f"{name}.out", "wb"))
            daemon = subprocess.Popen(
                [f"/usr/sbin/{name}", *arguments], stdout=output, stderr=output
            )
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)

        start("munged", "--foreground", "--force", *munge)
        wait_for(lambda: (folder / "munge.socket").exists())
        start("slurmctld", "-D", "-f", str(conf))
        start("slurmd", "-D", "-f", str(conf))
        wait_for(lambda: "idle" in call(variables, "sinfo", "-h", "-o", "%T"))
        yield variables
        # The processes of a job that still runs would outlive slurmd.
        call(variables, "scancel", "--full", f"--user={getpass.getuser()}")
        wait_for(lambda: not call(variables, "squeue", "-h"))


def call(variables: dict[str, str], *command: str) -> str:
    """Return the output of one of Slurm's commands, whether or not it succeeds."""
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True
    ).stdout


def wait_for(is_done, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.2)
