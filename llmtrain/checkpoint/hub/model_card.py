"""The README of an exported model: what was trained, on which data, how, and the results."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import ModelCardData

from llmtrain.checkpoint.contents import TrainerState, changed_values, values_by_step
from llmtrain.checkpoint.manifest import Manifest
from llmtrain.plan import Plan
from llmtrain.plan.described import split_lines
from llmtrain.plan.facts.classifier import SUFFIX
from llmtrain.recipe import ObjectiveConfig
from llmtrain.system.untrusted import read_bytes

BATCH = "batch.global_batch_size"
FOLDER = "FOLDER"
"""Placeholder for the model's name, until its repository is known."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
Line = dict[str, Any]
MOST_METRICS_BYTES = 1 << 34


def model_card(
    plan: Plan, state: TrainerState, manifest: Manifest, dtype: str, metrics: Path, whole: bool = False
) -> str:
    """Returns Markdown with a YAML head, as the hub reads it. Local paths are reduced to their last component.

    dtype: data type of the weights. metrics: `metrics.jsonl` of the run, which may not exist. whole: whether the text
    model is written with the multimodal model that it is part of.
    """
    recipe = plan.recipe
    causal = "AutoModelForMultimodalLM" if whole else "AutoModelForCausalLM"
    auto_class = causal if recipe.model.num_labels is None else f"AutoModel{SUFFIX}"
    train, evaluation = _last_lines(metrics, state.step)
    rows = [
        ("model", f"{_model_type(plan, whole)}, {plan.model.parameters:,} parameters, {dtype}"),
        ("started from", portable(recipe.model.pretrained) if recipe.model.pretrained else "random weights"),
        ("data", "; ".join(f"{portable(source.name)} (weight {source.weight:g})" for source in recipe.data.sources)),
        ("sequence length", f"{recipe.data.sequence_length:,} tokens"),
        ("optimizer", f"{recipe.optim.name}, peak rate {recipe.optim.lr:g}, {recipe.optim.schedule}"),
        ("global batch", _batches(plan, state)),
        ("trained", f"{state.step:,} steps, {_sequences(state)}, {state.tokens:,} target tokens"),
        *_metric_rows(train, evaluation, state, recipe.objective),
    ]
    recipe_text = json.dumps(_portable(recipe.model_dump(mode="json")), indent=2)
    packages = "\n".join(f"- {name} {version}" for name, version in sorted(manifest.versions.items()))
    return "\n".join(
        (
            "---",
            _front_matter(plan),
            "---",
            f"\n# {recipe.name}\n",
            "Trained with llmtrain.\n",
            "| | |",
            "|---|---|",
            *(f"| {name} | {_cell(value)} |" for name, value in rows),
            "\n## Use\n",
            "```python",
            f"from transformers import {auto_class}, AutoTokenizer\n",
            f'model = {auto_class}.from_pretrained("{FOLDER}", dtype="auto")',
            f'tokenizer = AutoTokenizer.from_pretrained("{FOLDER}")',
            "```",
            *_changes(state),
            f"\n## Plan{_since(state)}\n",
            *(f"- {line.strip()}" for line in split_lines(plan)),
            f"\n## Recipe{_since(state)}\n\n```json\n{recipe_text}\n```",
            f"\n## Versions\n\n{packages}\n",
        )
    )


def portable(text: str) -> str:
    """Returns a path without the folders above a file, and a URL without user, password and query."""
    parts = urlsplit(text)
    if parts.scheme and parts.netloc:
        return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
    return Path(text).name if text.startswith(("/", "~", "./", "../")) or Path(text).exists() else text


def _portable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_portable(item) for item in value]
    return portable(value) if isinstance(value, str) and "/" in value else value


def _front_matter(plan: Plan) -> str:
    recipe = plan.recipe
    names = [source.name for source in recipe.data.sources]
    base = recipe.model.pretrained
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation" if recipe.model.num_labels is None else "text-classification",
        tags=["llmtrain", plan.model.model_type],
        datasets=[name for name in names if _on_the_hub(name)] or None,
        base_model=base if base and _on_the_hub(base) else None,
    )
    return data.to_yaml()


def _on_the_hub(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is not None and portable(name) == name


def _metric_rows(
    train: Line, evaluation: Line, state: TrainerState, objective: ObjectiveConfig
) -> list[tuple[str, str]]:
    loss = evaluation.get("eval_loss", state.eval_loss)
    step = evaluation.get("step", state.eval_step)
    rows: list[tuple[str, str]] = []
    unit = f"per {objective.item} ({objective.name})" if objective.is_own else f"nats per {objective.item}"
    if train.get("loss") is not None:
        rows.append(("training loss", f"{train['loss']:.4f} {unit} in step {train['step']:,}"))
    if loss is not None:
        rows.append(("evaluation loss", f"{loss:.4f} {unit} after step {step:,}, on held-out text"))
    parts = (*evaluation.get("eval_loss_by_source", {}).items(), *evaluation.get("eval_loss_by_set", {}).items())
    for name, part_loss in parts:
        if part_loss is not None:
            rows.append((f"evaluation loss, {portable(name)}", f"{part_loss:.4f} {unit}"))
    return rows


def _model_type(plan: Plan, whole: bool) -> str:
    """Returns the model type, and what it is of a multimodal model."""
    part = plan.model.part
    if part is None:
        return plan.model.model_type
    return f"{plan.model.model_type} (the text model of {part.wrapper}{'' if whole else ', alone'})"


def _batches(plan: Plan, state: TrainerState) -> str:
    """Describes the global batch size of all steps, which may change when a run continues."""
    sizes = values_by_step(state.history, BATCH) or [(0, plan.recipe.batch.global_batch_size)]
    return ", ".join(f"{_grouped(size)} sequences" + (f" after step {step:,}" if step else "") for step, size in sizes)


def _grouped(number: object) -> str:
    return f"{number:,}" if isinstance(number, int) else str(number)


def _sequences(state: TrainerState) -> str:
    trained = f"{state.samples - state.passed_over:,} sequences"
    return f"{trained} ({state.passed_over:,} more were skipped)" if state.passed_over else trained


def _changes(state: TrainerState) -> list[str]:
    """Lists what was changed when the run was continued."""
    lines = []
    for before, now in itertools.pairwise(state.history):
        if changed := changed_values(_portable(before.values), _portable(now.values)):
            lines.append(f"- after step {now.step:,}: {', '.join(changed)}")
    return ["\n## Changes during the run\n", *lines] if lines else []


def _since(state: TrainerState) -> str:
    return f" after step {state.history[-1].step:,}" if len(state.history) > 1 else ""


def _last_lines(metrics: Path, step: int) -> tuple[Line, Line]:
    """Returns the last training step and the last evaluation up to `step`; empty if unknown."""
    train: Line = {}
    evaluation: Line = {}
    try:
        lines = read_bytes(metrics, MOST_METRICS_BYTES).decode(errors="replace").splitlines()
    except OSError:
        lines = []
    for text in lines:
        try:
            line = json.loads(text)
            is_past = line["step"] <= step
        except (ValueError, TypeError, KeyError, RecursionError):
            continue  # truncated by a kill
        if is_past and "eval_loss" in line:
            evaluation = line
        elif is_past:
            train = line
    return train, evaluation


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
