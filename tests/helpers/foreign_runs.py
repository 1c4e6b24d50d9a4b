"""Runs of other programs on the batches of a tiny recipe: DeepSpeed, the Trainer, and FSDP2 loops.

Each takes some steps, saves in its own way, and goes on. Rows are whole documents of equal length, so a mean over
micro-batches is the mean over all target tokens.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.recipe import Recipe
from tests.helpers.batches import GLOBAL_BATCH, VOCAB, T, part_of, tiny_recipe

SAVED = 5
NEXT = 20
FIELDS: dict[str, Any] = {"optim.weight_decay": 0.1, "train.max_steps": 40}


def foreign_recipe(**fields: Any) -> Recipe:
    """Returns the recipe of the runs."""
    return tiny_recipe(**{**FIELDS, **fields})


def rows(step: int) -> Tensor:
    """Returns the tokens of a step: one more than a row is long."""
    generator = torch.Generator().manual_seed(500 + step)
    shape = (GLOBAL_BATCH, T + 1)
    return (
        torch.randint(0, VOCAB, shape, generator=generator)
        * torch.randint(0, VOCAB, shape, generator=generator)
        // VOCAB
    )


def batch_of(step: int, micro: int, accumulation: int, rank: int, ranks: int) -> StepBatch:
    """Returns a rank's part of a step, for an engine here."""
    positions = torch.arange(T)[None]
    samples = [MicroBatch(input_ids=row[None, :-1], position_ids=positions, labels=row[None, 1:]) for row in rows(step)]
    return part_of(samples, step, micro, accumulation, rank, ranks)


def parts(step: int, rank: int, ranks: int, micro: int = 2) -> list[Tensor]:
    """Returns a rank's micro-batches of a step, for a loop elsewhere."""
    return list(rows(step)[rank::ranks].split(micro))


def model_of(recipe: Recipe) -> nn.Module:
    """Returns the recipe's model of transformers, with weights that all programs begin with."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(recipe.model.architecture, **recipe.model.config)
    return AutoModelForCausalLM.from_config(config)


def loss_of(model: nn.Module, part: Tensor) -> Tensor:
    """Returns the mean loss of some rows."""
    return loss_of_logits(model(input_ids=part[:, :-1], use_cache=False).logits, part[:, 1:])


def loss_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def groups_of(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2 and weight.requires_grad]
    others = [weight for weight in model.parameters() if weight.ndim < 2 and weight.requires_grad]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def schedule_of(optimizer: torch.optim.Optimizer, recipe: Recipe) -> Any:
    from transformers import get_scheduler

    optim = recipe.optim
    return get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=optim.warmup_steps,
        num_training_steps=recipe.train.max_steps,
        scheduler_specific_kwargs={"min_lr_rate": optim.min_lr_ratio},
    )


def adamw_of(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    optim = recipe.optim
    return torch.optim.AdamW(groups_of(model, optim.weight_decay), lr=optim.lr, betas=tuple(optim.betas), eps=optim.eps)


def _averaged(losses: list[float]) -> float:
    from torch import distributed as dist

    total = torch.tensor(losses, dtype=torch.float64).mean()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return float(total)


def deepspeed_run(rank: int, folder: Path, stage: int, ranks: int, variant: str = "") -> list[float]:
    """Trains with DeepSpeed; returns the losses after the save.

    variant: `goes on` loads a universal checkpoint from the folder instead of beginning and saving; `frozen` trains
    only the layers; `bf16` trains in bf16.
    """
    import deepspeed

    recipe = foreign_recipe()
    model = model_of(recipe)
    goes_on = variant == "goes on"
    for name, weight in model.named_parameters():
        weight.requires_grad_(variant != "frozen" or ".layers." in name)
    optimizer = adamw_of(model, recipe)
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": recipe.optim.clip_grad_norm,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, "sub_group_size": 20_000},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": goes_on},
        "bf16": {"enabled": variant == "bf16"},
    }
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=lambda inner: schedule_of(inner, recipe), config=config
    )
    if goes_on:
        engine.load_checkpoint(str(folder))
        # Stage 3 gives all groups one tensor as their count, to which torch's AdamW adds for each of them.
        for state in engine.optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()
    losses = []
    for step in range(SAVED if goes_on else 0, SAVED + NEXT):
        if step == SAVED and not goes_on:
            engine.save_checkpoint(str(folder))
        seen = []
        for part in parts(step, rank, ranks):
            loss = loss_of(engine, part)
            engine.backward(loss)
            engine.step()
            seen.append(loss.item())
        losses.append(_averaged(seen))
    return losses[-NEXT:]


class _Tied(nn.Module):
    """An embedding that is also the head."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight)


