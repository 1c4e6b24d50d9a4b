"""The results of a finished run: a Hugging Face folder, a sample of generated text, and scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.export import export
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.manifest import first_names, missing_parts, read_manifests
from llmtrain.data import Prepared
from llmtrain.errors import UserError
from llmtrain.models.inference.generate import generate
from llmtrain.plan import Plan
from llmtrain.recipe import Recipe
from llmtrain.run_dir import RunDir
from llmtrain.system.streams import print_as_is
from llmtrain.train.metrics.progress import sample_panel
from llmtrain.train.tasks import BackgroundScoring, ScoringError, score_last, score_table


def finish(
    run_dir: RunDir,
    plan: Plan,
    state: TrainerState,
    prepared: Prepared,
    tasks: BackgroundScoring | None,
    console: Console,
) -> None:
    """Compares the evaluation with a unigram model, exports, samples and scores; runs on rank 0 after the last step.

    tasks: if checkpoints were scored during the run; unfinished scores are waited for.
    """
    recipe = plan.recipe
    if tasks is not None:
        with console.status("scoring a checkpoint"), _printing_scoring_errors(console):
            tasks.wait()
    if state.eval_loss is not None and recipe.objective.name == "language_model":
        unigram = prepared.unigram_loss(recipe.evaluation.max_sequences)
        line = f"evaluation loss {state.eval_loss:.4f}; a unigram model of the same tokens has {unigram:.4f}"
        print_as_is(console, [line])
    checkpoint = newest(run_dir.checkpoints)
    if (state.step < recipe.train.steps and not state.ended) or not recipe.export.at_end or checkpoint is None:
        return
    if elsewhere := missing_parts(read_manifests(checkpoint)):
        lack = f"{checkpoint} lacks the parts of {first_names(elsewhere)}; copy them into it"
        print_as_is(console, [f"not exported: {lack}"])
        return
    with console.status("exporting"):
        # Replaces an export of fewer steps. The plan is that of the user's recipe.
        trusts = recipe.model.runs_own_code or plan.optimizer is not None
        export(checkpoint, run_dir.tokenizer, run_dir.export, replace=True, trust_remote_code=trusts)
    print_as_is(console, [f"exported {run_dir.export}"])
    if recipe.export.sample_prompt is not None:
        _sample(run_dir, recipe, recipe.export.sample_prompt, console)
    if recipe.tasks.names:
        with console.status("scoring downstream tasks"), _printing_scoring_errors(console):
            console.print(score_table(score_last(run_dir, state.step), state.step))


def _sample(run_dir: RunDir, recipe: Recipe, prompt: str, console: Console) -> None:
    try:
        trusts = recipe.model.runs_own_code
        continuation = generate(run_dir.export, prompt, recipe.export.sample_tokens, trust_remote_code=trusts)
    except (UserError, RuntimeError, MemoryError) as error:  # among them torch.OutOfMemoryError
        print_as_is(console, [f"no sample: {error}"], "yellow")
        return
    console.print(sample_panel(prompt, continuation, "sample"))


@contextmanager
def _printing_scoring_errors(console: Console) -> Iterator[None]:
    """Prints errors of scoring, for which a run does not fail."""
    try:
        yield
    except ScoringError as error:
        print_as_is(console, [str(error)], "yellow")
