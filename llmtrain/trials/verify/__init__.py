"""`llmtrain verify`: checks that every plan computes the same run as a plain PyTorch loop."""

from llmtrain.trials.verify.certify import verify
from llmtrain.trials.verify.job import Certificate, choose_plans

__all__ = ["Certificate", "choose_plans", "verify"]
