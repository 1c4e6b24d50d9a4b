"""An optimizer of a user's own that averages, as schedule-free ones do."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.optim import Optimizer

AVERAGING = {
    "optim.name": f"{__name__}:Averaging",
    "optim.lr": 0.1,
    "optim.schedule": "constant",
    "code_dir": str(Path(__file__).parents[2]),
}
"""Fields of a recipe."""


class Averaging(Optimizer):
    """Schedule-free SGD (arXiv 2405.15682): the weights are between the point that moves and the mean of its places."""

    def __init__(self, params, lr, weight_decay=0.0, beta=0.8):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta": beta, "k": 0, "trains": False})

    @torch.no_grad()
    def step(self, closure=None):
        """Takes an update."""
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("train() has not been called")
            group["k"] += 1
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                moving = self.state[weight].setdefault("moving", weight.clone())
                update = weight.grad + group["weight_decay"] * weight
                weight.lerp_(moving, 1 / group["k"])
                weight.sub_(update, alpha=group["lr"] * (1 - group["beta"] * (1 - 1 / group["k"])))
                moving.sub_(update, alpha=group["lr"])

    def eval(self):
        """Makes the weights the mean."""
        self._switch(False, lambda beta: 1 - 1 / beta)

    def train(self):
        """Makes the weights those of training again."""
        self._switch(True, lambda beta: 1 - beta)

    @torch.no_grad()
    def _switch(self, trains, share):
        for group in self.param_groups:
            for weight in group["params"] if group["trains"] is not trains else ():
                if "moving" in self.state[weight]:
                    weight.lerp_(self.state[weight]["moving"], share(group["beta"]))
            group["trains"] = trains
