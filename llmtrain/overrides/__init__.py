"""The private parts of DeepSpeed, `transformers`, accelerate and torch that llmtrain replaces or reads.

If the installed version lacks one of these places, or has a function with other parameters there, no engine is built:
without its replacement, a run would continue and compute something else. `docs/design/overrides.md` shows this list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from llmtrain.errors import Problem, RecipeError
from llmtrain.system.host import installed_version

TRIED = {"deepspeed": "0.19.8", "transformers": "5.24.0", "accelerate": "1.15.0", "peft": "0.21.2", "torch": "2.13.0"}
"""The versions with which the tests were run."""
OLDEST = {"transformers": "5.21.0", "accelerate": "1.11.0", "peft": "0.19.0", "torch": "2.11.0"}
"""The oldest versions (`constraints-oldest.txt`), with which a part of the tests was run."""


@dataclass(frozen=True)
class Override:
    """Private parts of another library that llmtrain replaces or reads."""

    places: tuple[str, ...]
    """Each `module:attribute`, or `module:Class.attribute`.

    `module:.name` is looked up in the module's source: only instances have the attribute, or importing takes seconds.
    `module:function(one, other)` also states the function's parameters, without `self`; `one|other` is one whose name
    depends on the release. With `...` at the end there may be others that have defaults.
    """
    why: str
    """The consequence without it."""
    test: str
    """The test that fails if the reason no longer exists, or if a place has another meaning."""
    upstream: str = ""
    """The issue or change request about it: `OWNER/NAME#NUMBER`. Empty if none is known."""
    report: str = ""
    """The name of a report in `docs/upstream` of a fault that it mends. Empty if there is none."""

    @property
    def package(self) -> str:
        """The library's package name."""
        return self.places[0].partition(".")[0].partition(":")[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The places without parameters."""
        return tuple(place.partition("(")[0] for place in self.places)

    def differences(self) -> list[str]:
        """Returns what the installed version lacks, or has with other parameters: "has no NAME", for example."""
        return [difference for place in self.places if (difference := _difference(place))]


def _difference(place: str) -> str:
    where, is_function, parameters = place.rstrip(")").partition("(")
    module, _, attributes = where.partition(":")
    name = f"{module}.{attributes.removeprefix('.')}"
    try:
        if attributes.startswith("."):
            found = find_spec(module)
            source = Path(found.origin).read_text(encoding="utf-8") if found and found.origin else ""
            return "" if re.search(rf"\b{attributes[1:]}\b", source) else f"has no {name}"
        function = resolve_name(where)
    except (ImportError, AttributeError):
        return f"has no {name}"
    own = _parameters(function) if is_function else []
    expected = parameters.split(", ") if parameters else []
    if "..." in expected:
        expected.remove("...")
        known = {name for names in expected for name in names.split("|")}
        own = [parameter for parameter in own if parameter.name in known or _is_required(parameter)]
    names = [parameter.name for parameter in own]
    if not is_function or (
        len(names) == len(expected) and all(a in b.split("|") for a, b in zip(names, expected, strict=True))
    ):
        return ""
    installed = ", ".join(parameter.name for parameter in _parameters(function))
    return f"has {name}({installed}) instead of {name}({parameters})"


def _parameters(function: Any) -> list[Parameter]:
    """Returns the parameters of a function, of a class, or of an operator that torch defines in Python."""
    parameters = signature(getattr(function, "_init_fn", function)).parameters.values()
    return [parameter for parameter in parameters if parameter.name != "self"]


def _is_required(parameter: Parameter) -> bool:
    is_variadic = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return parameter.default is Parameter.empty and not is_variadic


_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_BF16 = "deepspeed.runtime.bf16_optimizer:"
_ZERO = "deepspeed.runtime.zero.stage_1_and_2:"
_ZERO_3 = "deepspeed.runtime.zero.stage3:"
_GROUPS = "deepspeed.utils.groups:"
OVERRIDES = (
    Override(
        ("deepspeed.runtime.compiler:compile()",),
        "With ZeRO, each rank imports inductor for DeepSpeed's Muon, which adds a tenth to the time of a start.",
        "tests/engines/test_imports.py",
        report="inductor_imported",
    ),
    Override(
        (f"{_ENGINE}.allreduce_no_retain(bucket, dp_group, dp_world_size, ...)",),
        "A group of one rank copies all gradients into a buffer and back, 2% of a small model's step on a CPU.",
        "tests/engines/test_reduction.py",
    ),
    Override(
        (
            f"{_ZERO}DeepSpeedZeroOptimizer.scaled_global_norm(...)",
            f"{_ZERO_3}DeepSpeedZeroOptimizer_Stage3._get_norm_groups",
            f"{_ZERO}._zero_padding",
            *(f"{module}._global_grad_norm" for module in (_BF16, _ZERO, _ZERO_3)),
        ),
        "The guard would get the norm only after the update, and its sum would take an all-reduce for each group of "
        "parameters.",
        "tests/engines/test_norm.py",
    ),
    Override(
        (f"{_ENGINE}.clip_fp32_gradients()",),
        "At ZeRO-0, the norm is computed twice, and averaged over ranks that have different experts.",
        "tests/engines/deepspeed/test_expert.py",
        "deepspeedai/DeepSpeed#8475",
    ),
    Override(
        (
            *(f"{module}is_invalid_grad_norm(norm)" for module in (_BF16, _ZERO, _ZERO_3)),
            f"{_BF16}clip_tensors_by_global_norm(input_tensors, max_norm, global_norm, mpu, ...)",
            *(
                f"{module}mask_nan_or_inf_with_val_inplace(input, device, ...)"
                for module in ("deepspeed.runtime.utils:", _ZERO, _ZERO_3)
            ),
            f"{_ZERO_3}.reduce_and_partition_stream",
        ),
        "The host would wait for the device: for the norm, before and after it, and for gradients of each micro-batch. "
        "An update that is not finite would be dropped without the guard, or without lowering torch's loss scale.",
        "tests/cuda_on_host/test_waits.py",
        report="autocast_overflow",
    ),
    Override(
        (
            f"{_ZERO}DeepSpeedZeroOptimizer._record_gradient_stream(tensor, stream)",
            f"{_ZERO}DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue()",
            f"{_ZERO}DeepSpeedZeroOptimizer.reduce_ipg_grads(...)",
        ),
        "ZeRO-2 frees gradients larger than a bucket before their reduction ends, and the host waits for reductions.",
        "tests/cuda_on_host/test_overlap.py",
        report="gradient_stream",
    ),
    Override(
        (
            f"{_GROUPS}_ZERO_PARAM_INTRA_PARALLEL_GROUP",
            f"{_GROUPS}mpu",
        ),
        "A process could have only one engine: DeepSpeed makes groups when it makes the first one, and keeps them.",
        "tests/engines/deepspeed/test_hierarchical.py",
        "deepspeedai/DeepSpeed#7680",
    ),
    Override(
        (
            *(f"{_GROUPS}_EXPERT_{kind}PARALLEL_GROUP{end}" for kind in ("", "DATA_") for end in ("", "_RANKS")),
            f"{_ZERO_3}.ds_zero_placement_family",
            f"{_ZERO_3}.ds_zero_partition_group_name",
            "deepspeed.runtime.zero.partition_parameters:.ds_zero_partition_process_group",
        ),
        "DeepSpeed would average gradients of different experts, and knows no experts of pipelines or at ZeRO-3.",
        "tests/engines/deepspeed/test_expert.py",
    ),
    Override(
        (
            "deepspeed.runtime.engine:.torch_autocast_z0_gradscaler",
            *(f"{module}.torch_autocast_gradscaler" for module in (_BF16, _ZERO, _ZERO_3)),
        ),
        "With autocast_fp16, DeepSpeed does not save torch's loss scale, which norms at ZeRO-0 have to be divided by.",
        "tests/engines/test_norm.py",
        report="autocast_checkpoint",
    ),
    Override(
        ("deepspeed.runtime.engine:.lr_scheduler",),
        "Accelerate ignores the schedule of an optimizer that it did not build, so the learning rate is constant.",
        "tests/engines/test_optimizers.py",
        "huggingface/accelerate#1095",
    ),
    Override(
        (
            "deepspeed.runtime.pipe.module:PipelineModule._index_tied_modules()",
            "deepspeed.runtime.pipe.module:.tied_comms",
            f"{_BF16}.ds_pipe_replicated",
        ),
        "A tied weight would tie the whole stage that holds it, and leave the stage out of the norm.",
        "tests/engines/deepspeed/test_pipeline.py",
        report="tied_layer",
    ),
    Override(
        (
            *(
                f"deepspeed.runtime.pipe.engine:PipelineEngine.{name}(...)"
                for name in ("_exec_reduce_tied_grads", "_exec_reduce_grads", "_exec_optimizer_step")
            ),
            f"{_BF16}BF16_Optimizer.update_hp_grads(...)",
            f"{_ZERO}DeepSpeedZeroOptimizer.fill_grad_accum_attribute(...)",
            "deepspeed.runtime.engine:._running_engine_backward",
        ),
        "Pipelines would have only the schedule 1F1B, and only one stage on each rank.",
        "tests/engines/deepspeed/test_pipeline.py",
        "deepspeedai/DeepSpeed#4035",
    ),
    Override(
        ("deepspeed.ops:__compatible_ops__",),
        "At the first start, DeepSpeed compiles its operator for collectives on CPUs, which takes a minute.",
        "tests/engines/test_overrides.py",
    ),
    Override(
        (
            f"{_BF16}._hp_mapping",
            f"{_ZERO}._hp_mapping",
            *(
                f"{_ZERO_3}DeepSpeedZeroOptimizer_Stage3.{name}(sub_group_id, ...)"
                for name in (
                    "_get_sub_group_partition_rank",
                    "_swappable_optimizer_subgroup",
                    "_optimizer_states_and_gradient_swap_in",
                    "_optimizer_states_and_gradient_swap_out",
                )
            ),
            f"{_ZERO_3}DeepSpeedZeroOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters",
        ),
        "It is unknown which parts of the parameters a rank trains, so a checkpoint cannot be read under another plan.",
        "tests/checkpoint/test_elastic.py",
    ),
    Override(
        (
            "transformers.conversion_mapping:get_model_conversion_mapping(model, ...)",
            *(
                f"transformers.core_model_loading:{name}"
                for name in (
                    "PrefixChange",
                    "WeightRenaming",
                    "apply_converters(source_key, weight_converters, ...)",
                    "dot_natural_key(s, ...)",
                    "rename_source_key(source_key, weight_renamings, weight_converters, base_model_prefix, "
                    "meta_state_dict, ...)",
                    "revert_weight_conversion(model, state_dict, ...)",
                )
            ),
            "transformers.modeling_utils:PreTrainedModel._keys_to_ignore_on_load_unexpected",
        ),
        "Weights that files of the hub name or join differently can only be read and written as a whole model.",
        "tests/engines/test_from_hub.py",
    ),
    Override(
        ("transformers:PreTrainedModel._keys_to_ignore_on_save",),
        "An exported model would contain weights that `transformers` itself does not save.",
        "tests/checkpoint/test_export.py",
    ),
    Override(
        ("transformers.masking_utils:find_packed_sequence_indices(position_ids)",),
        "For each mask, the host would wait for the device to find the documents in the positions, which some families "
        "do not provide, and of which a sequence parallel rank only has a slice.",
        "tests/engines/test_documents.py",
        report="masks_without_positions",
    ),
    Override(
        ("transformers.models.mixtral.modeling_mixtral:.load_balancing_loss_func",),
        "Ranks that share a sequence would compute the router's loss from their own slices.",
        "tests/engines/deepspeed/test_sequence.py",
    ),
    Override(
        ("transformers.models.llama.modeling_llama:.apply_rotary_pos_emb",),
        "Liger's own functions would replace rotary positions in every model of the process.",
        "tests/models/test_liger.py",
        "linkedin/Liger-Kernel#242",
    ),
    Override(
        (
            "transformers.integrations.moe:_grouped_linear(input, weight, offs, bias, is_transposed)",
            "transformers:PreTrainedConfig._experts_implementation",
        ),
        "An adapter of experts would be added to the matrices of all experts in each pass, outside of their module.",
        "tests/engines/test_adapters.py",
    ),
    Override(
        tuple(
            f"transformers.{module}:log_state_dict_report(model, pretrained_model_name_or_path, "
            "ignore_mismatched_sizes, loading_info, ...)"
            for module in ("modeling_utils", "integrations.peft")
        ),
        "A model or an adapter that lacks weights would be loaded with random numbers.",
        "tests/models/test_generate.py",
    ),
    Override(
        (
            "accelerate.state:AcceleratorState._reset_state(reset_partial_state, ...)",
            "accelerate.state:.distributed_type",
        ),
        "The first state of a process stays: of another engine, or, on CPUs, one with which FSDP2 becomes DDP.",
        "tests/engines/test_accelerate.py",
        report="fsdp2_on_cpu",
    ),
    Override(
        ("accelerate.tracking:logger",),
        "Trackers change the number of threads, and make each worker on a CPU look like a run of one process.",
        "tests/train/metrics/test_trackers.py",
        "huggingface/accelerate#1446",
    ),
    Override(
        ("torch.nn.functional:scaled_dot_product_attention",),
        "A user's own model would let packed documents attend to each other, and its sequences could not be sliced.",
        "tests/models/test_own.py",
    ),
    Override(
        ("torch._C._distributed_c10d:Work.wait",),
        "It is unknown how long a rank waits for others.",
        "tests/engines/test_own_time.py",
    ),
    Override(
        ("torch.nn.modules.module:._forward_hooks",),
        "The copies of `nn.DataParallel` share the hooks with which `transformers` collects router logits, so that the "
        "router loss depends on the order of threads.",
        "tests/engines/test_data_parallel.py",
    ),
    Override(
        ("torch:_foreach_norm",),
        "The norm of gradients needs a call for each tensor, or is off by up to 3e-3 on CPUs.",
        "tests/engines/test_norm.py",
        "pytorch/pytorch#169237",
    ),
    Override(
        ("torch.testing._internal.distributed.fake_pg:FakeStore",),
        "To examine how a plan divides a model, llmtrain would need as many processes as the plan has ranks.",
        "tests/checkpoint/test_convert.py",
    ),
    Override(
        (
            "torch.library:get_kernel(op, dispatch_key, ...)",
            "torch.library:Library._destroy(...)",
            "torch.library:Library.impl(op_name, fn, dispatch_key, with_keyset, allow_override, ...)",
            "torch._inductor.mkldnn_ir:._linear_pointwise",
        ),
        "Matrix products in fp32 would take twice as long on processors with AVX-512 that are not Intel's.",
        "tests/engines/runtime/test_cpu.py",
        "pytorch/builder#504",
    ),
    Override(
        (
            "torch.nn.attention.varlen:_varlen_attn_backward(grad_out, query, key, value, out, lse, cu_seq_q, "
            "cu_seq_k, max_q, max_k, is_causal, rng_state, scale, window_size, ...)",
            "torch._library.custom_ops:._init_fn",
        ),
        "In a compiled layer, torch's attention by document boundaries would have no gradient.",
        "tests/cuda_on_host/test_varlen.py",
    ),
    Override(
        (
            "torch._inductor.codecache:CppCodeCache.load_async(main_code, extra_flags, ...)",
            "torch._inductor.codecache:pick_vec_isa()",
            "torch._inductor.cpu_vec_isa:invalid_vec_isa",
        ),
        "Attention by document boundaries and the loss would take longer on CPUs, with torch's kernels.",
        "tests/models/test_cpu_kernels.py",
    ),
    Override(
        (
            "torch._inductor.cpp_builder:get_cpp_compiler(...)",
            "torch._inductor.exc:InvalidCxxCompiler",
            "torch._dynamo.exc:FailOnRecompileLimitHit",
        ),
        "A run would fail in its first step, and not when it starts, if layers cannot be compiled.",
        "tests/models/test_compiled_layers.py",
    ),
)


@cache
def check_overrides() -> None:
    """Raises RecipeError for places that the installed versions do not have, or have with other parameters."""
    problems = [
        Problem(
            "versions.override",
            override.package,
            f"{override.package} {version} {difference}, on which llmtrain depends. Without it: {override.why}",
            f"pip install {override.package}=={TRIED[override.package]}",
        )
        for override in OVERRIDES
        if (version := installed_version(override.package))  # accelerate is optional
        for difference in override.differences()
    ]
    if problems:
        raise RecipeError(problems)


def untried_versions() -> Iterator[str]:
    """Yields a line for each installed library of another version than those that tests were run with.

    Of DeepSpeed, every release counts, since its patch releases change the engines. Of the others, only minor ones do.
    """
    for package, tried in TRIED.items():
        installed = installed_version(package)
        parts = 3 if package == "deepspeed" else 2
        known = [re.findall(r"\d+", version)[:parts] for version in (tried, OLDEST.get(package, tried))]
        if installed and re.findall(r"\d+", installed)[:parts] not in known:
            places = [
                name.partition(":")[2].removeprefix(".")
                for override in OVERRIDES
                if override.package == package
                for name in override.names
            ]
            check = f"; check {', '.join(places)}" if places else ""
            yield f"{package} {installed} is untested, llmtrain was tested with {tried}{check}"


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Sets attributes within the context. changes: (owner, name, value) of each."""
    own = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in own:
            setattr(owner, name, value)
