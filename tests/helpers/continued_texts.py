"""Compares the texts that a strategy continues with those of `transformers`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

from llmtrain.data import encode_prompts
from llmtrain.models import model_configuration
from llmtrain.models.precision import weight_dtype
from llmtrain.train.sampling import Sampler
from tests.helpers.batches import GLOBAL_BATCH, VOCAB, T, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.traces import Trace, assert_same_bits, engine_of, plan_of, trace
from tests.helpers.word_tokenizer import write_word_tokenizer

TOKENS = 12
PROMPTS = ["3 1 4 1 5", "9 2 6", "9 2"]
"""More than a micro-batch has rows."""
SAMPLES = {"samples.every_steps": 1, "samples.prompts": PROMPTS, "samples.tokens": TOKENS}
VARIED = {"model.config.tie_word_embeddings": False, "model.config.initializer_range": 0.3}
"""Weights with which a token depends on all tokens before, and not only on the last one."""


def _prepared(folder: Path) -> SimpleNamespace:
    """Of the data, what a sampler reads."""
    tokenizer = write_word_tokenizer(folder / "tokenizer", VOCAB)
    return SimpleNamespace(
        tokenizer_dir=tokenizer, sequence_length=T, vocab_size=VOCAB, stop_ids=[0], eos_id=0, chat_template=None
    )


def _expected(engine, recipe, prompt: str) -> str:
    """What `transformers` generates, with its cache, from the same weights on one process."""
    weights = dict(engine.named_weights())
    model = AutoModelForCausalLM.from_config(model_configuration(recipe), dtype=weight_dtype(recipe.parallel.precision))
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    ids = torch.tensor([[int(word) for word in prompt.split()]])
    limits = {"max_new_tokens": TOKENS, "eos_token_id": 0, "pad_token_id": 0, "do_sample": False}
    output = model.eval().generate(ids, attention_mask=torch.ones_like(ids), **limits)[0, ids.shape[1] :]
    return " ".join(str(token) for token in output.tolist() if token)


def _run(rank: int, ranks: int, fields: dict, prepared, samples: bool) -> tuple[list, Trace]:
    shared = fields.get("parallel.pipeline", 1) * fields.get("parallel.tensor", 1) * fields.get("parallel.sequence", 1)
    micro = {"batch.micro_batch_size": GLOBAL_BATCH * shared // (2 * ranks)}
    plan = plan_of(tiny_recipe(**micro, **SAMPLES, **VARIED, **fields), ranks)
    engine = engine_of(plan)
    sampler = Sampler(plan, prepared, encode_prompts(plan.recipe, prepared))
    shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
    part = (engine.data_parallel_rank, plan.data_parallel_size)
    found = []
    for steps in (range(0), range(3)):
        trace(engine, steps, *shape, *part)
        if samples:
            generator = torch.get_rng_state()
            continued = sampler.continued(engine)
            assert torch.equal(generator, torch.get_rng_state())
            found.append((continued, [_expected(engine, plan.recipe, one) for one in PROMPTS]))
            torch.set_rng_state(generator)
    return found, trace(engine, range(3, 6), *shape, *part)


def _both(rank: int, ranks: int, cases: list[dict], prepared) -> list[tuple]:
    return [tuple(_run(rank, ranks, fields, prepared, samples) for samples in (True, False)) for fields in cases]


def check_texts(ranks: int, cases: dict[str, dict], folder: Path) -> None:
    """Compares texts with those of `transformers`, and a run with samples with one without. cases: fields by name."""
    by_rank = run_ranks(ranks, _both, ranks, list(cases.values()), _prepared(folder))
    for found in by_rank:
        for name, ((samples, ours), (_, theirs)) in zip(cases, found, strict=True):
            for continued, expected in samples:
                assert len({word for _, text in continued for word in text.split()}) > TOKENS, name
                assert continued == list(zip(PROMPTS, expected, strict=True)), name
            assert_same_bits(ours, theirs, name)
