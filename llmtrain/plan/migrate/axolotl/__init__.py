"""Translates axolotl's YAML."""

from __future__ import annotations

from typing import Any

from llmtrain.plan.migrate import trl
from llmtrain.plan.migrate.axolotl.data import translate_data
from llmtrain.plan.migrate.axolotl.execution import (
    translate_deepspeed,
    translate_evaluation,
    translate_logging,
    translate_parallel,
)
from llmtrain.plan.migrate.axolotl.model import translate_model, translate_objective
from llmtrain.plan.migrate.axolotl.settings import DATA_SET, HARMLESS, SETTINGS, TITLE, UNSUPPORTED
from llmtrain.plan.migrate.axolotl.training import translate_batch, translate_optimizer
from llmtrain.plan.migrate.completion import complete, name_run
from llmtrain.plan.migrate.program import Given, Program
from llmtrain.plan.migrate.translation import Settings, Translation

FIRST = frozenset({"sequence_len", "learning_rate", "lora_r", "lora_alpha", "lora_dropout"})
"""Settings that others depend on, so that they are translated before these."""
NUMBERS = (
    "num_epochs warmup_steps warmup_ratio val_set_size eval_steps save_steps adam_beta1 adam_beta2 rl_beta dpo_beta "
    "orpo_alpha cosine_min_lr_ratio evals_per_epoch saves_per_epoch"
)
COUNTS = (
    "micro_batch_size gradient_accumulation_steps batch_size max_steps context_parallel_size sequence_parallel_degree "
    "tensor_parallel_size sequence_len"
)
MAPPINGS = "special_tokens lr_scheduler_kwargs trl"
NAMES = (
    "base_model lora_target_modules lora_target_parameters lora_modules_to_save unfrozen_parameters plugins "
    "dpo_loss_type"
)
TEXTS = (
    "rl adapter chat_template optimizer lr_scheduler metric_for_best_model output_dir wandb_project "
    "attn_implementation excess_length_strategy default_system_message chat_template_jinja"
)
"""Settings that are translated together with others, by the kind of their values."""
USUAL: dict[str, tuple[Any, ...]] = {
    "save_strategy": ("steps", "epoch", "best"),
    "eval_strategy": ("steps", "epoch"),
    "shuffle_merged_datasets": (True,),
    "context_parallel_size": (1,),
    "sequence_parallel_degree": (1,),
    "pretrain_multipack_attn": (True,),
    "pretraining_sample_concatenation": (True,),
    "bf16": (True, "auto"),
}
"""Values that are what happens here, too, or that another setting's line explains."""
NO_GENERATION = frozenset({"grpo", "gdpo", "ebft"})


def translate(given: Given) -> Translation:
    """Returns the recipe that axolotl's settings become. Raises RecipeError for what cannot be trained here."""
    file = given.file
    settings, result = Settings(file.values, file=file), Translation(TITLE)
    file.check(number=NUMBERS, count=COUNTS, mapping=MAPPINGS, names=NAMES, text=TEXTS)
    rl = settings.take("rl")
    if rl in NO_GENERATION:
        message = f"is {rl}: there is no reinforcement learning with generation"
        raise file.error("import.objective", "rl", message, "of the preference losses, dpo, ipo, orpo and kto exist")
    name_run(result, settings, "output_dir", "wandb_name", "mlflow_run_name")
    translate_model(result, settings)
    translate_data(result, settings, given, rl)
    translate_objective(result, settings, rl)
    devices = given.world_size(result)
    translate_optimizer(result, settings)
    translate_batch(result, settings, devices)
    translate_parallel(result, settings)
    translate_evaluation(result, settings)
    translate_logging(result, settings)
    adapts = settings.take("adapter")
    rows = [row for row in (*SETTINGS, *HARMLESS, *UNSUPPORTED) if row.key not in FIRST]
    result.apply(settings, [row for row in rows if adapts or not row.field.startswith("model.adapter.")])
    translate_deepspeed(result, settings, given)
    _always_different(result, settings, rl)
    noted = {line.key for line in result.lines}
    for key, usual in USUAL.items():
        if key not in noted and (value := settings.take(key)) in usual:
            result.same(key, value)
    result.report_untaken(settings)
    complete(result)
    return result


def _always_different(result: Translation, settings: Settings, rl: Any) -> None:
    """Notes what differs whatever the file says."""
    fields = result.fields
    if not rl and not settings.take("reward_model"):
        accumulates = fields["batch.global_batch_size"] > fields["batch.micro_batch_size"]
        if accumulates:
            text = (
                "a step's loss is the mean over all its trained tokens. axolotl takes the mean of each micro-batch, "
                "and the mean of these over accumulation and devices: tokens in a micro-batch of few weigh more"
            )
            result.different("", None, text)
        if fields.get("data.packing") == "best_fit":
            micro, length = fields["batch.micro_batch_size"], fields["data.sequence_length"]
            text = f"a micro-batch is {micro} packed sequences of {length} tokens"
            also = f", one row of {micro * length} tokens in axolotl with FlashAttention" if micro > 1 else ""
            result.different(
                "sample_packing",
                True,
                f"{text}{also}; other rows share a sequence, and the last step is not left out",
                "data.packing",
            )
        if any(source.get("format") == "messages" for source in fields.get("data.sources", ())):
            text = (
                "the token that ends a trained turn is always trained. axolotl trains it if it is the tokenizer's "
                "`eos_token` or one of `eot_tokens`: without these, a template with another end is not learned there"
            )
            result.different("", None, text, "data.train_on")
    text = "weights with two or more dimensions are decayed, as in axolotl; a bias or a norm never is"
    if fields.get("optim.weight_decay"):
        result.same("weight_decay", fields["optim.weight_decay"], "optim.weight_decay", text)


PROGRAM = Program(
    name="axolotl",
    title=TITLE,
    marks=frozenset({"base_model"}),
    translate=translate,
    tables={"Settings": SETTINGS, "Data sets": DATA_SET, "Not supported": UNSUPPORTED, "Without effect": HARMLESS},
    page="axolotl",
    includes=frozenset({"trainer", *(program.name for program in trl.PROGRAMS)}),
    command=r"\baxolotl\b",
)
