"""Measures which healthy updates the guard skips and which corrupted ones it catches; writes results/guard.json.

python benchmarks/guard.py

Small byte-level models are trained on the source text of Python's standard library by a plain loop that takes every
update. The guard and several other rules judge the loss and gradient norm of each step. At every 250th step, the same
weights also see corrupted batches, and the batch is also run with corrupted weights; neither is used for training. The
rule was chosen on the runs of `SET` and tested on those of `TRIED`, which have other seeds. A run takes a minute or two
on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.data.sources.files import NOT_STDLIB
from llmtrain.engines.guard import COLUMNS, Guard, LossAndNorm
from llmtrain.recipe import GuardConfig
from llmtrain.run_dir import environment
from llmtrain.system.host import available_cores

RESULT = Path(__file__).parent / "results" / "guard.json"
SYMBOLS = 256
HEAD = 16
"""Size of an attention head."""
CLIP_NORM = 1.0
PROBED = 250
"""Number of steps after which corrupted batches are tried again."""
EVERY = 10
"""Number of steps after which the gradient norm of a healthy step is multiplied again."""
FACTORS = (3, 10, 100)
WINDOW = GuardConfig().window_steps
OURS = "guard"
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """A healthy training run."""

    family: str
    hidden: int
    layers: int
    sequences: int
    """Number of sequences in a step."""
    length: int
    """Bytes per sequence."""
    lr: float
    warmup: int
    seed: int
    steps: int = 2000

    @property
    def tokens(self) -> int:
        """Number of tokens in a step."""
        return self.sequences * self.length

    def told(self) -> str:
        """Describes the run in one line."""
        sizes = f"{self.family} {self.hidden}×{self.layers}, {self.sequences}×{self.length} tokens"
        return f"{sizes}, lr {self.lr:g}, warm-up {self.warmup}, seed {self.seed}"


SET = (
    Run("llama", 64, 2, 12, 64, 3e-3, 100, 1),
    Run("gpt2", 96, 3, 6, 128, 1e-3, 0, 2),
    Run("llama", 128, 2, 3, 256, 3e-3, 20, 3),
    Run("llama", 64, 2, 6, 128, 2e-3, 50, 11),
    Run("llama", 80, 3, 12, 64, 5e-3, 100, 12),
    Run("gpt2", 64, 2, 3, 256, 3e-3, 100, 13),
    Run("llama", 128, 2, 6, 128, 4e-3, 0, 14),
)
TRIED = (
    Run("gpt2", 64, 4, 12, 64, 6e-3, 200, 4),
    Run("llama", 96, 3, 3, 256, 6e-3, 100, 5),
    Run("gpt2", 128, 2, 12, 64, 2e-3, 20, 15),
    Run("llama", 96, 3, 3, 256, 1e-3, 200, 16),
    Run("gpt2", 80, 3, 6, 128, 4e-3, 150, 17),
    Run("llama", 64, 3, 3, 256, 8e-3, 50, 18),
    Run("gpt2", 64, 2, 3, 256, 2e-3, 0, 19),
    Run("llama", 112, 3, 12, 64, 3e-3, 100, 20),
    Run("gpt2", 80, 3, 6, 128, 3e-3, 20, 23),
    Run("llama", 64, 3, 3, 256, 5e-3, 0, 24),
)
LARGE = (Run("llama", 64, 2, 192, 64, 3e-3, 50, 6, 400),)
"""A larger batch, for which loss and gradient norm vary less."""


@dataclass(frozen=True)
class Series:
    """The measurements of a run."""

    steps: Numbers
    """For each step: loss and gradient norm."""
    probes: dict[str, Numbers]
    """For each kind of corruption, one row per trial: step, loss and gradient norm."""

    @classmethod
    def of(cls, run: Run, folder: Path) -> Series:
        """Trains the run, or reads its measurements if the folder has them."""
        file = folder / f"seed_{run.seed}.npz"
        if not file.exists():
            found = train(run)
            np.savez(file, allow_pickle=False, series=found.steps, **found.probes)
        with np.load(file) as content:
            return cls(content["series"], {name: content[name] for name in content.files if name != "series"})


def corpus() -> Tensor:
    """Returns the concatenated source files of the standard library as bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if not NOT_STDLIB.intersection(file.parts))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def model_of(run: Run) -> nn.Module:
    """Builds a new model."""
    heads = run.hidden // HEAD
    sizes: dict[str, Any] = {"vocab_size": SYMBOLS, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if run.family == "gpt2":
        sizes |= {"n_embd": run.hidden, "n_layer": run.layers, "n_head": heads, "n_positions": run.length}
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        sizes |= {"hidden_size": run.hidden, "intermediate_size": 3 * run.hidden, "num_hidden_layers": run.layers}
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "tie_word_embeddings": True}
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(run.family, **sizes))
    return model


