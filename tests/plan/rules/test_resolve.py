"""A recipe on a cluster becomes a plan, or is refused with all faults at once and a fix for each."""

import random

import pytest

from llmtrain.errors import RecipeError
from llmtrain.plan.axes import model_parallel_size
from llmtrain.plan.described import kernel_lines
from llmtrain.plan.draft import Draft
from llmtrain.plan.facts.model_facts import MAX_LAYERS
from llmtrain.plan.installed import check_runnable
from llmtrain.plan.rules import RULES, broken, resolve
from llmtrain.plan.schedules import UNITS, PipelineSchedule
from llmtrain.recipe import parse_assignments
from llmtrain.recipe.cluster import Cluster

GPUS = Cluster(nodes=2, devices_per_node=4, device="h100")


def refusals(recipe, cluster=GPUS, **fields) -> dict[str, object]:
    """Rule → problem of a refused variant."""
    with pytest.raises(RecipeError) as error:
        resolve(recipe.with_(**fields), cluster)
    return {problem.rule: problem for problem in error.value.problems}


def notes(recipe, cluster=GPUS, **fields) -> set[str]:
    return {note["rule"] for note in resolve(recipe.with_(**fields), cluster).notes}


def test_the_plan_of_the_tiny_recipe_is_complete(tiny):
    plan = resolve(tiny, Cluster(devices_per_node=2))
    assert plan.layout() == {"dp": 2, "pp": 1, "tp": 1, "sp": 1, "ep": 1, "zero_stage": 0}
    assert plan.batch.gradient_accumulation_steps == 1
    assert plan.batch.tokens_per_step == 16 * 256
    assert plan.model.parameters == 2_410_176
    assert plan.notes == ()


def test_the_batch_triangle_holds_or_is_refused(tiny):
    draw, held = random.Random(0), 0
    for _ in range(200):
        total, micro, devices = draw.randint(1, 64), draw.randint(1, 8), draw.randint(1, 8)
        fields = {"batch.global_batch_size": total, "batch.micro_batch_size": micro}
        try:
            plan = resolve(tiny.with_(**fields), Cluster(devices_per_node=devices))
        except RecipeError as error:
            assert total % (micro * devices)
            (problem,) = error.problems
            assert f"{total} = {micro} × " in problem.message
            for fix in problem.fix.split(", or "):  # each one pasted is a legal plan
                fixed = tiny.with_(**fields).with_(**parse_assignments([fix.removeprefix("--set ")]))
                resolve(fixed, Cluster(devices_per_node=devices))
        else:
            held += 1
            assert total == micro * plan.batch.gradient_accumulation_steps * plan.data_parallel_size
    assert 10 < held < 190


def test_batch_remainder_names_the_nearest(tiny):
    problem = refusals(tiny, **{"batch.global_batch_size": 100})["batch.divides"]
    assert problem.field == "batch.global_batch_size"
    assert "100 = 8 × 1.5625 × 8; nearest global batch sizes: 64 or 128" in problem.message
    assert problem.fix == "--set batch.global_batch_size=128"
    problem = refusals(tiny, **{"batch.global_batch_size": 96})["batch.divides"]
    assert "or at 96, micro batch sizes: 6 or 12" in problem.message


def test_all_faults_are_reported_at_once(tiny):
    found = refusals(
        tiny,
        **{
            "model.config.hiden_size": 3,
            "batch.global_batch_size": 100,
            "parallel.precision": "bf16",
            "parallel.grad_accum_dtype": "fp16",
            "parallel.offload_param": "nvme",
        },
    )
    assert set(found) == {
        "model.config_key",
        "batch.divides",
        "precision.stage0",
        "precision.grad_accum",
        "zero.offload_param_stage",
        "zero.nvme_path",
    }


def test_degrees_must_divide_the_devices(tiny):
    problem = refusals(tiny, **{"parallel.pipeline": 3})["layout.world"]
    assert "3 × 1 × 1 = 3 does not divide 2 × 4 = 8 devices" in problem.message
    assert problem.fix == "use a multiple of 3 devices, or --set parallel.pipeline=2"
    assert "layout.world" in refusals(tiny, Cluster(), **{"parallel.zero_stage": 1, "parallel.pipeline": 2})


