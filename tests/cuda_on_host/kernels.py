"""Compiles the Triton kernels of plans for the GPU of this process, as a forward and a backward pass launch them.

Tensors have shapes and no memory: a model has its real width, and a micro-batch its real length. The code of the model,
of Liger, torchao and DeepSpeed, and of torch's compiler, runs as on a GPU.

    python -m tests.cuda_on_host.kernels 'NAME OF A CASE' …      # in the environment of `conftest.environment`
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GPUS = {"a100": "NVIDIA A100-SXM4-80GB", "h100": "NVIDIA H100 80GB HBM3", "b200": "NVIDIA B200"}
"""A device of the catalogue of each architecture, and its name on the device of this folder."""
TOKENS = 4096
LIGER = {"kernels.blocks": "liger", "kernels.loss": "liger"}
COMPILED = {"kernels.blocks": "compiled", "kernels.loss": "compiled"}
FLEX = {"model.attention": "flex_attention", "kernels.loss": "whole"}
FP8 = {"kernels.fp8": "rowwise", "kernels.blocks": "compiled", "kernels.loss": "whole"}
LLAMA_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_405B = LLAMA_8B | {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "llama": LLAMA_8B,
    "deepseek_v2": {"vocab_size": 102400, "moe_intermediate_size": 1408, "num_experts_per_tok": 6},
    "ministral": {"vocab_size": 131072, "head_dim": 128},
    "nemotron": {"vocab_size": 256000, "num_key_value_heads": 8},
    "hunyuan_v1_dense": {"vocab_size": 128256, "head_dim": 128},
    "hunyuan_v1_moe": {"vocab_size": 128256, "head_dim": 128},
}
"""Family → fields of one of its models, where those of `transformers` cannot be built or are unusual."""
EAGER = ("deepseek_v4", "gemma2", "gpt_oss")
"""Families that no other attention computes."""
PRECISIONS = ("bf16", "fp16", "fp32", "autocast_bf16", "autocast_fp16")


@dataclass(frozen=True)
class Case:
    """A model with its kernels."""

    group: str
    """The part of the page that its kernels are listed in."""
    family: str
    fields: Mapping[str, Any]


def cases() -> dict[str, Case]:
    """Returns the cases by their names."""
    from llmtrain.models.liger import FAMILIES

    found = {f"liger {family}": Case("Liger", family, LIGER) for family in FAMILIES}
    for precision in PRECISIONS[1:]:
        # A rule refuses its loss where the loss is scaled.
        kernels = LIGER | ({"kernels.loss": "chunked"} if precision.endswith("fp16") else {})
        found[f"liger llama {precision}"] = Case("Liger", "llama", kernels | {"parallel.precision": precision})
    found["liger llama 405b"] = Case("Liger", "llama", LIGER | {"model.config": LLAMA_405B})
    for precision in PRECISIONS[:-1]:  # autocast_fp16 has the types of autocast_bf16 and of fp16
        found[f"compiled llama {precision}"] = Case("Compiled", "llama", COMPILED | {"parallel.precision": precision})
    found["compiled gemma3_text"] = Case("Compiled", "gemma3_text", COMPILED)
    found["compiled llama varlen"] = Case("Compiled", "llama", COMPILED | {"model.attention": "varlen"})
    for family, precision in (("llama", "bf16"), ("llama", "fp32"), ("gemma2", "bf16"), ("gemma2", "fp32")):
        found[f"flex {family} {precision}"] = Case("FlexAttention", family, FLEX | {"parallel.precision": precision})
    for kind in ("rowwise", "tensorwise"):
        found[f"fp8 {kind}"] = Case("fp8", "llama", FP8 | {"kernels.fp8": kind})
    return found


def groups() -> dict[str, list[str]]:
    """Returns the names of the cases of each group."""
    found: dict[str, list[str]] = {}
    for name, case in cases().items():
        found.setdefault(case.group, []).append(name)
    return found


def environment_of(libraries: Path, device: str) -> dict[str, str]:
    """Returns the variables with which a program has one GPU of `GPUS`, and compiles for it."""
    from tests.cuda_on_host.conftest import environment

    cache = libraries.parent / "kernels"
    return environment(libraries, devices=1) | {
        "CUDA_ON_HOST_NAME": GPUS[device],
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0",  # which loads CUDA
        "HF_HUB_OFFLINE": "1",
    }


def compile_cases(libraries: Path, device: str, names: Iterable[str]) -> dict[str, Any]:
    """Compiles cases for a device of `GPUS`, in another process.

    Returns for each name what its kernels need, as the fields of `triton_driver.Compiled`, or why a rule refuses it.
    """
    command = [sys.executable, "-m", "tests.cuda_on_host.kernels", device, *names]
    done = subprocess.run(command, env=environment_of(libraries, device), capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{' '.join(command[2:])}: {done.stdout[-2000:]}{done.stderr[-8000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compile_case(device: str, case: Case) -> list[dict[str, Any]] | str:
    """Compiles a case in this process, as `compile_cases` does in another one."""
    from llmtrain.errors import RecipeError
    from llmtrain.plan.draft import WEIGHT_DTYPE
    from tests.cuda_on_host import triton_driver

    triton_driver.used.clear()
    try:
        plan = _plan(device, case)
    except RecipeError as refusal:
        return str(refusal)
    _passes(plan)
    rounded = {one.name for one in triton_driver.used if one.in_tf32}
    if rounded and WEIGHT_DTYPE[plan.recipe.parallel.precision] == "fp32":
        raise AssertionError(f"a plan with weights in fp32 multiplies in TF32: {', '.join(sorted(rounded))}")
    return [asdict(one) for one in triton_driver.used]


def _plan(device: str, case: Case) -> Any:
    from transformers import AutoConfig

    from llmtrain.plan.rules import resolve
    from llmtrain.recipe.cluster import DEVICES, Cluster
    from tests.helpers.batches import tiny_recipe

    fields = {"parallel.precision": "bf16", "parallel.zero_stage": 1} | case.fields
    if fields["parallel.precision"] == "autocast_fp16":
        fields["parallel.zero_stage"] = 0
    config = SIZES.get(case.family) or {"vocab_size": AutoConfig.for_model(case.family).vocab_size}
    sizes = {"model.architecture": case.family, "model.config": config}
    if case.family in EAGER:
        sizes["model.attention"] = "eager"
    recipe = tiny_recipe(**sizes | {"data.sequence_length": TOKENS} | fields)
    # What fits is another rule's: the first layers of a model are compiled.
    unlimited = DEVICES[device].model_copy(update={"memory_bytes": None})
    return resolve(recipe, Cluster(devices_per_node=8, device=device, own_devices=[unlimited]))


def _passes(plan: Any) -> None:
    """Runs the plan's model, cut to two layers, forward and backward."""
    import torch
    from transformers import AutoModelForCausalLM

    from llmtrain.engines.forward import forward, use_kernels
    from llmtrain.models.build import model_configuration
    from llmtrain.models.precision import autocast, weight_dtype
    from llmtrain.models.tiny.configuration import with_layers
    from tests.helpers.batches import global_batch

    recipe, precision = plan.recipe, plan.recipe.parallel.precision
    config = with_layers(model_configuration(recipe), 2)
    batch = global_batch(0, 1, TOKENS, config.vocab_size)[0]
    _ = batch.documents  # read on the host before the pass, as the loader does
    with shapes():
        with torch.device("cuda"):
            attention = recipe.model.attention_kernel
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=weight_dtype(precision)
            ).train()
        use_kernels(model, plan)
        with autocast(precision, "cuda"):
            loss, auxiliary = forward(model, model, batch, torch.device("cuda"))
        (loss if auxiliary is None else loss + auxiliary).sum().backward()


