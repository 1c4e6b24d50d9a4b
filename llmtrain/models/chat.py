"""A conversation with an exported model, written by the chat template that it was trained with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from llmtrain.data.chat.conversation import Conversation, Message
from llmtrain.data.chat.encode import ChatEncoder, Encoded
from llmtrain.data.chat.template import load_template
from llmtrain.errors import Problem, RecipeError
from llmtrain.models.generate import device_for, model_folder, sampling
from llmtrain.system.untrusted import utf8_name

TOKENS = 256
PROBE: tuple[Message, ...] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


class Chat:
    """The model, and what has been said."""

    def __init__(
        self, path: Path, tokens: int | None, temperature: float, seed: int, system: str | None = None
    ) -> None:
        """path: folder of a model, or a run directory. tokens: most tokens of an answer;
        by default 256, or a quarter of the positions.

        Raises RecipeError if it contains no model, and DataError if its tokenizer has no chat template.
        """
        folder = model_folder(path)
        self._encoder = ChatEncoder(folder, load_template(None, folder))
        with utf8_name(folder) as named:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(named)
            model: Any = AutoModelForCausalLM.from_pretrained(named)
        self._model = model.to(device_for(model)).eval()
        self._temperature = temperature
        self._most: int = getattr(model.config, "max_position_embeddings", None) or 2**63
        self._tokens = tokens or max(1, min(TOKENS, self._most // 4))
        self._said: list[Message] = [{"role": "system", "content": system}] if system else []
        self._first = len(self._said)
        self._stops = self._ends()
        torch.manual_seed(seed)

    def ask(self, text: str, write: Callable[[str], None]) -> int:
        """Writes the answer to a question, piece by piece; returns how many old messages were left out.

        Messages are left out, the oldest first, if the model has no positions for all and an answer. Raises RecipeError
        for a question that the template refuses, or that has no room.
        """
        self._said.append({"role": "user", "content": text})
        ids = self._encoder.prompt(self._said)
        left_out = 0
        while len(ids) + self._tokens > self._most and len(self._said) > self._first + 1:
            del self._said[self._first : self._first + 2]
            left_out += 2
            ids = self._encoder.prompt(self._said)
        room = min(self._tokens, self._most - len(ids))
        if room < 1:
            self._said.pop()
            message = f"it has {len(ids):,} tokens, but the model only {self._most:,} positions"
            raise RecipeError(Problem("generate.long", "question", message, "ask a shorter one"))
        inputs = torch.tensor([ids], device=self._model.device)
        output = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=room,
            eos_token_id=self._stops,
            pad_token_id=self._stops[0],
            streamer=_Pieces(self._tokenizer, write),
            **sampling(self._temperature),
        )
        answer = self._tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip()
        self._said.append({"role": "assistant", "content": answer})
        return left_out

    def _ends(self) -> list[int]:
        """Returns the tokens that end a turn, as the template writes it, and those that the model declares."""
        declared = self._model.generation_config.eos_token_id
        (found,) = self._encoder.encode([Conversation(PROBE, (True, True))])
        ends = found.ends if isinstance(found, Encoded) else frozenset()
        more = declared if isinstance(declared, list) else [declared]
        return sorted({*ends, *more, self._tokenizer.eos_token_id} - {None})


class _Pieces(TextStreamer):  # type: ignore[misc]
    """Passes on text as soon as it is complete, without the white space before it."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write
        self._begun = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Writes a piece."""
        text = text if self._begun else text.lstrip()
        self._begun |= bool(text)
        self._write(text)
