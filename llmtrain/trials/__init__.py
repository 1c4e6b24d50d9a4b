"""Runs that try something before it is relied on: a plan at a small scale, its equality with a reference, a node."""
