import os

if "KERAS_STRATEGY_TESTS_WITHOUT" in os.environ:
    from tests.hooks import dropping

    dropping.drop(os.environ["KERAS_STRATEGY_TESTS_WITHOUT"])
