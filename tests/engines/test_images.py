"""Conversations with images: packed as each alone, and every strategy as the plain loop."""

from __future__ import annotations

import json
import os

import pytest
import torch
from transformers import (
    AutoModelForMultimodalLM,
    AutoTokenizer,
    Gemma4ImageProcessorPil,
    Llama4ImageProcessor,
    Llama4Processor,
    Qwen2VLImageProcessorPil,
)

from llmtrain.data import BatchLoader, prepare
from llmtrain.data.images import decode_image, read_image
from llmtrain.engines.forward import forward, use_kernels
from llmtrain.engines.plain import PlainLoop, plain_model
from llmtrain.models import build_model
from llmtrain.models.images import with_images
from llmtrain.plan.facts.images import IMAGE_FAMILIES
from tests.helpers.harness import run_ranks
from tests.helpers.image_chats import image_recipe, image_rows, save_image_model
from tests.helpers.traces import Trace, assert_same, engine_of, plan_of, worst

FAMILIES = ("qwen3_vl", "qwen3_5", "gemma4", "qwen3_vl_moe", "qwen3_5_moe")
LLAMA = "llama4"
WITH_TORCHVISION = (
    pytest.mark.breadth,
    pytest.mark.skipif("TORCHVISION" not in os.environ, reason="see tests/helpers/torchvision_folder.py"),
)
STEPS = 3
CPU = torch.device("cpu")
LORA = {"model.adapter": {"rank": 2}}
FROZEN: dict[str, object] = {"model.trainable": "the text model"}
TOWER: dict[str, object] = {"model.trainable": "the tower"}
LENGTHS = {"gemma4": 256, LLAMA: 192}
"""Length of a sequence with two images, if it is not the usual one."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: save_image_model(folder / family, family) for family in (*FAMILIES, LLAMA)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    return folder, image_rows(folder, 24)


def _alone(model, family: str, folder, row) -> torch.Tensor:
    """The summed loss of a conversation, computed from what the processor of `transformers` makes of it."""
    source = folder / "rows.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    settings = json.loads((source.parent / "settings.json").read_text())
    kinds = {"gemma4": Gemma4ImageProcessorPil, LLAMA: Llama4ImageProcessor}
    processor = kinds.get(family, Qwen2VLImageProcessorPil).from_dict(settings)
    token = "<|image|>" if family in kinds else "<|image_pad|>"
    column, images, messages = iter(row.get("images", [])), [], []
    for message in row["messages"]:
        parts = []
        for part in [] if isinstance(message["content"], str) else message["content"]:
            if part["type"] != "text":
                values = {key: part[key] for key in ("path", "base64") if key in part}
                images.append(read_image(part.get("image_url") or values or next(column), source.parent))
            parts.append(part if part["type"] == "text" else {"type": "image"})
        messages.append({**message, "content": parts or message["content"]})
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    inputs = {}
    if images:
        made = processor([decode_image(image) for image in images], return_tensors="pt")
        inputs = {name: made[name] for name in made if name not in ("num_soft_tokens_per_image", "aspect_ratios")}
        first, *texts = text.split(token)
        if family == LLAMA:  # 4 × 4 patches of a tile, of which 4 become one token
            expanded = [Llama4Processor._prompt_split_image(None, ratio, 4) for ratio in made["aspect_ratios"].tolist()]
        elif family == "gemma4":
            expanded = [f"<|image>{token * n}<image|>" for n in made["num_soft_tokens_per_image"]]
        else:
            expanded = [token * (int(grid.prod()) // processor.merge_size**2) for grid in made["image_grid_thw"]]
        text = first + "".join(image + after for image, after in zip(expanded, texts, strict=True))
    question, answer = text.split("<|im_start|>assistant\n")
    answer = answer.removesuffix("\n")
    context, trained = (
        tokenizer(part, add_special_tokens=False)["input_ids"]
        for part in (question + "<|im_start|>assistant\n", answer)
    )
    ids = torch.tensor([context + trained])
    if family != LLAMA:
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    logits = model(input_ids=ids, **inputs, use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits[len(context) - 1 : -1], ids[0, len(context) :], reduction="sum")


@pytest.mark.parametrize("family", [*FAMILIES, pytest.param(LLAMA, marks=WITH_TORCHVISION)])
def test_packed_conversations_have_the_losses_and_gradients_of_each_alone(family, models, rows, tmp_path):
    _, written = rows
    folder = rows[0]
    recipe = image_recipe(models[family], folder, written, **{"data.sequence_length": 2 * LENGTHS.get(family, 128)})
    prepared, plan = prepare(recipe), plan_of(recipe, 1)
    size = prepared.train_sequences
    assert size < len(written) / 2  # packed
    loader = BatchLoader(
        prepared,
        seed=1,
        global_batch_size=size,
        micro_batch_size=size,
        gradient_accumulation_steps=1,
        dp_rank=0,
        dp_size=1,
    )
    (batch,) = loader.train_batch(0).micro_batches
    assert batch.images is not None
    assert batch.images.are_seen
    ours = build_model(recipe, torch.float32, CPU).train()
    use_kernels(ours, plan)
    loss, _ = forward(ours, ours, batch, CPU)
    loss.backward()
    (folder / "settings.json").write_text((models[family] / "preprocessor_config.json").read_text())
    theirs = AutoModelForMultimodalLM.from_pretrained(models[family], dtype=torch.float32).train()
    if family == LLAMA:
        with_images(theirs)  # its own forward pass fails in transformers 5.24.0
    expected = sum(_alone(theirs, family, folder, row) for row in written)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    largest = max(gradient.abs().max() for gradient in gradients.values())
    trained = {name: parameter for name, parameter in ours.named_parameters() if parameter.requires_grad}
    assert trained.keys() == gradients.keys()
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5 * float(largest), msg=name)


def test_llama_4_computes_texts_beside_an_image_that_no_token_stands_for(models):
    """Without torchvision, which only makes the pixels."""
    model = with_images(AutoModelForMultimodalLM.from_pretrained(models[LLAMA], dtype=torch.float32))
    tokens, tower = torch.arange(3, 40)[None], model.config.vision_config
    pixels = torch.zeros(1, 3, tower.image_size, tower.image_size, dtype=torch.bfloat16)
    logits = model(input_ids=tokens, pixel_values=pixels, unseen=True).logits
    torch.testing.assert_close(logits, model.language_model(input_ids=tokens).logits)
    logits.sum().backward()
    assert not model.vision_model.class_embedding.grad.any()


def _losses(recipe, ranks: int, rank: int = 0, plain: bool = False) -> Trace:
    """Trains some steps, then evaluates."""
    plan, prepared = plan_of(recipe, ranks), prepare(recipe)
    engine = PlainLoop(plain_model(plan, CPU), plan.recipe) if plain else engine_of(plan)
    loader = BatchLoader.of(plan, prepared, engine.data_parallel_rank)
    size = recipe.batch.global_batch_size
    results = [engine.train_step(loader.train_batch(step * size)) for step in range(STEPS)]
    return Trace(
        losses=[result.loss.item() for result in results],
        grad_norms=[result.grad_norm.item() for result in results],
        rates=[result.lr for result in results],
        evaluation=engine.eval_step(loader.train_batch(STEPS * size)).item(),
        weights={name: tensor.float().numpy().copy() for name, tensor in engine.named_weights()},
    )


def _run(rank: int, recipes: list, ranks: int) -> list[Trace]:
    return [_losses(recipe, ranks, rank) for recipe in recipes]


CASES = {
    "ZeRO-0": {},
    "ZeRO-1": {"parallel.zero_stage": 1},
    "ZeRO-2": {"parallel.zero_stage": 2},
    "ZeRO-3": {"parallel.zero_stage": 3},
    "DDP": {"parallel.backend": "accelerate"},
    "FSDP2": {"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
    "chunks and recomputation, ZeRO-3": {
        **{"parallel.zero_stage": 3, "kernels.loss": "chunked", "parallel.activation_checkpointing": "full"},
    },
    "packed, ZeRO-3": {"parallel.zero_stage": 3, "data.packing": "best_fit", "batch.micro_batch_size": 2},
    "bf16, ZeRO-3": {"parallel.zero_stage": 3, "parallel.precision": "bf16"},
    "bf16, FSDP2": {
        **{"parallel.backend": "accelerate", "parallel.accelerate": "fsdp2", "parallel.zero_stage": 3},
        **{"parallel.precision": "bf16"},
    },
    "LoRA": LORA,
    "LoRA, ZeRO-3": {**LORA, "parallel.zero_stage": 3},
    "LoRA, DDP": {**LORA, "parallel.backend": "accelerate"},
    "frozen tower, ZeRO-3": {**FROZEN, "parallel.zero_stage": 3},
    "frozen tower, FSDP2": {
        **FROZEN,
        "parallel.backend": "accelerate",
        "parallel.accelerate": "fsdp2",
        "parallel.zero_stage": 3,
    },
    "trained tower, DDP": {**TOWER, "parallel.backend": "accelerate"},
}


SOME = ("packed, ZeRO-3", "FSDP2", "LoRA, ZeRO-3", "trained tower, DDP")
"""Those where a family's own tower, placeholders and parameters count most."""