class _Decoder(nn.Module):
    """A decoder layer as a layer of a pipeline, with its own rotary embedding, which has no weights."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.block, self.rotary = layer, rotary

    def forward(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1])[None]
        out = self.block(hidden, position_embeddings=self.rotary(hidden, positions), position_ids=positions)
        return out[0] if isinstance(out, tuple) else out


def pipeline_run(rank: int, folder: Path, stages: int, ranks: int, zero: int, tied: bool) -> list[float]:
    """Trains a pipeline of DeepSpeed's; returns the losses after the save."""
    import deepspeed
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    recipe = foreign_recipe(**({} if tied else {"model.config.tie_word_embeddings": False}))
    whole = model_of(recipe)
    inner = whole.model

    first, last = inner.embed_tokens, whole.lm_head
    if tied:
        first = TiedLayerSpec("embed", _Tied, inner.embed_tokens.weight)
        last = TiedLayerSpec("embed", _Tied, inner.embed_tokens.weight, forward_fn=_Tied.logits)
    layers = [first, *(_Decoder(layer, inner.rotary_emb) for layer in inner.layers), inner.norm, last]
    module = PipelineModule(layers, num_stages=stages, loss_fn=loss_of_logits, partition_method="uniform")
    optimizer = adamw_of(module, recipe)
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": recipe.optim.clip_grad_norm,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, _, _, _ = deepspeed.initialize(
        model=module, optimizer=optimizer, lr_scheduler=lambda inner: schedule_of(inner, recipe), config=config
    )
    shared, losses = ranks // stages, []
    for step in range(SAVED + NEXT):
        if step == SAVED:
            engine.save_checkpoint(str(folder))
        mine = parts(step, rank % shared if shared > 1 else 0, shared)
        losses.append(float(engine.train_batch(iter([(part[:, :-1], part[:, 1:]) for part in mine]))))
    return losses[-NEXT:]


