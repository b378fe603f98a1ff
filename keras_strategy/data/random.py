"""Process-wide random generators that all workers must share.

Keras draws from them to shuffle arrays and to seed layers. If each worker drew
different numbers, the workers would read different batches.
"""

import base64
import hashlib
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_strategy.cluster.membership import Cluster
from keras_strategy.core.registry import get_engine


def sync_with_chief(cluster: Cluster, digests: Sequence[str] | None = None) -> None:
    """Set the generators to the chief's; `digests` are exchanged if not given."""
    operation = "the comparison of random states"
    digests = digests or cluster.exchange(operation, random_state_digest())
    if len(set(digests)) == 1:
        return
    state = get_random_state() if cluster.is_chief else None
    states = cluster.exchange("the chief's random state", state)
    if not cluster.is_chief:
        set_random_state(states[0])


def random_state_digest() -> str:
    """Return a digest of this process's generator states."""
    text = json.dumps(get_random_state())
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def get_random_state() -> dict[str, Any]:
    """Return this process's generator states as JSON values."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    engine = get_engine().random_state()
    torch = sys.modules.get("torch")  # on any backend, its DataLoader draws from it
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [
            name,
            base64.b64encode(np.asarray(keys).astype("<u4").tobytes()).decode(),
            position,
            has_gauss,
            cached,
        ],
        "engine": None if engine is None else base64.b64encode(engine).decode(),
        "torch": None if torch is None else torch.get_rng_state().tolist(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set the generators to a state that `get_random_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    keys = np.frombuffer(base64.b64decode(keys), dtype="<u4").astype(np.uint32)
    np.random.set_state((name, keys, *rest))
    if state["engine"] is not None:
        get_engine().set_random_state(base64.b64decode(state["engine"]))
    torch = sys.modules.get("torch")
    if torch is not None and state["torch"] is not None:
        torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
