"""Benchmarks of llmtrain: `python -m benchmarks`."""
