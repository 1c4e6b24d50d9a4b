"""Metrics, progress and trackers of a run."""

from llmtrain.train.metrics.logger import Evaluation, MetricsLogger, Record, StepMetrics, metrics_of, note_event
from llmtrain.train.metrics.progress import TrainingProgress
from llmtrain.train.metrics.throughput import BusyCores, Meter, Window
from llmtrain.train.metrics.trackers import check_trackers

__all__ = [
    "BusyCores",
    "Evaluation",
    "Meter",
    "MetricsLogger",
    "Record",
    "StepMetrics",
    "TrainingProgress",
    "Window",
    "check_trackers",
    "metrics_of",
    "note_event",
]
