"""Checks what a machine, or each host of a hostfile, can do for a run, what is wrong, and how to fix it.

Importing this package has no side effects.
"""
