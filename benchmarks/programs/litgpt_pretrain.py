"""Runs `litgpt pretrain` through the function behind its command: `python litgpt_pretrain.py FOLDER --steps 60`.

FOLDER is the output of `subject`: the same sequences in the same batches, and the model's sizes. All settings other
than those of the model, the batches and the optimizer are litgpt's defaults: it compiles the whole model. It runs in an
environment of its own (`other_environment`). Step times are derived from the times at which batches are requested.
Prints one line of JSON.
"""

import argparse
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from litgpt import pretrain
from litgpt.args import EvalArgs, LogArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from torch.utils.data import DataLoader

from benchmarks.programs.windows import print_speed, read


class Rows(DataModule):
    """The sequences in order, each with its next token at the end; records when each one is requested."""

    def __init__(self, folder: Path) -> None:
        """Reads the sequences."""
        super().__init__()
        self.rows = []
        self.asked: list[float] = []
        for step in torch.load(folder / "batches_0.pt"):
            for inputs, _, labels in step:
                self.rows += list(torch.cat([inputs, labels[:, -1:]], dim=1))

    def connect(self, tokenizer: object = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        """Is called by litgpt."""
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        """Returns all sequences once."""
        return DataLoader(self, batch_size=self.batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader:
        """Returns a loader with two batches, because litgpt requires one and tries two batches of it."""
        return DataLoader(self.rows[: 2 * self.batch_size], batch_size=self.batch_size)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(time.perf_counter())
        return self.rows[index]


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    sys.argv = ["litgpt", "pretrain", "tiny"]  # litgpt reads it again when it saves
    model = read(options.folder / "model.json")
    train = read(options.folder / "train.json")
    rows = Rows(options.folder)
    batch_size = train.micro_batch_size * train.accumulation
    pretrain.setup(
        model_name="tiny",
        model_config=_config(model, train.sequence_length),
        out_dir=options.folder / "litgpt",
        precision="32-true",
        data=rows,
        train=TrainArgs(
            save_interval=None,
            log_interval=train.log_every,
            global_batch_size=batch_size,
            micro_batch_size=train.micro_batch_size,
            max_tokens=options.steps * batch_size * train.sequence_length,
            max_norm=train.clip_grad_norm,
            min_lr=train.lr * train.min_lr_ratio,
            lr_warmup_steps=train.warmup_steps,
            tie_embeddings=model.tie_word_embeddings,
        ),
        eval=EvalArgs(interval=10**9, max_iters=1, final_validation=False),
        log=LogArgs(),
        optimizer={
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": train.lr, "weight_decay": train.weight_decay, "betas": train.betas},
        },
        devices=1,
        logger_name="csv",
    )
    print_speed(rows.asked[::batch_size][: options.steps], train)


def _config(model: SimpleNamespace, sequence_length: int) -> Config:
    """Returns litgpt's configuration of a Llama."""
    return Config(
        name="tiny",
        block_size=sequence_length,
        vocab_size=model.vocab_size,
        padded_vocab_size=model.vocab_size,
        n_layer=model.num_hidden_layers,
        n_head=model.num_attention_heads,
        n_query_groups=model.num_key_value_heads,
        n_embd=model.hidden_size,
        intermediate_size=model.intermediate_size,
        norm_class_name="RMSNorm",
        norm_eps=model.rms_norm_eps,
        mlp_class_name="LLaMAMLP",
        parallel_residual=False,
        bias=False,
        rotary_percentage=1.0,
    )


if __name__ == "__main__":
    main()
