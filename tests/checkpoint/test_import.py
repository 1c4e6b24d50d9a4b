"""A run that another program began continues here with the losses with which that program goes on."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp
from torch.nn.functional import pad

from llmtrain.checkpoint.check import verify_checkpoint
from llmtrain.checkpoint.contents import read_state
from llmtrain.checkpoint.foreign.exported import export_state
from llmtrain.checkpoint.foreign.imported import import_checkpoint
from llmtrain.checkpoint.foreign.pickles import StoredTensor, read_pickle, read_torch
from llmtrain.checkpoint.state import load
from llmtrain.engines.state.save_load import CheckpointReader
from llmtrain.errors import CheckpointError, RecipeError
from llmtrain.plan.load import load_recipe
from llmtrain.run_dir import RunDir
from tests.helpers import foreign_runs
from tests.helpers.batches import MIXTRAL
from tests.helpers.commands import llmtrain, metrics
from tests.helpers.foreign_runs import (
    NEXT,
    SAVED,
    adamw_of,
    batch_of,
    foreign_recipe,
    groups_of,
    loss_of,
    model_of,
    rows,
)
from tests.helpers.harness import run_ranks
from tests.helpers.megatron_runs import KINDS
from tests.helpers.traces import engine_of, plan_of

CLOSE = 1e-6
"""Relative, of a loss in fp32: rounding of sums in another order over 25 steps, as between the plans of `test_elastic`.
Without the moments of a single weight, the second loss differs by more than that."""
LAYERS = {"model.trainable": ["model.layers.*"]}
UNTIED = {"model.config.tie_word_embeddings": False}
PLANS: list[dict[str, Any]] = [
    {"zero_stage": 3},
    {"pipeline": 2, "zero_stage": 1},
    {"tensor": 2},
    {"backend": "accelerate", "accelerate": "fsdp2", "zero_stage": 3},
    {"zero_stage": 2},
]
"""Plans of two ranks."""
RUNS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    **{f"zero{stage}": ("deepspeed_run", (stage, 2), {}) for stage in (0, 2)},
    **{f"zero{stage}-frozen": ("deepspeed_run", (stage, 2, "frozen"), LAYERS) for stage in (1, 3)},
    "pipeline": ("pipeline_run", (2, 2, 1, False), UNTIED),
    "pipeline-tied": ("pipeline_run", (2, 2, 1, True), {}),
    "fsdp2": ("fsdp2_run", (2, "nested"), {}),
    "fsdp2-flat": ("fsdp2_run", (2, "flat"), {}),
    "accelerate": ("accelerate_run", (2,), {}),
    "accelerate-fsdp2": ("accelerate_run", (2, True), {}),
}
"""Runs of two ranks: function of `foreign_runs`, its arguments, and fields of the recipe here."""


def _run_each(rank: int, folder: Path) -> dict[str, list[float]]:
    return {
        name: getattr(foreign_runs, function)(rank, folder / name, *arguments)
        for name, (function, arguments, _) in RUNS.items()
    }


def _go_on_each(rank: int, todo: dict[str, tuple[Path, dict, dict]]) -> dict[str, list[float]]:
    found = {}
    for name, (checkpoint, layout, fields) in todo.items():
        parallel = {f"parallel.{key}": value for key, value in layout.items()}
        plan = plan_of(foreign_recipe(**parallel, **fields), 2)
        engine = engine_of(plan)
        step = load(checkpoint, engine, plan, "key").step
        shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
        place = (engine.data_parallel_rank, plan.data_parallel_size)
        batches = [batch_of(step + number, *shape, *place) for number in range(NEXT)]
        found[name] = [engine.train_step(batch).loss.item() for batch in batches]
        engine.close()
    return found


def _compare(theirs: dict[str, list[float]], folders: dict[str, Path], tmp_path: Path, fields: dict[str, dict]) -> None:
    """Imports each folder, continues it under one of the plans, and compares the losses."""
    todo = {}
    for number, (name, folder) in enumerate(folders.items()):
        plan = plan_of(foreign_recipe(**fields.get(name, {})), 1)
        done = import_checkpoint(folder, plan, RunDir(tmp_path / "runs" / name), samples=SAVED * 8)
        assert (done.step, done.different) == (SAVED, []), name
        verify_checkpoint(done.checkpoint)
        todo[name] = (done.checkpoint, PLANS[number % len(PLANS)], fields.get(name, {}))
    for found in run_ranks(2, _go_on_each, todo):
        for name, losses in found.items():
            assert losses == pytest.approx(theirs[name], rel=CLOSE), (name, todo[name][1])


@pytest.mark.slow
def test_runs_of_other_programs_continue_under_other_plans(tmp_path):
    theirs = run_ranks(2, _run_each, tmp_path)[0]
    _compare(theirs, {name: tmp_path / name for name in RUNS}, tmp_path, {name: run[2] for name, run in RUNS.items()})


def _load_each(rank: int, folder: Path) -> dict[str, list[float]]:
    return {
        **{
            f"stage {stage}": foreign_runs.deepspeed_run(rank, folder / "universal", stage, 2, "goes on")
            for stage in (1, 3)
        },
        "fsdp2": foreign_runs.fsdp2_run(rank, folder / "dcp", 2, "loaded"),
    }


@pytest.mark.slow
def test_other_programs_continue_from_an_export(tmp_path):
    begun = tmp_path / "begun"
    theirs = run_ranks(2, foreign_runs.deepspeed_run, begun, 3, 2)[0]
    done = _imported(begun, tmp_path)
    converter = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers=1"]
    converted = tmp_path / "converted"
    places = [f"--input_folder={begun / f'global_step{SAVED}'}", f"--output_folder={converted}"]
    subprocess.run([*converter, "--num_merge_workers=1", *places], check=True, capture_output=True, timeout=300)
    again = import_checkpoint(converted, plan_of(foreign_recipe(), 1), RunDir(tmp_path / "again"))
    _assert_same_state(done.checkpoint, again.checkpoint)
    export_state(done.checkpoint, tmp_path / "universal", "deepspeed-universal")
    export_state(done.checkpoint, tmp_path / "dcp", "dcp")
    for name, losses in run_ranks(2, _load_each, tmp_path)[0].items():
        assert losses == pytest.approx(theirs, rel=CLOSE), name


@pytest.mark.slow
def test_runs_of_the_trainer_continue(tmp_path):
    theirs, folders = {}, {}
    for how, ranks in (("plain", 1), ("deepspeed3", 2)):
        theirs[how] = run_ranks(ranks, foreign_runs.trainer_run, tmp_path / how, ranks, how)[0]
        folders[how] = tmp_path / how / f"checkpoint-{SAVED}"
    _compare(theirs, folders, tmp_path, {})


@pytest.mark.slow
def test_weights_of_bf16_without_zero_are_the_fp32_ones(tmp_path):
    run_ranks(2, foreign_runs.deepspeed_run, tmp_path, 0, 2, "bf16")
    reader = CheckpointReader(_imported(tmp_path, tmp_path).checkpoint)
    saved = torch.load(tmp_path / f"global_step{SAVED}" / "mp_rank_00_model_states.pt")["optimizer"]
    groups = groups_of(model := model_of(foreign_recipe()), 0.1)
    names = {weight: name for name, weight in model.named_parameters()}
    number = 0
    for group, masters in zip(groups, saved["fp32_groups"], strict=True):
        for weight, master in zip(group["params"], masters, strict=True):
            assert master.dtype == torch.float32
            assert torch.equal(reader.whole(names[weight]), master.flatten())
            states = saved["optimizer_state_dict"]["state"][number]
            assert torch.equal(reader.whole(names[weight], "exp_avg_sq"), states["exp_avg_sq"].flatten())
            number += 1


@pytest.mark.breadth
@pytest.mark.skipif("OLD_DEEPSPEED" not in os.environ, reason="OLD_DEEPSPEED names no folder of versions")
@pytest.mark.parametrize("stage", range(4))
def test_checkpoints_of_old_versions_of_deepspeed_continue(stage, tmp_path):
    """`pip install --no-deps --target $OLD_DEEPSPEED/0.14.5 deepspeed==0.14.5` and others, with DS_BUILD_OPS=0."""
    theirs, folders = {}, {}
    for version in sorted(Path(os.environ["OLD_DEEPSPEED"]).iterdir()):
        if not (version / "deepspeed").is_dir():
            continue
        folder = folders[version.name] = tmp_path / version.name
        folder.mkdir()
        env = {**os.environ, "PYTHONPATH": f"{version}:{Path(__file__).parents[2]}", "LOCAL_SIZE": "2"}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        arguments = ["-m", "tests.helpers.foreign_runs", "deepspeed_run", str(folder), str(stage), "2"]
        subprocess.run([*torchrun, *arguments], env=env, check=True, capture_output=True, timeout=400)
        theirs[version.name] = json.loads((folder / "losses.json").read_text())
    _compare(theirs, folders, tmp_path, {})


MEGATRON = {
    "reshardable": ("llama", 2, 1, "fully_reshardable", "stacked"),
    "flat": ("llama", 2, 1, "fully_sharded_model_space", "stacked"),
    "single": ("qwen3", 1, 2, "adam", "single"),
    "experts": ("mixtral", 1, 1, "adam", "stacked"),  # which two ranks divide
    "gpt2": ("gpt2", 2, 1, "adam", "stacked"),
}
"""Runs of `megatron_runs`: kind of model, ranks of a tensor, stages, form of the optimizer's states and of layers."""


