"""One worker process of a test: joins, and then does what the test's script says."""

import json
import sys

from short import wait_for_others

from keras_strategy.cluster import watchdog
from keras_strategy.cluster.client import CoordinatorClient
from keras_strategy.cluster.rendezvous import rendezvous_address

# So that tests need not wait for long.
watchdog.ANSWER_SECONDS = 3.0
watchdog.LEFT_SECONDS = 1.0
watchdog.DEADLOCK_SECONDS = 1.0

arguments = json.loads(sys.argv[1])
rank, names = arguments["rank"], arguments["names"]
client = CoordinatorClient(
    rendezvous_address(arguments["addresses"]),
    rank,
    names,
    60.0,
    exit_process=arguments["exit_process"],
    is_elastic=arguments["is_elastic"],
)
wait_for_others(client, arguments["timeout"])
print("joined", flush=True)
exec(compile(arguments["script"], "script.py", "exec"), {"client": client})
