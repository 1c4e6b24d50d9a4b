"""Enumerates plans of a recipe on a cluster: all plans, the nearest legal ones, or the fastest ones."""
