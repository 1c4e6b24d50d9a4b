"""Shows runs, from their directories alone: as a page with curves, in a terminal, or as a comparison."""

from llmtrain.report.run import RunData, RunReader, read_run
from llmtrain.report.table import MetricsTable

__all__ = ["MetricsTable", "RunData", "RunReader", "read_run"]
