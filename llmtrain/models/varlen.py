"""Attention over packed documents, given their boundaries instead of a mask.

GPUs run torch's kernel, in bf16 and fp16. CPUs run that of `llmtrain.models.cpu`, in fp32; in other types, or if it
could not be compiled, torch's kernel for CPUs computes one document at a time.

The arguments (`Documents.arguments`) have the names under which `transformers` passes boundaries through its models to
a flash kernel. This attention and a flash kernel therefore receive them in the same way, and a recomputed layer
receives those of its own micro-batch.

In the graph of a compiled layer, attention is a custom operator (`varlen_operator`). The number and the lengths of
documents are therefore not compiled in: the compiler only sees a tensor whose length varies.
"""

from __future__ import annotations

import dis
import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from llmtrain.data import Documents
from llmtrain.errors import Problem, RecipeError
from llmtrain.models import cpu
from llmtrain.overrides.torch import mark_dynamic_length, varlen_backward

VARLEN = "varlen"
"""Name of the attention implementation in recipes and in `transformers`."""
KERNEL_TYPES = (torch.bfloat16, torch.float16)
"""The dtypes that torch's kernel supports."""
KERNEL_STEP = 8
"""The kernel requires head sizes that are multiples of this number."""
GROUPS_ANNOUNCED = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether the kernel has an argument for keys that queries share. Without it, as in torch 2.11, it compares shapes."""
OLDEST_GPU = (8, 0)
"""Lowest compute capability of flash kernels and of torch's copy: Ampere's (`flash_api.cpp` of both)."""
NEWEST_GPU = {"flash_attention_3": (10, 0)}
"""Compute capability from which on there is no machine code (`hopper/setup.py` in flash-attn's source)."""
_UNSUPPORTED = {
    "softcap": "caps its scores, which of the kernels only flash_attention_2 does",
    "position_bias": "adds a bias to its scores",
    "indices": "attends to the tokens that an indexer chooses, with a mask",
    "cache": "reads a cache",
}
"""Arguments of an attention function that neither implementation supports, and what a model that passes them does."""


def takes_cu_seq_lens(attention: str) -> bool:
    """Whether an attention implementation separates packed documents by `cu_seq_lens` instead of a mask."""
    return attention == VARLEN or bool(is_flash_attention_requested(requested_attention_implementation=attention))


def check_device(attention: str, device: torch.device) -> None:
    """Raises RecipeError if a kernel without masks is not compiled for this NVIDIA GPU.

    The rules check the GPUs of the catalogue of devices; any other GPU is asked for its capability here.
    """
    if device.type != "cuda" or torch.version.hip is not None or not takes_cu_seq_lens(attention):
        return
    found = torch.cuda.get_device_capability(device)
    newest = NEWEST_GPU.get(attention)
    if found >= OLDEST_GPU and (newest is None or found < newest):
        return
    least, actual = (".".join(map(str, capability)) for capability in (OLDEST_GPU, found))
    most = f" and below {newest[0]}.{newest[1]}" if newest else ""
    message = f"'{attention}' needs a compute capability of at least {least}{most}, but this GPU has {actual}"
    raise RecipeError(Problem("model.attention_device", "model.attention", message, "--set model.attention=sdpa"))


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function for `transformers`: causal within each document.

    query, key, value: [batch, heads, T, head_dim], where key and value may have fewer heads; cu_seq_lens_q,
    max_length_q: see `Documents.arguments`; in a compiled layer, see `varying_documents`; s_aux: the sinks [heads], for
    each head the score of attending to nothing. Returns [batch, T, heads, head_dim]. Raises ValueError for unsupported
    kinds of attention.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    require_supported(query, key, attention_mask, dropout, causal, others)
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError("the document boundaries do not reach its attention")
    rows, _, length, width = query.shape
    chunk = chunk_size(module)
    if chunk is not None and chunk < length:
        cu_seq_lens_q, max_length_q = _cut_chunks(cu_seq_lens_q, max_length_q, rows * length, chunk)
    states = (flatten_batch(query), flatten_batch(key), flatten_batch(value))
    scale = 1 / math.sqrt(width) if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.to(torch.promote_types(states[0].dtype, torch.float32))
    if query.is_cuda:
        output = _attend_by_kernel(*states, cu_seq_lens_q, max_length_q, scale, sliding_window, sinks)
    elif isinstance(max_length_q, Tensor) or cpu.has_kernel_for(states[0]):
        longest = max_length_q if isinstance(max_length_q, Tensor) else torch.tensor([max_length_q])
        output, _ = varlen_operator(*states, cu_seq_lens_q, longest, scale, sliding_window, sinks)
    else:
        output = _attend_per_document(*states, cu_seq_lens_q, scale, sliding_window, sinks)
    return output.view(rows, length, *output.shape[1:]), None


def chunk_size(module: nn.Module) -> int | None:
    """Returns how many tokens of a document attend to each other in this layer; None if there is no limit (Llama 4).

    The number of a layer is only read where it matters: in a compiled layer, it would be compiled in.
    """
    config = getattr(module, "config", None)
    size: int | None = getattr(config, "attention_chunk_size", None)
    kinds: list[str] | None = getattr(config, "layer_types", None)
    if size is None or kinds is None:
        return None
    layer = getattr(module, "layer_idx", None)
    return size if layer is not None and kinds[layer] == "chunked_attention" else None


def _cut_chunks(bounds: Tensor, longest: int | Tensor, tokens: int, chunk: int) -> tuple[Tensor, int | Tensor]:
    """Cuts documents into chunks. As many empty ones follow as keep the number independent of their lengths."""
    chunks = (bounds.diff() + chunk - 1) // chunk
    ends = chunks.cumsum(0)
    numbers = torch.arange(tokens // chunk + len(chunks), device=bounds.device)
    document = torch.searchsorted(ends, numbers, right=True).clamp(max=len(chunks) - 1)
    before = (ends - chunks)[document]
    starts = (bounds[document] + (numbers - before) * chunk).clamp(max=bounds[-1])
    cut = torch.cat([starts, bounds[-1:]]).to(bounds.dtype)
    return cut, longest.clamp(max=chunk) if isinstance(longest, Tensor) else min(longest, chunk)


def no_mask(*sizes: Any, attention_mask: Tensor | None = None, use_vmap: bool = False, **others: Any) -> None:
    """Returns no mask when `transformers` asks for one. Raises ValueError if the model needs its own mask."""
    if attention_mask is not None or use_vmap:
        raise ValueError("it has a mask of its own")


def require_supported(
    query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, causal: bool, others: dict[str, Any]
) -> None:
    """Raises ValueError for kinds of attention that the kernels do not compute. Arguments as `varlen_attention`."""
    reasons = [why for name, why in _UNSUPPORTED.items() if others.get(name) is not None]
    if dropout:
        reasons.append(f"has attention dropout of {dropout:g}, which the kernel does not support")
    if mask is not None:
        reasons.append("has a mask of its own")
    if not causal or query.shape[2] != key.shape[2]:
        reasons.append("does not attend causally")
    if reasons:
        raise ValueError("it " + " and ".join(reasons))


def flatten_batch(states: Tensor) -> Tensor:
    """Reshapes [batch, heads, T, dim] to [batch · T, heads, dim], in the dtype that autocast would compute in."""
    device = states.device.type
    if torch.is_autocast_enabled(device):
        states = states.to(torch.get_autocast_dtype(device))
    return states.transpose(1, 2).flatten(0, 1)


def varying_documents(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the forward method of a compiled layer, so that the same graph serves micro-batches with other documents.

    The length of the longest document is an int, which would be compiled in. The graph receives it as a tensor
    [1] in host memory, which the operator reads without waiting for the device. It is made here, and not with the
    boundaries, because DistributedDataParallel and FSDP2 copy all tensors that a model receives to the device.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if "cu_seq_lens_q" in kwargs:
            mark_dynamic_length(kwargs["cu_seq_lens_q"])
            longest = torch.tensor([kwargs["max_length_q"]])
            kwargs |= {"max_length_q": longest, "max_length_k": longest}
        return forward(*args, **kwargs)

    return run


class _ReceivesBoundaries:
    """An attention module that gets boundaries from its layer."""

    boundaries: Mapping[str, Any] = {}

    def forward(self, *args: Any, **named: Any) -> Any:
        parent: Any = super()
        return parent.forward(*args, **self.boundaries, **named)


class _PassesBoundaries:
    """A decoder layer whose own code does not pass boundaries on to its attention."""

    def forward(self, *args: Any, **named: Any) -> Any:
        parent: Any = super()
        boundaries = {name: named[name] for name in Documents.NAMES if name in named}
        for child in parent.children():
            if isinstance(child, _ReceivesBoundaries):
                child.boundaries = boundaries
        return parent.forward(*args, **named)


def pass_boundaries(model: nn.Module) -> None:
    """Lets boundaries reach attention where a layer takes further arguments, but passes them to nothing."""
    for layer in model.modules():
        attention = [child for child in layer.children() if _further_arguments(child)]
        further = _further_arguments(layer)
        if further and attention and not _reads(layer, further):
            for module, kind in ((layer, _PassesBoundaries), *((child, _ReceivesBoundaries) for child in attention)):
                module.__class__ = _extended(type(module), kind)  # type: ignore[arg-type]


@cache
def _extended(own: type, kind: type) -> type:
    """Returns a class of a family with the forward method of `kind`; the same for all layers, which share a graph."""
    return type(own.__name__, (kind, own), {"__module__": own.__module__})


def _further_arguments(module: nn.Module) -> str:
    """Returns the name of the parameter with which a module of `transformers` takes further arguments, if it does."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    is_family = type(module).__module__.startswith("transformers.models.")
    return next((one.name for one in parameters if is_family and one.kind is one.VAR_KEYWORD), "")


def _reads(module: nn.Module, name: str) -> bool:
    """Whether the forward method of a module reads one of its parameters."""
    code = dis.get_instructions(inspect.unwrap(type(module).forward))
    return any(name in (one.argval if isinstance(one.argval, tuple) else (one.argval,)) for one in code)


def _attend_by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int | Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Runs torch's kernel. With sinks, only the operator has the whole gradient."""
    kept = value.shape[-1]
    query, key, value = padded_for_kernel(query, key, value)
    output: Tensor
    if sinks is not None and isinstance(longest, int):
        longest = torch.tensor([longest])
    if isinstance(longest, Tensor):
        output, _ = varlen_operator(query, key, value, bounds, longest, scale, window, sinks)
    else:
        output, _ = _kernel(query, key, value, bounds, longest, scale, window)
    return output[..., :kept]


def padded_for_kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Fills heads up for torch's kernel, which requires equal sizes that are multiples of 8.

    Padding with zeros changes neither scores nor sums. Raises ValueError for a dtype that the kernel does not support.
    """
    if query.dtype not in KERNEL_TYPES:
        raise ValueError(f"the kernel computes in bf16 or fp16, not in {query.dtype}")
    padded = -(-max(query.shape[-1], value.shape[-1]) // KERNEL_STEP) * KERNEL_STEP
    return tuple(functional.pad(states, (0, padded - states.shape[-1])) for states in (query, key, value))


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Returns attention and its log-sum-exp."""
    reach = _window_size(window, longest)
    return varlen_kernel(query, key, value, (bounds, bounds), (longest, longest), scale, reach)


def varlen_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Returns attention and its log-sum-exp, [heads, tokens], by torch's kernel.

    bounds, longest: of the documents, in the queries and in the keys. window: how many keys before and after the one at
    the same distance from the end of the document a query sees; -1 means all of them.
    """
    groups: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if GROUPS_ANNOUNCED else {}
    output, log_sums = varlen_attn(
        query,
        key,
        value,
        *bounds,
        *longest,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=window,
        **groups,
    )
    return output, log_sums


def _window_size(window: int | None, longest: int) -> tuple[int, int]:
    """Returns how many tokens before and after one are attended to, in addition to itself; -1 means all of them."""
    return (-1 if window is None or window >= longest else window - 1), 0


def with_sinks(output: Tensor, log_sums: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns attention [tokens, heads, head_dim] and its log-sum-exp [heads, tokens] with the sinks [heads] added.

    A sink is another key, whose value is zero: it only makes the weights of the others smaller.
    """
    if sinks is None:
        return output, log_sums
    whole = torch.logaddexp(log_sums, sinks[:, None])
    return (output * (log_sums - whole).exp().T[..., None]).to(output.dtype), whole


def sink_gradients(gradient: Tensor, output: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Returns the gradients of the sinks [heads]. output, log_sums: with the sinks.

    The gradient of the score of a key is its weight · (gradient · (its value - output)), and the value of a sink is 0.
    """
    weights = torch.exp(sinks[:, None] - log_sums)
    gradients: Tensor = (weights * (gradient * output).sum(-1, dtype=sinks.dtype).T).sum(1)
    return -gradients


@torch.library.custom_op("llmtrain::varlen", mutates_args=())
def varlen_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A custom operator of attention, which the compiler does not trace. Returns what its backward pass needs.

    query, key, value: [tokens, heads, head_dim]; longest: see `varying_documents`; sinks: [heads]. Returns
    [tokens, heads, head_dim] and the kernel's log-sum-exp [heads, tokens], sinks included, which is empty where
    documents are computed one at a time.
    """
    if query.is_cuda:
        return with_sinks(*_kernel(query, key, value, bounds, int(longest), scale, window), sinks)
    if not cpu.has_kernel_for(query):
        return _attend_per_document(query, key, value, bounds, scale, window, sinks), query.new_empty(0)
    return with_sinks(*cpu.attention(query, key, value, bounds, scale, window), sinks)


@varlen_operator.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    if query.is_cuda:
        return torch.empty_like(query), query.new_empty(heads, tokens, dtype=torch.float32)
    log_sums = query.new_empty((heads, tokens) if cpu.has_kernel_for(query) else 0)
    return query.new_empty(tokens, heads, value.shape[-1]), log_sums


@torch.library.custom_op("llmtrain::varlen_backward", mutates_args=())
def _varlen_backward_operator(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: Tensor,
    output: Tensor,
    log_sums: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> list[Tensor]:
    """Returns the gradients of queries, keys, values, and sinks if there are any.

    The kernels compute the weights of the keys again from the log-sum-exp, so with the sinks in it they are right.
    Where documents are computed one at a time, attention is computed again, and differentiated.
    """
    gradients: tuple[Tensor, ...]
    if query.is_cuda:
        reach = _window_size(window, int(longest))
        states = (query, key, value)
        both = (bounds, bounds), (int(longest), int(longest))
        gradients = varlen_backward(gradient, states, output, log_sums, *both, scale, reach)
    elif cpu.has_kernel_for(query):
        gradients = cpu.attention_gradients(gradient, query, key, value, bounds, output, log_sums, scale, window)
    else:

        def attend(queries: Tensor, keys: Tensor, values: Tensor, *of_heads: Tensor) -> Tensor:
            return _attend_per_document(queries, keys, values, bounds, scale, window, next(iter(of_heads), None))

        inputs = (query, key, value) if sinks is None else (query, key, value, sinks)
        return [each.contiguous() for each in torch.func.vjp(attend, *inputs)[1](gradient)]
    return [*gradients, *([] if sinks is None else [sink_gradients(gradient, output, log_sums, sinks)])]


@_varlen_backward_operator.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> list[Tensor]:
    states = (query, key, value)
    gradients = [torch.empty_like(one) if query.is_cuda else one.new_empty(one.shape) for one in states]
    sinks = others[-1]
    return [*gradients, *([] if sinks is None else [torch.empty_like(sinks)])]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window, sinks = inputs
    ctx.save_for_backward(*tensors, *output, sinks)


def _varlen_gradients(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, sinks = ctx.saved_tensors
    *gradients, last = _varlen_backward_operator(gradient, *saved, ctx.scale, ctx.window, sinks)
    of_states, of_sinks = ([*gradients, last], None) if sinks is None else (gradients, last)
    return *of_states, None, None, None, None, of_sinks


varlen_operator.register_autograd(_varlen_gradients, setup_context=_save_for_backward)


def _attend_per_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes attention one document at a time, where no kernel is available.

    It uses `torch.split` because the gradient of each slice would be as long as all tokens. Sinks are the scores of a
    key of zeros in front, whose value is zero.
    """
    lengths = bounds.diff().tolist()
    outputs = []
    for parts in zip(*(torch.split(states, lengths) for states in (query, key, value)), strict=True):
        document_query, document_key, document_value = (part.transpose(0, 1)[None] for part in parts)
        length = document_query.shape[2]
        band = None
        if sinks is not None or (window is not None and window < length):
            band = _band(length, window or length, document_query.device)
        if sinks is not None:
            assert band is not None
            scores = document_query.new_zeros(length, length).masked_fill(~band, -math.inf)
            of_sinks = sinks.to(scores.dtype)[:, None, None].expand(-1, length, 1)
            band = torch.cat([of_sinks, scores.expand(len(sinks), -1, -1)], dim=-1)[None]
            document_key, document_value = (functional.pad(one, (0, 0, 1, 0)) for one in (document_key, document_value))
        attended = functional.scaled_dot_product_attention(
            document_query,
            document_key,
            document_value,
            attn_mask=band,
            is_causal=band is None,
            scale=scale,
            enable_gqa=document_query.shape[1] != document_key.shape[1],
        )
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Returns the mask [length, length] with which each token attends to the last `window` tokens, including itself."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


ALL_ATTENTION_FUNCTIONS.register(VARLEN, varlen_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(VARLEN, no_mask)
