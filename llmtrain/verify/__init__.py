"""`llmtrain verify`: every plan that runs here computes the run of a plain PyTorch loop, or is reported."""

from llmtrain.verify.certify import verify
from llmtrain.verify.job import Certificate, choose

__all__ = ["Certificate", "choose", "verify"]
