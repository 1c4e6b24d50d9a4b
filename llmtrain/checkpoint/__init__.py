"""Checkpoints that are whole or not there, and what is made of them."""

from llmtrain.checkpoint.folder import newest, verify
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import TrainerState, load

__all__ = ["Saver", "TrainerState", "load", "newest", "verify"]