# One legal recipe per kind of parallelism; each refused case changes it in one place.
PIPELINE = {"parallel.pipeline": 4, "parallel.zero_stage": 1}
TENSOR = {"parallel.tensor": 3, "batch.global_batch_size": 16, "model.config.intermediate_size": 384}
SEQUENCE = {"parallel.sequence": 2, "model.config.num_key_value_heads": 2}
RING = {
    **{**SEQUENCE, "parallel.sequence": 4, "model.attention": "varlen"},
    **{"parallel.precision": "bf16", "parallel.zero_stage": 1},
}
"""The ranks do not divide the heads."""
EVEN_HEADS = {"model.config.num_attention_heads": 8, "model.config.num_key_value_heads": 4, "parallel.tensor": 2}
MOE = {
    "model.architecture": "mixtral",
    "model.config.num_local_experts": 4,
    "model.config.tie_word_embeddings": False,
    "parallel.expert": 4,
    "batch.global_batch_size": 64,
}
LEGAL = [
    (PIPELINE, GPUS),
    (TENSOR, Cluster(devices_per_node=3, device="h100")),
    ({**TENSOR, **PIPELINE, "model.config.intermediate_size": 384}, Cluster(devices_per_node=12, device="h100")),
    (EVEN_HEADS, GPUS),
    (SEQUENCE, GPUS),
    (RING, GPUS),
    ({**RING, "parallel.sequence_ring": 4}, GPUS),
    ({**SEQUENCE, "model.config.num_key_value_heads": 3, "model.attention": "eager"}, GPUS),
    (
        {"model.attention": "varlen", "parallel.precision": "bf16", "parallel.zero_stage": 1}
        | {"model.config.head_dim": 256},
        GPUS,
    ),
    (MOE, GPUS),
    ({**MOE, "parallel.zero_stage": 3, "parallel.sequence": 2}, GPUS),
    ({**MOE, **EVEN_HEADS, "parallel.expert": 2}, GPUS),
    ({**MOE, **EVEN_HEADS, "parallel.sequence": 2}, GPUS),
    ({**MOE, **EVEN_HEADS, "parallel.expert": 2}, Cluster(devices_per_node=2, device="h100")),
    ({"parallel.zero_stage": 3, "parallel.offload_optimizer": "nvme", "parallel.nvme_path": "/nvme"}, GPUS),
    ({"parallel.zero_stage": 3, "parallel.offload_param": "cpu", "parallel.precision": "fp16"}, GPUS),
]
REFUSED = [
    ("layout.tensor_divides", {"parallel.tensor": 4}),
    ("tensor.family", {**PIPELINE, "parallel.tensor": 2, "model.architecture": "mamba", "model.config": {}}),
    ("tensor.family", {"parallel.tensor": 2, "model.architecture": "cpmant", "model.config": {}}),
    ("layout.sequence_divides", {**SEQUENCE, "parallel.sequence": 4, "parallel.sequence_ring": 1}),
    ("layout.sequence_ring", {**RING, "parallel.sequence_ring": 3}),
    ("layout.sequence_ring", {**RING, "data.sequence_length": 252, "parallel.sequence_ring": 4}),
    ("layout.sequence_ring", {**RING, "model.attention": "sdpa"}),
    (
        "recompute.selective",
        {**RING, "kernels.blocks": "compiled", "parallel.activation_checkpointing": "selective"},
    ),
    (
        "layout.sequence_ring",
        {**RING, "model.architecture": "qwen3_5_text", "model.config": {}, "parallel.sequence_ring": 2},
    ),
    ("layout.sequence_ring", {"parallel.sequence_ring": 2}),
    ("layout.sequence_divides", {**SEQUENCE, "data.sequence_length": 255}),
    ("layout.expert", {"parallel.expert": 2}),
    ("layout.expert_divides", {**MOE, "parallel.expert": 3}),
    ("layout.expert_divides", {**MOE, "model.config.num_local_experts": 6}),
    ("pipeline.zero_stage", {**PIPELINE, "parallel.zero_stage": 2}),
    ("pipeline.zero_stage", {**PIPELINE, "parallel.zero_stage": 0}),
    ("pipeline.layers", {**PIPELINE, "parallel.pipeline": 8}),
    ("tensor.divides", {**EVEN_HEADS, "model.config.intermediate_size": 385}),
    ("model.experts_aligned", {**MOE, "model.config.intermediate_size": 385}),
    (
        "pipeline.tied_accumulation",
        {**PIPELINE, "parallel.precision": "bf16", "parallel.offload_optimizer": "cpu"},
    ),
    ("zero.nvme_path", {"parallel.nvme_path": "/nvme"}),
    ("model.attention_precision", {"model.attention": "flash_attention_2"}),
    ("model.attention_precision", {"model.attention": "varlen"}),
    (
        "model.attention_heads",
        {"model.attention": "varlen", "parallel.precision": "bf16", "model.config.head_dim": 512},
    ),
    (
        "model.attention_heads",
        {"model.attention": "flash_attention_2", "parallel.precision": "bf16", "model.config.head_dim": 264},
    ),
    ("model.vocabulary", {"model.config.vocab_size": 100}),
    ("model.pretrained_tokenizer", {"model.architecture": None, "model.pretrained": "/nowhere"}),
]


