"""Table of programs that N replicas and one device train to equal results.

`python -m conformance.equality` prints it.
"""
