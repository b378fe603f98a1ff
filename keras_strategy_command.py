"""The command `keras-strategy`, which starts workers without importing Keras.

To import a module of `keras_strategy`, Python first runs the package's `__init__`, and
that imports Keras and an engine: seconds, and memory, in a process that only watches
others. A module outside the package can leave that out.
"""

import importlib.util
import sys


def main() -> int:
    """Does what the command line says and returns the exit status."""
    if sys.argv[1:2] != ["info"]:
        spec = importlib.util.find_spec("keras_strategy")
        if spec is not None:
            # The package with its place, from which its modules are imported, but
            # without its contents.
            sys.modules["keras_strategy"] = importlib.util.module_from_spec(spec)
    from keras_strategy.launch.command import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
