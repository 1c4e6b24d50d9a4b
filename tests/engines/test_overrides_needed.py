"""Each override is needed: without it, a test fails on a copy of llmtrain. Where none fails, the override can go."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmtrain.overrides import OVERRIDES

ROOT = Path(__file__).parents[2]
ENGINES = "tests/engines/"
DEEPSPEED = "tests/engines/deepspeed/"
WAITS = "tests/cuda_on_host/test_waits.py"
HIERARCHICAL = "tests/engines/deepspeed/test_hierarchical.py -m breadth"
OVERLAP = "tests/cuda_on_host/test_overlap.py -m slow"


@dataclass(frozen=True)
class Removal:
    """A change of the source that removes an override, or gives another meaning to what is read."""

    place: str
    """The end of one of the override's places."""
    old: str
    new: str
    tests: str
    """The tests of which one fails then, as options of pytest."""
    file: str = "overrides/deepspeed.py"


def _removed(line: str) -> tuple[str, str]:
    """Returns a whole statement, and nothing in its place."""
    return f" {line}\n", " pass\n"


TORCH, TRANSFORMERS, ACCELERATE = (f"overrides/{name}.py" for name in ("torch", "transformers", "accelerate"))
REMOVALS = (
    Removal(
        "compiler:compile",
        "        leave_muon_eager()\n",
        "",
        f"{ENGINES}test_imports.py -m slow",
        "engines/deepspeed/engine.py",
    ),
    Removal("allreduce_no_retain", *_removed("engine.allreduce_no_retain = reduce"), f"{ENGINES}test_reduction.py"),
    Removal("clip_fp32_gradients", *_removed("engine.clip_fp32_gradients = clip"), f"{DEEPSPEED}test_expert.py"),
    Removal("scaled_global_norm", " else cls(optimizer)", " else None", f"{ENGINES}test_norm.py"),
    Removal(
        "_global_grad_norm",
        "last_norm(self.engine.optimizer)",
        "self.engine.get_global_grad_norm() or 0.0",
        f"{ENGINES}test_norm.py",
        "engines/deepspeed/engine.py",
    ),
    *(
        Removal(
            f"{module}:is_invalid_grad_norm",
            f'({module.rpartition(".")[2]}, "is_invalid_grad_norm", _not_asked),',
            "",
            WAITS,
        )
        for module in ("bf16_optimizer", "zero.stage_1_and_2", "zero.stage3")
    ),
    Removal(
        "clip_tensors_by_global_norm",
        '(bf16_optimizer, "clip_tensors_by_global_norm", _clip),',
        "",
        WAITS,
    ),
    *(
        Removal(
            f"{module}:mask_nan_or_inf_with_val_inplace",
            f'({name}, "mask_nan_or_inf_with_val_inplace", _mark_invalid),',
            "",
            WAITS,
        )
        for module, name in (("runtime.utils", "deepspeed_utils"), ("stage_1_and_2", "stage_1_and_2"))
    ),
    Removal("_exec_reduce_tied_grads", *_removed("engine._exec_reduce_tied_grads()"), f"{DEEPSPEED}test_pipeline.py"),
    Removal("reduce_and_partition_stream", "if isinstance(stream, torch.cuda.Stream):", "if False:", WAITS),
    Removal("_record_gradient_stream", *_removed("optimizer._record_gradient_stream = keep"), OVERLAP),
    Removal(
        "independent_gradient_partition_epilogue",
        *_removed("optimizer.independent_gradient_partition_epilogue = end_pass_on_device"),
        OVERLAP,
    ),
    Removal(
        "groups:mpu",
        *_removed("groups.mpu = None"),
        f"{HIERARCHICAL} -k several",
    ),
    Removal(
        "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
        *_removed("groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None"),
        f"{HIERARCHICAL} -k several",
    ),
    Removal(
        "_EXPERT_DATA_PARALLEL_GROUP",
        "groups._EXPERT_DATA_PARALLEL_GROUP = {name: equal}",
        "groups._EXPERT_DATA_PARALLEL_GROUP = {name: sharing}",
        f"{DEEPSPEED}test_expert.py",
    ),
    Removal(
        "ds_zero_partition_process_group",
        *_removed("expert.ds_zero_partition_process_group = equal"),
        f"{DEEPSPEED}test_expert.py",
    ),
    Removal(
        "torch_autocast_z0_gradscaler",
        "engine.torch_autocast_z0_gradscaler or getattr",
        "getattr",
        f"{ENGINES}test_norm.py",
    ),
    Removal(
        "lr_scheduler", *_removed("engine.lr_scheduler = schedule"), f"{ENGINES}test_optimizers.py -m breadth -k lion-2"
    ),
    Removal("_index_tied_modules", "def _index_tied_modules(", "def _unused(", f"{DEEPSPEED}test_pipeline.py"),
    Removal(
        "__compatible_ops__",
        *_removed('ops.__compatible_ops__["deepspeed_shm_comm"] = False'),
        f"{ENGINES}test_overrides.py -k collective",
    ),
    Removal("_hp_mapping", "mapping.lp_fragment_address.start", "0", "tests/checkpoint/test_elastic.py"),
    Removal(
        "_get_sub_group_partition_rank",
        "optimizer._get_sub_group_partition_rank(index)",
        "0",
        "tests/checkpoint/test_elastic.py",
    ),
    Removal(
        "_reassign_or_swap_out_partitioned_parameters",
        *_removed("optimizer._reassign_or_swap_out_partitioned_parameters(index)"),
        "tests/checkpoint/test_elastic.py",
    ),
    Removal(
        "rename_source_key",
        "core_model_loading.rename_source_key(key, renamings, converters, prefix, state)",
        "(key, None)",
        f"{ENGINES}test_from_hub.py",
        "models/hub_names.py",
    ),
    Removal(
        "find_packed_sequence_indices",
        "return None if _active.changes else _own_find(position_ids)",
        "return _own_find(position_ids)",
        f"{ENGINES}test_documents.py",
        TRANSFORMERS,
    ),
    Removal(
        "load_balancing_loss_func",
        "if not hasattr(family, name):",
        "if True:",
        f"{DEEPSPEED}test_sequence.py",
        TRANSFORMERS,
    ),
    Removal(
        "_experts_implementation",
        *_removed("module.config._experts_implementation = EXPERTS_FUNCTION"),
        f"{ENGINES}test_adapters.py",
        TRANSFORMERS,
    ),
    Removal(
        "apply_rotary_pos_emb",
        'ROTATION = ("apply_rotary_pos_emb"',
        'ROTATION = ("no_such_function"',
        "tests/models/test_liger.py",
        "models/liger.py",
    ),
    Removal(
        "log_state_dict_report",
        *_removed("check(model, str(pretrained_model_name_or_path), loading_info)"),
        "tests/models/test_generate.py",
        TRANSFORMERS,
    ),
    Removal(
        "_keys_to_ignore_on_save",
        "set(model._keys_to_ignore_on_save or ())",
        "set()",
        "tests/checkpoint/test_export.py",
        TRANSFORMERS,
    ),
    Removal(
        "AcceleratorState._reset_state",
        *_removed("AcceleratorState._reset_state(reset_partial_state=True)"),
        f"{ENGINES}test_accelerate.py",
        ACCELERATE,
    ),
    Removal(
        "distributed_type",
        *_removed("PartialState().distributed_type = DistributedType.MULTI_GPU"),
        f"{ENGINES}test_accelerate.py",
        ACCELERATE,
    ),
    Removal(
        "tracking:logger",
        *_removed("tracking.logger = logging.getLogger(tracking.__name__)"),
        "tests/train/metrics/test_trackers.py",
        ACCELERATE,
    ),
    Removal("Work.wait", *_removed("Work.wait = watched  # type: ignore"), f"{ENGINES}test_own_time.py", TORCH),
    Removal(
        "_foreach_norm",
        'torch.split(gradient.reshape(-1), PIECE) if gradient.device.type == "cpu" else (gradient,)',
        "(gradient,)",
        f"{ENGINES}test_norm.py",
        TORCH,
    ),
    Removal("get_cpp_compiler", *_removed("get_cpp_compiler()"), "tests/models/test_compiled_layers.py", TORCH),
    Removal(
        "_varlen_attn_backward",
        "torch.ops.torch_attn._varlen_attn_backward(",
        "torch.empty(",
        "tests/cuda_on_host/test_varlen.py -m breadth",
        TORCH,
    ),
    Removal(
        "CppCodeCache.load_async",
        "load = codecache.CppCodeCache.load_async(",
        "raise OSError; load = codecache.CppCodeCache.load_async(",
        "tests/models/test_cpu_kernels.py",
        TORCH,
    ),
    Removal(
        "_destroy",
        "if wanted and _replaced is None:",
        "if wanted and _replaced:",
        "tests/engines/runtime/test_cpu.py",
        "overrides/onednn.py",
    ),
    Removal(
        "_forward_hooks",
        *_removed("module._forward_hooks = module._forward_hooks.copy()"),
        f"{ENGINES}test_data_parallel.py",
        TORCH,
    ),
    Removal(
        "functional:scaled_dot_product_attention",
        *_removed("torch.nn.functional.scaled_dot_product_attention = function"),
        "tests/models/test_own.py -k examples",
        TORCH,
    ),
)
NOT_REMOVED = {"torch.testing._internal.distributed.fake_pg:FakeStore"}
"""First places of overrides that no change can remove: without a fake group, nothing is examined. Every test would
fail, whatever the reason."""


