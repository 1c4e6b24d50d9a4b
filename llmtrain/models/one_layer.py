"""One decoder layer of a model at its full width, and how long it takes: what kernels are measured on."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from llmtrain.models.stages import allocate, backbone, decoder_layers, parameters_without_memory

VOCABULARY = 256
"""Tokens of its table: embedding and head are no part of what is measured."""
WARM_UP, RUNS = 3, 10

Timer = Callable[[Callable[[], None], torch.device], float]
"""Seconds that a call takes on a device."""


def one_layer(config: PreTrainedConfig, attention: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The causal LM of `config` with the first of its decoder layers alone, few tokens, and random weights."""
    config = copy.deepcopy(config)
    config.vocab_size = VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)
    with no_init_weights(), parameters_without_memory(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    model.tie_weights()
    del decoder_layers(model)[1][1:]
    allocate(model, device)
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    return model


def seconds_of_layer(model: PreTrainedModel, rows: int, tokens: int, timer: Timer | None = None) -> float:
    """Of a forward and a backward pass of `one_layer`, the final norm included, on sequences [rows, tokens]."""
    base, device = backbone(model), next(model.parameters()).device
    inputs = torch.arange(tokens, device=device).expand(rows, -1)

    def run() -> None:
        states = base(input_ids=inputs % VOCABULARY, position_ids=inputs, use_cache=False)[0]
        states.backward(torch.ones_like(states))
        model.zero_grad()

    return (timer or seconds_of)(run, device)


def seconds_of(run: Callable[[], None], device: torch.device) -> float:
    """Median of several runs, after some that are not counted: kernels are compiled in them."""
    taken = []
    for _ in range(WARM_UP + RUNS):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return median(taken[WARM_UP:])
