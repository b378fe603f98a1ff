"""Worker script that calls one function: `worker_call.py CALL_FILE RESULT_FILE`.

It is run by its path, since `python -m` would import the whole package before a
function that may not need it.
"""

import importlib
import operator
import pickle
import sys


def main(call_file: str, result_file: str) -> None:
    """Call the function that a file describes, and write its result."""
    with open(call_file, "rb") as file:
        # First the path: the function and its arguments are importable only with it.
        existing = set(sys.path)
        sys.path.extend(p for p in pickle.load(file) if p not in existing)
        module, qualname, args, kwargs = pickle.load(file)
    function = operator.attrgetter(qualname)(importlib.import_module(module))
    result = function(*args, **kwargs)
    with open(result_file, "wb") as file:
        pickle.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
