"""Renders a plan as DeepSpeed JSON: complete and explicit, so that no default of the engine matters."""

from __future__ import annotations

from typing import Any

from llmtrain.plan.draft import COMPUTE_DTYPE, WEIGHT_DTYPE
from llmtrain.plan.facts.families import FAMILIES
from llmtrain.plan.plan import Plan
from llmtrain.plan.predict.flat import (
    MAX_LIVE_PARAMETERS,
    SUB_GROUP_SIZE,
    bucket_elements,
    overlaps_reduction,
    persistence_threshold,
)
from llmtrain.plan.predict.traffic import REUSE_DISTANCE
from llmtrain.recipe import OffloadDevice

Block = dict[str, Any]


def render(plan: Plan) -> dict[str, Any]:
    """Returns the DeepSpeed configuration of a plan, as a new dictionary of JSON values.

    It is empty if DeepSpeed does not run the plan. There is no scheduler block, since the learning rate schedule is
    passed to the engine as an object, and no activation checkpointing block, since DeepSpeed only applies it to code
    that asks for it (`llmtrain.models.recompute`).
    """
    if plan.recipe.parallel.strategy != "deepspeed":
        return {}
    config = {
        **_batch(plan),
        **_gradients(plan),
        **_optimizer(plan),
        "zero_allow_untested_optimizer": not plan.optimizer_row.known_to_zero,
        "zero_force_ds_cpu_optimizer": False,
        **_precision(plan),
        "zero_optimization": _zero(plan),
        **_parallelism(plan),
        **_run_time(),
    }
    if "nvme" in (plan.recipe.parallel.offload_optimizer, plan.recipe.parallel.offload_param):
        config["aio"] = {
            "block_size": 1_048_576,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
            "use_gds": False,
        }
    return config


def _batch(plan: Plan) -> Block:
    """Returns the batch sizes as integers.

    DeepSpeed does not know which ranks share sequences, so it would refuse the right global batch size, which is left
    out in this case. Tensor groups are described to it.
    """
    batch = {
        "train_batch_size": plan.batch.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.batch.micro_batch_size,
        "gradient_accumulation_steps": plan.batch.gradient_accumulation_steps,
    }
    if plan.gradient_ranks > plan.data_parallel_size:
        del batch["train_batch_size"]
    return batch


def _gradients(plan: Plan) -> Block:
    """Returns how gradients are summed.

    They are reduced over ranks in the data type in which they are accumulated over micro-batches: only then is a sum
    over ranks as accurate as one over micro-batches, and a run independent of its layout. DeepSpeed's own default is
    the data type of the weights, in which a sum over 256 ranks loses its low bits.
    """
    accumulated_in = plan.recipe.parallel.grad_accum_dtype
    return {
        "gradient_clipping": plan.recipe.optim.clip_grad_norm,  # if missing, DeepSpeed clips at 1.0
        "communication_data_type": accumulated_in,
        "seq_parallel_communication_data_type": accumulated_in,
        "data_types": {"grad_accum_dtype": accumulated_in},
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "gradient_allreduce_op": "mean",
    }


def _optimizer(plan: Plan) -> Block:
    """Returns torch's own optimizers: DeepSpeed's would be compiled at the first start.

    They are fused: these leave the weights unchanged if a tensor on the device says so (`llmtrain.engines.guard`).
    There is no block for other optimizers, which are passed to DeepSpeed as objects.
    """
    optim, row = plan.recipe.optim, plan.optimizer_row
    if row.deepspeed_type is None:
        return {}
    arguments = row.arguments(optim) | {"weight_decay": optim.weight_decay, "fused": True} | row.deepspeed
    return {"optimizer": {"type": row.deepspeed_type, "params": {"lr": optim.lr} | arguments}}


