"""`llmtrain export --merge`: a model without an adapter, from a run that trained one or from a folder of PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from llmtrain.commands.checkpoint import one_checkpoint
from llmtrain.system.streams import quiet_libraries


def merge_adapter(
    path: Path,
    out: Path,
    tokenizer: Path | None,
    dtype: Literal["float32", "bfloat16", "float16"] | None,
    max_shard_size: str,
    base: str | None = None,
    into: Literal["trained", "full"] = "trained",
) -> None:
    """Merges the adapter of a checkpoint, of a run directory or of a folder of PEFT."""
    is_peft = (path / "adapter_config.json").is_file()
    folder = path if is_peft else one_checkpoint(path)
    with quiet_libraries():
        from llmtrain.checkpoint.export import size_in_bytes
        from llmtrain.checkpoint.merge import merge, merge_checkpoint

        most = size_in_bytes(max_shard_size)
        if is_peft:
            merge(folder, out, tokenizer, base, dtype, most, into)
        else:
            own = tokenizer or folder.parent.parent / "tokenizer"
            merge_checkpoint(folder, own, out, dtype, most, base, into)
    print(f"merged {folder} into {out}")
