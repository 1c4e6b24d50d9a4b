"""What each decoder layer saves for its backward pass, seen and not estimated: the very model under fake tensors.

Fake tensors have shapes and no memory, so a model of any size is traced on a laptop. What autograd would
save goes through `torch.autograd.graph.saved_tensors_hooks`; a storage counts once, in the layer that saves it first.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import torch
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from llmtrain.data.cache import cache_folder, key_of
from llmtrain.durable import write_atomically
from llmtrain.errors import Problem, RecipeError, UserError
from llmtrain.models.build import model_configuration
from llmtrain.models.precision import autocast, weight_dtype
from llmtrain.models.stages import decoder_layers
from llmtrain.plan import Plan
from llmtrain.untrusted import UNREADABLE, read_json


def traced_layers(plan: Plan) -> tuple[int, ...]:
    """Bytes that each layer saves of one micro-batch, whole: no rank shares it. Kept in the cache folder.

    Raises RecipeError for a model whose forward pass looks at the values of its tensors, and for fused attention.
    """
    file = cache_folder(plan.recipe.data) / "traces" / f"{_key(plan)}.json"
    with suppress(*UNREADABLE):
        return tuple(read_json(file, list[int]))
    layers = _trace(plan)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(layers))
    return layers


def _key(plan: Plan) -> str:
    """What the result depends on. The configuration, not where it was found: a folder may be written again."""
    recipe = plan.recipe
    return key_of(
        model_configuration(recipe).to_json_string(),
        recipe.model.attention_kernel,
        recipe.model.revision,
        recipe.data.sequence_length,
        recipe.data.mask_documents,
        recipe.batch.micro_batch_size,
        recipe.parallel.precision,
        torch.__version__,
        transformers.__version__,
    )


def _trace(plan: Plan) -> tuple[int, ...]:
    recipe = plan.recipe
    if recipe.model.attention_kernel not in ("sdpa", "eager") or not recipe.data.mask_documents:
        # Fused kernels are not on every machine; and without documents `transformers` leaves the mask out after
        # looking at positions, whose values are not there.
        raise _untraceable("only 'sdpa' and 'eager' attention with documents kept apart")
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = AutoModelForCausalLM.from_config(
                model_configuration(recipe),
                attn_implementation=recipe.model.attention_kernel,
                dtype=weight_dtype(recipe.parallel.precision),
                trust_remote_code=recipe.model.trust_remote_code,
            ).train()
            seen = _Seen(decoder_layers(model)[1], {_storage(weight) for weight in model.parameters()})
            size = (recipe.batch.micro_batch_size, recipe.data.sequence_length)
            # As the masks of packed documents are, without looking at positions.
            dtype = torch.bool if recipe.model.attention_kernel == "sdpa" else model.dtype
            mask = torch.ones(size[0], 1, size[1], size[1], dtype=dtype)
            with (
                torch.autograd.graph.saved_tensors_hooks(seen.pack, lambda tensor: tensor),
                autocast(recipe.parallel.precision, "cpu"),
            ):
                model(input_ids=torch.zeros(size, dtype=torch.long), attention_mask=mask, use_cache=False)
    except UserError:
        raise
    except Exception as error:  # whatever a foreign model does with values that are not there
        raise _untraceable(f"'{plan.model.model_type}' fails: {type(error).__name__}") from error
    return tuple(seen.saved)


def _untraceable(reason: str) -> RecipeError:
    fix = "leave --trace out: the estimate needs no model"
    return RecipeError(Problem("memory.trace", "--trace", f"a model is traced without values: {reason}", fix))


class _Seen:
    """Bytes by layer, from hooks around each of them."""

    def __init__(self, layers: Any, known: set[int]) -> None:
        self.saved = [0] * len(layers)
        self._known = known
        self._inside: int | None = None
        self._kept: list[Tensor] = []
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(
                lambda _, arguments, named, index=index: self._enter(index, named), with_kwargs=True
            )
            layer.register_forward_hook(lambda *_: self._leave())

    def pack(self, tensor: Tensor) -> Tensor:
        """What autograd is about to save."""
        storage = _storage(tensor)
        if self._inside is not None and storage not in self._known:
            self._known.add(storage)
            self._kept.append(tensor)  # else another tensor may get its address
            self.saved[self._inside] += tensor.untyped_storage().nbytes()
        return tensor

    def _enter(self, index: int, named: dict[str, Any]) -> None:
        """What is handed to a layer by name, masks and rotary tables, is shared by all."""
        self._inside = index
        for one in named.values():
            for tensor in one if isinstance(one, tuple) else (one,):
                if isinstance(tensor, Tensor):
                    self._kept.append(tensor)
                    self._known.add(_storage(tensor))

    def _leave(self) -> None:
        self._inside = None


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
