"""Turns text into training batches: corpora, tokenizer, token store, packing and sampling.

Importing this package loads none of `torch`, `transformers` and `datasets`; each is imported where it is used.
"""

from llmtrain.data.images import Images
from llmtrain.data.loader import (
    BatchLoader,
    Completions,
    Documents,
    EmbeddingNoise,
    MicroBatch,
    StepBatch,
    with_max_steps,
)
from llmtrain.data.prepare import MAIN_SET, Prepared, PreparedSource, find_prepared, prepare, verify_prepared
from llmtrain.data.progress import Progress
from llmtrain.data.prompts import encode_prompts
from llmtrain.data.report import data_summary, notes, report
from llmtrain.data.samples import NO_TARGET
from llmtrain.data.store import TokenStore

__all__ = [
    "MAIN_SET",
    "NO_TARGET",
    "BatchLoader",
    "Completions",
    "Documents",
    "EmbeddingNoise",
    "Images",
    "MicroBatch",
    "Prepared",
    "PreparedSource",
    "Progress",
    "StepBatch",
    "TokenStore",
    "data_summary",
    "encode_prompts",
    "find_prepared",
    "notes",
    "prepare",
    "report",
    "verify_prepared",
    "with_max_steps",
]
