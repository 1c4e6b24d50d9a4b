"""The optimizers of the reference: those of torch, and others as plainly as their papers have them.

They share no code with the engines (`tests/trials/verify/test_independence.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.recipe import Recipe
from llmtrain.recipe.own_code import import_object, is_path


def reference_optimizer(trained: Mapping[str, nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    """Returns the recipe's optimizer of the named weights."""
    optim, weights = recipe.optim, list(trained.values())
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if is_path(optim.name):
        own: torch.optim.Optimizer = import_object(optim.name, recipe.code_dir)(groups, lr=optim.lr, **optim.options)
        return own
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.betas[0])
    if optim.name == "lion":
        return PlainLion(groups, {"lr": optim.lr, "betas": optim.betas})
    if optim.name == "muon":
        matrices = {id(weight) for name, weight in trained.items() if _is_inner(name, weight)}
        options: dict[str, Any] = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": "match_rms_adamw"}
        options |= optim.options | {"dtype": torch.float32 if recipe.parallel.precision == "fp32" else torch.bfloat16}
        return PlainMuon(matrices, options, groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
    if optim.name == "schedule_free_adamw":
        warmup = optim.with_warmup_steps(recipe.train.steps).warmup_steps
        settings = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "warmup": warmup}
        return PlainScheduleFree(groups, settings)
    if optim.name == "adafactor":
        given = {"eps1": None, "eps2": 1e-3} | optim.options
        eps = given.pop("eps1"), given.pop("eps2")
        return torch.optim.Adafactor(groups, lr=optim.lr, eps=eps, **given)
    if optim.name == "adamw_8bit":
        settings = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
        return PlainAdamW8bit(groups, settings | {"block": optim.options.get("block_size", 256)})
    kinds: dict[str, type[torch.optim.Adam]] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
    return kinds[optim.name](groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)


class PlainLion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675, algorithm 2)."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes an update."""
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                beta1, beta2 = group["betas"]
                momentum = self.state[weight].get("m", torch.zeros_like(weight))
                direction = torch.sign(beta1 * momentum + (1 - beta1) * weight.grad)
                weight -= group["lr"] * (direction + group["weight_decay"] * weight)
                self.state[weight]["m"] = beta2 * momentum + (1 - beta2) * weight.grad


