"""How a recipe changes the reference's model: adapters by PEFT, frozen weights with the values of 4 bits, new rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import peft
import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llmtrain.recipe import ModelConfig

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Values of the 4-bit type of QLoRA (arXiv 2305.14314, appendix E)."""


def train_part(model: PreTrainedModel, part: ModelConfig, adapter: dict[str, Tensor]) -> None:
    """Freezes what is not trained, and lets PEFT add the adapter. adapter: its initial weights, if they are drawn."""
    if part.trainable:
        named = model.named_parameters(remove_duplicate=False)
        trained = {
            id(parameter) for name, parameter in named if any(fnmatchcase(name, pattern) for pattern in part.trainable)
        }
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and id(parameter) in trained)
    if part.adapter is None:
        return
    lora = part.adapter
    if lora.pretrained is not None:
        config = peft.PeftConfig.from_pretrained(lora.pretrained, revision=lora.revision)
        config.lora_dropout = lora.dropout
        named_as = {"revision": lora.revision, "is_trainable": True, "autocast_adapter_dtype": False}
        peft.PeftModel.from_pretrained(model, lora.pretrained, config=config, **named_as)
        _stack_experts(model)
        return
    names = [name for name, _ in model.named_modules()]
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    # In some mixtures of experts, PEFT's own "all-linear" also means experts and routers, with other ranks.
    every = [name for name in linear if model.get_submodule(name) is not model.get_output_embeddings()]
    targets = every if lora.targets == "all-linear" else _matching(linear, lora.targets)
    parameters = _matching([name for name, _ in model.named_parameters()], lora.target_parameters)
    saved = _matching(names, lora.modules_to_save)
    embedding = model.get_input_embeddings()
    ties = _shares_saved_table(model, saved)
    if ties:  # PEFT looks for the embedding's name, and adds that of the head
        [name] = [name for name, module in model.named_modules() if module is embedding]
        saved = [name, *(other for other in saved if model.get_submodule(other) is not model.get_output_embeddings())]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha or lora.rank,
        lora_dropout=lora.dropout,
        target_modules=targets,
        target_parameters=parameters or None,
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        modules_to_save=saved or None,
        ensure_weight_tying=ties,
    )
    peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    _stack_experts(model)
    added = {plain_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, value in adapter.items():
        added[name].data.copy_(value)


def _shares_saved_table(model: PreTrainedModel, saved: Sequence[str]) -> bool:
    """Whether embedding and head share a table that is trained as a whole."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tables = {id(embedding), id(head)}
    return head.weight is embedding.weight and any(id(model.get_submodule(name)) in tables for name in saved)


def _stack_experts(model: PreTrainedModel) -> None:
    """Makes the matrices of experts, which PEFT joins along the ranks, stacks with a matrix for each expert.

    They then have the names and shapes of `llmtrain.models.experts`, and optimizers treat them alike.
    """
    for wrapper in [module for module in model.modules() if isinstance(module, ParamWrapper)]:
        for side in (wrapper.lora_A, wrapper.lora_B):
            if wrapper.parameter_name != "weight":
                side["default"] = _Stack(side["default"].weight, wrapper, joins_rows=side is wrapper.lora_A)


class _Stack(nn.Module):
    """A matrix for each expert. PEFT reads `weight`, where they are joined.

    The joined matrix is [experts · rank, inputs] for A, and [outputs, rank · experts] for B.
    """

    def __init__(self, weight: Tensor, wrapper: ParamWrapper, joins_rows: bool) -> None:
        super().__init__()
        self.name, self.joins_rows = wrapper.parameter_name, joins_rows
        rows, columns = weight.shape
        experts = int(wrapper.num_experts)
        if joins_rows:
            stack = weight.detach().reshape(experts, rows // experts, columns)
        else:
            stack = weight.detach().reshape(rows, columns // experts, experts).permute(2, 0, 1)
        self.register_parameter(self.name, nn.Parameter(stack.contiguous()))

    @property
    def weight(self) -> Tensor:
        stack: Tensor = getattr(self, self.name)  # no nn.Parameter while `functional_call` replaces it
        return stack.flatten(0, 1) if self.joins_rows else stack.permute(1, 2, 0).flatten(1)


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Returns the names of modules that match a pattern as a whole, or from one of their dots on."""
    return [
        name
        for name in names
        if any(fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for pattern in patterns)
    ]


def plain_name(name: str) -> str:
    """Returns the name of a parameter without those of PEFT's modules; that of a stack as if it were a layer's."""
    for part in (".base_layer.", ".modules_to_save.default.", ".default."):
        while part in name:  # wrappers of parameters are nested
            name = name.replace(part, ".")
    module, lora, stack = name.partition(".lora_")
    if not lora or stack.endswith((".weight", "magnitude_vector")):
        return name
    side, _, own = stack.partition(".")
    return f"{module}.{own}.lora_{side}.weight"


@torch.no_grad()
def round_base(model: PreTrainedModel, full: PreTrainedModel, part: ModelConfig) -> None:
    """Gives the frozen linear layers and fused experts of `model`, except for the head, the values of `full` in NF4."""
    assert part.adapter is not None, "the recipe requires it"
    saved = _matching([name for name, _ in model.named_modules()], part.adapter.modules_to_save)
    for name, module in model.named_modules():
        kept = any(f"{name}.".startswith(f"{prefix}.") for prefix in saved) or module is model.get_output_embeddings()
        if type(module) is nn.Linear and not kept:
            module.weight.copy_(in_nf4(full.get_submodule(name).weight))
        if hasattr(module, "has_gate") and not kept:
            for stack, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 3:
                    rounded = [in_nf4(matrix) for matrix in full.get_submodule(name).get_parameter(stack)]
                    parameter.copy_(torch.stack(rounded))


def in_nf4(weight: Tensor) -> Tensor:
    """Returns the values of a weight in NF4 with double quantization (arXiv 2305.14314, section 3)."""
    blocks = torch.split(weight.flatten(), 64)
    scales = torch.stack([block.abs().max() for block in blocks])
    steps = [10.0 ** (e - 6) * (0.1 + 0.9 * (k + 0.5) / 2**e) for e in range(7) for k in range(2**e)]
    eight_bit = sorted([*steps, *(-step for step in steps), 0.0, 1.0])
    mean = scales.mean()
    scales = (
        torch.cat([_on_grid(some, eight_bit) * some.abs().max() for some in torch.split(scales - mean, 256)]) + mean
    )
    rounded = [_on_grid(block, NF4) * scale for block, scale in zip(blocks, scales, strict=True)]
    return torch.cat(rounded).view_as(weight)


def _on_grid(values: Tensor, levels: Sequence[float]) -> Tensor:
    """Returns the level nearest to each value, relative to the largest magnitude; levels ascend."""
    grid = torch.tensor(levels, dtype=torch.float64)
    relative = values / values.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return grid[(relative.double()[:, None] - grid).abs().argmin(1)].float()


@torch.no_grad()
def add_rows(model: PreTrainedModel, size: int, kept: int) -> None:
    """Makes embedding and head as large as `size`; rows beyond the first `kept` are the mean of these."""
    model.resize_token_embeddings(size, mean_resizing=False)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        for weight in table.parameters():
            weight[kept:] = weight[:kept].double().mean(0).to(weight.dtype)
