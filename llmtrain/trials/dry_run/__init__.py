"""`llmtrain train --dry-run`: reports what a plan will do, and runs a scaled-down copy of it on this machine."""
