"""Kills saves at every filesystem call or at random instants, and checks what is left of them.

`tests/checkpoint/test_chaos.py` and `benchmarks/chaos.py` run these. Each campaign returns how often it killed
and raises AssertionError where a kill has cost more than the save that it hit.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from llmtrain.checkpoint.check import verify_checkpoint
from llmtrain.checkpoint.contents import TrainerState
from llmtrain.checkpoint.folder import find, newest, point_latest, read_latest
from llmtrain.checkpoint.save import Saver
from llmtrain.checkpoint.state import load
from llmtrain.engines.plain import PlainLoop
from llmtrain.errors import CheckpointError
from llmtrain.models import build_model
from tests.helpers.batches import step_batch, tiny_recipe
from tests.helpers.faults import Faults, die_after, injected
from tests.helpers.harness import run_ranks
from tests.helpers.traces import engine_of, plan_of

RUN = "chaos"
SMALL = {"model.config.hidden_size": 16, "model.config.intermediate_size": 32, "model.config.vocab_size": 64}
RECIPE = tiny_recipe(**SMALL, **{"checkpoint.keep_last": 1, "parallel.zero_stage": 1})


def _state(step: int) -> TrainerState:
    return TrainerState(step=step, samples=8 * step, data="key")


def at_every_call(folder: Path, kind: str, taken_back: bool, every: int = 1, seed: int = 0) -> int:
    """One rank; kills each `every`-th filesystem call of a save, each in a fork of its own.

    taken_back: the run was taken back to the step before, so that it saves over an older checkpoint.
    """
    return run_ranks(1, _at_every_call, folder, kind, taken_back, every, seed)[0]


def _at_every_call(rank: int, folder: Path, kind: str, taken_back: bool, every: int, seed: int) -> int:
    engine = _plain_loop()
    plan = plan_of(RECIPE, 1)
    expected = {}
    base = folder / "base"
    for step in range(1, 5):
        engine.train_step(_batch(step))
        expected[step] = {name: weight.clone() for name, weight in engine.named_weights()}
        # Of the checkpoints that a run has left, one is a step that will be saved again.
        if step < 3 or (taken_back and step == 3):
            Saver(base, plan_of(RECIPE.with_(**{"checkpoint.keep_last": None}), 1), engine, RUN).save(_state(step))
    saving, reading = _plain_loop(), _plain_loop()
    point_latest(base, "step_00000002")
    load(base / "step_00000002", saving, plan, "key")
    saving.train_step(_batch(3))
    kills, at = 0, 1 + random.Random(seed).randrange(every)
    while _killed(_forked(folder / "now", base, plan, saving, Faults(at, kind))):
        kills += 1
        step = assert_whole(folder / "now", at_least=2)
        assert load(newest(folder / "now"), reading, plan, "key").step == step
        assert all(torch.equal(weight, expected[step][name]) for name, weight in reading.named_weights())
        assert_goes_on(folder / "now", plan, engine)
        at += every
    assert kills > 20 / every, "the calls of a save are not seen"
    return kills


def _plain_loop() -> PlainLoop:
    return PlainLoop(build_model(RECIPE, torch.float32, torch.device("cpu")), RECIPE)


def _batch(step: int):
    batch = step_batch(step, 2, 4)
    for micro in batch.micro_batches:
        micro.input_ids.remainder_(64)
        micro.labels.copy_(micro.labels.where(micro.labels < 0, micro.labels.remainder(64)))
    return batch


def _forked(now: Path, base: Path, plan, engine, faults: Faults) -> int:
    """Returns the exit status of a fork that saves step 3 into a copy of `base`."""
    shutil.rmtree(now, ignore_errors=True)
    shutil.copytree(base, now)
    child = os.fork()
    if child == 0:
        saver = Saver(now, plan, engine, RUN)
        with injected(faults):
            saver.save(_state(3))
        os._exit(0)
    return os.waitpid(child, 0)[1]


def _killed(status: int) -> bool:
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


def at_random_instants(folder: Path, kills: int, seed: int) -> int:
    """One rank saves step after step; each attempt is a fork that is killed at a random instant."""
    return run_ranks(1, _at_random_instants, folder, kills, seed)[0]


def _at_random_instants(rank: int, folder: Path, kills: int, seed: int) -> int:
    engine, plan, generator = _plain_loop(), plan_of(RECIPE, 1), random.Random(seed)
    Saver(folder, plan, engine, RUN).save(_state(1))
    for _ in range(kills):
        last = assert_whole(folder, at_least=1)
        delay = generator.uniform(0.001, 0.12)
        child = os.fork()
        if child == 0:
            saver = Saver(folder, plan, engine, RUN)
            die_after(delay)
            step = last
            while True:
                step += 1
                saver.save(_state(step))
                (folder.parent / "saved").write_text(str(step))
        assert _killed(os.waitpid(child, 0)[1])
        saved = folder.parent / "saved"
        assert_whole(folder, at_least=max(last, int(saved.read_text() or 0) if saved.exists() else 0))
    return kills


class Shards:
    """A stand-in for an engine of which each rank holds a shard; the values identify step and rank."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank = rank
        self.step = step

    def save(self, writer) -> None:
        writer.tensors(
            f"engine/rank_{self.rank:05d}.safetensors", {"shard": _values(self.rank, self.step)}, private=True
        )
        if self.rank == 0:
            writer.tensors("engine/shared.safetensors", {"step": torch.tensor(self.step)})

    def load(self, folder: Path) -> None:
        self.step = int(load_file(folder / "engine" / "shared.safetensors")["step"])
        shard = load_file(folder / "engine" / f"rank_{self.rank:05d}.safetensors")["shard"]
        assert torch.equal(shard, _values(self.rank, self.step))