@pytest.mark.breadth
@pytest.mark.skipif("MEGATRON" not in os.environ, reason="MEGATRON names no folder of versions")
@pytest.mark.parametrize("case", MEGATRON)
def test_runs_of_megatron_continue(case, tmp_path):
    """`pip install --no-deps --target $MEGATRON/0.16.1 megatron-core==0.16.1` and others, such as 0.13.1."""
    theirs, folders = {}, {}
    kind, *options = MEGATRON[case]
    for version in sorted(Path(os.environ["MEGATRON"]).iterdir()):
        is_old = tuple(map(int, version.name.split("."))) < (0, 14)
        if (case == "flat") != is_old and case in ("flat", "single", "reshardable"):
            continue  # forms that this version does not save
        folder = folders[version.name] = tmp_path / version.name
        folder.mkdir()
        env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{version}"}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        arguments = ["-m", "tests.helpers.megatron_runs", folder, kind, *options]
        subprocess.run([*torchrun, *map(str, arguments)], env=env, check=True, capture_output=True, timeout=400)
        theirs[version.name] = json.loads((folder / "losses.json").read_text())
    assert folders
    _compare(theirs, folders, tmp_path, dict.fromkeys(folders, KINDS[kind]))


def _as_megatron(values: dict[str, torch.Tensor], padding: int = 0) -> dict[str, torch.Tensor]:
    """Returns weights of two layers of Llama, or states of them, as Megatron-Core names, joins and stacks them."""

    def layer(number: int) -> dict[str, torch.Tensor]:
        own = {name.split(".", 3)[3]: value for name, value in values.items() if f".layers.{number}." in name}
        heads = [own[f"self_attn.{name}_proj.weight"].split(16) for name in "qkv"]
        groups = [one for group in range(2) for one in (*heads[0][2 * group :][:2], heads[1][group], heads[2][group])]
        return {
            "self_attention.linear_qkv.layer_norm_weight": own["input_layernorm.weight"],
            "self_attention.linear_qkv.weight": torch.cat(groups),
            "self_attention.linear_proj.weight": own["self_attn.o_proj.weight"],
            "mlp.linear_fc1.layer_norm_weight": own["post_attention_layernorm.weight"],
            "mlp.linear_fc1.weight": torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]]),
            "mlp.linear_fc2.weight": own["mlp.down_proj.weight"],
        }

    layers = [layer(0), layer(1)]
    return {
        **{f"decoder.layers.{name}": torch.stack([one[name] for one in layers]) for name in layers[0]},
        "embedding.word_embeddings.weight": pad(values["model.embed_tokens.weight"], (0, 0, 0, padding)),
        "decoder.final_layernorm.weight": values["model.norm.weight"],
        "output_layer.weight": pad(values["lm_head.weight"], (0, 0, 0, padding)),
    }


