"""A watcher process for each rank, which ends a hanging run after writing all stacks, and reports slow ranks."""

from llmtrain.train.watchdog.watcher import WatcherHandle, start

__all__ = ["WatcherHandle", "start"]