@pytest.mark.parametrize(("fields", "cluster"), LEGAL)
def test_legal_layouts_are_resolved(tiny, fields, cluster):
    plan = resolve(tiny.with_(**{"batch.global_batch_size": 64, **fields}), cluster)
    assert plan.data_parallel_size * model_parallel_size(plan.parallel) == cluster.world_size


def test_groups_across_nodes_are_reported_with_their_links(tiny):
    recipe = tiny.with_(**EVEN_HEADS, **{"batch.global_batch_size": 64})
    for device, told in (
        ("h100", "50 GB/s between nodes, but 450 GB/s within a node (9 times that)"),
        ("cpu", "the network"),
    ):
        (note,) = resolve(recipe, Cluster(nodes=4, devices_per_node=1, device=device)).notes
        assert note["rule"] == "layout.tensor_node"
        assert told in note["message"]


@pytest.mark.parametrize(("rule", "fields"), REFUSED)
def test_illegal_layouts_are_refused_with_a_fix(tiny, rule, fields):
    found = refusals(tiny, **{"batch.global_batch_size": 64, **fields})
    assert rule in found
    assert found[rule].fix


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_kernels_of_gpus_are_refused_on_a_cpu(tiny, attention):
    problem = refusals(tiny, Cluster(), **{"model.attention": attention})["model.attention_device"]
    for fix in problem.fix.split(", or "):
        resolve(tiny.with_(**parse_assignments([fix.removeprefix("--set ")])), Cluster())


@pytest.mark.parametrize("precision", ["bf16", "autocast_bf16"])
@pytest.mark.parametrize("attention", ["varlen", "flash_attention_2", "flex_attention"])
def test_several_rows_of_documents_need_no_mask(tiny, attention, precision):
    fields = {"model.attention": attention, "parallel.precision": precision, "parallel.zero_stage": 1}
    assert resolve(tiny.with_(**fields, **{"batch.global_batch_size": 64}), GPUS).batch.micro_batch_size > 1


def test_a_missing_kernel_is_named(tiny):
    """Where none of its packages is there, as here."""
    fields = {"model.attention": "flash_attention_3", "parallel.precision": "bf16", "parallel.zero_stage": 1}
    plan = resolve(tiny.with_(**fields, **{"batch.global_batch_size": 64}), GPUS)
    with pytest.raises(RecipeError, match=r"(?s)not installed: flash_attn_interface or kernels.*attention=varlen"):
        check_runnable(plan)


