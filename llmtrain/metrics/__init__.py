"""Metrics, progress and trackers of a run."""

from llmtrain.metrics.logger import Evaluation, MetricsLogger, Record, StepMetrics, note_event
from llmtrain.metrics.progress import TrainingProgress
from llmtrain.metrics.throughput import BusyCores, Meter, Rates, Window, rates
from llmtrain.metrics.trackers import check_trackers

__all__ = [
    "BusyCores",
    "Evaluation",
    "Meter",
    "MetricsLogger",
    "Rates",
    "Record",
    "StepMetrics",
    "TrainingProgress",
    "Window",
    "check_trackers",
    "note_event",
    "rates",
]
