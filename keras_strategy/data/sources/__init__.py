"""The kinds of datasets: one module for each library, with the same methods."""
