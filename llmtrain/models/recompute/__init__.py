"""Recomputation in the backward pass: checkpoints of layers, their inputs on the host, and tiles."""
