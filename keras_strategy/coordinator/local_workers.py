"""The program that looks after the workers of a coordinator on its machine.

    python local_workers.py SCHEDULER COUNT DIRECTORY [MODULE...]

It is run by its path, and imports no engine: one process imports the modules, and all
workers are forks of it, also those that are started again.
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

# What `distributed.Security` calls them, and the names of their files.
CERTIFICATES = ("tls_ca_file", "tls_worker_cert", "tls_worker_key")
# Dask serves pages about its work, without certificates. There is no way to have none,
# but for this address, and no pages.
PAGES_AT = "127.0.0.1:0"
_SECONDS_TO_JOIN = 60


async def look_after(scheduler: str, count: int, directory: Path) -> None:
    """Starts workers, and those that have died again, until it is told to end.

    Args:
        scheduler: The address of Dask's scheduler.
        count: How many workers.
        directory: Where the certificates are.
    """
    distributed: Any = importlib.import_module("distributed")
    told_to_end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told_to_end.set)
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
            dashboard_address=PAGES_AT,
        )
        for index in range(count)
    ]

    async def finished() -> None:
        await asyncio.gather(*nannies)
        await asyncio.gather(*(nanny.finished() for nanny in nannies))

    waited = [
        asyncio.ensure_future(told_to_end.wait()),
        asyncio.ensure_future(finished()),
    ]
    done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*(nanny.close() for nanny in nannies), return_exceptions=True)
    for each in done:
        each.result()


def main(scheduler: str, count: str, directory: str, *modules: str) -> None:
    """Runs the program with the arguments of the command line."""
    dask: Any = importlib.import_module("dask")
    importlib.import_module("distributed")  # which has the configuration
    # Dask sets these for a worker, which is too late for what it finds imported.
    for name, value in dask.config.get("distributed.nanny.pre-spawn-environ").items():
        os.environ.setdefault(name, str(value))
    multiprocessing.set_forkserver_preload(["distributed", *modules])
    forkserver.ensure_running()
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        asyncio.run(look_after(scheduler, int(count), Path(directory)))


if __name__ == "__main__":
    main(*sys.argv[1:])