def test_a_pipeline_without_clipping_may_use_zero_0(tiny):
    resolve(tiny.with_(**{**PIPELINE, "parallel.zero_stage": 0, "optim.clip_grad_norm": 0.0}), GPUS)


def test_bf16_pipelines_support_tied_weights(tiny):
    resolve(tiny.with_(**{**PIPELINE, "parallel.precision": "bf16"}), GPUS)


def test_learned_positions_limit_the_sequence_and_rotary_ones_do_not(tiny):
    gpt2 = {"model.architecture": "gpt2", "data.sequence_length": 2048}
    gpt2 |= {"model.config": {"n_embd": 192, "n_layer": 2, "n_head": 6}, "batch.global_batch_size": 64}
    assert "model.positions" in refusals(tiny, **gpt2)
    resolve(tiny.with_(**{**gpt2, "data.sequence_length": 1024}), GPUS)
    for architecture in ("opt", "gptj", "mpt"):  # a learned table, which has more rows, and two computed ones
        field = "max_seq_len" if architecture == "mpt" else "max_position_embeddings"
        short = {"model.architecture": architecture, "model.config": {field: 128}}
        assert "model.positions" in refusals(tiny, **short, **{"data.sequence_length": 160})
        assert "model.positions" not in refusals(tiny, **short, **{"data.sequence_length": 128})
    assert notes(tiny, **{"data.sequence_length": 512, "batch.global_batch_size": 64}) == {"model.rotary_length"}


def test_encoders_are_refused_unless_they_are_decoders(tiny):
    bert = tiny.with_(**{"model.architecture": "bert", "model.config": {"hidden_size": 48, "num_hidden_layers": 2}})
    assert "model.causal" in refusals(bert)
    assert "model.causal" not in refusals(bert, **{"model.config.is_decoder": True})


def test_notes_do_not_refuse(tiny):
    assert "pipeline.bubble" in notes(tiny, **PIPELINE)
    assert "layout.tensor_node" in notes(
        tiny, Cluster(nodes=3, devices_per_node=4), **TENSOR | {"batch.global_batch_size": 64}
    )


@pytest.mark.parametrize("total", [8, 16, 30, 64, 96, 210])
@pytest.mark.parametrize("stages", [2, 4])
def test_the_note_about_the_bubble_suggests_changes(tiny, total, stages):
    cluster = Cluster(devices_per_node=stages)
    fields = {"parallel.pipeline": stages, "parallel.zero_stage": 1, "batch.global_batch_size": total}
    recipe = tiny.with_(**fields, **{"batch.micro_batch_size": total})
    (note,) = resolve(recipe, cluster).notes
    assert note["rule"] == "pipeline.bubble"
    idle = f"({stages} − 1) / (1 + {stages} − 1) = {(stages - 1) / stages:.0%}"
    assert note["message"].startswith(
        f"1 micro-batch per step in {stages} stages: each device idles {idle} of the time"
    )
    told = [word for word in note["fix"].replace(",", "").split() if "=" in word]
    better = recipe.with_(**parse_assignments(told))
    assert resolve(better, cluster).notes == ()
    # No more micro-batches than it takes: the next larger ones would idle too long.
    size = better.batch.micro_batch_size
    larger = next((other for other in range(size + 1, total + 1) if better.batch.global_batch_size % other == 0), None)
    assert larger is None or resolve(better.with_(**{"batch.micro_batch_size": larger}), cluster).notes


def test_the_note_about_the_bubble_suggests_what_interleaved_stages_accept(tiny):
    fields = {"parallel.pipeline": 4, "parallel.pipeline_chunks": 2, "parallel.pipeline_schedule": "interleaved"}
    fields |= {"parallel.zero_stage": 1, "model.config.num_hidden_layers": 8}
    recipe = tiny.with_(**fields, **{"batch.global_batch_size": 56, "batch.micro_batch_size": 14})
    (note,) = resolve(recipe, Cluster(devices_per_node=4)).notes
    assert note["fix"] == "--set batch.micro_batch_size=2 gives 28 micro-batches"  # 14 are no multiple of 4
    resolve(recipe.with_(**{"batch.micro_batch_size": 2}), Cluster(devices_per_node=4))