@pytest.mark.parametrize(
    ("family", "cases"),
    [
        pytest.param("qwen3_vl", tuple(CASES), marks=pytest.mark.slow),
        pytest.param("gemma4", SOME, marks=pytest.mark.slow),
        *(pytest.param(name, tuple(CASES), marks=pytest.mark.breadth) for name in FAMILIES if name != "qwen3_vl"),
        pytest.param(LLAMA, tuple(CASES), marks=WITH_TORCHVISION),
    ],
)
def test_every_strategy_matches_the_plain_loop(family, cases, models, rows):
    folder, written = rows
    base = {"data.packing": "none", "batch.micro_batch_size": 1}  # a micro-batch is one conversation
    base["data.sequence_length"] = LENGTHS.get(family, 96)
    known = IMAGE_FAMILIES[family]
    parts = {"the text model": list(known.language), "the tower": [f"{prefix}*" for prefix in known.tower]}
    recipes = {}
    for name in cases:
        fields = {**base, **CASES[name]}
        if "model.trainable" in fields:
            fields["model.trainable"] = parts[fields["model.trainable"]]
        recipes[name] = image_recipe(models[family], folder, written, **fields)
    by_rank = run_ranks(2, _run, list(recipes.values()), 2, timeout=120)
    plain: dict[str, Trace] = {}
    for number, (name, recipe) in enumerate(recipes.items()):
        kind = repr((recipe.model, recipe.data, recipe.batch))
        if kind not in plain:
            alone = recipe.with_(
                **{"parallel.zero_stage": 0, "parallel.backend": "deepspeed", "parallel.accelerate": "ddp"}
            )
            plain[kind] = _losses(alone, 1, plain=True)
        for rank in range(2):
            run = by_rank[rank][number]
            if recipe.parallel.precision == "fp32":
                assert_same(run, plain[kind], f"{name}, rank {rank}")
            else:  # one unit in the last place of the loss, as derived in `test_parity`
                assert worst(run.losses, plain[kind].losses) < 2**-8, f"{name}, rank {rank}"
