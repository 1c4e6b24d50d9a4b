"""Tiny copies of models, on which splits (into stages, among tensor parallel ranks) and kernels are verified."""
