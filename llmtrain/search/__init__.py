"""Enumerates the plans of a recipe on a cluster: all, the nearest legal ones, the fastest."""