def _is_of(removal: Removal, names: tuple[str, ...]) -> bool:
    return any(name.endswith((f".{removal.place}", f":{removal.place}", f"_{removal.place}")) for name in names)


def test_every_override_is_removed_once():
    assert all(any(_is_of(removal, one.names) for one in OVERRIDES) for removal in REMOVALS)
    left = {one.names[0] for one in OVERRIDES if not any(_is_of(removal, one.names) for removal in REMOVALS)}
    assert left == NOT_REMOVED
    for removal in REMOVALS:
        source = (ROOT / "llmtrain" / removal.file).read_text()
        assert source.count(removal.old) == 1, removal.place
        compile(source.replace(removal.old, removal.new), removal.place, "exec")
        assert any(removal.tests.split()[0] == one.test for one in OVERRIDES if _is_of(removal, one.names))


@pytest.mark.breadth
@pytest.mark.parametrize("removal", REMOVALS, ids=lambda removal: removal.place)
def test_without_the_override_a_test_fails(removal, tmp_path):
    for folder in ("llmtrain", "tests", "recipes", "tools", "docs", "ds_configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = tmp_path / "llmtrain" / removal.file
    source.write_text(source.read_text().replace(removal.old, removal.new))
    levels = [] if "-m" in removal.tests else ["-m", "not breadth"]
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", *levels]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*command, *removal.tests.split()], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert "FAILED" in done.stdout
