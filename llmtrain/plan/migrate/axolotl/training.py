"""The optimizer, the schedule, the batch and the length of an axolotl configuration."""

from __future__ import annotations

from llmtrain.plan.migrate.axolotl.settings import OPTIMIZERS, OPTIMIZERS_DIFFER, SETTINGS, number
from llmtrain.plan.migrate.trainer_settings import SCHEDULES
from llmtrain.plan.migrate.translation import Settings, Translation


def translate_optimizer(result: Translation, settings: Settings) -> None:
    """Translates the optimizer and the schedule."""
    name = settings.take("optimizer", "adamw_torch_fused")
    known = OPTIMIZERS.get(str(name))
    if known is None:
        result.unsupported("optimizer", name, "adamw is used; a class of your own can be (optim.name)")
    elif name in OPTIMIZERS_DIFFER:
        result.different("optimizer", name, OPTIMIZERS_DIFFER[name], "optim.name")
    elif "optimizer" in settings:
        result.same("optimizer", name, "optim.name")
    result.set("optim.name", known or "adamw", "optimizer")
    result.apply(settings, [row for row in SETTINGS if row.key == "learning_rate"])
    betas = [number(settings.take(key, default)) for key, default in (("adam_beta1", 0.9), ("adam_beta2", 0.999))]
    if known == "sgd":
        betas[0] = 0.0
    result.set("optim.betas", betas, "adam_beta1, adam_beta2")
    for key in ("adam_beta1", "adam_beta2"):
        if key in settings:
            result.same(key, settings.take(key), "optim.betas")
    if options := settings.take("optim_args"):
        result.unsupported("optim_args", options, "set those that the optimizer here has in optim.options")
    _schedule(result, settings)


def _schedule(result: Translation, settings: Settings) -> None:
    name, kwargs = settings.take("lr_scheduler", "cosine"), settings.take("lr_scheduler_kwargs", {})
    known = SCHEDULES.get(str(name))
    result.set("optim.schedule", known or "cosine", "lr_scheduler")
    if known is None:
        text = "cosine is used; a function of your own can be (optim.schedule)"
        result.unsupported("lr_scheduler", name, text)
    elif "lr_scheduler" in settings:
        result.same("lr_scheduler", name, "optim.schedule")
    renamed = {"min_lr_rate": "optim.min_lr_ratio", "min_lr_ratio": "optim.min_lr_ratio"}
    renamed["num_decay_steps"] = "optim.decay_steps"
    for key, value in kwargs.items():
        if key in renamed:
            result.set(renamed[key], value, f"lr_scheduler_kwargs.{key}")
            result.same(f"lr_scheduler_kwargs.{key}", value, renamed[key])
        else:
            result.unsupported(f"lr_scheduler_kwargs.{key}", value, "see optim.schedule for the fields of a schedule")
    if known == "wsd" and "optim.decay_steps" not in result.fields:
        result.missing("optim.decay_steps", "set the number of steps of the decay at the end")
    if settings.take("cosine_min_lr_ratio") == 1:
        result.set("optim.schedule", "constant", "cosine_min_lr_ratio: 1")
        result.same("cosine_min_lr_ratio", 1.0, "optim.schedule", "a cosine that ends where it begins")
    steps, share = settings.take("warmup_steps"), settings.take("warmup_ratio")
    total = settings.take("max_steps")
    shown = "warmup_ratio"
    if steps is not None and 0 < number(steps) < 1:
        steps, share, shown = None, number(steps), "warmup_steps"
    if name == "constant":
        for key in ("warmup_steps", "warmup_ratio"):
            if value := settings.take(key):
                result.same(key, value, text="`constant` has no warm-up, in axolotl either")
    elif steps is not None:
        result.set("optim.warmup_steps", 2 if steps == 1 else steps, "warmup_steps")
        result.same("warmup_steps", steps, "optim.warmup_steps", "axolotl takes 2" if steps == 1 else "")
    elif total:
        warmup = int(number(share) * total) if share is not None else min(int(0.03 * total), 100)
        warmup = 2 if warmup == 1 else warmup
        result.set("optim.warmup_steps", warmup, "warmup_ratio" if share is not None else "axolotl's default, 3 %")
        if share is not None:
            result.same(shown, share, "optim.warmup_steps", f"of {total} steps")
    elif share is None or share:
        result.set("optim.warmup_ratio", 0.03 if share is None else number(share), "warmup_ratio")
        if share is None:
            text = "axolotl's default is 3 % of the steps, at most 100; set optim.warmup_steps for a longer run"
            result.different("", None, text, "optim.warmup_ratio")
        else:
            result.same(shown, share, "optim.warmup_ratio")


def translate_batch(result: Translation, settings: Settings, devices: int) -> None:
    """Translates the batch, and the length of the run."""
    micro = settings.take("micro_batch_size", 1)
    whole, accumulated = settings.take("batch_size"), settings.take("gradient_accumulation_steps", 1)
    if whole:
        accumulated = max(1, whole // micro)
        result.same("batch_size", whole, "batch.global_batch_size", "of one device")
    split = 1
    for key in ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size"):
        split *= settings.take(key) or 1
    replicas = max(1, devices // split)
    total = micro * accumulated * replicas
    result.set("batch.micro_batch_size", micro, "micro_batch_size")
    made = f"{micro} × {accumulated} × {replicas}"
    result.set("batch.global_batch_size", total, f"micro_batch_size × gradient_accumulation_steps × devices: {made}")
    text = f"= {total} sequences of a step ({made}); on other devices, the accumulation follows"
    result.same("gradient_accumulation_steps", accumulated, "batch.global_batch_size", text)
    result.same("micro_batch_size", micro, "batch.micro_batch_size")
    epochs, steps = settings.take("num_epochs", 1.0), settings.take("max_steps")
    if steps:
        result.set("train.max_steps", steps, "max_steps")
        text = "the run has this many steps; axolotl's ends earlier if `num_epochs` have been read"
        result.different("max_steps", steps, text, "train.max_steps")
        if "num_epochs" in settings:
            result.same("num_epochs", epochs, text="max_steps decides")
    else:
        epochs = number(epochs)
        result.set("train.epochs", int(epochs) if epochs == int(epochs) else epochs, "num_epochs")
        result.same("num_epochs", epochs, "train.epochs")
