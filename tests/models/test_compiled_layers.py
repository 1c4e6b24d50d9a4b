"""Compiled layers compute the same and keep their parameters; layers that cannot be compiled are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch._dynamo import lookup_backend
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralMLP

from llmtrain.data import Documents
from llmtrain.errors import RecipeError
from llmtrain.models import compiled, cpu, target_loss_sum, varlen
from llmtrain.models.compiled import check_compiler, check_layers, compile_layers, compiled_loss, share_compiler_threads
from llmtrain.models.recompute.checkpoints import use_recomputation
from llmtrain.recipe import ParallelConfig
from llmtrain.system.stops import STOP_SIGNALS

FIELDS = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 12}
FIELDS |= {"num_attention_heads": 4, "num_key_value_heads": 2}
PARTS = {"blocks": "kernels.blocks", "loss": "kernels.loss"}


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    monkeypatch.setattr(compiled, "_accepted", set())


def _llama():
    return AutoConfig.for_model("llama", **FIELDS)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(
            pytest.param(one, marks=pytest.mark.breadth)
            for one in ("gpt2", "gemma3_text", "qwen3", "falcon_h1", "mistral", "opt", "bloom")
        ),
    ],
)
def test_families_can_be_compiled(family):
    check_layers(AutoConfig.for_model(family), "sdpa" if family != "bloom" else "eager")


def test_a_layer_that_depends_on_values_is_refused_before_the_run(monkeypatch):
    """The experts of Mixtral did, before transformers 5.24."""
    forward = MistralMLP.forward
    monkeypatch.setattr(MistralMLP, "forward", lambda self, x: forward(self, x) if x.sum() else x)
    with pytest.raises(RecipeError, match=r"layers of mistral cannot be compiled.*\n.*kernels\.blocks=eager"):
        check_layers(AutoConfig.for_model("mistral", **FIELDS), "sdpa")


def test_a_family_without_a_tiny_copy_is_refused():
    with pytest.raises(RecipeError, match=r"layers of xlnet cannot be compiled .*`d_head` "):
        check_layers(AutoConfig.for_model("xlnet"), "eager")


def test_too_many_kinds_of_layers_are_refused(monkeypatch):
    monkeypatch.setattr(compiled, "MAX_LAYER_KINDS", 2)
    forward = LlamaDecoderLayer.forward

    def numbered(self, hidden_states, *args, **kwargs):
        return forward(self, hidden_states, *args, **kwargs) * (1 + 0 * self.self_attn.layer_idx)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", numbered)
    with pytest.raises(RecipeError, match=r"layers of llama cannot be compiled \(FailOnRecompileLimitHit"):
        check_layers(_llama(), "sdpa")


def test_the_number_of_graphs_is_limited_for_the_compiled_function_alone(monkeypatch):
    monkeypatch.setattr(compiled, "_inductor", lookup_backend("aot_eager"))
    torch._dynamo.reset()
    before = torch._dynamo.config.recompile_limit
    double = compiled._compiled(lambda tensor: 2 * tensor, is_whole=True, limit=before + 2)
    for size in range(1, before + 3):
        assert double(torch.ones(size)).sum() == 2 * size
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        double(torch.ones(before + 3))
    assert torch._dynamo.config.recompile_limit == before


def test_deviating_results_are_detected(monkeypatch):
    compiled_layer = compiled._compiled_layer

    def wrong(*arguments):
        function = compiled_layer(*arguments)
        return lambda *args, **kwargs: 1.001 * function(*args, **kwargs)

    monkeypatch.setattr(compiled, "_compiled_layer", wrong)
    with pytest.raises(RecipeError, match="logits or gradients deviate by"):
        check_layers(_llama(), "sdpa")


def test_a_configuration_is_checked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(compiled, "_deviation", lambda *about: asked.append(about) or 0.0)
    for attention in ("sdpa", "sdpa", "eager"):
        check_layers(_llama(), attention)
    assert [attention for _, attention, _ in asked] == ["sdpa", "eager"]


def test_all_layers_share_one_graph_and_keep_their_names(monkeypatch):
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(compiled, "_inductor", backend)
    torch._dynamo.reset()
    model = AutoModelForCausalLM.from_config(_llama())
    names, saved = [name for name, _ in model.named_parameters()], list(model.state_dict())
    tokens = torch.arange(20)[None]
    expected = model(tokens, use_cache=False).logits
    compile_layers(model, "sdpa")
    assert torch.equal(model(tokens, use_cache=False).logits, expected)
    assert len(made) == 1
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == saved


@pytest.mark.parametrize("again", ["none", "selective"])
def test_other_documents_need_no_new_graph(again, monkeypatch):
    """One graph for training, whatever the number of documents and their lengths; attention is computed once in the
    forward pass, and on a CPU once more for its gradient, but not a third time for a selective checkpoint."""
    made, computed, one_by_one = [], [], varlen._attend_per_document

    def backend(graph, inputs):
        made.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    def counted(*given):
        computed.append(given)
        return one_by_one(*given)

    monkeypatch.setattr(compiled, "_inductor", backend)
    monkeypatch.setattr(varlen, "_attend_per_document", counted)
    monkeypatch.setattr(cpu, "_library", None)  # another test of the process may have loaded the kernels
    torch._dynamo.reset()
    config = AutoConfig.for_model("mistral", **FIELDS | {"num_hidden_layers": 2, "sliding_window": 6})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="varlen")
    tokens = torch.arange(20)[None]

    def passes(lengths):
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        bounds = Documents.of(positions).arguments(torch.device("cpu"))
        logits = model(tokens, position_ids=positions, use_cache=False, **bounds).logits
        return logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))

    packings = ([20], [7, 13], [1] * 20, [5, 3, 12], [2, 2, 16])
    expected = [passes(lengths) for lengths in packings]
    use_recomputation(model, ParallelConfig(activation_checkpointing=again))
    compile_layers(model, "varlen")
    computed.clear()
    for lengths, results in zip(packings, expected, strict=True):
        for own, other in zip(passes(lengths), results, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    assert len(made) == 1
    assert len(computed) == 2 * 2 * len(packings)


def test_compilers_are_shielded_from_signals_and_the_watchdog_waits_longer(monkeypatch):
    said = []

    @contextmanager
    def told():
        said.append("begins")
        yield
        said.append("ends")

    def compiler(graph, inputs):
        said.append(set(STOP_SIGNALS) <= signal.pthread_sigmask(signal.SIG_BLOCK, []))
        return graph.forward

    monkeypatch.setattr(compiled, "compiling", told)
    monkeypatch.setattr(compile_fx, "compile_fx", compiler)
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    compiled._inductor(graph, [])
    assert said == ["begins", True, "ends"]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_missing_compiler_is_reported(on_cpu, monkeypatch):
    monkeypatch.setattr("llmtrain.overrides.torch.find_spec", lambda name: None)
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(RecipeError) as refused:
        check_compiler(list(PARTS.values()), on_cpu)
    told = str(refused.value)
    assert ("needs a C++ compiler" in told, "pip install triton" in told) == (on_cpu, not on_cpu)
    assert "--set kernels.blocks=eager" in told
    assert "--set kernels.loss=chunked" in told


def test_missing_headers_of_python_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(RecipeError, match=r"Python\.h.*\n.*python3-dev"):
        check_compiler(["kernels.blocks"], on_cpu=True)


def test_ranks_share_the_processors(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(96)))
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    with inductor_config.patch(compile_threads=7):
        for ranks, threads in ((1, 32), (8, 12), (200, 1)):
            share_compiler_threads(ranks)
            assert inductor_config.compile_threads == threads
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "5")
        share_compiler_threads(8)
        assert inductor_config.compile_threads == 1


RANK = """
import os, sys, time
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from llmtrain.models.compiled import _stops_blocked
config.compile_threads = 2
with _stops_blocked():
    AsyncCompile.warm_pool()
    AsyncCompile.wakeup()
