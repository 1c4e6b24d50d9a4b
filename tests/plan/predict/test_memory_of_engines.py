"""The predicted bytes of state equal the tensors that real engines hold, to the byte."""

from __future__ import annotations

import itertools

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from llmtrain.models import build_model
from llmtrain.models.nf4 import Nf4Linear
from llmtrain.plan import Plan
from llmtrain.plan.predict.flat import bucket_elements, has_bf16_optimizer, optimizer_groups
from llmtrain.plan.predict.model_state import state_of, sum_bytes, weight_bytes
from llmtrain.plan.predict.parts import Parts
from llmtrain.plan.rules import resolve
from llmtrain.recipe.cluster import Cluster
from tests.helpers.batches import CLASSIFIER, GLOBAL_BATCH, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.live_tensors import live_bytes, live_storages, measure
from tests.helpers.moe import CONFIGS
from tests.helpers.traces import engine_of, plan_of


def predicted(plan: Plan, stage: int = 0) -> tuple[int, int]:
    """As `measure`; on a CPU host and device are one memory."""
    state = state_of(plan, plan.model.weights, stage)

    def held(parts: Parts) -> int:
        return parts.total - parts.live_parameters - parts.communication + state.host

    first, last = held(state.forward), held(state.backward)
    if plan.recipe.parallel.strategy == "ddp":
        first -= state.forward.buckets  # which no tensor of Python is
    if plan.recipe.parallel.strategy == "fsdp2":
        last -= state.backward.buckets  # of the reduction, which is over
        if plan.batch.gradient_accumulation_steps == 1:
            first = last
    if plan.recipe.parallel.strategy != "deepspeed":
        return first, last
    if plan.parallel.zero_stage in (1, 2) and not has_bf16_optimizer(plan):
        stages_sums = plan.parallel.zero_stage == 1 and weight_bytes(plan) != sum_bytes(plan)
        bucket = bucket_elements(plan) * (sum_bytes(plan) if plan.parallel.zero_stage == 1 else weight_bytes(plan))
        # Released when a pass of stage 2 ends, or the step's last pass of stage 1; a bucket that contains sums stays.
        last -= 0 if stages_sums and plan.cluster.world_size > 1 else bucket
    if plan.batch.gradient_accumulation_steps == 1:
        first = last
    if plan.recipe.parallel.offload_param == "cpu" and plan.cluster.world_size == 1:
        # On a CPU the only rank's small parameters are not copied to their own device.
        first, last = first - state.backward.parameters, last - state.backward.parameters
    return first, last


def plans(ranks: int, stages, precisions, accumulations=(2,), optimizers=("adamw",), **fields) -> list[Plan]:
    found = []
    for stage, precision, accumulation, optimizer in itertools.product(stages, precisions, accumulations, optimizers):
        if stage == 0 and precision == "bf16":
            continue  # refused
        ranks_of_replica = fields.get("parallel.pipeline", 1) * fields.get("parallel.tensor", 1)
        ranks_of_replica *= fields.get("parallel.sequence", 1)
        micro = GLOBAL_BATCH * ranks_of_replica // (ranks * accumulation)
        recipe = tiny_recipe(
            **{"parallel.zero_stage": stage, "parallel.precision": precision, "batch.micro_batch_size": micro},
            **{"optim.name": optimizer, **fields},
        )
        found.append(plan_of(recipe, ranks))
    return found


TENSOR = {"parallel.tensor": 2}
UNTIED = {"model.config.tie_word_embeddings": False}
OFFLOAD = {"parallel.offload_optimizer": "cpu"}
OFFLOAD_ALL = OFFLOAD | {"parallel.offload_param": "cpu"}


def check(ranks: int, chosen: list[Plan], measured_by=None) -> None:
    by_rank = run_ranks(ranks, measured_by or _measure, chosen, timeout=580)
    for index, plan in enumerate(chosen):
        measured = [by_rank[rank][index] for rank in range(ranks)]
        parallel = plan.recipe.parallel
        name = f"{ranks} ranks, {plan.layout()}, {parallel.precision}, {parallel.offload_optimizer}, {plan.batch}"
        fullest = tuple(max(one[moment] for one in measured) for moment in (0, 1))
        assert fullest == predicted(plan), name


def _measure(rank: int, chosen: list[Plan]) -> list[tuple[int, int]]:
    return [measure(rank, plan) for plan in chosen]


def _measure_fp16(rank: int, chosen: list[Plan]) -> list[tuple[int, int]]:
    """On a CPU that says that it has fp16, which torch computes there and DeepSpeed refuses."""
    get_accelerator().is_fp16_supported = lambda: True
    return _measure(rank, chosen)


