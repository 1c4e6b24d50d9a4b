"""Continues prompts with the weights of the moment, under every strategy.

Each token takes a forward pass of the plan's own engine over the text so far, as an evaluation does: no second model is
held, no weights are gathered, and nothing is cached between passes. The ranks that compute the logits choose a token,
and all ranks agree on it, so they all make the same number of passes. Global random generators are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from llmtrain.data import NO_TARGET, MicroBatch, Prepared
from llmtrain.engines import Engine
from llmtrain.engines.runtime.agree import all_reduce_max
from llmtrain.models.inference.generate import MIN_TEMPERATURE
from llmtrain.plan import Plan
from llmtrain.plan.plan import SHORTENED_TO
from llmtrain.system.untrusted import utf8_name

LIKELIEST = 50
"""Number of tokens of which one is drawn, if the temperature is not 0."""
COLUMNS = 8 * SHORTENED_TO
"""Shapes that may vary are multiples of this many tokens, so that there are few of them."""


Sample = tuple[str, str]
"""A prompt and its continuation."""


class Sampler:
    """Continues the prompts of a recipe. All ranks make one, and call it together."""

    def __init__(self, plan: Plan, prepared: Prepared, prompts: Sequence[Sequence[int]]) -> None:
        """prompts: token ids of the recipe's prompts, each shorter than a sequence."""
        self._config, self._seed = plan.recipe.samples, plan.recipe.train.seed
        self._length, self._rows = prepared.sequence_length, plan.batch.micro_batch_size
        self._has_one_shape = plan.has_one_shape
        self._vocab_size, self._stops = prepared.vocab_size, set(prepared.stop_ids)
        with utf8_name(prepared.tokenizer_dir) as folder:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self._prompts = prompts

    def continued(self, engine: Engine, beat: Callable[[], object] = lambda: None) -> list[Sample]:
        """Returns the prompts with their continuations. beat: called after each token."""
        continuations = []
        for first in range(0, len(self._prompts), self._rows):
            continuations += self._together(engine, first, beat)
        return list(zip(self._config.prompts, continuations, strict=True))

    def _together(self, engine: Engine, first: int, beat: Callable[[], object]) -> list[str]:
        """Continues as many prompts as a micro-batch has rows."""
        prompts = self._prompts[first : first + self._rows]
        texts = [list(ids) for ids in prompts]
        generators = [torch.Generator().manual_seed(self._seed + first + row) for row in range(len(texts))]
        left = set(range(len(texts)))
        while left:
            chosen = torch.full((len(texts),), -1)
            noise = [torch.empty(LIKELIEST).exponential_(generator=generator) for generator in generators]
            for row, logits in engine.next_logits(self._batch(texts, left)).items():
                chosen[row] = self._choice(logits[: self._vocab_size], noise[row])
            tokens = all_reduce_max(chosen, engine.device).tolist()
            for row in sorted(left):
                ends = tokens[row] in self._stops
                texts[row] += [] if ends else [tokens[row]]
                max_length = min(len(prompts[row]) + self._config.tokens, self._length)
                if ends or len(texts[row]) >= max_length:
                    left.remove(row)
            beat()
        pairs = zip(texts, prompts, strict=True)
        return [self._tokenizer.decode(text[len(ids) :], skip_special_tokens=True) for text, ids in pairs]

    def _choice(self, logits: Tensor, noise: Tensor) -> int:
        """Returns the most likely token; at a temperature, one drawn by Gumbel's maximum.

        noise: exponential variates, one for each candidate.
        """
        if self._config.temperature < MIN_TEMPERATURE:
            return int(logits.argmax())
        scores, tokens = logits.cpu().topk(min(LIKELIEST, len(logits)))
        return int(tokens[(scores / self._config.temperature - noise[: len(scores)].log()).argmax()])

    def _batch(self, texts: list[list[int]], left: set[int]) -> MicroBatch:
        """Returns the texts as rows, with a label at the last token of those that go on.

        What follows a text cannot influence it, since attention is causal.
        """
        rows, columns = self._rows, self._length
        if not self._has_one_shape:
            rows, columns = len(texts), min(-(-max(map(len, texts)) // COLUMNS) * COLUMNS, self._length)
        inputs = torch.zeros((rows, columns), dtype=torch.int64)
        labels = torch.full((rows, columns), NO_TARGET)
        for row, ids in enumerate(texts):
            inputs[row, : len(ids)] = torch.tensor(ids)
            if row in left:
                labels[row, len(ids) - 1] = 0
        return MicroBatch(inputs, torch.arange(columns).repeat(rows, 1), labels)
