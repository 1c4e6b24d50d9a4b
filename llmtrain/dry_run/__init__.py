"""`llmtrain train --dry-run`: what a plan will do, and the same plan made small and really run, on this machine."""

from llmtrain.dry_run.report import Report
from llmtrain.dry_run.run import dry_run

__all__ = ["Report", "dry_run"]