def train(run: Run) -> Series:
    """Trains without skipping any update."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    model, text = model_of(run), corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    window = run.length + 1
    order = torch.randperm(len(text) // window)
    steps: list[tuple[float, float]] = []
    probes: dict[str, list[tuple[float, float, float]]] = {}
    for step in range(run.steps):
        warm = min(1.0, (step + 1) / run.warmup) if run.warmup else 1.0
        rows = order[step * run.sequences : (step + 1) * run.sequences].tolist()
        batch = torch.stack([text[row * window : (row + 1) * window] for row in rows]).long()
        if step and step % PROBED == 0:
            for kind, loss, norm in probed(model, batch):
                probes.setdefault(kind, []).append((step, loss, norm))
        steps.append(measured(model, batch[:, :-1], batch[:, 1:]))
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        for group in optimizer.param_groups:
            group["lr"] = run.lr * warm * 0.5 * (1 + math.cos(math.pi * step / run.steps))
        optimizer.step()
    return Series(np.array(steps), {kind: np.array(found) for kind, found in probes.items()})


def measured(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
    """Returns loss and gradient norm. The gradients remain in the parameters."""
    model.zero_grad()
    logits = model(input_ids=tokens).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
    return loss.item(), norm.item()


def probed(model: nn.Module, batch: Tensor) -> Iterator[tuple[str, float, float]]:
    """Yields kind, loss and gradient norm for several faults of a step. The weights are restored afterwards."""
    for kind, tokens, targets in spoilt_batches(batch):
        yield kind, *measured(model, tokens, targets)
    kept = [one.detach().clone() for one in model.parameters()]
    for share in (0.1, 0.3, 1.0):
        with torch.no_grad():
            for one in model.parameters():
                one.add_(torch.randn_like(one) * share * one.std() if one.dim() > 1 else 0)
        yield f"weights with noise of {share:g} of their deviation", *measured(model, batch[:, :-1], batch[:, 1:])
        with torch.no_grad():
            for one, before in zip(model.parameters(), kept, strict=True):
                one.copy_(before)


def spoilt_batches(batch: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields the kind, the tokens and the targets of corrupted batches."""
    tokens, targets = batch[:, :-1], batch[:, 1:]
    noise = torch.randint(0, SYMBOLS, batch.shape)
    yield "random bytes", noise[:, :-1], noise[:, 1:]
    yield "random targets", tokens, noise[:, 1:]
    for share in (2, 4, 8):
        mask = torch.rand(targets.shape) < 1 / share
        yield f"1/{share} of the targets random", tokens, torch.where(mask, noise[:, 1:], targets)
    yield "targets one place off", tokens, targets.roll(1, 1)
    backwards = batch.flip(1)
    yield "text backwards", backwards[:, :-1], backwards[:, 1:]
    repeated = torch.full_like(batch, 255)
    yield "one byte that no text has, repeated", repeated[:, :-1], repeated[:, 1:]


def guarded(steps: Numbers) -> Numbers:
    """Returns the guard's limits on loss and gradient norm for each step; NaN while it has no limit."""
    guard, column = Guard(GuardConfig(), torch.device("cpu")), COLUMNS.index("loss_limit")
    found = []
    for step in torch.from_numpy(steps):
        guard.should_skip(LossAndNorm(*step))
        found.append(guard.state()["steps"][-1, column : column + 2].numpy())
    return np.array(found)


