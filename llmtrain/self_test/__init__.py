"""Tries a node with all its devices: what it computes, how fast it is, and how far that is from the predictions.

Importing this package has no side effects.
"""
