"""A recipe small enough to train in a second, on a corpus cut from the standard library."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

RECIPE = """
from llmtrain import (
    BatchConfig, CheckpointConfig, DataConfig, EvalConfig, LoggingConfig, ModelConfig, OptimConfig, Recipe, Source,
    TrainConfig, TrainedTokenizer, main,
)


def recipe() -> Recipe:
    return Recipe(
        name="small",
        model=ModelConfig(
            architecture="llama",
            config={{
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
            }},
        ),
        data=DataConfig(
            sources=[Source({corpus!r})], tokenizer=TrainedTokenizer(vocab_size=512), sequence_length=64,
            eval_fraction=0.1, cache_dir={cache!r},
        ),
        optim=OptimConfig(lr=1e-2, warmup_steps=3, clip_grad_norm=0.5),
        batch=BatchConfig(global_batch_size=8, micro_batch_size=2),
        train=TrainConfig(max_steps=12),
        evaluation=EvalConfig(every_steps=6, max_sequences=10),
        checkpoint=CheckpointConfig(every_steps=4),
        logging=LoggingConfig(every_steps=1, trackers=()),
    )


if __name__ == "__main__":
    main(recipe)
"""


def write_small_recipe(folder: Path) -> Path:
    """Writes the recipe file and its corpus, a jsonl of some modules of the standard library."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    with (folder / "corpus.jsonl").open("w") as corpus:
        for module in modules:
            corpus.write(json.dumps({"text": module.read_text(encoding="utf-8")[:4000]}) + "\n")
    path = folder / "small.py"
    path.write_text(RECIPE.format(corpus=str(folder / "corpus.jsonl"), cache=str(folder / "cache")))
    return path