def _precision(plan: Plan) -> Block:
    precision = plan.recipe.parallel.precision
    return {
        # The guard detects overflow on the device; DeepSpeed's check waits for the device at each step.
        "bf16": {"enabled": precision == "bf16", "immediate_grad_update": False, "check_grad_overflow": False},
        "fp16": {
            "enabled": precision == "fp16",
            "auto_cast": False,
            "loss_scale": 0,  # dynamic
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "consecutive_hysteresis": False,
            "min_loss_scale": 1,
        },
        "torch_autocast": {
            "enabled": COMPUTE_DTYPE[precision] != WEIGHT_DTYPE[precision],
            "dtype": "float16" if precision == "autocast_fp16" else "bfloat16",
            # Gradients of the modules listed here would be reduced in the lower precision.
            "lower_precision_safe_modules": [],
        },
    }


def _zero(plan: Plan) -> Block:
    stage, parallel = plan.parallel.zero_stage, plan.parallel
    if stage == 0:
        return {"stage": 0}
    bucket = bucket_elements(plan)
    pin = not plan.cluster.spec.on_cpu
    zero: Block = {
        "stage": stage,
        "overlap_comm": stage == 3 or overlaps_reduction(plan),
        "reduce_scatter": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket,
        "allgather_partitions": True,
        "allgather_bucket_size": bucket,
        "use_multi_rank_bucket_allreduce": True,
        "round_robin_gradients": False,
        "ignore_unused_parameters": True,
        "load_from_fp32_weights": True,
        "offload_optimizer": _offload(parallel.offload_optimizer, parallel.nvme_path, pin),
    }
    if stage == 3:
        zero |= _zero3(plan, bucket, pin)
    return zero


def _zero3(plan: Plan, bucket: int, pin: bool) -> Block:
    parallel = plan.recipe.parallel
    offload_param = _offload(parallel.offload_param, parallel.nvme_path, pin)
    if parallel.offload_param == "nvme":
        # A partition has to fit in one buffer.
        partition = -(-plan.model.largest_parameter // plan.data_parallel_size)
        offload_param |= {"buffer_count": 5, "buffer_size": max(100_000_000, partition), "max_in_cpu": 1_000_000_000}
    # Blocks to gather as a whole, since ranks may reach the experts within in different orders.
    family = FAMILIES.get(plan.model.model_type)
    leaves = [family.moe_block] if family and family.moe_block and parallel.expert == 1 else []
    return {
        "offload_param": offload_param,
        "leaf_module": {"classes": leaves, "names": [], "name_suffixes": []},
        "sub_group_size": SUB_GROUP_SIZE,
        "stage3_prefetch_bucket_size": bucket,
        "stage3_param_persistence_threshold": persistence_threshold(plan),
        "stage3_max_live_parameters": MAX_LIVE_PARAMETERS,
        "stage3_max_reuse_distance": REUSE_DISTANCE,
        "stage3_module_granularity_threshold": 0,
        "stage3_allgather_sequential": False,
        # For export, weights are gathered from the engine, parameter by parameter.
        "stage3_gather_16bit_weights_on_model_save": False,
        "zero_hpz_partition_size": parallel.hierarchical_partition,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
    }


def _offload(device: OffloadDevice, nvme_path: str | None, pin: bool) -> Block:
    """Returns where states are stored; pinned memory is for a device that copies from it."""
    if device == "none":
        return {"device": "none"}
    block: Block = {"device": device, "pin_memory": pin}
    if device == "nvme":
        block["nvme_path"] = nvme_path
    return block


def _parallelism(plan: Plan) -> Block:
    """Returns the blocks for degrees above 1."""
    blocks = Block()
    if plan.stages:
        blocks["pipeline"] = {
            # Counts in the engine's layers, which are stages here: each would be recomputed in addition to its own
            # layers' checkpoints.
            "activation_checkpoint_interval": 0,
            "use_reentrant": False,  # re-entrant checkpoints fail on integer inputs
            "pipe_partitioned": False,
            "grad_partitioned": False,
        }
    return blocks


def _run_time() -> Block:
    """Disables what DeepSpeed writes and measures by itself, since the run does that."""
    return {
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dump_state": False,
        # Synchronises the device twice in each micro-batch.
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
        # A checkpoint whose ranks name it differently cannot be loaded.
        "checkpoint": {"tag_validation": "Fail", "load_universal": False, "use_node_local_storage": False},
    }
