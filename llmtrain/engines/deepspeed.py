"""DeepSpeed's data parallel engine: ZeRO 0 to 3, offload, every precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine as _Engine
from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel

from llmtrain.data import MicroBatch, StepBatch
from llmtrain.engines import deepspeed_state
from llmtrain.engines.forward import forward, install_kernels
from llmtrain.engines.guard import Guard, Measured, finite_or_infinite, over_ranks
from llmtrain.engines.held import held
from llmtrain.engines.host_checks import no_host_checks
from llmtrain.engines.leaves import gather_layers_together
from llmtrain.engines.norm import gradients_of, squared_norm
from llmtrain.engines.optim import parameter_groups, schedule
from llmtrain.engines.pieces import Piece, Region
from llmtrain.engines.reduction import reduce_among_several
from llmtrain.engines.seam import StepResult
from llmtrain.engines.state import Place, load_state, pieces_of, save_state, untrained_pieces
from llmtrain.engines.writer import Writer
from llmtrain.engines.zero_norm import NormWithLoss
from llmtrain.models import build_model
from llmtrain.plan import Plan

WEIGHT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Type of the weights that the forward pass reads; fp32 for the precisions that are not listed."""


class DeepSpeedDataParallel:
    """`deepspeed.initialize` on a whole causal LM, replicated or sharded over data parallel ranks."""

    def __init__(self, plan: Plan, ds_config: dict[str, Any], device: torch.device) -> None:
        self.plan = plan
        self.device = device
        recipe = plan.recipe
        model = self._build_model(ds_config)
        if recipe.parallel.activation_checkpointing == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        install_kernels(model, plan)
        if plan.layout.zero_stage == 3 and recipe.kernels.blocks == "compiled":
            gather_layers_together(model)
        self.model = model
        self._own_norm: Tensor | None = None
        self.engine = self._initialise(model, ds_config)
        reduce_among_several(self.engine)
        # DeepSpeed would take the norm once more, and average it over ranks that have different experts.
        self.engine.clip_fp32_gradients = self._clip
        self._norm_with_loss = NormWithLoss.of(self.engine.optimizer, plan.layout)
        self.guard = Guard(recipe.guard, device)
        self.guard.watch(self.engine.basic_optimizer)

    def _initialise(self, model: PreTrainedModel, ds_config: dict[str, Any]) -> _Engine:
        """Hands the model, its parameter groups and its schedule to DeepSpeed."""
        recipe = self.plan.recipe
        engine: _Engine = deepspeed.initialize(
            model=model,
            model_parameters=self._parameter_groups(),
            lr_scheduler=lambda optimizer: schedule(optimizer, recipe),
            config=ds_config,
        )[0]
        return engine

    @property
    def data_parallel_rank(self) -> int:
        """Every rank is a replica."""
        return dist.get_rank()

    @property
    def averaged_ranks(self) -> int:
        """Ranks with different tokens, over which DeepSpeed averages gradients."""
        return self.plan.layout.dp

    @property
    def _replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of the model as this one; None where these are all ranks."""
        return None

    def train_step(self, batch: StepBatch) -> StepResult:
        """Accumulates this rank's micro-batches and updates once.

        DeepSpeed averages gradients over ranks, so a rank's loss is multiplied by
        their number: the sum over all ranks and micro-batches, divided by the target tokens, is left.
        """
        if not self.model.training:  # asked of each module, it costs as much as a small update
            self.engine.train()
        lr = self.engine.get_lr()[0]
        total = torch.zeros((), device=self.device)
        self.guard.begin(lambda: self._measure(total / batch.target_tokens))
        with no_host_checks(self.plan.recipe.parallel.precision):
            for index, micro_batch in enumerate(batch.micro_batches, start=1):
                loss_sum, auxiliary = self._forward(micro_batch)
                loss = loss_sum * (self.averaged_ranks / batch.target_tokens)
                if auxiliary is not None:
                    loss = loss + auxiliary / len(batch.micro_batches)
                total += loss_sum.detach()
                is_last = index == len(batch.micro_batches)
                if is_last and self._norm_with_loss is not None:
                    self._norm_with_loss.share = total / batch.target_tokens
                self._backward(loss, is_last)
        measured = self.guard.end()
        return StepResult(loss=measured.loss, grad_norm=measured.grad_norm, lr=lr)

    @torch.no_grad()
    def eval_step(self, batch: StepBatch) -> Tensor:
        """Mean cross-entropy over the target tokens of all ranks."""
        self.engine.eval()
        total = torch.zeros((), device=self.device)
        for micro_batch in batch.micro_batches:
            total += self._forward(micro_batch)[0]
        return self._sum_over_replicas(total) / batch.target_tokens

    def save(self, writer: Writer) -> None:
        """Writes this rank's share of the pieces."""
        save_state(self, writer)

    def load(self, folder: Path) -> None:
        """Reads what any engine wrote."""
        load_state(self, folder)

    def pieces(self) -> Iterator[list[Piece]]:
        """Live pieces of everything that is trained, and of what is not."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        yield from pieces_of(held(self.engine.optimizer), lambda one: self._place(names[one], one))
        frozen = [one for one in names if not one.requires_grad]
        with gather(frozen) if frozen and self.plan.layout.zero_stage == 3 else nullcontext():
            yield untrained_pieces(self.model, self._equal_ranks, self._hugging_face_name, self._split)

    def progress(self) -> dict[str, Any]:
        """DeepSpeed's counters."""
        return deepspeed_state.progress(self.engine)

    def resumed(self, progress: dict[str, Any]) -> None:
        """Goes on from written pieces."""
        deepspeed_state.resumed(self.engine, progress)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, whole, under its Hugging Face name; tied ones once."""
        for name, parameter in self.model.named_parameters():
            yield name, self._whole(parameter).cpu()

    def describe(self) -> dict[str, Any]:
        """Classes that DeepSpeed has chosen, the device and the backend."""
        return {
            "engine": f"deepspeed {deepspeed.__version__}",
            "optimizer": type(self.engine.optimizer).__name__,
            "basic_optimizer": type(self.engine.basic_optimizer).__name__,
            "device": str(self.device),
            "backend": dist.get_backend(),
        }

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """This rank's sum of cross-entropies, and the auxiliary loss of a mixture of experts."""
        return forward(self.engine, self.model, micro_batch, self.device)

    def _build_model(self, ds_config: dict[str, Any]) -> PreTrainedModel:
        return _build(self.plan, ds_config, self.device, self._replicas)

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        """A copy of a weight that ZeRO-3 may have partitioned."""
        partitioned = self.plan.layout.zero_stage == 3
        with deepspeed.zero.GatheredParameters([parameter]) if partitioned else nullcontext():
            return parameter.detach().clone()

    def _backward(self, loss: Tensor, is_last: bool) -> None:
        """Adds the gradients of a micro-batch and, after the last one, updates."""
        self.engine.backward(loss, scale_wrt_gas=False)
        self._own_norm = self._replicated_grad_norm() if is_last else None
        self.engine.step()

    def _measure(self, loss: Tensor) -> Measured:
        """Of all ranks, from this one's share of the loss, when the optimizer is about to begin."""
        norm = self._engine_grad_norm() if self._own_norm is None else self._own_norm
        if self._norm_with_loss is not None and (known := self._norm_with_loss.take_loss()) is not None:
            return Measured(known, finite_or_infinite(norm))
        return over_ranks(loss, norm, copies=dist.get_world_size() // self.averaged_ranks)

    def _sum_over_replicas(self, value: Tensor) -> Tensor:
        if self.averaged_ranks > 1:
            dist.all_reduce(value, group=self._replicas)
        return value

    def _replicated_grad_norm(self) -> Tensor | None:
        """The norm where DeepSpeed keeps none: fp32 weights at ZeRO-0, whose gradients lie whole on every rank.

        Between `backward` and `step` of the last micro-batch they are already averaged.
        """
        if self.plan.layout.zero_stage > 0 or self.plan.recipe.parallel.precision in WEIGHT_DTYPES:
            return None
        norm = self._gradient_norm()
        scaler = self.engine.torch_autocast_z0_gradscaler
        return norm / scaler.get_scale() if scaler else norm

    def _clip(self) -> None:
        """Clips by the norm that was taken just before; called where DeepSpeed keeps none, with a limit above 0."""
        assert self._own_norm is not None, "an update without its norm"
        nn.utils.clip_grads_with_norm_(self.model.parameters(), self.engine.gradient_clipping(), self._own_norm)

    def _gradient_norm(self) -> Tensor:
        """2-norm of the gradients: those that lie on this rank, and of split weights those of the other holders."""
        held: dict[dist.ProcessGroup | None, list[Tensor]] = {}
        for parameter in self.model.parameters():
            # A rank without a gradient joins the sum all the same.
            held.setdefault(self._holders(parameter), []).extend(gradients_of([parameter]))
        squares = {group: squared_norm(found, self.device) for group, found in held.items()}
        for group, square in squares.items():
            if group is not None:
                dist.all_reduce(square, group=group)
        return torch.stack(list(squares.values())).sum().sqrt().float()

    def _holders(self, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        """The ranks that hold other parts of a weight than this one; None where it lies here whole, ZeRO aside."""
        return None

    def _place(self, name: str, parameter: nn.Parameter) -> Place:
        return self._hugging_face_name(name), self._region(name, parameter), self._copy(parameter)

    def _hugging_face_name(self, name: str) -> str:
        """Of a parameter of `model`."""
        return name

    def _region(self, name: str, parameter: nn.Parameter) -> Region:
        """Where what this rank holds of a parameter lies, ZeRO aside."""
        return Region.whole(shape_of(parameter))

    def _split(self, tensor: Tensor) -> tuple[Region, tuple[int, int]] | None:
        """Region and copy of the slice of an untrained tensor that this rank holds; None where it holds the whole."""
        return None

    def _copy(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Which copy of what it holds this rank has, of how many: this one's number, and all."""
        return self._copy_in(self._replicas)

    def _copy_in(self, group: dist.ProcessGroup | None) -> tuple[int, int]:
        """As `_copy`, of a part that the ranks of a group have in common. ZeRO's shards of it are no copies."""
        return (0, 1) if self.plan.layout.zero_stage else (dist.get_rank(group), dist.get_world_size(group))

    @property
    def _equal_ranks(self) -> tuple[int, int]:
        """This rank's number among those that hold what is neither split nor sharded; their number."""
        return dist.get_rank(), dist.get_world_size()

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """What DeepSpeed's optimizer is made of."""
        return parameter_groups(self.model, self.plan.recipe.optim.weight_decay)

    def _engine_grad_norm(self) -> Tensor:
        # The engine's own copy is of the step before until this one is over.
        norm = self.engine.optimizer._global_grad_norm
        return torch.as_tensor(norm, device=self.device, dtype=torch.float32)


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """Of a parameter that ZeRO-3 may have partitioned."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _build(
    plan: Plan, ds_config: dict[str, Any], device: torch.device, replicas: dist.ProcessGroup | None = None
) -> PreTrainedModel:
    """replicas: the ranks that ZeRO-3 partitions over; all of them where it is None."""
    recipe = plan.recipe
    dtype = WEIGHT_DTYPES.get(recipe.parallel.precision, torch.float32)
    if plan.layout.zero_stage < 3:
        return build_model(recipe, dtype, device)

    def partitioned() -> AbstractContextManager[object]:
        # Only the device is overridden. The type is already that of the parameters, and forcing it on
        # every new tensor would round the fp32 frequencies of rotary embeddings. (`Init(dtype=...)` is
        # no way either: DeepSpeed 0.19.8 replaces it by bf16 wherever fp16 is not supported.)
        context: AbstractContextManager[object] = deepspeed.zero.Init(
            data_parallel_group=replicas,
            config_dict_or_path=ds_config,
            tensor_overrides=[DeepSpeedTensorOverride.device],
        )
        return context

    is_reader = dist.get_rank(replicas) == 0
    return build_model(recipe, dtype, device, partitioned=partitioned, gather=gather, is_reader=is_reader)


def gather(parameters: list[nn.Parameter]) -> AbstractContextManager[object]:
    """Makes parameters whole that ZeRO-3 has partitioned; what the first replica wrote is spread to the others."""
    context: AbstractContextManager[object] = deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)
    return context