class PlainMuon(torch.optim.AdamW):
    """Muon for some matrices (arXiv 2502.16982, section 2.2), AdamW for everything else.

    The paper's momentum is a sum; here, as in torch, it is a mean. They differ by a factor, which does not affect
    the update.
    """

    def __init__(self, matrices: set[int], options: dict[str, Any], *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.matrices = matrices
        self.options = options

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes an update."""
        for group in self.param_groups:
            for weight in (
                weight for weight in group["params"] if id(weight) in self.matrices and weight.grad is not None
            ):
                gradient, mu = weight.grad, self.options["momentum"]
                momentum = mu * self.state[weight].get("m", torch.zeros_like(weight)) + (1 - mu) * gradient
                self.state[weight]["m"] = momentum
                update = (1 - mu) * gradient + mu * momentum if self.options["nesterov"] else momentum
                stack = update if update.ndim == 3 else update[None]
                direction = torch.stack([self._orthogonal(matrix) for matrix in stack]).view_as(weight)
                weight -= group["lr"] * (direction + group["weight_decay"] * weight)
                weight.grad = None  # AdamW leaves the weight alone
        super().step()

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        """Returns the scaled direction of an update."""
        rows, columns = matrix.shape
        x: Tensor = matrix.to(self.options["dtype"])
        x = x / x.norm().clamp(min=1e-7)  # 0 without a gradient, as of an adapter's A in the first step
        for _ in range(self.options["ns_steps"]):
            # On the side on which the product is smaller; the polynomial is the same.
            gram = x @ x.T if rows <= columns else x.T @ x
            polynomial = -4.7750 * gram + 2.0315 * gram @ gram
            x = 3.4445 * x + (polynomial @ x if rows <= columns else x @ polynomial)
        if self.options["adjust_lr_fn"] == "original":
            return x.float() * math.sqrt(max(1, rows / columns))
        return x.float() * 0.2 * math.sqrt(max(rows, columns))


class PlainScheduleFree(torch.optim.Optimizer):
    """Schedule-free AdamW (arXiv 2405.15682, algorithm 1), with all three points.

    The weights are y, where gradients are taken, or x, the mean, between `eval` and `train`. The mean weighs updates by
    the square of the learning rate, which rises linearly in the warm-up.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes an update."""
        for group in self.param_groups:
            for y in (weight for weight in group["params"] if weight.grad is not None):
                state, (beta1, beta2) = self.state[y], group["betas"]
                if not state:
                    state |= {"x": y.clone(), "z": y.clone(), "v": torch.zeros_like(y), "updates": 0, "total": 0.0}
                weight = min(1.0, state["updates"] / group["warmup"]) ** 2 if group["warmup"] else 1.0
                state["updates"] += 1
                state["total"] += weight
                state["v"] = beta2 * state["v"] + (1 - beta2) * y.grad**2
                size = torch.sqrt(state["v"] / (1 - beta2 ** state["updates"])) + group["eps"]
                state["z"] = state["z"] - group["lr"] * (y.grad / size + group["weight_decay"] * y)
                share = weight / state["total"] if weight else 0.0
                state["x"] = (1 - share) * state["x"] + share * state["z"]
                y.copy_((1 - beta1) * state["z"] + beta1 * state["x"])

    @torch.no_grad()
    def eval(self) -> None:
        """Makes the weights x."""
        for y, state in self.state.items():
            y.copy_(state["x"])

    @torch.no_grad()
    def train(self) -> None:
        """Makes the weights y again."""
        for group in self.param_groups:
            for y in group["params"]:
                if state := self.state.get(y):
                    beta1 = group["betas"][0]
                    y.copy_((1 - beta1) * state["z"] + beta1 * state["x"])


class PlainAdamW8bit(torch.optim.Optimizer):
    """AdamW that rounds both moments of matrices after each step, by blocks of a row (arXiv 2110.02861).

    A moment is kept as its rounded value: a fraction of the largest magnitude in its block. Fractions are those of the
    dynamic map: d, 2d, 4d, …, 64d of them in the decades up to 1e-6, 1e-5, 1e-4, …, 1. d is 1 with a sign, 2 without.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes an update."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                state = self.state[weight]
                if not state:
                    state |= {"m": torch.zeros_like(weight), "v": torch.zeros_like(weight), "updates": 0}
                state["updates"] += 1
                m = beta1 * state["m"] + (1 - beta1) * weight.grad
                v = beta2 * state["v"] + (1 - beta2) * weight.grad**2
                size = torch.sqrt(v) / math.sqrt(1 - beta2 ** state["updates"]) + group["eps"]
                weight *= 1 - group["lr"] * group["weight_decay"]
                weight -= m / size * (group["lr"] / (1 - beta1 ** state["updates"]))
                if weight.ndim > 1:
                    m, v = (_rounded(m, group["block"], signed=True), _rounded(v, group["block"], signed=False))
                state["m"], state["v"] = m, v


def _rounded(moment: Tensor, size: int, signed: bool) -> Tensor:
    """Returns a moment, rounded to 8 bits."""
    fractions = [0.0]
    for decade in range(-6, 1):
        steps = 2 ** (decade + 6) * (1 if signed else 2)
        fractions += [10.0**decade * (1 + 9 * step / steps) / 10 for step in range(1, steps + 1)]
    levels = torch.tensor(fractions, device=moment.device)
    middles = (levels[1:] + levels[:-1]) / 2
    if not signed:
        middles[0] = 0.0  # only 0 becomes 0
    blocks = []
    for block in torch.split(moment, size, dim=-1):
        largest = block.abs().amax(dim=-1, keepdim=True)
        share = torch.where(largest > 0, block / largest, 0.0)
        # The number of middles below a share is the number of the nearest level.
        blocks.append(torch.sign(share) * levels[torch.searchsorted(middles, share.abs())] * largest)
    return torch.cat(blocks, dim=-1)


def _is_inner(name: str, weight: Tensor) -> bool:
    """Whether a weight is a matrix within a decoder layer, or one for each expert."""
    is_in_layer = any(part.isdecimal() for part in name.split("."))
    return is_in_layer and (weight.ndim == 2 or (weight.ndim == 3 and ".experts." in name))