def _values(rank: int, step: int) -> torch.Tensor:
    return torch.full((3000,), 100.0 * step + rank)


def of_ranks(folder: Path, world_size: int, kills: int, seed: int, real: bool = False) -> int:
    """Several ranks save together; a random one is killed at a random call or instant.

    real: DeepSpeed's engine instead of a stand-in.
    """
    generator = random.Random(seed)
    for number in range(kills):
        victim = generator.randrange(world_size)
        # More calls are the leader's than the others'; a number beyond them all kills in a later save.
        fault = ("call", generator.randint(1, 70)) if generator.random() < 0.7 else ("time", generator.uniform(0, 0.3))
        checkpoints = folder / str(number % 2)
        last = assert_whole(checkpoints, at_least=0) if checkpoints.exists() else 0
        try:
            run_ranks(world_size, _save_until_killed, checkpoints, world_size, victim, fault, real, timeout=60)
            raise RuntimeError("nobody was killed")
        except AssertionError as error:
            # Whichever is reported first: the death of the victim, or gloo's error on another rank.
            if "died without a word" not in str(error) and "gloo" not in str(error):
                raise
        now = assert_whole(checkpoints, at_least=last)
        if not real:
            for rank in range(world_size if now else 0):
                part = load_file(newest(checkpoints) / "engine" / f"rank_{rank:05d}.safetensors")
                assert torch.equal(part["shard"], _values(rank, now))
    return kills


def _save_until_killed(rank: int, checkpoints: Path, world_size: int, victim: int, fault, real: bool) -> None:
    plan = plan_of(RECIPE.with_(**{"batch.micro_batch_size": 1}), world_size)
    engine = engine_of(plan) if real else Shards(rank, 0)
    saver = Saver(checkpoints, plan, engine, RUN)
    found = newest(checkpoints)
    state = load(found, engine, plan, "key") if found else _state(0)
    faults = Faults()
    if rank == victim:
        kind, amount = fault
        if kind == "time":
            die_after(0.001 + amount)
        else:
            faults.at = amount
    with injected(faults):
        for step in range(state.step + 1, state.step + 1000):
            if not real:
                engine.step = step
            saver.save(_state(step))


def assert_whole(checkpoints: Path, at_least: int) -> int:
    """Checks the state after a kill at any moment; returns the step to continue from, 0 for none."""
    for one in find(checkpoints):
        verify_checkpoint(one.folder)  # no half of a checkpoint looks like one
    latest, _ = read_latest(checkpoints)
    if latest is None:
        # Each kill so far came before the first `latest`; the newest of all is what is continued from.
        step = find(checkpoints)[-1].manifests[0].step if find(checkpoints) else 0
        assert step >= at_least
        return step
    step = verify_checkpoint(checkpoints / latest)[0].step
    assert newest(checkpoints) == checkpoints / latest
    assert step >= at_least, f"step {at_least} was saved, {step} is left"
    return step


def assert_goes_on(checkpoints: Path, plan, engine) -> None:
    """Checks that the next save works, and removes what the killed one has left."""
    Saver(checkpoints, plan, engine, RUN).save(_state(9))
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_00000009"]


def full_at_every_call(folder: Path, every: int = 1) -> int:
    """One rank; at each `every`-th call of a save, the disk is full. The save must fail without losing anything."""
    return run_ranks(1, _full_at_every_call, folder, every)[0]


def _full_at_every_call(rank: int, folder: Path, every: int) -> int:
    engine, plan = _plain_loop(), plan_of(RECIPE, 1)
    failures, at = 0, 1
    while True:
        checkpoints = folder / str(at)
        saver = Saver(checkpoints, plan, engine, RUN, pauses=())
        for step in (1, 2):
            saver.save(_state(step))
        faults = Faults(at, "full")
        try:
            with injected(faults):
                saver.save(_state(3))
        except CheckpointError as error:
            if "No space left" not in str(error):
                raise
            failures += 1
            assert_whole(checkpoints, at_least=2)
            assert not list(checkpoints.glob(".*partial*"))
        if faults.count < at:
            return failures
        assert_goes_on(checkpoints, plan, engine)
        at += every
