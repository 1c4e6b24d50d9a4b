"""Runs of Megatron-Core on the batches of a tiny recipe, which save its distributed checkpoint, on CPUs over gloo.

`torchrun -m tests.helpers.megatron_runs FOLDER KIND TENSOR PIPELINE OPTIMIZER LAYERS`, with megatron-core on the path.
Its layers, optimizers, schedule and files are its own; only the places at which it asks for CUDA are given the CPU.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch import distributed as dist
from torch.overrides import TorchFunctionMode

from llmtrain.recipe import Recipe
from tests.helpers.batches import GLOBAL_BATCH, VOCAB, T
from tests.helpers.foreign_runs import NEXT, SAVED, foreign_recipe, rows

UNTIED = {"model.config.tie_word_embeddings": False}
KINDS: dict[str, dict[str, Any]] = {
    "llama": UNTIED,
    "qwen3": {**UNTIED, "model.architecture": "qwen3", "model.config.head_dim": 16},
    "mixtral": {
        **UNTIED,
        **{"model.architecture": "mixtral", "model.config.num_local_experts": 4},
        **{"model.config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "gpt2": {
        "model.architecture": "gpt2",
        "model.config": {
            **{"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": T, "n_inner": 128},
            **{"activation_function": "gelu", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        },
    },
}
"""Fields of the recipe that has the model of each kind."""


def megatron_recipe(kind: str) -> Recipe:
    """Returns the recipe of a kind of model."""
    return foreign_recipe(**KINDS[kind])


class _OnCpu(TorchFunctionMode):
    """Gives tensors that are asked for on `cuda` on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is Tensor.cuda:
            return args[0]
        if function is Tensor.type and len(args) == 1:
            return str(function(*args)).replace("torch.", "torch.cuda.")  # its optimizers ask for the type's name
        return function(*args, **kwargs)


def _without_cuda() -> None:
    numpy.product = numpy.prod  # type: ignore[attr-defined]  # which versions before 0.14 call
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment,misc]
    torch.cuda.device_count = lambda: 1  # type: ignore[assignment]
    torch.cuda.set_device = lambda *_: None  # type: ignore[assignment]
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # random states of dropout, which is 0
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.transformer.moe import moe_utils

    if hasattr(distrib_optimizer, "quantize_param_shard"):
        distrib_optimizer.quantize_param_shard = lambda *_: None  # of FP8 weights, of which there are none
    moe_utils.te_general_gemm = None  # which is not defined without Transformer Engine, though the router asks for it


def _model_of(kind: str, tensor: int, pipeline: int) -> tuple[Any, Any]:
    """Returns the configuration and the stage of a rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    gpt2, experts = kind == "gpt2", 4 if kind == "mixtral" else None
    theirs: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 4 if gpt2 else 2,
        "kv_channels": 16,
        "normalization": "LayerNorm" if gpt2 else "RMSNorm",
        "layernorm_epsilon": 1e-5 if gpt2 or kind == "mixtral" else 1e-6,
        "gated_linear_unit": not gpt2,
        "activation_func": torch.nn.functional.gelu if gpt2 else torch.nn.functional.silu,
        "add_bias_linear": gpt2,
        "qk_layernorm": kind == "qwen3",
        "num_moe_experts": experts,
    }
    config = TransformerConfig(
        **theirs,
        **({"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather"} if experts else {}),
        expert_model_parallel_size=2 if experts else 1,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        deallocate_pipeline_outputs=True,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=T,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=gpt2,
        position_embedding_type="learned_absolute" if gpt2 else "rope",
        rotary_base=10000,
    )
    return config, model


def _arguments(config: Any, recipe: Recipe, kind: str, step: int) -> Namespace:
    """Returns what Megatron-LM's training saves as `args`, as far as it concerns an import."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    gpt2 = kind == "gpt2"
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    return Namespace(
        **{name: getattr(config, name) for name in names},
        normalization=config.normalization,
        norm_epsilon=config.layernorm_epsilon,
        group_query_attention=not gpt2,
        swiglu=config.gated_linear_unit,
        add_bias_linear=config.add_bias_linear,
        apply_layernorm_1p=False,
        position_embedding_type="learned_absolute" if gpt2 else "rope",
        rotary_base=10000,
        rotary_percent=1.0,
        rotary_interleaved=False,
        untie_embeddings_and_output_weights=not gpt2,
        padded_vocab_size=VOCAB,
        iteration=step,
        consumed_train_samples=step * GLOBAL_BATCH,
        params_dtype=torch.float32,
        model_type=ModelType.encoder_or_decoder,
        attention_backend=AttnBackend.auto,
        optimizer="adam",
    )


