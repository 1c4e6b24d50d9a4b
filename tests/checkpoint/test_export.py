"""An exported folder contains the weights that the run evaluated with, for every stage and precision."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from safetensors import safe_open
from tokenizers import Tokenizer, models
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, PreTrainedTokenizerFast

from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.export import _write_settings, export, size_in_bytes
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.hub.model_card import portable
from llmtrain.checkpoint.save import Saver
from llmtrain.errors import CheckpointError, RecipeError
from llmtrain.models import build_model
from llmtrain.models.hub_names import empty_model
from tests.helpers.batches import GLOBAL_BATCH, MIXTRAL, step_batch, tiny_recipe
from tests.helpers.harness import run_ranks
from tests.helpers.own_code import write_folder
from tests.helpers.traces import engine_of, plan_of

RANKS = 2
CASES = [
    # ZeRO stage, precision, another degree
    (0, "fp32", "pipeline", 1),
    (0, "autocast_bf16", "pipeline", 1),
    (1, "bf16", "pipeline", 1),
    (2, "bf16", "pipeline", 1),
    (3, "fp32", "pipeline", 1),
    (3, "bf16", "pipeline", 1),
    (1, "fp32", "pipeline", 2),
    (1, "bf16", "pipeline", 2),
    (0, "fp32", "tensor", 2),
    (2, "bf16", "tensor", 2),
    (3, "bf16", "tensor", 2),
    (1, "bf16", "sequence", 2),
    (3, "fp32", "sequence", 2),
]


def _trained(rank: int, folder):
    """Trains and saves each case; the weights of the live engine."""
    found = []
    for index, (stage, precision, name, degree) in enumerate(CASES):
        dp = RANKS // degree
        fields = {"parallel.zero_stage": stage, "parallel.precision": precision, f"parallel.{name}": degree}
        plan = plan_of(tiny_recipe(**fields, **{"batch.micro_batch_size": GLOBAL_BATCH // RANKS}), RANKS)
        engine = engine_of(plan)
        for step in range(6):
            shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
            engine.train_step(step_batch(step, *shape, engine.data_parallel_rank, dp))
        Saver(folder / str(index), plan, engine).save(TrainerState(step=6))
        found.append({name: (str(w.dtype), w.float().numpy().copy()) for name, w in engine.named_weights()})
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(RANKS, _trained, folder)[0]


@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_exported_weights_equal_the_engines_bit_for_bit(case, checkpoints, tokenizer, tmp_path):
    folder, weights = checkpoints
    export(newest(folder / str(case)), tokenizer, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == model.config.eos_token_id == 0
    exported = dict(model.named_parameters())
    assert exported.keys() == weights[case].keys()
    for name, (dtype, value) in weights[case].items():
        assert str(exported[name].dtype) == dtype
        assert torch.equal(exported[name].float(), torch.from_numpy(value)), name


def _saved(rank: int, cases: list[tuple[str, dict]], folder) -> None:
    """A checkpoint of each case after three steps; the rate of the first is zero."""
    for name, fields in cases:
        plan = plan_of(tiny_recipe(**{"batch.micro_batch_size": GLOBAL_BATCH // RANKS, **fields}), RANKS)
        engine = engine_of(plan)
        shape = (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps)
        for step in range(3):
            engine.train_step(step_batch(step, *shape, engine.data_parallel_rank, plan.data_parallel_size))
        state = TrainerState(step=1, samples=GLOBAL_BATCH, tokens=200, eval_loss=5.25, eval_step=1)
        Saver(folder / name / "checkpoints", plan, engine).save(state)


EXPERTS = {**MIXTRAL, "model.config.tie_word_embeddings": False, "parallel.expert": 2, "parallel.zero_stage": 1}
FAMILIES = {
    "tied": {"parallel.zero_stage": 3},
    "experts": EXPERTS,
    "half": {**EXPERTS, "parallel.precision": "bf16"},
    "gpt2": {
        "model.architecture": "gpt2",
        "model.config": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256},
    },
    "large": {
        "model.config.num_hidden_layers": 16,
        "model.config.tie_word_embeddings": False,
        "parallel.zero_stage": 3,
    },
}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    run_ranks(RANKS, _saved, list(FAMILIES.items()), folder)
    return folder


def _loaded(folder, **options):
    """The model of a folder, in the type of its weights; nothing is missing, nothing is left over."""
    model, told = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True, **options)
    assert not any(told.values()), told
    return model


def _tensors(folder) -> dict[str, tuple[str, torch.Tensor]]:
    """By name, the file of each tensor and its content."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as content:
            assert content.metadata() == {"format": "pt"}
            found |= {name: (file.name, content.get_tensor(name)) for name in content.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("size", [10**9, 60_000])
@pytest.mark.parametrize("name", ["tied", "experts", "half", "gpt2"])
def test_files_are_those_of_save_pretrained(name, size, families, tokenizer, tmp_path):
    """Names, shapes, types, content, and which tensor is in which file; experts are one tensor each, as on the hub.

    The files of experts may differ: `transformers` takes those that it cut from one tensor for one.
    """
    export(newest(families / name / "checkpoints"), tokenizer, tmp_path / "ours", most_bytes=size)
    loaded = _loaded(tmp_path / "ours")
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=loaded.dtype)  # it would save in another order
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    ours, theirs = _tensors(tmp_path / "ours"), _tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    has_experts = name in ("experts", "half")
    assert any("experts.1.w1" in key for key in ours) == has_experts
    for key, (file, tensor) in theirs.items():
        assert ours[key][0] == file or has_experts, key
        assert ours[key][1].dtype == tensor.dtype, key
        assert torch.equal(ours[key][1], tensor), key
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "ours" / file).read_text()) == json.loads(
            (tmp_path / "theirs" / file).read_text()
        )
    index = tmp_path / "ours" / "model.safetensors.index.json"
    assert index.exists() == (tmp_path / "theirs" / index.name).exists() == (size == 60_000)
    if index.exists():
        told = json.loads(index.read_text())
        assert told["weight_map"] == {key: file for key, (file, _) in ours.items()}
        assert told["metadata"]["total_size"] == sum(
            tensor.numel() * tensor.element_size() for _, tensor in ours.values()
        )
        assert has_experts or told == json.loads((tmp_path / "theirs" / index.name).read_text())
        most = [
            sum(tensor.nbytes for file, tensor in ours.values() if file == one) for one in {f for f, _ in ours.values()}
        ]
        assert max(most) <= max(size, *(tensor.nbytes for _, tensor in ours.values()))


