"""Plain PyTorch in one process: what every plan must agree with.

It shares no code with the engines, since a fault in shared code would be certified: here are another loss, other
groups of weight decay, another clipping, other learning rates. The model is that of `transformers`, unchanged. Each
document runs alone, so that no mask and no position can be wrong. Of llmtrain only declarations may be imported
(`tests/verify/test_independence.py`); what is given as data is `verify.documents` and the initial weights.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from llmtrain.plan.rules.model import MIXES_DOCUMENTS
from llmtrain.recipe import OptimConfig, Recipe

NO_TARGET = -100
WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Type of the weights that the model reads, where it is not fp32."""
AUTOCAST = {"autocast_bf16": torch.bfloat16, "autocast_fp16": torch.float16}
CLIP_EPS = 1e-6
"""Added to the norm that is divided by, as `torch.nn.utils.clip_grad_norm_` does."""

SELECTED_TOKENS = ("index_topk", "keep_window_size")
"""Fields of configurations: how many tokens one attends to that are chosen by a score."""


@dataclass(frozen=True)
class Document:
    """A document, or as much of it as a sequence holds."""

    inputs: Tensor
    """[n], int64."""
    targets: Tensor
    """[n], int64: the token to predict at each place; `NO_TARGET` where there is none."""


Sequences = Sequence[Sequence[Document]]
"""Of each sequence the documents that are packed into it, padding last."""


@dataclass(frozen=True)
class Step:
    """What one update was."""

    loss: float
    """Mean cross-entropy per target token."""
    grad_norm: float
    """Before clipping."""
    lr: float