def megatron_run(
    rank: int, folder: Path, kind: str, tensor: int, pipeline: int, optimizer: str, layers: str
) -> list[float]:
    """Trains; returns the losses after the save.

    optimizer: `adam`, or the form in which the distributed optimizer saves its states. layers: `stacked` in tensors,
    or `single`, with tensors of their own.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func

    parallel_state.initialize_model_parallel(
        tensor, pipeline, expert_model_parallel_size=2 if kind == "mixtral" else 1, expert_tensor_parallel_size=1
    )
    torch.manual_seed(3)
    recipe = megatron_recipe(kind)
    sharded = optimizer != "adam"
    config, stage = _model_of(kind, tensor, pipeline)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    model = DistributedDataParallel(config, ddp, stage)
    config.finalize_model_grads_func = finalize_model_grads
    optim = recipe.optim
    options = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.lr * optim.min_lr_ratio,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad_norm,
        use_distributed_optimizer=sharded,
        params_dtype=torch.float32,
    )
    try:
        from megatron.core.optimizer import get_standard_config_overrides

        adam = get_megatron_optimizer(options, [model], get_standard_config_overrides(options))
    except ImportError:  # before 0.16, where this is the default
        adam = get_megatron_optimizer(options, [model])
    schedule = OptimizerParamScheduler(
        adam,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.lr * optim.min_lr_ratio,
        lr_warmup_steps=optim.warmup_steps,
        lr_decay_steps=recipe.train.max_steps or 0,
        lr_decay_style="cosine",
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    place, count = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

    def forward(batches: Any, part: Any) -> tuple[Tensor, Any]:
        tokens = next(batches)
        positions = torch.arange(T).expand(len(tokens), T)
        mask = torch.ones(T, T, dtype=torch.bool).triu(1)[None, None]
        output = part(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
        return output, lambda losses: (losses.float().mean(), {"loss": losses.float().mean().detach()})

    losses = []
    for step in range(SAVED + NEXT):
        if step == SAVED:
            _save(folder, step, stage, adam, schedule, _arguments(config, recipe, kind, step), optimizer, layers)
        mine = list(rows(step)[place::count].split(2))
        model.zero_grad_buffer()
        adam.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(mine),
            model=[model],
            num_microbatches=len(mine),
            seq_length=T,
            micro_batch_size=2,
        )
        adam.step()
        schedule.step(1)
        mean = torch.tensor([float(one["loss"]) for one in found], dtype=torch.float64).mean()
        total = torch.tensor([0.0 if math.isnan(mean) else float(mean), float(not math.isnan(mean))])
        dist.all_reduce(total)
        losses.append(float(total[0] / total[1]))
    return losses[-NEXT:]


def _save(
    folder: Path,
    step: int,
    stage: Any,
    adam: Any,
    schedule: Any,
    arguments: Namespace,
    optimizer: str,
    layers: str,
) -> None:
    """Saves what Megatron-LM's `save_checkpoint` does with `--ckpt-format torch_dist`."""
    from megatron.core import dist_checkpointing, parallel_state

    metadata: dict[str, Any] = {"singleton_local_shards": layers == "single", "chained_optim_avoid_prefix": True}
    if optimizer != "adam":
        metadata["distrib_optim_sharding_type"] = optimizer
    state: dict[str, Any] = {"args": arguments, "checkpoint_version": 3.0, "iteration": step}
    told = dict(metadata)
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state["model"] = stage.sharded_state_dict(metadata=metadata)
    state["optimizer"] = adam.sharded_state_dict(state["model"], metadata=metadata)
    state["opt_param_scheduler"] = schedule.state_dict()
    place = folder / f"iter_{step:07d}"
    if dist.get_rank() == 0:
        place.mkdir(parents=True)
    dist.barrier()
    more = {"content_metadata": told} if "content_metadata" in dist_checkpointing.save.__annotations__ else {}
    dist_checkpointing.save(state, str(place), **more)
    if dist.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(step))


def main() -> None:
    folder, kind, tensor, pipeline, optimizer, layers = sys.argv[1:]
    dist.init_process_group("gloo")
    _without_cuda()
    with _OnCpu():
        losses = megatron_run(dist.get_rank(), Path(folder), kind, int(tensor), int(pipeline), optimizer, layers)
    if dist.get_rank() == 0:
        Path(folder, "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
