"""The machine below a run: files, streams, signals, cores and heartbeats. Pure."""
