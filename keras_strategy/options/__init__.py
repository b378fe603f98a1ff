"""Options of strategies, runs, datasets and workers, checked when created."""