def test_weights_that_a_model_does_not_save_are_left_out(families, tokenizer, tmp_path, monkeypatch):
    """As `save_pretrained` leaves them out: a model from the hub may compute a table again when it is loaded."""
    monkeypatch.setattr(GPT2LMHeadModel, "_keys_to_ignore_on_save", ["transformer.wpe.weight"])
    export(newest(families / "gpt2" / "checkpoints"), tokenizer, tmp_path / "ours")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "ours"))
    model.save_pretrained(tmp_path / "theirs")
    names = _tensors(tmp_path / "ours").keys()
    assert names == _tensors(tmp_path / "theirs").keys()
    assert "transformer.wpe.weight" not in names


def _most_memory(work) -> int:
    """The most bytes that torch had at one time, in host memory or mapped from files."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    live = most = 0
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


@pytest.mark.parametrize("size", [10**9, 200_000])
def test_memory_is_that_of_the_largest_weight_and_not_of_the_model(size, families, tokenizer, tmp_path):
    checkpoint = newest(families / "large" / "checkpoints")
    mapped = sum(file.stat().st_size for file in (checkpoint / "engine").glob("*.safetensors"))
    most = _most_memory(lambda: export(checkpoint, tokenizer, tmp_path / "out", most_bytes=size)) - mapped
    tensors = _tensors(tmp_path / "out")
    sizes = [tensor.numel() * tensor.element_size() for _, tensor in tensors.values()]
    # Of the largest: the ranks' pieces, the whole that they are joined to, and one more while the next begins.
    assert 0 < most <= 3 * max(sizes)
    assert sum(sizes) > 10 * most


def test_a_bf16_run_exports_its_fp32_weights(families, tokenizer, tmp_path):
    """The weights that are trained, of which the forward pass reads rounded ones."""
    checkpoint = newest(families / "half" / "checkpoints")
    export(checkpoint, tokenizer, tmp_path / "half")
    export(checkpoint, tokenizer, tmp_path / "full", dtype="float32")
    half, full = _loaded(tmp_path / "half"), _loaded(tmp_path / "full")
    assert (half.dtype, full.dtype) == (torch.bfloat16, torch.float32)
    theirs = dict(half.named_parameters())
    assert all(torch.equal(value.bfloat16(), theirs[name]) for name, value in full.named_parameters())
    assert any(not torch.equal(value, theirs[name].float()) for name, value in full.named_parameters())


def test_the_card_describes_the_training_and_its_result(families, tokenizer, tmp_path):
    run = families / "tied"
    lines = [
        {"step": 1, "loss": 5.5},
        {"step": 1, "eval_loss": 5.125, "eval_loss_by_source": {"/d/a.txt": 5.0}, "eval_loss_by_set": {"wiki": 4.5}},
        {"step": 2, "loss": 1.0},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1, "lo')
    export(newest(run / "checkpoints"), tokenizer, tmp_path / "out")
    _, head, body = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["llmtrain", "llama"],
    }
    assert "| training loss | 5.5000 nats per token in step 1 |" in body
    assert "| evaluation loss | 5.1250 nats per token after step 1, on held-out text |" in body
    assert "| evaluation loss, a.txt | 5.0000 nats per token |" in body
    assert "| evaluation loss, wiki | 4.5000 nats per token |" in body
    assert "1 steps, 8 sequences, 200 target tokens" in body
    assert '"zero_stage": 3' in body
    assert "- torch " in body
    assert str(tmp_path.parent) not in body


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("/data/secret-project/corpus.jsonl", "corpus.jsonl"),
        ("https://user:token@example.org/a/corpus.txt?key=1", "https://example.org/a/corpus.txt"),
        ("Qwen/Qwen3-0.6B-Base", "Qwen/Qwen3-0.6B-Base"),
        ("~/models/mine", "mine"),
        ("stdlib", "stdlib"),
    ],
)
def test_a_card_names_no_folder_and_no_secret(name, told):
    assert portable(name) == told


def test_weights_start_another_run(families, tokenizer, tmp_path):
    """And back: the hub's names of a family whose prefix may be missing."""
    export(newest(families / "gpt2" / "checkpoints"), tokenizer, tmp_path / "out")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    recipe = tiny_recipe(**{"model.architecture": None, "model.config": {}, "model.pretrained": str(tmp_path / "out")})
    again = build_model(recipe, torch.float32, torch.device("cpu"))
    assert all(torch.equal(value, again.get_parameter(name)) for name, value in model.named_parameters())


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("512 MiB", 2**29), ("1000", 1000), ("2kb", 2000)])
def test_sizes_are_read(text, size):
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0GB", "-1GB", "1.5GB", "5XB"])
def test_invalid_sizes_are_refused(text):
    with pytest.raises(RecipeError, match="--max-shard-size 5GB"):
        size_in_bytes(text)


