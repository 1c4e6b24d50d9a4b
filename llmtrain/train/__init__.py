"""A training run: the worker of each rank, the loop, what interrupts it and what a finished run leaves."""