def test_rule_ids_are_unique():
    ids = [rule.id for rule in RULES]
    assert len(set(ids)) == len(ids)


def test_absurd_sizes_neither_overflow_nor_hang(tiny):
    huge = {"model.config.hidden_size": 2 * 10**9 - 2, "model.config.num_hidden_layers": MAX_LAYERS}
    plan = resolve(tiny.with_(**huge), Cluster())
    assert plan.model.parameters > 10**22
    problem = refusals(tiny, Cluster(nodes=10**6, devices_per_node=7))["batch.divides"]
    assert "7000000" in problem.message


def test_a_draft_with_an_invalid_model_is_still_checked(tiny):
    assert broken(Draft(tiny, Cluster(), None)) == ([], [])


def test_an_attention_that_the_recipe_names_is_shown(tiny):
    assert kernel_lines(resolve(tiny, Cluster())) == []
    assert kernel_lines(resolve(tiny.with_(**{"model.attention": "varlen"}), Cluster())) == [
        "kernels  attention varlen"
    ]


CHUNKED = {"parallel.pipeline": 2, "parallel.zero_stage": 1, "batch.micro_batch_size": 1}


@pytest.mark.parametrize(
    ("fields", "rule", "field"),
    [
        ({"pipeline_chunks": 2}, "pipeline.chunks", "parallel.pipeline_chunks"),
        ({"pipeline_schedule": "interleaved"}, "pipeline.chunks", "parallel.pipeline_chunks"),
        ({"pipeline_schedule": "zero_bubble", "pipeline_chunks": 3}, "pipeline.chunks", "parallel.pipeline_chunks"),
        ({"pipeline": 1, "pipeline_schedule": "zero_bubble"}, "pipeline.chunks", "parallel.pipeline_schedule"),
        ({"pipeline_schedule": "interleaved", "pipeline_chunks": 8}, "pipeline.layers", "parallel.pipeline_chunks"),
    ],
)
def test_a_schedule_has_its_own_number_of_stages(tiny, fields, rule, field):
    given = {f"parallel.{name}": value for name, value in fields.items()}
    assert refusals(tiny, Cluster(devices_per_node=2), **{**CHUNKED, **given})[rule].field == field


def test_interleaved_stages_require_a_multiple_of_micro_batches(tiny):
    fields = CHUNKED | {"parallel.pipeline_schedule": "interleaved", "parallel.pipeline_chunks": 2}
    odd = refusals(tiny, Cluster(devices_per_node=2), **fields, **{"batch.global_batch_size": 5})
    assert "5 micro-batches" in odd["pipeline.interleaved"].message
    with pytest.raises(AssertionError, match="waits for itself"):
        list(PipelineSchedule("interleaved", 4, 3).slots(5, UNITS))
    resolve(tiny.with_(**fields, **{"batch.global_batch_size": 6}), Cluster(devices_per_node=2))


def test_compiled_layers_cannot_delay_gradients(tiny):
    fields = CHUNKED | {"parallel.pipeline_schedule": "zero_bubble", "parallel.pipeline_chunks": 2}
    compiled = refusals(tiny, Cluster(devices_per_node=2), **fields, **{"kernels.blocks": "compiled"})
    assert compiled["pipeline.compiled"].field == "kernels.blocks"


def test_a_ring_that_does_not_divide_the_ranks_is_the_only_problem(tiny):
    heads = {"model.config.num_attention_heads": 2, "model.config.num_key_value_heads": 2}
    recipe = tiny.with_(**{**RING, **heads, "parallel.sequence_ring": 3})
    with pytest.raises(RecipeError) as caught:
        resolve(recipe, Cluster(devices_per_node=4, device="h100"))
    assert [problem.rule for problem in caught.value.problems] == ["layout.sequence_ring"]