def test_an_export_that_cannot_be_written_leaves_nothing(families, tokenizer, tmp_path):
    checkpoint = newest(families / "tied" / "checkpoints")
    with pytest.raises(CheckpointError, match="--tokenizer"):
        export(checkpoint, tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        export(checkpoint, tokenizer, tmp_path / "file" / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    with pytest.raises(CheckpointError, match="is not empty"):
        export(checkpoint, tokenizer, tmp_path / "full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def test_a_damaged_checkpoint_is_not_exported(checkpoints, tokenizer, tmp_path):
    folder = newest(checkpoints[0] / "0")
    file = folder / "trainer.json"
    content = file.read_bytes()
    file.write_bytes(content + b" ")
    try:
        with pytest.raises(CheckpointError, match=r"trainer\.json"):
            export(folder, tokenizer, tmp_path / "out")
    finally:
        file.write_bytes(content)
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_generate_by_itself_is_exported(tmp_path):
    """Its own class does not inherit from GenerationMixin."""
    folder = write_folder(tmp_path)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = empty_model(config, torch.float32, trust_remote_code=True)
    inner = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>").save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "out").mkdir()
    _write_settings(model, tmp_path / "tokenizer", tmp_path / "out", pads=True)
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert written["eos_token_id"] == 0
    assert written["suppress_tokens"] == list(range(2, 256))
