"""The imports of the server that forks ranks; without it, they would take each rank several seconds.

Some is only imported when an engine is built: inductor, which DeepSpeed's Muon asks torch to compile for, and what the
overrides look at. What is there already is never garbage, and `see_memory_usage` of DeepSpeed collects all the time.
"""

from __future__ import annotations

import gc

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import torch._dynamo  # noqa: F401 - asks once what devices there are
import transformers.models.llama.modeling_llama  # noqa: F401

import llmtrain.engines  # noqa: F401
from llmtrain.overrides import check_overrides

check_overrides()
gc.freeze()
