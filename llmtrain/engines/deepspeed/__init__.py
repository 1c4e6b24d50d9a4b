"""The DeepSpeed engine, and one part for each axis of parallelism."""
