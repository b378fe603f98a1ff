"""Does training on N replicas end with what one device ends with?

`python -m tests.equality` answers with a table.
"""
