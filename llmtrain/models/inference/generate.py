"""Continues a text with an exported model, or a conversation by the chat template that it was trained with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TextStreamer

from llmtrain.data.chat.conversation import Conversation, Message
from llmtrain.data.chat.encode import ChatEncoder, Encoded
from llmtrain.data.chat.template import load_template
from llmtrain.data.chat.turns import PROBE
from llmtrain.errors import CheckpointError, Problem, RecipeError
from llmtrain.models.inference.load import load_causal_lm, load_tokenizer, reading
from llmtrain.plan.facts.template_limits import limited_templates

TOKENS = 256
"""Largest number of tokens of an answer, unless the model has few positions."""
MIN_TEMPERATURE = 1e-6
"""At lower temperatures the most likely token is taken, as at 0; logits divided by them may be infinite."""


def sampling(temperature: float) -> dict[str, Any]:
    """Returns the arguments of `transformers` that sample from the 50 most likely tokens; 0 takes the most likely."""
    if temperature < MIN_TEMPERATURE:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 50}


def load_model(folder: Path, trust_remote_code: bool) -> tuple[Any, Any]:
    """Returns the tokenizer and the model of a folder.

    trust_remote_code: whether the model's own code may be run; a tokenizer's own code never is. Raises RecipeError if
    there is such code and it may not be run, and CheckpointError for a folder that is damaged or incomplete.
    """
    return load_tokenizer(folder), load_causal_lm(folder, trust_remote_code)


def generate(
    folder: Path,
    prompt: str,
    max_new_tokens: int = 48,
    temperature: float = 0.8,
    seed: int = 1,
    trust_remote_code: bool = False,
) -> str:
    """Returns a continuation of `prompt`, sampled from the 50 most likely tokens; temperature 0 takes the most likely.

    folder: of a model. Raises as `load_model` does.
    """
    tokenizer, model = load_model(folder, trust_remote_code)
    device = device_for(model)
    model = model.to(device).eval()
    with reading(folder, "it cannot continue the text"), torch.random.fork_rng([device] if device == "cuda" else []):
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=True).to(device)
        check_rows(folder, model, inputs["input_ids"])
        torch.manual_seed(seed)
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, **sampling(temperature))
        continuation: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return continuation


def check_rows(folder: Path, model: PreTrainedModel, ids: Tensor) -> None:
    """Raises CheckpointError if the model has no embedding for one of the tokens."""
    rows, largest = model.get_input_embeddings().weight.shape[0], int(ids.max())
    if largest >= rows:
        message = f"its tokenizer has a token {largest:,}, but its model only has embeddings for {rows:,}"
        raise CheckpointError(Problem("model.vocabulary", str(folder), message, "use the model's own tokenizer"))


def device_for(model: PreTrainedModel) -> str:
    """Returns `cuda` if the free memory of the GPU suffices for the model and half as much again."""
    if not torch.cuda.is_available():
        return "cpu"
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return "cuda" if 1.5 * size < torch.cuda.mem_get_info()[0] else "cpu"


class Chat:
    """A conversation with a model."""

    def __init__(
        self,
        folder: Path,
        tokens: int | None,
        temperature: float,
        seed: int,
        system: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """folder: of a model. tokens: largest number of tokens of an answer; by default 256, or a quarter of the
        positions.

        Raises DataError if the model's tokenizer has no chat template, and as `load_model` does.
        """
        self._folder, self._tokenizer = folder, load_tokenizer(folder)
        self._encoder = ChatEncoder(folder, load_template(None, folder))
        model = load_causal_lm(folder, trust_remote_code)
        self._model = model.to(device_for(model)).eval()
        self._temperature = temperature
        self._most: int = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**63
        self._tokens = tokens or max(1, min(TOKENS, self._most // 4))
        self._messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self._first = len(self._messages)
        with reading(folder, "the end of a turn cannot be found"), limited_templates():
            self._stops = self._ends()
        torch.manual_seed(seed)

    def ask(self, text: str, write: Callable[[str], None]) -> int:
        """Writes the answer to a question, piece by piece; returns how many old messages were left out.

        The oldest messages are left out if the model has too few positions for all messages and an answer. Raises
        RecipeError for a question that the template refuses or that is too long; the conversation is then unchanged.
        """
        messages: list[Message] = [*self._messages, {"role": "user", "content": text}]
        left_out = 0
        with limited_templates():
            ids = self._encoder.prompt(messages)
            while len(ids) + self._tokens > self._most and len(messages) > self._first + 1:
                del messages[self._first : self._first + 2]
                left_out += 2
                ids = self._encoder.prompt(messages)
        room = min(self._tokens, self._most - len(ids))
        if room < 1:
            message = f"it has {len(ids):,} tokens, but the model has only {self._most:,} positions"
            raise RecipeError(Problem("generate.long", "question", message, "ask a shorter one"))
        inputs = torch.tensor([ids], device=self._model.device)
        with reading(self._folder, "it cannot answer"):
            check_rows(self._folder, self._model, inputs)
            output = self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=room,
                eos_token_id=self._stops,
                pad_token_id=self._stops[0],
                streamer=_TextStreamer(self._tokenizer, write),
                **sampling(self._temperature),
            )
            answer = self._tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip()
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        return left_out

    def _ends(self) -> list[int]:
        """Returns the tokens that end a turn, as the template writes it, and those that the model declares."""
        declared = self._model.generation_config.eos_token_id
        (encoded,) = self._encoder.encode([Conversation(PROBE, (True, True))])
        ends = encoded.ends if isinstance(encoded, Encoded) else frozenset()
        declared_ids = declared if isinstance(declared, list) else [declared]
        return sorted({*ends, *declared_ids, self._tokenizer.eos_token_id} - {None})


class _TextStreamer(TextStreamer):  # type: ignore[misc]
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