@pytest.mark.breadth
def test_fp16_uses_the_predicted_memory():
    on_gpu = Cluster(devices_per_node=2, device="gpu")  # on a CPU a rule refuses it
    chosen = [
        resolve(plan.recipe.with_(**{"parallel.precision": "fp16"}), on_gpu)
        for plan in plans(2, (1, 2, 3), ("fp32",), (1, 2))
    ]
    check(2, chosen, _measure_fp16)


@pytest.mark.breadth
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast_bf16"])
def test_every_stage_and_offload_uses_the_predicted_memory(ranks, precision):
    chosen = [
        *plans(ranks, (0, 1, 2, 3), (precision,)),
        *plans(ranks, (1, 2, 3), (precision,), **OFFLOAD),
        *plans(ranks, (3,), (precision,), **OFFLOAD_ALL),
    ]
    check(ranks, chosen)


@pytest.mark.breadth
def test_hierarchical_partition_keeps_the_parameters_a_second_time():
    fields = {"parallel.hierarchical_partition": 2}
    check(4, [*plans(4, (3,), ("fp32", "bf16"), **fields), *plans(4, (3,), ("bf16",), **OFFLOAD, **fields)])


@pytest.mark.breadth
def test_one_micro_batch_and_sgd_use_the_predicted_memory():
    chosen = [
        *plans(2, (0, 1, 2, 3), ("fp32", "bf16"), (1,)),
        *plans(2, (0, 1, 2, 3), ("fp32", "bf16"), (2,), ("sgd",)),
    ]
    check(2, chosen)


@pytest.mark.breadth
@pytest.mark.parametrize(
    "name", ["lion", "muon", "schedule_free_adamw", "adafactor", "adamw_8bit", "torch.optim:RAdam"]
)
def test_other_optimizers_use_the_predicted_memory(name):
    check(2, plans(2, (0, 1, 2, 3), ("fp32", "bf16"), (2,), (name,)))


@pytest.mark.breadth
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_these_optimizers_use_the_predicted_memory_for_distributed_experts(name):
    config = CONFIGS["mixtral"] | {"num_local_experts": 16}  # a router's factor of 4 is too small to be noted
    experts = {"parallel.expert": 2, "model": {"architecture": "mixtral", "config": config}}
    check(4, plans(4, (0, 1, 3), ("fp32", "bf16"), (2,), (name,), **experts))