def by(rule: Callable[[Numbers], Numbers]) -> Callable[[Numbers], Numbers]:
    """Returns a function that computes the limits of another rule for each step.

    rule: computes the limits from the last window of accepted updates.
    """

    def limits(steps: Numbers) -> Numbers:
        taken: list[Numbers] = []
        found = []
        for step in steps:
            found.append(rule(np.array(taken[-WINDOW:])) if len(taken) >= WINDOW else np.full(2, np.nan))
            if not (step > found[-1]).any():
                taken.append(step)
        return np.array(found)

    return limits


def _six_mad(window: Numbers) -> Numbers:
    logs = np.log(window)
    middle = np.median(logs, axis=0)
    found: Numbers = np.exp(middle + 6 * 1.4826 * np.median(np.abs(logs - middle), axis=0))
    return found


RULES: dict[str, Callable[[Numbers], Numbers]] = {
    OURS: guarded,
    "6 deviations": by(lambda window: window.mean(0) + 6 * window.std(0)),
    "6 deviations of logarithms": by(lambda window: np.exp(np.log(window).mean(0) + 6 * np.log(window).std(0))),
    "6 robust deviations of logarithms": by(_six_mad),
    "4 times the largest": by(lambda window: 4 * window.max(0)),
}


def judged(run: Run, series: Series) -> dict[str, Any]:
    """Returns each rule's results for a run: healthy updates that were skipped, and corrupted ones that were caught."""
    row: dict[str, Any] = {"run": run.told(), "tokens_per_step": run.tokens, "steps": run.steps}
    row |= {"final_loss": round(float(series.steps[-WINDOW:, 0].mean()), 3), "skipped": {}, "caught": {}}
    for name, limits_of in RULES.items():
        limits = limits_of(series.steps)
        skipped = (series.steps > limits).any(1)
        row["skipped"][name] = int(skipped.sum())
        if name == OURS:
            row["nearest"] = [round(float(one), 3) for one in np.nanmax(series.steps / limits, axis=0)]
        caught = row["caught"][name] = {}
        for kind, probes in series.probes.items():
            steps = probes[:, 0].astype(int)
            caught[kind] = [int((probes[:, 1:] > limits[steps]).any(1).sum()), len(steps)]
        chosen = np.arange(WINDOW, len(series.steps), EVERY)
        for factor in FACTORS:
            spikes = series.steps[chosen, 1] * factor > limits[chosen, 1]
            caught[f"gradient × {factor}"] = [int(spikes.sum()), len(chosen)]
    return row


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the sums of the results over runs."""
    found: dict[str, Any] = {"runs": len(rows), "steps": sum(row["steps"] for row in rows), "skipped": {}, "caught": {}}
    for name in RULES:
        found["skipped"][name] = sum(row["skipped"][name] for row in rows)
        found["caught"][name] = {
            kind: [sum(row["caught"][name][kind][part] for row in rows) for part in (0, 1)]
            for kind in rows[0]["caught"][name]
        }
    found["nearest"] = {
        name: max(row["nearest"][part] for row in rows) for part, name in enumerate(("loss", "grad_norm"))
    }
    return found


def main() -> None:
    """Trains the runs and writes the results of each rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=Path, help="folder for the runs' numbers, which are read where it has them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.series or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        groups = {"set": SET, "tried": TRIED, "large": LARGE}
        runs = [run for group in groups.values() for run in group]
        with ProcessPoolExecutor(available_cores(), mp_context=get_context("spawn")) as pool:
            series = pool.map(Series.of, runs, [folder] * len(runs))
            rows = {run: judged(run, one) for run, one in zip(runs, series, strict=True)}
    about = environment()
    result: dict[str, Any] = {
        "command": "python benchmarks/guard.py",
        "commit": (about["git"] or {}).get("commit"),
        "versions": {"python": about["python"], **about["packages"]},
        "hardware": "CPU",
        "corpus_bytes": len(corpus()),
        "guard": GuardConfig().model_dump(mode="json"),
    }
    for name, group in groups.items():
        of_group = [rows[run] for run in group]
        result[name] = {
            **summed(of_group),
            "each": [{k: v for k, v in row.items() if k != "caught"} for row in of_group],
        }
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(RESULT)


if __name__ == "__main__":
    main()
