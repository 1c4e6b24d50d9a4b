"""The ranks of a run: their devices, process groups, collectives and host memory."""
