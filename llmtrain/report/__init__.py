"""Shows runs to people, from their directories alone: a page with curves, a terminal, a comparison."""

from llmtrain.report.run import RunData, RunReader, read_run
from llmtrain.report.table import MetricsTable

__all__ = ["MetricsTable", "RunData", "RunReader", "read_run"]
