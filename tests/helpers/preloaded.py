"""The imports of the server that forks ranks; without it, they would take each rank several seconds.

Some is only imported later: inductor, if something is compiled, and what the overrides look at. What is there already
is never garbage, and `see_memory_usage` of DeepSpeed collects all the time.
"""

from __future__ import annotations

import gc

import torch._dynamo
import torch._inductor.compile_fx  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import llmtrain.engines  # noqa: F401
from llmtrain.overrides import check_overrides

check_overrides()
gc.freeze()
