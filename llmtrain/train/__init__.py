"""A training run: the worker of each rank, the loop, its interruptions, and the results of a finished run."""
