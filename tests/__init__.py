import os
import sys

if "KERAS_STRATEGY_TESTS_WITHOUT" in os.environ:
    from tests.keras_patches import dropping

    dropping.drop(os.environ["KERAS_STRATEGY_TESTS_WITHOUT"])

if "tensorflow" in sys.modules:  # in a worker; conftest.py does it elsewhere
    from tests.untuned import leave_untuned

    leave_untuned()
