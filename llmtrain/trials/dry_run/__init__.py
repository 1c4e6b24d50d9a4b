"""`llmtrain train --dry-run`: reports what a plan will do, and runs a scaled-down copy of it on this machine."""

from llmtrain.trials.dry_run.report import DryRunReport
from llmtrain.trials.dry_run.run import dry_run

__all__ = ["DryRunReport", "dry_run"]
