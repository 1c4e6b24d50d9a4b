"""Batches for parity tests: packed documents, with a different number of target tokens in each sample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from llmtrain.data import Completions, MicroBatch, StepBatch
from llmtrain.recipe import BatchConfig, Custom, DataConfig, ModelConfig, OptimConfig, Recipe, Source, TrainConfig

VOCAB = 256
T = 32
GLOBAL_BATCH = 8

MIXTRAL = {
    "model.architecture": "mixtral",
    "model.config.num_local_experts": 4,
    "model.config.output_router_logits": True,
    "model.config.router_aux_loss_coef": 0.5,
}
"""Fields that make the tiny recipe's model a mixture of experts with a router's loss."""


_LOSSES = "llmtrain.objectives:"
CLASSIFIER: dict[str, Any] = {
    "model.num_labels": 3,
    "objective": Custom(f"{_LOSSES}classification", count=f"{_LOSSES}classified", classes=[3, 4, 5]),
}
"""Fields that give the tiny recipe's model a head for three of the likelier tokens."""


WRAPPER: dict[str, Any] = {
    "text_config": {
        **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": T, "sliding_window": 8},
    },
    "vision_config": {
        **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"image_size": 28, "patch_size": 14},
    },
    "mm_tokens_per_image": 4,
}
"""Gemma 3 with its vision tower, which texts do not reach."""


def tiny_recipe(**fields) -> Recipe:
    recipe = Recipe(
        name="parity",
        model=ModelConfig(
            architecture="llama",
            config={
                "vocab_size": VOCAB,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": T,
                "tie_word_embeddings": True,
            },
        ),
        data=DataConfig(sources=[Source("stdlib")], tokenizer="none", sequence_length=T),
        # A clipping that bites, a decay that shows and a schedule that moves: each one is a way to differ.
        optim=OptimConfig(lr=1e-3, weight_decay=1.0, warmup_steps=4, schedule="cosine", clip_grad_norm=0.5),
        batch=BatchConfig(global_batch_size=GLOBAL_BATCH, micro_batch_size=1),
        train=TrainConfig(max_steps=40, seed=7),
    )
    return recipe.with_(**fields)


def global_batch(step: int, size: int = GLOBAL_BATCH, length: int = T, vocab: int = VOCAB) -> list[MicroBatch]:
    """The samples of a step, one per micro-batch: two documents each, then padding."""
    generator = torch.Generator().manual_seed(1000 + step)

    def integers(low: int, high: int, size: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator)

    samples = []
    for _ in range(size):
        first, second = (int(n) for n in integers(3, length // 2, (2,)))
        positions = torch.cat([torch.arange(first), torch.arange(second), torch.arange(length - first - second)])
        # Low tokens are likelier, so that there is something to learn.
        tokens = (integers(0, vocab, (length + 1,)) * integers(0, vocab, (length + 1,))) // vocab
        labels = tokens[1:].clone()
        labels[first + second :] = -100
        samples.append(MicroBatch(input_ids=tokens[None, :-1], position_ids=positions[None], labels=labels[None]))
    return samples


def with_pairs(batch: StepBatch) -> StepBatch:
    """Returns the batch with the two documents of each sample as a pair, with made-up reference log-probabilities."""
    micro_batches = []
    for one in batch.micro_batches:
        segments = ((one.position_ids == 0).cumsum(1) - 1).clamp(max=1)
        references = torch.full((len(one.labels), 2), -50.0, dtype=torch.float64)
        desirable = torch.tensor([True, False]).repeat(len(one.labels), 1)
        completions = Completions.of(segments, one.labels, references, desirable)
        micro_batches.append(replace(one, completions=completions))
    return replace(batch, micro_batches=micro_batches, examples=batch.samples)


def step_batch(
    step: int,
    micro_batch: int,
    accumulation: int,
    dp_rank: int = 0,
    dp: int = 1,
    size: int = GLOBAL_BATCH,
    **shape: int,
) -> StepBatch:
    """Returns a rank's part: sample (m·dp + rank)·micro_batch + k is row k of micro-batch m.

    size: of the global batch; shape: `length` and `vocab` of its samples.
    """
    assert micro_batch * accumulation * dp == size
    return part_of(global_batch(step, size, **shape), step, micro_batch, accumulation, dp_rank, dp)


def part_of(
    samples: list[MicroBatch], step: int, micro_batch: int, accumulation: int, dp_rank: int, dp: int
) -> StepBatch:
    """Returns a rank's part of the samples of a step."""
    micro_batches = []
    for m in range(accumulation):
        start = (m * dp + dp_rank) * micro_batch
        rows = samples[start : start + micro_batch]
        micro_batches.append(
            MicroBatch(
                input_ids=torch.cat([row.input_ids for row in rows]),
                position_ids=torch.cat([row.position_ids for row in rows]),
                labels=torch.cat([row.labels for row in rows]),
            )
        )
    targets = sum(int((row.labels != -100).sum()) for row in samples)
    return StepBatch(
        micro_batches=micro_batches, target_tokens=targets, samples=len(samples), first_sample=step * len(samples)
    )
