"""Calls one function in a worker process: `worker_call.py CALL_FILE RESULT_FILE`.

It is run by its path, since `python -m` would import the whole package before a
function that may not need it.
"""

import importlib
import operator
import os
import pickle
import sys


def main(call_file: str, result_file: str) -> None:
    """Calls the function that a file describes and writes what it returns."""
    with open(call_file, "rb") as file:
        # The path comes first: arguments may be of classes found only there.
        known = set(sys.path)
        sys.path.extend(p for p in pickle.load(file) if p not in known)
        module, qualname = pickle.load(file)
        args, kwargs = pickle.load(file)
    function = operator.attrgetter(qualname)(importlib.import_module(module))
    result = function(*args, **kwargs)
    # A reader finds a whole result or none.
    with open(result_file + ".part", "wb") as file:
        pickle.dump(result, file)
    os.replace(result_file + ".part", result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
