"""Program that supervises the workers of a coordinator on its machine.

    python local_workers.py SCHEDULER COUNT DIRECTORY [MODULE...]

It is run by its path and imports no backend: one process imports the modules, and all
workers, also restarted ones, are forks of it.
"""

import asyncio
import importlib
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

# Attributes of `distributed.Security`, and the names of the certificate files.
CERTIFICATES = ("tls_ca_file", "tls_worker_cert", "tls_worker_key")
# Dask always serves status pages without certificates: empty ones on the loopback.
DASHBOARD_ADDRESS = "127.0.0.1:0"
_SECONDS_TO_JOIN = 60


async def supervise(scheduler: str, count: int, directory: Path) -> None:
    """Start workers, and restart dead ones, until SIGTERM."""
    distributed: Any = importlib.import_module("distributed")
    stop_requested = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop_requested.set)
    files = {name: str(directory / name) for name in CERTIFICATES}
    security = distributed.Security(require_encryption=True, **files)
    nannies = [
        distributed.Nanny(
            scheduler,
            name=index,
            nthreads=1,
            memory_limit=None,
            host="127.0.0.1",
            protocol="tls://",
            security=security,
            death_timeout=_SECONDS_TO_JOIN,
            local_directory=str(directory),
            dashboard=False,
            dashboard_address=DASHBOARD_ADDRESS,
        )
        for index in range(count)
    ]

    async def wait_for_workers() -> None:
        await asyncio.gather(*nannies)
        await asyncio.gather(*(nanny.finished() for nanny in nannies))

    waits = stop_requested.wait(), wait_for_workers()
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*(nanny.close() for nanny in nannies), return_exceptions=True)
    for task in done:
        task.result()


def main(scheduler: str, count: str, directory: str, *modules: str) -> None:
    """Run the program with the arguments of the command line."""
    dask: Any = importlib.import_module("dask")
    importlib.import_module("distributed")  # loads the configuration
    # Dask sets these per worker, too late for modules that are already imported.
    for name, value in dask.config.get("distributed.nanny.pre-spawn-environ").items():
        os.environ.setdefault(name, str(value))
    multiprocessing.set_forkserver_preload(["distributed", *modules])
    forkserver.ensure_running()
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        asyncio.run(supervise(scheduler, int(count), Path(directory)))


if __name__ == "__main__":
    main(*sys.argv[1:])
