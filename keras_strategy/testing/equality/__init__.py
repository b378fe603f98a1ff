"""Does training on N replicas end with what one device ends with?

`python -m keras_strategy.testing.equality` answers with a table.
"""