def _flat(value: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in the form of Megatron-Core 0.13, for two ranks of a tensor that divide its last dimension."""
    columns = value.shape[-1] // 2
    return torch.stack([part.flatten() for part in value.split(columns, -1)]).view(*[1] * (value.ndim - 1), 2, -1)


def test_layers_of_megatron_are_divided(tmp_path):
    names = [name for name, _ in model_of(foreign_recipe(**UNTIED)).named_parameters()]
    model = model_of(foreign_recipe(**UNTIED))
    values = {name: weight.detach() for name, weight in model.named_parameters()}
    first, second = ({name: torch.rand_like(value) for name, value in values.items()} for _ in range(2))
    saved = _as_megatron(values, padding=8)
    saved |= {f"optimizer.state.exp_avg.{name}": value for name, value in _as_megatron(first, padding=8).items()}
    saved |= {
        f"optimizer.state.exp_avg_sq.{name}": torch.stack([_flat(one) for one in value])
        if "layers" in name
        else _flat(value)
        for name, value in _as_megatron(second, padding=8).items()
    }
    folder = tmp_path / "iter_0000003"
    dcp.save(saved, checkpoint_id=str(folder), no_dist=True)
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "wd_mult": 1.0, "step": 3}]
    arguments = {"num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2, "rotary_base": 5000}

    def told(**changed: Any) -> None:
        common = {"iteration": 3, "optimizer": {"optimizer": {"param_groups": groups}}, "opt_param_scheduler": {}}
        torch.save({**common, "args": Namespace(**arguments, **changed)}, folder / "common.pt")

    told()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    done = _imported(tmp_path, tmp_path, UNTIED)
    text = "\n".join(done.lines())
    assert "vocabulary: 264 rows in the folder, 256 here" in text
    assert "rotary_base: 5000 in the folder, 10000.0 here" in text
    assert "weight_decay: 0.1 in the folder, 0.0 here, for 5 weights" in text
    assert done.step == 3
    reader = CheckpointReader(done.checkpoint)
    for name in names:
        for kind, expected in (("weight", values), ("exp_avg", first), ("exp_avg_sq", second)):
            assert torch.equal(reader.whole(name, kind).view_as(expected[name]), expected[name]), (name, kind)
    shutil.rmtree(tmp_path / "run")
    arguments["num_query_groups"] = 4
    told()
    with pytest.raises(CheckpointError, match="groups 4, not 2"):
        _imported(tmp_path, tmp_path, UNTIED)
    arguments["num_query_groups"] = 2
    told()
    with pytest.raises(CheckpointError, match="has 2 layers, and the recipe's model has 3"):
        _imported(tmp_path, tmp_path, {**UNTIED, "model.config.num_hidden_layers": 3})
    told(rotary_interleaved=True)
    with pytest.raises(CheckpointError, match="neighbouring pairs"):
        _imported(tmp_path, tmp_path, UNTIED)


def _assert_same_state(first: Path, second: Path) -> None:
    ours, theirs = CheckpointReader(first), CheckpointReader(second)
    assert ours.shards.keys() == theirs.shards.keys()
    for name, shards in ours.shards.items():
        assert shards[0].steps == theirs.shards[name][0].steps
        for kind in shards[0].kinds:
            assert torch.equal(ours.whole(name, kind), theirs.whole(name, kind)), (name, kind)


@pytest.fixture(scope="module")
def saved_by_accelerate(tmp_path_factory) -> Path:
    """A folder of weights and a plain optimizer, after two steps."""
    folder = tmp_path_factory.mktemp("plain")
    recipe = foreign_recipe()
    model = model_of(recipe)
    optimizer = adamw_of(model, recipe)
    for step in range(2):
        loss_of(model, rows(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    return folder


def _imported(folder: Path, tmp_path: Path, fields: dict | None = None, **options: Any):
    return import_checkpoint(folder, plan_of(foreign_recipe(**(fields or {})), 1), RunDir(tmp_path / "run"), **options)


def test_an_import_says_what_it_took_what_differs_and_what_is_absent(saved_by_accelerate, tmp_path):
    fields = {"optim.betas": (0.8, 0.95), "optim.weight_decay": 0.2, "optim.name": "adam", "train.max_steps": 2}
    done = _imported(saved_by_accelerate, tmp_path, fields)
    text = "\n".join(done.lines())
    assert "step 2, of which the optimizer counts 2 updates" in text
    assert "betas: (0.9, 0.95) in the folder, (0.8, 0.95) here" in text
    assert "optim.weight_decay: 0.1 in the folder, 0.2 here, for 15 weights: model.embed_tokens.weight" in text
    assert "AdamW (decoupled), the recipe's optimizer is adam" in text
    assert "the recipe ends at step 2" in text
    assert "learning rate" in text
    assert "position in the data: training begins with this recipe's first sequence" in text
    assert read_state(done.checkpoint).data == ""
    with pytest.raises(RecipeError, match="holds a run"):
        _imported(saved_by_accelerate, tmp_path)


@pytest.mark.parametrize("form", ["deepspeed-universal", "dcp"])
def test_an_export_of_the_state_is_imported_bit_for_bit(form, saved_by_accelerate, tmp_path):
    done = _imported(saved_by_accelerate, tmp_path)
    export_state(done.checkpoint, tmp_path / "out", form)
    again = import_checkpoint(tmp_path / "out", plan_of(foreign_recipe(), 1), RunDir(tmp_path / "again"))
    assert (again.step, again.different) == (2, [])
    _assert_same_state(done.checkpoint, again.checkpoint)
    with pytest.raises(CheckpointError, match="not empty"):
        export_state(done.checkpoint, tmp_path / "out", form)


def test_weights_that_do_not_fit_are_named_before_anything_is_written(saved_by_accelerate, tmp_path):
    with pytest.raises(CheckpointError) as raised:
        _imported(saved_by_accelerate, tmp_path, {"model.config.num_hidden_layers": 3, **UNTIED})
    assert "model.layers.2.self_attn.q_proj.weight" in str(raised.value)
    with pytest.raises(CheckpointError) as raised:
        _imported(saved_by_accelerate, tmp_path, {"model.config.num_hidden_layers": 1})
    assert "9 tensors that the recipe's model does not have: model.layers.1." in str(raised.value)
    with pytest.raises(CheckpointError, match=re.escape("up_proj.weight [128, 64], not [96, 64]")):
        _imported(saved_by_accelerate, tmp_path, {"model.config.intermediate_size": 96})
    with pytest.raises(CheckpointError, match=r"lacks 'momentum_buffer'.*it has exp_avg, exp_avg_sq"):
        _imported(saved_by_accelerate, tmp_path, {"optim.name": "sgd"})
    with pytest.raises(RecipeError, match="keeps states of its own form"):
        _imported(saved_by_accelerate, tmp_path, {"optim.name": "muon"})
    assert not (tmp_path / "run").exists()


def test_names_of_other_programs_can_be_replaced(saved_by_accelerate, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    weights = torch.load(saved_by_accelerate / "pytorch_model.bin")
    named = OrderedDict((f"_orig_mod.net.{name.removeprefix('model.')}", value) for name, value in weights.items())
    torch.save(named, other / "pytorch_model.bin")
    (other / "optimizer.bin").write_bytes((saved_by_accelerate / "optimizer.bin").read_bytes())
    with pytest.raises(CheckpointError, match="--rename"):
        _imported(other, tmp_path)
    done = _imported(other, tmp_path, renames=[(r"^net\.", "model.")])
    assert done.step == 2


def test_the_rotary_pairs_of_torchtitan_become_halves(saved_by_accelerate, tmp_path):
    """Of each head, transformers rotates row i with row i + half, torchtitan row 2i with row 2i + 1."""
    weights = torch.load(saved_by_accelerate / "pytorch_model.bin")
    optimizer = torch.load(saved_by_accelerate / "optimizer.bin")
    others = {
        "model.embed_tokens": "tok_embeddings",
        **{f"self_attn.{name}_proj": f"attention.w{name}" for name in "qkvo"},
        **{
            f"mlp.{name}_proj": f"feed_forward.w{number}" for number, name in enumerate(("gate", "down", "up"), start=1)
        },
        **{"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "lm_head": "output"},
    }

    def theirs(name: str, value: torch.Tensor) -> tuple[str, torch.Tensor]:
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if heads:
            size = len(value) // heads
            order = [
                head * size + half * size // 2 + row
                for head in range(heads)
                for row in range(size // 2)
                for half in (0, 1)
            ]
            value = value[order]
        for ours, other in others.items():
            name = name.replace(ours, other)
        return name.removeprefix("model."), value

    names = [name for name in weights if "lm_head" not in name]
    order = [name for name in names if weights[name].ndim > 1] + [name for name in names if weights[name].ndim == 1]
    states = {}
    for name, state in zip(order, optimizer["state"].values(), strict=True):
        other, _ = theirs(name, weights[name])
        states[other] = {kind: theirs(name, state[kind])[1] for kind in ("exp_avg", "exp_avg_sq")} | {
            "step": state["step"]
        }
    saved = dict(theirs(name, value) for name, value in weights.items())
    dcp.save({**saved, "optimizer": {"state": states}}, checkpoint_id=str(tmp_path / "titan"), no_dist=True)
    done = _imported(saved_by_accelerate, tmp_path)
    again = import_checkpoint(tmp_path / "titan", plan_of(foreign_recipe(), 1), RunDir(tmp_path / "again"))
    _assert_same_state(done.checkpoint, again.checkpoint)


def test_states_of_separate_experts_are_joined_like_their_weights(tmp_path):
    fields = {**MIXTRAL, **UNTIED}
    model = model_of(foreign_recipe(**fields))
    model.save_pretrained(tmp_path / "weights")
    (tmp_path / "moments").mkdir()
    shutil.copy(tmp_path / "weights" / "config.json", tmp_path / "moments")
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    assert any(".experts.3.w2." in name for name in weights)
    moments = {name: torch.rand_like(value) for name, value in weights.items()}
    save_file(moments, tmp_path / "moments" / "model.safetensors", {"format": "pt"})
    states = {name: {"exp_avg": one, "exp_avg_sq": 2 * one, "step": torch.tensor(3.0)} for name, one in moments.items()}
    dcp.save({"model": weights, "optimizer": {"state": states}}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    saved = CheckpointReader(_imported(tmp_path / "dcp", tmp_path, fields).checkpoint)
    joined = type(model).from_pretrained(tmp_path / "moments").state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(saved.whole(name), value.flatten())
        assert torch.equal(saved.whole(name, "exp_avg"), joined[name].flatten())
        assert torch.equal(saved.whole(name, "exp_avg_sq"), 2 * joined[name].flatten())


@pytest.mark.slow
def test_the_command_begins_a_run_that_train_continues(small_recipe, tmp_path):
    recipe, _ = load_recipe(str(small_recipe), [])
    model = model_of(recipe.with_(**{"model.config.vocab_size": 512}))
    optimizer = adamw_of(model, recipe)
    for _ in range(2):
        loss_of(model, rows(0)).backward()
        optimizer.step()
    folder, run_dir = tmp_path / "checkpoint-2", tmp_path / "run"
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 2}')
    wrong = llmtrain("checkpoint", "import", folder / "nowhere", small_recipe, "--run-dir", run_dir)
    assert (wrong.returncode, run_dir.exists()) == (4, False), wrong.stderr
    done = llmtrain("checkpoint", "import", folder, small_recipe, "--run-dir", run_dir)
    assert done.returncode == 0, done.stderr
    assert "20 weights, 34,976 numbers, from Trainer" in done.stdout
    trained = llmtrain("train", small_recipe, "--run-dir", run_dir, "--max-steps", "3", "--nproc", "2")
    assert "continuing after step 2" in trained.stdout, trained.stderr
    assert [line["step"] for line in metrics(run_dir) if "loss" in line] == [3]


class _Call:
    """Calls a function when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.made = function, arguments

    def __reduce__(self) -> Any:
        return self.made


def _edited(path: Path, edit: dict[bytes, bytes]) -> None:
    """Replaces bytes in the pickle of an archive."""
    with zipfile.ZipFile(path) as archive:
        content = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            for before, after in edit.items() if name.endswith(".pkl") else ():
                assert before in data
                data = data.replace(before, after)
            archive.writestr(name, data)


def test_pickles_are_read_as_data(saved_by_accelerate, tmp_path):
    value = {"a": torch.arange(6.0).view(2, 3), "b": [torch.ones(4, dtype=torch.bfloat16)[1:3], (1, "x", None)]}
    value["c"] = value["a"].t()
    torch.save(value, tmp_path / "fine.pt")
    read = read_torch(tmp_path / "fine.pt")
    assert isinstance(read["a"], StoredTensor)
    for ours, theirs in ((read["a"], value["a"]), (read["b"][0], value["b"][0]), (read["c"], value["c"])):
        assert torch.equal(ours.read(), theirs)
    assert torch.equal(read["a"].read(2, 5), torch.tensor([2.0, 3.0, 4.0]))
    assert read["b"][1] == (1, "x", None)
    with pytest.raises(CheckpointError, match="6 elements, of which 2 to 7 are needed"):
        read["a"].read(2, 7)


@pytest.mark.parametrize("content", [[1], {"global_steps": 3, "module": 5}, {"module": {}, "param_shapes": 3}, 7])
def test_a_folder_of_another_layout_is_refused(content, tmp_path):
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": content}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match=r"has an unknown layout|does not say which weights|lacks"):
        _imported(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (_Call(os.system, "touch HARM"), "posix.system"),
        (_Call(eval, "open('HARM', 'w')"), "builtins.eval"),
        (_Call(getattr, 1, "real"), "builtins.getattr"),
        (RunDir(Path()), "llmtrain.run_dir.RunDir"),
        ({"x": [_Call(os.system, "touch HARM"), _Call(exec, "1")]}, "builtins.exec, posix.system"),
    ],
)
def test_a_pickle_that_would_run_code_is_refused_by_name(value, named, saved_by_accelerate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes((saved_by_accelerate / "pytorch_model.bin").read_bytes())
    torch.save({"state": value, "param_groups": []}, folder / "optimizer.bin")
    with pytest.raises(CheckpointError, match=f"optimizer.bin.* would call {re.escape(named)} when loaded"):
        _imported(folder, tmp_path)
    (tmp_path / "bare.pkl").write_bytes(pickle.dumps(value))
    with pytest.raises(CheckpointError, match=re.escape(named)):
        read_pickle(tmp_path / "bare.pkl")
    assert not (tmp_path / "HARM").exists()
    assert not (tmp_path / "run").exists()


def test_a_tensor_outside_its_file_is_refused(tmp_path):
    def written(edit: dict[bytes, bytes]) -> Path:
        path = tmp_path / "tensor.pt"
        torch.save({"w": torch.zeros(4, 3)}, path)
        _edited(path, edit)
        return path

    # The pickle has the storage's length 12, the offset 0, the shape (4, 3) and the stride (3, 1).
    for edit, message in (
        ({b"K\x04K\x03\x86": b"J\x00\x00\x00\x7fK\x03\x86"}, "which needs"),
        ({b"K\x04K\x03\x86": b"J\xff\xff\xff\xffK\x03\x86"}, "whose shape is not one"),
        ({b"K\x04K\x03\x86": b"K\x05K\x03\x86"}, "needs 15 elements of a storage of 12"),
        ({b"cpuq": b"cpuq", b"K\x0ct": b"K\x7ft"}, "508 bytes, and has 48"),
        ({b"X\x01\x00\x00\x000": b"X\x01\x00\x00\x007"}, "a storage that is not in it: 7"),
        ({b"K\x03K\x01\x86": b"K\x7fK\x01\x86"}, "needs 384 elements of a storage of 12"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_torch(written(edit))
    memo = b"\x80\x02Nr\xff\xff\xff\x7f."
    (tmp_path / "memo.pkl").write_bytes(memo)
    with pytest.raises(CheckpointError, match="more memory"):
        read_pickle(tmp_path / "memo.pkl")
    sets = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x04\x00\x00\x00evilK\x01sb."
    (tmp_path / "sets.pkl").write_bytes(sets)
    with pytest.raises(CheckpointError, match="sets attributes"):
        read_pickle(tmp_path / "sets.pkl")
