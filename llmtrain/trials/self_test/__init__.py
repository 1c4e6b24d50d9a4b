"""Tests a node with all its devices: whether results are right, how fast it is, and how accurate predictions are.

Importing this package has no side effects.
"""
