"""The imports of the server that forks ranks; without it, they would take each rank several seconds.

Inductor and the modules that `check_overrides` reads would otherwise be imported later, by each rank. `gc.freeze`
exempts the objects that exist already, because DeepSpeed's `see_memory_usage` often runs the garbage collector.
"""

from __future__ import annotations

import gc

import tests.helpers.torchvision_folder  # isort: skip  # noqa: F401  before `transformers` looks for it
import torch._dynamo
import torch._inductor.compile_fx  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import llmtrain.engines  # noqa: F401
from llmtrain.overrides import check_overrides

check_overrides()
gc.freeze()
