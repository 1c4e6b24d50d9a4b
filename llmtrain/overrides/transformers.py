"""The private parts of `transformers` 5.24 that llmtrain replaces or reads. `llmtrain.overrides` has the list."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial, wraps
from types import MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.integrations import moe
from transformers.modeling_outputs import CausalLMOutputWithPast

from llmtrain.overrides import replaced

Change = Callable[[dict[str, Any]], dict[str, Any]]
"""Maps the arguments of a function that makes a mask, such as `q_length` and `mask_function`, to other ones."""

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name of a cache of keys and values among arguments and in outputs; it changed in 5.24."""
EXPERTS_FUNCTION = "llmtrain"
"""The name of llmtrain's function among those of `transformers` that compute experts (`ExpertsInterface`)."""

_own_find = masking_utils.find_packed_sequence_indices


class _Active(threading.local):
    """What changes the masks that this thread makes; `nn.DataParallel` runs forward passes in several threads."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.find: Callable[[Tensor], Tensor | None] | None = None


_active = _Active()
_lock = threading.Lock()
_contexts = 0
"""The number of contexts of all threads in which functions are replaced."""
_replaced = ExitStack()


@contextmanager
def mask_arguments(change: Change) -> Iterator[None]:
    """Applies `change` to the arguments of every mask (full, sliding or chunked) of this thread within the context.

    Only the function that makes the mask has all of them; it is found in a table with a place for other functions
    (https://huggingface.co/docs/transformers/attention_interface). Contexts nest, and the innermost change is applied
    first. `transformers` does not look for packed documents itself, for which it would wait for the device.
    """
    _active.changes.append(change)
    _enter()
    try:
        yield
    finally:
        _leave()
        _active.changes.pop()


def _enter() -> None:
    """Replaces the functions, unless another context has."""
    global _contexts
    with _lock:
        _contexts += 1
        if _contexts > 1:
            return
        masks, functions = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, {}
        for name in masks:
            functions[name] = partial(_make_mask, masks[name])
        for name, function in functions.items():
            masks[name] = function
            _replaced.callback(masks.__delitem__, name)
        _replaced.enter_context(replaced((masking_utils, "find_packed_sequence_indices", _find)))


def _leave() -> None:
    global _contexts
    with _lock:
        _contexts -= 1
        if not _contexts:
            _replaced.close()


@contextmanager
def document_indices(find: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """A context in which `find` returns the document of each token, given the positions; None for a single one.

    Used within `mask_arguments`, for a part of the rows of a micro-batch.
    """
    before, _active.find = _active.find, find
    try:
        yield
    finally:
        _active.find = before


def _find(position_ids: Tensor) -> Tensor | None:
    if _active.find:
        return _active.find(position_ids)
    return None if _active.changes else _own_find(position_ids)


def _make_mask(function: Callable[..., Any], **arguments: Any) -> Any:
    for change in reversed(_active.changes):
        arguments = change(arguments)
    return function(**arguments)


def attention_of(model: PreTrainedModel) -> str:
    """Returns the name of a model's attention implementation.

    Documented: https://huggingface.co/docs/transformers/community_integrations/transformers_as_backend
    """
    name: str = model.config._attn_implementation
    return name


def with_attention(config: PreTrainedConfig, name: str) -> PreTrainedConfig:
    """Returns a copy of a configuration with another attention implementation."""
    changed = copy(config)
    changed._attn_implementation = name
    return changed


def defining_module(module: nn.Module) -> ModuleType:
    """Returns the Python module that defines a module, and the functions that it calls."""
    return sys.modules[type(module).__module__]


def call_instead(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Replaces the function `name` of a module's family by `function` during the module's forward pass."""
    family, plain = defining_module(module), type(module).forward

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with replaced((family, name, function)):
            return plain(*args, **kwargs)

    vars(module)["forward"] = MethodType(forward, module)


@contextmanager
def router_loss(model: PreTrainedModel, change: Callable[..., Any]) -> Iterator[None]:
    """Calls `change(original, *arguments)` within the context where a family computes its load balancing loss."""
    family, name = defining_module(model), "load_balancing_loss_func"
    if not hasattr(family, name):
        yield
        return
    with replaced((family, name, partial(change, getattr(family, name)))):
        yield


def draw_weights(owner: PreTrainedModel, module: nn.Module) -> None:
    """Draws the initial weights of one module as the family of `owner` does.

    Documented: https://huggingface.co/docs/transformers/add_new_model
    """
    owner._init_weights(module)


def skipped_patterns(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns patterns of tensors in files that the model's class leaves out without a word."""
    return tuple(model._keys_to_ignore_on_load_unexpected or ())


@contextmanager
def checked_loading(check: Callable[[PreTrainedModel, str, Any], None]) -> Iterator[None]:
    """Calls `check(model, source, differences)` for each model or adapter that is loaded within the context.

    `transformers` only logs how the weights of a source differ from those that the model needs, and does not return it
    for a model with an adapter. differences: its `LoadStateDictInfo`.
    """
    from transformers import modeling_utils
    from transformers.integrations import peft

    def report(
        model: PreTrainedModel,
        pretrained_model_name_or_path: str,
        ignore_mismatched_sizes: bool,
        loading_info: Any,
        logger: Any = None,
    ) -> None:
        check(model, str(pretrained_model_name_or_path), loading_info)

    with replaced(*((module, "log_state_dict_report", report) for module in (modeling_utils, peft))):
        yield


def unsaved_names(model: PreTrainedModel) -> set[str]:
    """Returns the names of weights that `transformers` does not save."""
    return set(model._keys_to_ignore_on_save or ())


def grouped_linear(
    inputs: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """Multiplies each group of rows with a matrix of its own, by torch's kernel or in a loop, and adds a bias per row.

    inputs: [rows, width], sorted by group. weight: [groups, outputs, width], or [groups, width, outputs] if transposed.
    ends: [groups], int32, the end of each group. bias: [rows, outputs].
    """
    result: Tensor = moe._grouped_linear(inputs, weight, ends, bias=bias, is_transposed=transposed)
    return result


def use_experts_function(module: Any) -> None:
    """Lets a module compute its experts by `llmtrain.models.experts.forward`.

    The modules of a model share its configuration, which names the function of all.
    """
    module.config = copy(module.config)
    module.config._experts_implementation = EXPERTS_FUNCTION
