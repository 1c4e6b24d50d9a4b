"""Metrics, progress and trackers of a run."""

from llmtrain.metrics.logger import Evaluation, MetricsLogger, StepMetrics, note_event
from llmtrain.metrics.progress import TrainingProgress
from llmtrain.metrics.throughput import BusyCores, Meter, Window
from llmtrain.metrics.trackers import check_trackers

__all__ = [
    "BusyCores",
    "Evaluation",
    "Meter",
    "MetricsLogger",
    "StepMetrics",
    "TrainingProgress",
    "Window",
    "check_trackers",
    "note_event",
]
