"""Tiny copies of a model, on which a split or a kernel is tried before it is used."""
