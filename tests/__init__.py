import os
import sys

if "KERAS_STRATEGY_TESTS_WITHOUT" in os.environ:
    from tests.hooks import dropping

    dropping.drop(os.environ["KERAS_STRATEGY_TESTS_WITHOUT"])

if "tensorflow" in sys.modules:  # in a worker; conftest.py does it elsewhere
    from tests.quick_tensorflow import leave_untuned, note_no_stacks

    leave_untuned()
    note_no_stacks()