AsyncCompile.wait_pool_ready()
print("ready", flush=True)
sys.stdin.read(1)
os._exit(75)
"""
"""A rank with the processes that compile for a GPU."""


def _session(leader: int) -> set[int]:
    """The processes of a session but its leader, those apart that have ended."""
    found = set()
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader != int(process.name) and state != "Z":
                found.add(int(process.name))
    return found


def _is_empty(leader: int) -> bool:
    end = time.monotonic() + 60
    while (left := _session(leader)) and time.monotonic() < end:
        time.sleep(0.1)
    return not left


@pytest.mark.parametrize(
    "is_killed", [pytest.param(False, marks=pytest.mark.breadth), pytest.param(True, marks=pytest.mark.breadth)]
)
def test_compiler_processes_end_with_their_rank_and_ignore_stopping_signals(is_killed):
    command = [sys.executable, "-c", RANK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"ready\n"
        compilers = _session(rank.pid)
        assert compilers
        for process in compilers:
            for stop in STOP_SIGNALS:
                os.kill(process, stop)
        time.sleep(1)
        assert compilers <= _session(rank.pid)
        if is_killed:
            rank.kill()
        else:
            rank.stdin.write(b"x")
            rank.stdin.flush()
        rank.wait()
    assert _is_empty(rank.pid)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_loss_equals_the_eager_loss(dtype):
    """In fp32, sums in another order; a gradient in bf16 is rounded once, by 2⁻⁹ at most, on both sides."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(1, 40, 997)).to(dtype).requires_grad_()
    labels = torch.randint(0, 997, (1, 40))
    labels[0, 7:12] = -100
    expected = target_loss_sum(logits, labels)
    (wanted,) = torch.autograd.grad(expected, logits)
    loss = compiled_loss(on_cpu=False)(logits, labels)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    rounding = 1e-6 if dtype == torch.float32 else 2**-8
    assert ((gradient - wanted).abs() <= rounding * wanted.abs() + 1e-7).all()
    assert gradient.dtype == dtype