GPT2 = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
EIGHT_BIT = {"optim.options": {"block_size": 48}}
"""Neither partitions nor slices of rows end with a block."""
DIVIDED = [
    (1, (0, 2), {}),
    (2, (0, 1, 2, 3), {}),
    (2, (1, 3), OFFLOAD),
    (2, (0, 1, 3), {"parallel.tensor": 2}),
    (4, (1, 3), {"parallel.tensor": 2}),
    (2, (0,), {"parallel.backend": "accelerate", "parallel.accelerate": "ddp"}),
    (2, (3,), {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2"}),
    (4, (0, 1, 3), {"parallel.expert": 2, "model": {"architecture": "mixtral", "config": CONFIGS["mixtral"]}}),
    (2, (2, 3), {"model": {"architecture": "gpt2", "config": GPT2}}),
    (2, (3,), {"model.adapter": {"rank": 4}, "parallel.tensor": 2}),
]


@pytest.mark.parametrize(
    ("ranks", "stages", "fields"),
    [
        pytest.param(2, (1,), {}, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.breadth) for case in DIVIDED),
    ],
    ids=str,
)
def test_moments_in_8_bit_take_a_byte_each_and_scales(ranks, stages, fields):
    check(ranks, plans(ranks, stages, ("fp32", "bf16"), (2,), ("adamw_8bit",), **EIGHT_BIT, **fields))


@pytest.mark.breadth
def test_tensor_and_sequence_ranks_use_the_predicted_memory():
    chosen = [
        plan
        for degree in ("parallel.tensor", "parallel.sequence")
        for fields in ({}, UNTIED)
        for plan in plans(2, (0, 1, 2, 3), ("fp32", "bf16"), **{degree: 2}, **fields)
    ]
    check(2, chosen)


@pytest.mark.slow
def test_another_head_uses_the_predicted_memory():
    of_tensor = [plan for stage in (1, 3) for plan in plans(2, (stage,), ("fp32",), **TENSOR, **CLASSIFIER)]
    check(2, plans(2, (0, 2, 3), ("fp32",), **CLASSIFIER) + of_tensor)
    check_stages(2, plans(2, (1,), ("fp32",), **TWO_STAGES, **CLASSIFIER))


@pytest.mark.breadth
@pytest.mark.parametrize(("family", "ranks", "expert"), [("mixtral", 2, 2), ("qwen3_moe", 4, 2), ("mixtral", 4, 4)])
def test_expert_ranks_use_the_predicted_memory(family, ranks, expert):
    experts = {"parallel.expert": expert, **_model(family)}
    check(ranks, plans(ranks, (0, 1, 2, 3), ("fp32", "bf16"), **experts))


@pytest.mark.breadth
def test_expert_ranks_that_share_attention_use_the_predicted_memory():
    for family in ("mixtral", "qwen3_moe"):
        both = {"parallel.expert": 2, "parallel.tensor": 2, **_model(family)}
        check(4, plans(4, (0, 1, 2, 3), ("fp32", "bf16"), **both))


def _model(family: str) -> dict[str, object]:
    """Its head norms larger than `SCALARS`."""
    wide = {"head_dim": 32} if "head_dim" in CONFIGS[family] else {}
    return {"model": {"architecture": family, "config": CONFIGS[family] | wide}}


def check_stages(ranks: int, chosen: list[Plan], measured_by=None) -> None:
    """As `check`, of every stage, before the update."""
    by_rank = run_ranks(ranks, measured_by or _measure, chosen, timeout=580)
    for index, plan in enumerate(chosen):
        stages = plan.parallel.pipeline
        for stage in range(stages):
            own = range(stage * ranks // stages, (stage + 1) * ranks // stages)
            name = (stage, str(plan.layout()), plan.recipe.parallel.precision)
            assert max(by_rank[rank][index][1] for rank in own) == before_update(plan, stage), name
        assert {one[index][0] for one in by_rank} == {0}, f"{plan.layout()} keeps results of its passes"


def before_update(plan: Plan, stage: int) -> int:
    """What a rank of a pipeline holds then: gradients are reduced, and buckets given back."""
    state = state_of(plan, plan.model.weights, stage)
    flat = 0  # which the update makes first
    is_offloaded = plan.recipe.parallel.offload_optimizer != "none"
    if plan.parallel.zero_stage == 1 and sum_bytes(plan) == weight_bytes(plan) and not is_offloaded:
        flat = 4 * max(group.partition for group in optimizer_groups(plan, plan.model.weights, stage))
    return state.update.total + state.host - flat


OFFLOADED = {"parallel.offload_optimizer": "cpu"}
FSDP2 = {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2"}
CHUNKED = {"kernels.loss": "chunked"}
TWO_STAGES = {"parallel.pipeline": 2, "optim.clip_grad_norm": 0.0}  # ZeRO-0 would clip by the first stage's norm


@pytest.mark.breadth
def test_stages_of_two_replicas_use_the_predicted_memory():
    check_stages(4, plans(4, (0, 1), ("fp32",), **TWO_STAGES, **UNTIED))


@pytest.mark.slow
def test_stages_keep_no_logits_of_a_loss_in_chunks():
    check_stages(2, plans(2, (1,), ("fp32", "bf16"), **TWO_STAGES, **CHUNKED))


@pytest.mark.breadth
@pytest.mark.parametrize(("ranks", "fields"), [(2, UNTIED), (4, {}), (2, {"optim.name": "sgd"})], ids=str)
def test_stages_use_the_predicted_memory(ranks, fields):
    check_stages(ranks, plans(ranks, (0, 1), ("fp32", "bf16", "autocast_bf16"), **TWO_STAGES, **fields))


@pytest.mark.breadth
@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_whose_states_are_offloaded_use_the_predicted_memory(ranks):
    """Untied: gradients of a tied copy that wait on the host would not be summed (`pipeline.tied_accumulation`)."""
    check_stages(ranks, plans(ranks, (1,), ("fp32", "bf16"), **TWO_STAGES, **UNTIED, **OFFLOADED))


@pytest.mark.breadth
@pytest.mark.parametrize("fields", [{}, UNTIED], ids=str)
@pytest.mark.parametrize("degree", ["parallel.tensor", "parallel.sequence"])
def test_stages_with_tensor_parallel_ranks_use_the_predicted_memory(degree, fields):
    check_stages(4, plans(4, (0, 1), ("fp32", "bf16"), **TWO_STAGES, **{degree: 2}, **fields))


@pytest.mark.breadth
@pytest.mark.parametrize("ranks", [1, 2])
def test_distributed_data_parallel_uses_the_predicted_memory(ranks):
    backend = {"parallel.backend": "accelerate", "parallel.accelerate": "ddp"}
    check(ranks, plans(ranks, (0,), ("fp32", "autocast_bf16"), (1, 2), **backend))


@pytest.mark.breadth
@pytest.mark.parametrize("ranks", [1, 2])
def test_fsdp2_uses_the_predicted_memory(ranks):
    check(ranks, plans(ranks, (2, 3), ("fp32", "bf16", "autocast_bf16"), (1, 2), **FSDP2))


def _at_the_start(rank: int, plan: Plan) -> tuple[int, int]:
    """Bytes while FSDP2 shards, and before the update."""
    from torch.distributed import fsdp

    shard, before, seen = fsdp.fully_shard, set(live_storages()), []

    def watched(*arguments, **options):
        made = shard(*arguments, **options)
        seen.append(live_bytes(before))
        return made

    fsdp.fully_shard = watched
    held = measure(rank, plan)[1]
    return max(seen), held


@pytest.mark.breadth
def test_fsdp2_holds_the_whole_model_while_it_is_sharded():
    """257 rows over two ranks: 129 on the first."""
    (plan,) = plans(2, (3,), ("bf16",), (1,), **FSDP2, **{"model.config.vocab_size": 257})
    by_rank = run_ranks(2, _at_the_start, plan)
    assert by_rank[0] == (state_of(plan, plan.model.weights, 0).start.total, predicted(plan)[1])


LORA = {"model.adapter": {"rank": 4}}
TUNED = {
    "lora": LORA,
    "dora": {"model.adapter": {"rank": 4, "dora": True, "targets": ["q_proj", "down_proj"]}},
    "saved": {"model.adapter": {"rank": 4, "modules_to_save": ["lm_head", "norm"]}, **UNTIED},
    "by name": {"model.trainable": ["*.1.mlp.*", "*norm.weight"]},
}


def tuned_plans(ranks: int, stages, precisions, **fields) -> list[Plan]:
    """ZeRO-3 refuses DoRA."""
    found = []
    for name in ["lora"] if len(stages) == 1 else TUNED:
        legal = [stage for stage in stages if name != "dora" or stage < 3]
        found += plans(ranks, legal, precisions, **TUNED[name], **fields)
    return found


@pytest.mark.parametrize(
    ("ranks", "stages", "precisions"),
    [
        pytest.param(2, (2,), ("bf16",), marks=pytest.mark.breadth),
        pytest.param(2, (3,), ("fp32",), marks=pytest.mark.slow),
        pytest.param(1, (0, 1, 2, 3), ("fp32", "bf16"), marks=pytest.mark.breadth),
        pytest.param(2, (0, 1, 2, 3), ("fp32", "bf16"), marks=pytest.mark.breadth),
    ],
)
def test_frozen_parameters_have_neither_gradients_nor_states(ranks, stages, precisions):
    check(ranks, tuned_plans(ranks, stages, precisions))


@pytest.mark.parametrize(
    ("stages", "precisions", "fields"),
    [
        pytest.param((2,), ("bf16",), {}, marks=pytest.mark.slow),
        pytest.param((0, 1, 2), ("fp32", "bf16"), {}, marks=pytest.mark.breadth),
        pytest.param((1,), ("bf16",), {"parallel.pipeline": 2}, marks=pytest.mark.breadth),
    ],
)
def test_4_bit_weights_take_their_packed_size(stages, precisions, fields, tmp_path):
    build_model(tiny_recipe(**UNTIED), torch.float32, torch.device("cpu")).save_pretrained(tmp_path)
    model = {"model.architecture": None, "model.config": {}, "model.pretrained": str(tmp_path)}
    chosen = plans(2, stages, precisions, **model, **LORA, **{"model.quantize": "nf4"}, **fields)
    (check_stages if "parallel.pipeline" in fields else check)(2, chosen, _measure_packed)


def _measure_packed(rank: int, chosen: list[Plan]) -> list[tuple[int, int]]:
    """Packed weights are integers in buffers, which `measure` leaves out."""
    found = []
    for plan in chosen:
        first, last = measure(rank, plan)
        layers = [one for one in engine_of(plan).model.modules() if isinstance(one, Nf4Linear)]
        packed = sum({one.data_ptr(): one.nbytes for layer in layers for one in layer.buffers()}.values())
        # For a pipeline, the first number is the memory that its passes keep, see `measure`.
        found.append((first + (packed if plan.parallel.pipeline == 1 else 0), last + packed))
    return found
