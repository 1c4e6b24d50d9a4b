"""The prompts that a run continues to show its progress, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmtrain.data.prepare import Prepared
from llmtrain.errors import DataError, Problem, RecipeError
from llmtrain.recipe import Recipe
from llmtrain.system.untrusted import utf8_name

FIELD = "samples.prompts"


def encode_prompts(recipe: Recipe, prepared: Prepared) -> list[list[int]]:
    """Returns the token ids of each prompt of a recipe; none if it generates no samples.

    A prompt is a text to continue or, if the training data are conversations, a user's question. Raises DataError for
    prompts that leave no room in a sequence, and for a chat template that cannot render them.
    """
    if not recipe.samples.every_steps:
        return []
    prompts = recipe.samples.prompts
    encoded = _questions(prompts, prepared) if prepared.chat_template else _texts(prompts, prepared)
    problems = [
        Problem(
            "samples.long",
            f"{FIELD}.{number}",
            f"it has {len(ids):,} tokens, which leave no room in a sequence of {prepared.sequence_length:,}",
            "shorten it",
        )
        for number, ids in enumerate(encoded)
        if len(ids) >= prepared.sequence_length
    ]
    if problems:
        raise DataError(problems)
    return encoded


def _questions(prompts: Sequence[str], prepared: Prepared) -> list[list[int]]:
    from llmtrain.data.chat.encode import ChatEncoder
    from llmtrain.plan.facts.template_limits import limited_templates

    assert prepared.chat_template is not None
    encoder = ChatEncoder(prepared.tokenizer_dir, prepared.chat_template)
    encoded, problems = [], []
    with limited_templates():
        for number, prompt in enumerate(prompts):
            try:
                encoded.append(encoder.prompt([{"role": "user", "content": prompt}]))
            except RecipeError as error:
                problems += [replace(problem, field=f"{FIELD}.{number}") for problem in error.problems]
    if problems:
        raise DataError(problems)
    return encoded


def _texts(prompts: Sequence[str], prepared: Prepared) -> list[list[int]]:
    from transformers import AutoTokenizer

    with utf8_name(prepared.tokenizer_dir) as named:
        tokenizer: Any = AutoTokenizer.from_pretrained(named, trust_remote_code=False)
    encoded = [tokenizer(prompt, add_special_tokens=True, verbose=False)["input_ids"] for prompt in prompts]
    return [ids or [prepared.eos_id] for ids in encoded]
