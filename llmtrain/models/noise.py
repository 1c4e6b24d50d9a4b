"""NEFTune (arXiv 2310.05914): uniform noise on the embeddings of a model while it is trained.

The noise of a token depends on the run's seed, the number of its sample and its column alone, so that every layout adds
the same. Its scale is that of the paper, α / √(L · d), with L the length of the token's document, however it is packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmtrain.data import MicroBatch


@contextmanager
def noisy_embeddings(model: PreTrainedModel, batch: MicroBatch) -> Iterator[None]:
    """A context in which the embedding of a model adds the noise of a micro-batch, if it has any, in training.

    model: whole, or the first stage of a pipeline. batch: whole sequences, with positions on the host.
    """
    if batch.noise is None or not torch.is_grad_enabled():
        yield
        return

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + embedding_noise(batch, output.size(-1), output.device).to(output.dtype)

    hook = model.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()


def embedding_noise(batch: MicroBatch, width: int, device: torch.device) -> Tensor:
    """Returns the noise of a micro-batch, fp32 [rows, columns, width]. width: of the embedding."""
    noise, documents = batch.noise, batch.documents
    assert noise is not None
    assert documents is not None, "the positions are on the host"
    rows, columns = batch.input_ids.shape
    # Whole sequences are drawn even if the micro-batch is shorter: the numbers of a generator depend on the shape.
    drawn = torch.stack([_uniform(seed, (noise.length, width), device)[:columns] for seed in noise.seeds])
    lengths = documents.bounds.diff().long()
    scale = noise.alpha / (lengths * width).sqrt().repeat_interleave(lengths).view(rows, columns, 1)
    return drawn * scale.to(device, non_blocking=True)


def _uniform(seed: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Draws from the uniform distribution on [−1, 1)."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.rand(shape, generator=generator, device=device) * 2 - 1
