"""Worker script that calls one function: `worker_call.py CALL RESULT ERROR`.

The arguments are files: the function to read, its result or its exception to write.
It is run by its path, since `python -m` would import the whole package before a
function that may not need it.
"""

import contextlib
import importlib
import operator
import pickle
import sys
import traceback

import cloudpickle


def main(call_file: str, result_file: str, error_file: str) -> None:
    """Call the function that a file describes, and write its result or its error."""
    with open(call_file, "rb") as file:
        # First the path: the function and its arguments are importable only with it.
        existing = set(sys.path)
        sys.path.extend(p for p in pickle.load(file) if p not in existing)
        function, args, kwargs = pickle.load(file)
    if isinstance(function, tuple):
        module, qualname = function
        function = operator.attrgetter(qualname)(importlib.import_module(module))
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        error.add_note(f"It was raised in a worker:\n{traceback.format_exc()}")
        with contextlib.suppress(Exception), open(error_file, "wb") as file:
            file.write(cloudpickle.dumps(error))
        error.__notes__.pop()
        raise
    with open(result_file, "wb") as file:
        cloudpickle.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