class ReferenceLoop:
    """Trains the model of a recipe.

    Weights in fp32 are trained as they are, or under autocast. Below that there are fp32 master weights
    (arXiv 1710.03740): they start from the rounded weights, and each forward pass reads them rounded.
    A weight without a gradient is not updated.
    """

    def __init__(
        self,
        recipe: Recipe,
        weights: Mapping[str, Tensor] | None,
        device: torch.device,
        micro_batch_size: int | None = None,
        together: bool = False,
    ) -> None:
        """weights: initial ones, by the names of `state_dict`; None for those that the recipe names.

        micro_batch_size: sequences per backward pass; default the recipe's. A router's loss is a mean within them.
        together: runs the documents of a micro-batch in one pass, shorter ones padded at their end. No token sees what
        comes after it, so the result is the same except for its rounding.
        """
        self.recipe = recipe
        self.device = device
        self.model = _model(recipe, device)
        if weights is not None:
            self.model.load_state_dict(dict(weights))
        self.micro_batch_size = micro_batch_size or recipe.batch.micro_batch_size
        self.together = together
        self.runs_whole = _runs_whole(self.model.config, recipe.data.sequence_length)
        trained = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        self.masters = {name: nn.Parameter(one.detach().float()) for name, one in trained.items()}
        self.types = {name: one.dtype for name, one in trained.items()}
        self.optimizer = _optimizer(self.masters.values(), recipe.optim)
        self.steps = 0

    def train_step(self, sequences: Sequences) -> Step:
        """One update with a global batch."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        micro_batches = [
            sequences[i : i + self.micro_batch_size] for i in range(0, len(sequences), self.micro_batch_size)
        ]
        targets = count_targets(sequences)
        total = 0.0
        for micro_batch in micro_batches:
            loss_sum, auxiliary = self._losses(micro_batch)
            (loss_sum / targets + auxiliary / len(micro_batches)).backward()  # type: ignore[no-untyped-call]
            total += loss_sum.item()
        gradients = [weight.grad for weight in self.masters.values() if weight.grad is not None]
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
        limit = self.recipe.optim.clip_grad_norm
        if limit:
            for gradient in gradients:
                gradient.mul_(min(1.0, limit / (norm + CLIP_EPS)))
        lr = learning_rate(self.recipe.optim, self.steps, self.recipe.train.max_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.steps += 1
        return Step(total / targets, norm, lr)

    @torch.no_grad()
    def evaluate(self, sequences: Sequences) -> float:
        """Mean cross-entropy per target token."""
        self.model.eval()
        return sum(self._losses([one])[0].item() for one in sequences) / count_targets(sequences)

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, as the forward pass reads it; tied ones once."""
        rounded = self._rounded()
        for name, weight in self.model.named_parameters():
            yield name, rounded.get(name, weight).detach().cpu()

    def _rounded(self) -> dict[str, Tensor]:
        return {name: weight.to(self.types[name]) for name, weight in self.masters.items()}

    def _losses(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Sum of the cross-entropies of a micro-batch, and its router's loss."""
        total = torch.zeros((), device=self.device)
        routers: list[Sequence[Tensor]] = []
        for documents in self._passes(sequences):
            loss, logits = self._forward(documents)
            total = total + loss
            routers.append(logits)
        return total, self._router_loss([torch.cat(layer) for layer in zip(*routers, strict=True)])

    def _passes(self, sequences: Sequences) -> list[list[tuple[Document, Tensor]]]:
        """The rows of each forward pass of a micro-batch, and their positions. A row is a document, or a sequence."""
        rows = [[one] for documents in sequences for one in documents]
        if self.runs_whole:
            rows = [list(documents) for documents in sequences]
        joined = [(join(row), torch.cat([torch.arange(len(one.inputs)) for one in row])) for row in rows]
        return [joined] if self.together else [[one] for one in joined]

    def _forward(self, rows: list[tuple[Document, Tensor]]) -> tuple[Tensor, Sequence[Tensor]]:
        """Sum of the cross-entropies, and the logits of each layer's router for all tokens that are no padding."""
        inputs = {
            "input_ids": _pad([one.inputs for one, _ in rows]).to(self.device),
            "position_ids": _pad([positions for _, positions in rows]).to(self.device),
            "use_cache": False,
        }
        with self._autocast():
            output = functional_call(self.model, self._rounded(), kwargs=inputs)
        targets = _pad([one.targets for one, _ in rows], NO_TARGET).to(self.device)
        loss = cross_entropy(output.logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        if getattr(output, "aux_loss", None) is None:
            return loss, ()
        real = _pad([torch.ones_like(one.inputs, dtype=torch.bool) for one, _ in rows]).flatten().to(self.device)
        return loss, [layer.flatten(0, -2)[real] for layer in output.router_logits]

    def _router_loss(self, logits: Sequence[Tensor]) -> Tensor:
        """How unevenly all tokens of a micro-batch, padding among them, use the experts, by the family's own function.

        It is a product of two means over tokens, so that the documents' losses cannot be summed.
        """
        if not logits:
            return torch.zeros((), device=self.device)
        family = sys.modules[type(self.model).__module__]
        loss: Tensor = family.load_balancing_loss_func(
            tuple(logits), self.model.num_experts, self.model.num_experts_per_tok
        )
        named = "aux_loss_coef" if hasattr(self.model, "aux_loss_coef") else "router_aux_loss_coef"
        return loss * float(getattr(self.model, named))

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = AUTOCAST.get(self.recipe.parallel.precision)
        return torch.autocast(self.device.type, dtype) if dtype else nullcontext()


def count_targets(sequences: Sequences) -> int:
    """Targets in all documents."""
    return sum(int((one.targets != NO_TARGET).sum()) for documents in sequences for one in documents)


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """Of the update that comes after `step` others, of a run of `steps`."""
    peak, least, warmup = optim.lr, optim.min_lr_ratio, optim.warmup_steps
    if step < warmup:
        rise = step / warmup
        # `wsd` of transformers starts from the rate that it ends at.
        return peak * (rise * (1 - least) + least if optim.schedule == "wsd" else rise)
    share = (step - warmup) / max(1, steps - warmup)
    if optim.schedule == "constant":
        return peak
    if optim.schedule == "linear":
        return peak * ((steps - step) / max(1, steps - warmup))
    if optim.schedule == "cosine":
        return peak * ((1 + math.cos(math.pi * share)) / 2 * (1 - least) + least)
    if optim.schedule == "inverse_sqrt":
        scale = warmup or 10_000
        return peak * (1 / math.sqrt((step + scale - warmup) / scale))
    decayed = max(0, step - (steps - optim.decay_steps)) / max(1, optim.decay_steps)
    return peak * ((1 - decayed) * (1 - least) + least if decayed else 1.0)


def _optimizer(trained: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
    weights = list(trained)
    groups: list[dict[str, Any]] = [
        {"params": [one for one in weights if one.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [one for one in weights if one.ndim <= 1], "weight_decay": 0.0},
    ]
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.betas[0])
    kind = torch.optim.AdamW if optim.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)


def _model(recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """The recipe's model, as `transformers` builds or reads it; in place of a kernel it has plain attention."""
    model, fields = recipe.model, dict(recipe.model.config)
    named: dict[str, Any] = {
        "attn_implementation": model.attention_kernel if model.attention_kernel == "sdpa" else "eager",
        "dtype": WEIGHTS.get(recipe.parallel.precision, torch.float32),
    }
    if model.pretrained is not None:
        origin = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
        config = AutoConfig.from_pretrained(model.pretrained, **origin, **fields)
        read = AutoModelForCausalLM.from_pretrained(model.pretrained, config=config, **origin, **named)
        with torch.device("meta"):
            declared = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
        for name, weight in declared.named_parameters():
            if not weight.requires_grad:  # forgotten where weights are read
                read.get_parameter(name).requires_grad_(False)
        return cast(PreTrainedModel, read.to(device))
    if recipe.vocab_size is not None:
        fields["vocab_size"] = recipe.vocab_size
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(model.architecture, **fields), **named)
    return cast(PreTrainedModel, made.to(device))


def _runs_whole(config: PreTrainedConfig, length: int) -> bool:
    """Whether sequences of so many tokens run whole, in a family whose documents cannot run alone.

    Some mix packed documents whatever their attention does. Others attend to the few tokens with the best scores, and
    among equal scores, as many are 0, choose by the place in the row.
    """
    chosen = min(getattr(config, name, length) for name in SELECTED_TOKENS)
    return config.model_type in MIXES_DOCUMENTS or chosen < length


def join(documents: Sequence[Document]) -> Document:
    """One after another, as one."""
    return Document(torch.cat([one.inputs for one in documents]), torch.cat([one.targets for one in documents]))


def _pad(rows: Sequence[Tensor], value: int = 0) -> Tensor:
    """[rows, longest]"""
    return pad_sequence(list(rows), batch_first=True, padding_value=value)