class _Rows(torch.utils.data.Dataset):
    """All rows of a run, in the order of its steps."""

    def __len__(self) -> int:
        return (SAVED + NEXT) * GLOBAL_BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = rows(index // GLOBAL_BATCH)[index % GLOBAL_BATCH]
        return {"input_ids": row[:-1], "wanted": row[1:]}


def trainer_run(rank: int, folder: Path, ranks: int, how: str) -> list[float]:
    """Trains with the Trainer; returns the losses after the save. how: `plain`, or `deepspeed` and a stage."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    recipe = foreign_recipe()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    options: dict[str, Any] = {}
    if how.startswith("deepspeed"):
        options["deepspeed"] = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": int(how[-1])},
            "zero_allow_untested_optimizer": True,
        }
    optim = recipe.optim
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=GLOBAL_BATCH // (2 * ranks),
        max_steps=SAVED + NEXT,
        save_steps=SAVED,
        save_total_limit=None,
        logging_steps=1,
        learning_rate=optim.lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_epsilon=optim.eps,
        max_grad_norm=optim.clip_grad_norm,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        **options,
    )

    class Ordered(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = schedule_of(optimizer or self.optimizer, recipe)
            return self.lr_scheduler

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            wanted = inputs.pop("wanted")
            loss = loss_of_logits(model(**inputs, use_cache=False).logits, wanted)
            losses.setdefault(self.state.global_step, []).append(loss.item())
            return loss

    losses: dict[int, list[float]] = {}

    class SaveOnce(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = state.global_step == SAVED

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = False

    trainer = Ordered(
        model=model_of(recipe),
        args=arguments,
        train_dataset=_Rows(),
        callbacks=[SaveOnce()],
        data_collator=lambda items: {name: torch.stack([item[name] for item in items]) for name in items[0]},
    )
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    return [_averaged(losses[step]) for step in range(SAVED, SAVED + NEXT)]


def fsdp2_run(rank: int, folder: Path, ranks: int, kind: str) -> list[float]:
    """Trains a loop with FSDP2, which saves with torch.distributed.checkpoint; returns the losses after the save.

    kind: `nested` saves {"model", "optimizer"}; `flat` saves the model's weights beside the rest, as torchtitan does;
    `loaded` loads the folder instead of beginning and saving.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    recipe = foreign_recipe()
    model = model_of(recipe)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw_of(model, recipe)
    scheduler = schedule_of(optimizer, recipe)
    losses = []
    if kind == "loaded":
        weights, states = get_state_dict(model, optimizer)
        loaded = {"model": weights, "optimizer": states, "train_state": {"step": torch.tensor(0)}}
        planner = checkpoint.DefaultLoadPlanner(allow_partial_load=True)  # options of torch that are not set here
        checkpoint.load(loaded, checkpoint_id=str(folder), planner=planner)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        scheduler.last_epoch = int(loaded["train_state"]["step"])
    for step in range(SAVED if kind == "loaded" else 0, SAVED + NEXT):
        if step == SAVED and kind != "loaded":
            weights, states = get_state_dict(model, optimizer)
            saved = {"model": weights} if kind == "nested" else dict(weights)
            saved |= {"optimizer": states, "lr_scheduler": scheduler.state_dict()}
            saved["train_state"] = {"step": torch.tensor(step)}
            checkpoint.save(saved, checkpoint_id=str(folder))
        seen = []
        mine = parts(step, rank, ranks)
        for part in mine:
            loss = loss_of(model, part)
            (loss / len(mine)).backward()
            seen.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optim.clip_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(_averaged(seen))
    return losses[-NEXT:]


def accelerate_run(rank: int, folder: Path, ranks: int, fsdp: bool = False) -> list[float]:
    """Trains a loop of Accelerate, which saves with `save_state`; returns the losses after the save.

    fsdp: splits the model with FSDP2, as the Trainer does on GPUs, and saves both in folders of their own.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    from llmtrain.overrides.accelerate import allow_sharding_on_cpus

    recipe = foreign_recipe()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    AcceleratorState._reset_state(reset_partial_state=True)  # of a run before
    if fsdp:
        allow_sharding_on_cpus(torch.device("cpu"))
    accelerator = Accelerator(fsdp_plugin=plugin) if fsdp else Accelerator(cpu=True)
    plain = model_of(recipe)
    model, optimizer = accelerator.prepare(plain, adamw_of(plain, recipe))
    scheduler = schedule_of(optimizer.optimizer, recipe)
    accelerator.register_for_checkpointing(scheduler)
    losses = []
    for step in range(SAVED + NEXT):
        if step == SAVED:
            accelerator.save_state(str(folder))
        seen = []
        mine = parts(step, rank, ranks)
        for part in mine:
            loss = loss_of(model, part)
            accelerator.backward(loss / len(mine))
            seen.append(loss.item())
        accelerator.clip_grad_norm_(model.parameters(), recipe.optim.clip_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(_averaged(seen))
    return losses[-NEXT:]


def main() -> None:
    """Runs a function of this module on the rank that torchrun gives, with another version of a library."""
    name, folder, *numbers = sys.argv[1:]
    rank = int(os.environ["RANK"])
    losses = globals()[name](rank, Path(folder), *map(int, numbers))
    if rank == 0:
        Path(folder, "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
