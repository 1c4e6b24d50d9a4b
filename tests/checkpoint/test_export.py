"""An exported folder holds the weights that the run evaluated with, of every stage and precision."""

from __future__ import annotations

import pytest
import torch
from batches import GLOBAL_BATCH, step_batch, tiny_recipe
from harness import run_ranks
from tokenizers import Tokenizer, models
from traces import engine_of, plan_of
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from llmtrain.checkpoint.export import export
from llmtrain.checkpoint.folder import newest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import TrainerState
from llmtrain.errors import CheckpointError

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
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    inner = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(RANKS, _trained, folder)[0]


@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_exported_weights_are_the_engines_bit_for_bit(case, checkpoints, tokenizer, tmp_path):
    folder, weights = checkpoints
    export(newest(folder / str(case)), tokenizer, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == model.config.eos_token_id == 0
    exported = dict(model.named_parameters())
    assert exported.keys() == weights[case].keys()
    for name, (dtype, value) in weights[case].items():
        assert str(exported[name].dtype) == dtype
        assert torch.equal(exported[name].float(), torch.from_numpy(value)), name


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
