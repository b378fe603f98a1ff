"""`python -m keras_strategy` is the command `keras-strategy`."""

import sys

from keras_strategy.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