def shapes() -> Any:
    """Returns a context in which tensors have no memory, and where a program asks for a number of one, it gets one."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    aten = torch.ops.aten

    class Shapes(FakeTensorMode):
        def dispatch(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if function is aten._local_scalar_dense.default:  # such as the number of target tokens
                return True if args[0].dtype == torch.bool else TOKENS
            if function is aten.equal.default:  # is the gradient of the loss 1? That of a part of a step is not
                return False
            if function is aten._fused_sdp_choice.default:
                return int(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION)  # the one that takes masks
            if function is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:  # its rule has no other type
                return function(*(one.bfloat16() for one in args[:2]), *args[2:], **(kwargs or {})).to(args[0].dtype)
            if function is aten._scaled_mm.out:  # has no rule for shapes: it would be computed
                return (kwargs or {})["out"]
            return super().dispatch(function, types, args, kwargs)

    return Shapes(allow_non_fake_inputs=True)


def install() -> None:
    """Prepares this process: Triton's driver, and what torch's compiler does in C++ with memory."""
    import torch._dynamo  # asks once what devices there are
    from torch._inductor import config
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._subclasses.fake_tensor import FakeTensor

    from tests.cuda_on_host import triton_driver
    from tests.cuda_on_host.torch_cuda import replace

    def empty(size: Any, stride: Any, dtype: Any) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    def reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)

    def address(tensor: torch.Tensor) -> int:  # Triton asks whether it is a multiple of 16
        return 256 + int(tensor.storage_offset()) * tensor.dtype.itemsize

    def not_timed(*given: Any, **named: Any) -> float:
        return 0.0

    triton_driver.install()
    replace(torch._C._dynamo.guards, _empty_strided_cuda=empty, _reinterpret_tensor=reinterpret)
    replace(FakeTensor, data_ptr=address)
    replace(CachingAutotuner, bench=not_timed)
    # A cached graph has the fastest configuration only; here all are compiled, any of which a GPU may find fastest.
    replace(config, fx_graph_cache=False, autotune_local_cache=False)
    torch._functorch.config.enable_autograd_cache = False


def main(device: str, names: list[str]) -> None:
    """Prints what was compiled."""
    warnings.filterwarnings("ignore")
    install()
    every = cases()
    print(json.dumps({name: compile_case(device, every[name]) for name in names}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
