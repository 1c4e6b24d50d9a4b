"""Plain PyTorch in one process: the run that every plan must agree with.

It shares no code with the engines, since an error in shared code would be certified: it has its own loss, clipping,
learning rates, and optimizers (`reference_optimizers.py`); adapters are those of PEFT (`reference_adapters.py`). The
model is that of `transformers`, unchanged. Each document runs alone, so that no mask and no position can be wrong. Only
declarations may be imported from llmtrain (`tests/trials/verify/test_independence.py`); `verify.documents` and the
initial weights are received as data.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    PreTrainedConfig,
)

from llmtrain.plan.facts.families import MIXES_DOCUMENTS
from llmtrain.recipe import GradientContext, ObjectiveConfig, Recipe, gradient_seed
from llmtrain.recipe.own_code import import_object, is_path, own_code_errors
from llmtrain.trials.verify.reference_adapters import plain_name, train_part
from llmtrain.trials.verify.reference_model import own_output, reference_model
from llmtrain.trials.verify.reference_optimizers import reference_optimizer

NO_TARGET = -100
AUTOCAST = {"autocast_bf16": torch.bfloat16, "autocast_fp16": torch.float16}
CLIP_EPS = 1e-6
"""Added to the norm in the divisor, as in `torch.nn.utils.clip_grad_norm_`."""

SELECTED_TOKENS = ("index_topk", "keep_window_size")
"""Fields of configurations that limit the number of tokens that attention selects by score."""


@dataclass(frozen=True)
class ReferenceDocument:
    """A document, or the part of it that a sequence contains."""

    inputs: Tensor
    """[n], int64."""
    targets: Tensor
    """[n], int64: the token to predict at each position; `NO_TARGET` if there is none."""
    pair: tuple[int, bool] | None = None
    """Number of the pair of which it is one conversation, and whether it is the rejected one."""
    desirable: bool | None = None
    """For KTO, whether the completion is desirable."""
    mismatched: ReferenceDocument | None = None
    """For KTO, the same prompt with the completion of another one."""
    values: Tensor | None = None
    """[n, columns], fp32: the numbers that a user's own loss is given, of the document of each input; None without
    columns."""


Row = TypeVar("Row", bound=tuple[Any, ...])
Sequences = Sequence[Sequence[ReferenceDocument]]
"""For each sequence, the documents that are packed into it, with padding last."""


@dataclass(frozen=True)
class ReferenceStep:
    """One update."""

    loss: float
    """Mean cross-entropy per target token, or mean loss per item of the objective."""
    grad_norm: float
    """Norm before clipping."""
    lr: float


class ReferenceLoop:
    """Trains the model of a recipe.

    fp32 weights are trained as they are, or under autocast. For lower precisions there are fp32 master weights (arXiv
    1710.03740): they start from the rounded weights, and each forward pass reads them rounded. A weight without a
    gradient is not updated.
    """

    def __init__(
        self,
        recipe: Recipe,
        weights: Mapping[str, Tensor],
        device: torch.device,
        micro_batch_size: int | None = None,
        together: bool = False,
        rounds: bool = True,
    ) -> None:
        """weights: the initial weights by their names in `state_dict`, and those of adapters by their names in PEFT's
        files. Weights that are missing are initialized as the recipe says.

        micro_batch_size: sequences per backward pass; default: the recipe's. A router's loss is a mean within them.
        together: whether to run the documents of a micro-batch in one pass, padded at their end. No token sees later
        ones, so the result only differs by rounding.
        rounds: whether passes below fp32 round the result of each operation. If not, only weights and gradients are
        rounded.
        """
        self.recipe = recipe
        self.device = device
        self.model = reference_model(recipe, device)
        of_model = {name: weight for name, weight in weights.items() if name in self.model.state_dict()}
        if of_model:
            self.model.load_state_dict(of_model, strict=recipe.model.pretrained is None)
        train_part(self.model, recipe.model, {name: weights[name] for name in weights.keys() - of_model.keys()})
        self.micro_batch_size = micro_batch_size or recipe.batch.micro_batch_size
        self.together = together
        is_own = recipe.model.build is not None
        self.runs_whole = not is_own and _runs_whole(self.model.config, recipe.data.sequence_length)
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        needed = trained if recipe.objective.needs_reference else {}
        self.initial = {
            name: (parameter if rounds else parameter.float()).detach().clone() for name, parameter in needed.items()
        }
        """The trained weights of the reference of an objective of completions."""
        self.divergence = 0.0
        """KTO's z0 of the batch."""
        self.masters = {name: nn.Parameter(parameter.detach().float()) for name, parameter in trained.items()}
        self.types = {name: parameter.dtype for name, parameter in trained.items()}
        self.rounds = rounds
        self.adds_auxiliary_loss = is_own and self._own_forward(torch.zeros(1, 2, dtype=torch.long), {})[1] is not None
        """Whether a user's own model adds a loss for each micro-batch, which must then run in one pass."""
        if not rounds:
            self.model.float()
        self.optimizer = reference_optimizer(self.masters, recipe)
        self.steps = 0
        self.callbacks = [_callback(recipe, number) for number in range(len(recipe.gradient_callbacks))]
        self._head_weight: Tensor | None = None
        """That of the last forward pass, if the user's own loss gets it."""
        self._reached: set[str] = set()
        """Names of the weights that had a gradient in a step."""
        self.gradient_shares: dict[str, float] = {}
        """Name of each weight that had a gradient → the largest ratio, in any step, of the gradient's norm to that of
        all gradients."""

    def change_last_bits(self, seed: int) -> None:
        """Adds or subtracts, at random, one unit in the last place of each trained weight, kept in fp32.

        That changes the run by nothing but other roundings of all of its operations.
        """
        generator = torch.Generator().manual_seed(seed)
        for master in self.masters.values():
            signs = 2 * torch.randint(2, master.shape, generator=generator).to(master) - 1
            with torch.no_grad():
                master.mul_(1 + 2**-23 * signs)

    def train_step(self, sequences: Sequences) -> ReferenceStep:
        """Updates the weights with a global batch."""
        self.model.train()
        self._average(False)
        self.optimizer.zero_grad(set_to_none=True)
        micro_batches = [
            sequences[i : i + self.micro_batch_size] for i in range(0, len(sequences), self.micro_batch_size)
        ]
        num_items = max(1, count_items(sequences, self.recipe))
        self.divergence = self._divergence(sequences)
        total = 0.0
        for micro_batch in micro_batches:
            loss_sum, auxiliary = self._losses(micro_batch)
            (loss_sum / num_items + auxiliary / len(micro_batches)).backward()  # type: ignore[no-untyped-call]
            total += loss_sum.item()
        self._change_gradients()
        named = {name: weight.grad for name, weight in self.masters.items() if weight.grad is not None}
        self._reached |= named.keys()
        squares = {name: gradient.double().square().sum().item() for name, gradient in named.items()}
        norm, gradients = math.sqrt(sum(squares.values())), named.values()
        for name, square in squares.items():
            share = math.sqrt(square) / norm if norm else 0.0
            self.gradient_shares[plain_name(name)] = max(share, self.gradient_shares.get(plain_name(name), 0.0))
        limit = self.recipe.optim.clip_grad_norm
        if limit:
            for gradient in gradients:
                gradient.mul_(min(1.0, limit / (norm + CLIP_EPS)))
        lr = learning_rate(self.recipe, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.steps += 1
        return ReferenceStep(total / num_items, norm, lr)

    @torch.no_grad()
    def _change_gradients(self) -> None:
        """Calls the user's callbacks that change gradients. Raises RecipeError for their exceptions."""
        named = {plain_name(name): weight.grad for name, weight in self.masters.items() if weight.grad is not None}
        context = GradientContext(self.steps + 1, named, self.recipe)
        for number, callback in enumerate(self.callbacks):
            path, folder = self.recipe.gradient_callbacks[number].object, self.recipe.code_dir
            with (
                torch.random.fork_rng([self.device] if self.device.type == "cuda" else []),
                own_code_errors(path, folder, "callbacks", f"fails in on_gradients of step {context.step:,}"),
            ):
                torch.manual_seed(gradient_seed(self.recipe.train.seed, context.step, number))
                callback.on_gradients(context)

    @torch.no_grad()
    def evaluate(self, sequences: Sequences) -> float:
        """Returns the mean cross-entropy per target token, or the mean loss per item of the objective."""
        self.model.eval()
        self._average(True)
        self.divergence = self._divergence(sequences)
        return sum(self._losses([sequence])[0].item() for sequence in sequences) / max(
            1, count_items(sequences, self.recipe)
        )

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every weight with its Hugging Face name, as the forward pass reads it; tied ones once.

        Leaves out adapters that no loss has reached, such as those that PEFT adds to the vision tower of a wrapper.
        """
        self._average(True)
        rounded = self._rounded()
        for name, weight in self.model.named_parameters():
            is_idle = self.steps > 0 and ".lora_" in name and name not in self._reached
            if "original_module." not in name and not is_idle:  # PEFT keeps the original of a module trained as a whole
                yield plain_name(name), rounded.get(name, weight).detach().cpu()

    def _average(self, averaged: bool) -> None:
        """Puts the averaged weights, or the trained ones, into the model, if the optimizer averages."""
        switch = [getattr(self.optimizer, name, None) for name in ("train", "eval")]
        if all(map(callable, switch)):
            switch[averaged]()  # type: ignore[misc]

    def _rounded(self) -> dict[str, Tensor]:
        rounded = {name: weight.to(self.types[name]) for name, weight in self.masters.items()}
        return rounded if self.rounds else {name: weight.float() for name, weight in rounded.items()}

    def _losses(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Returns the sum of a micro-batch's losses, of all its items, and the router's loss."""
        losses: list[Tensor] = []
        routers: list[Sequence[Tensor]] = []
        own: list[Tensor] = []
        for rows in self._passes(sequences):
            loss, router, logits = self._forward(rows, self._rounded())
            losses.append(loss)
            routers.append(router)
            own += [of_row[: len(document.inputs)] for (document, _), of_row in zip(rows, logits, strict=True)]
        auxiliary = self._router_loss([torch.cat(layer) for layer in zip(*routers, strict=True)])
        if is_path(self.recipe.objective.name):
            return self._own_losses(sequences, torch.cat(own)), auxiliary
        if self.recipe.objective.name == "language_model":
            return torch.cat(losses).sum(), auxiliary
        with torch.no_grad():
            references = torch.cat([self._forward(rows, self.initial)[0] for rows in self._passes(sequences)])
        if self.recipe.objective.name == "kto":
            return self._kto_losses(sequences, references - torch.cat(losses)), auxiliary
        return self._pair_losses(sequences, torch.cat(losses), references), auxiliary

    @torch.no_grad()
    def _divergence(self, sequences: Sequences) -> float:
        """Returns KTO's z0: the mean log-ratio of the mismatched completions of a whole batch, at least 0."""
        mismatched = [
            [document.mismatched]
            for documents in sequences
            for document in documents
            if document.mismatched is not None
        ]
        if not mismatched:
            return 0.0
        ratios = [
            (self._forward(rows, self.initial)[0] - self._forward(rows, self._rounded())[0]).sum().item()
            for rows in self._passes(mismatched)
        ]
        counted = sum(count_targets([documents]) > 0 for documents in mismatched)
        return max(0.0, sum(ratios) / counted) if counted else 0.0

    def _kto_losses(self, sequences: Sequences, ratios: Tensor) -> Tensor:
        """Returns the sum of the losses of all labelled completions; ratios: the log-ratio of each document."""
        objective = self.recipe.objective
        total = 0 * ratios.sum()
        for document, ratio in zip(
            (document for documents in sequences for document in documents), ratios, strict=True
        ):
            if document.desirable is not None:
                sign = 1 if document.desirable else -1
                value = torch.sigmoid(objective.beta * sign * (ratio - self.divergence))
                weight = objective.desirable_weight if document.desirable else objective.undesirable_weight
                total = total + weight * (1 - value)
        return total

    def _pair_losses(self, sequences: Sequences, losses: Tensor, references: Tensor) -> Tensor:
        """Returns the sum of the losses of all pairs.

        losses, references: the sum of the cross-entropies of each document, under the model and under the initial
        weights.
        """
        documents = iter(zip(losses, references, strict=True))
        total = 0 * losses.double().sum()  # gives a micro-batch without a pair a gradient of 0
        for sequence in sequences:
            by_pair = {document.pair: (*next(documents), count_targets([[document]])) for document in sequence}
            for number in {pair[0] for pair in by_pair if pair is not None}:
                total = total + self._pair_loss(by_pair[number, False], by_pair[number, True])
        return total

    def _pair_loss(self, chosen: tuple[Tensor, Tensor, int], rejected: tuple[Tensor, Tensor, int]) -> Tensor:
        """Returns the loss of a pair, given both cross-entropies of each completion, and its number of targets."""
        objective = self.recipe.objective
        (won, won_before, won_size), (lost, lost_before, lost_size) = chosen, rejected
        if objective.name == "orpo":
            likelihoods = [torch.exp(-won / won_size), torch.exp(-lost / lost_size)]
            won_odds, lost_odds = (likelihood / (1 - likelihood) for likelihood in likelihoods)
            return won / won_size - objective.beta * torch.log(torch.sigmoid(torch.log(won_odds / lost_odds)))
        extra = objective.sft_weight * won / won_size
        if objective.name == "ipo":
            preferred = (won_before - won) / won_size - (lost_before - lost) / lost_size
            return (preferred - 0.5 / objective.beta) ** 2 + extra
        preferred = objective.beta * ((won_before - won) - (lost_before - lost))
        right, wrong = -torch.log(torch.sigmoid(preferred)), -torch.log(torch.sigmoid(-preferred))
        return (1 - objective.label_smoothing) * right + objective.label_smoothing * wrong + extra

    def _passes(self, sequences: Sequences) -> list[list[tuple[ReferenceDocument, Tensor]]]:
        """Returns the rows of each forward pass of a micro-batch with their positions.

        A row is a document, or a sequence.
        """
        rows = [[document] for documents in sequences for document in documents]
        if self.runs_whole or self.adds_auxiliary_loss:
            rows = [list(documents) for documents in sequences]
        joined = [
            (join_documents(row), torch.cat([torch.arange(len(document.inputs)) for document in row])) for row in rows
        ]
        return [joined] if self.together or self.adds_auxiliary_loss else [[row] for row in joined]

    def _own_losses(self, sequences: Sequences, logits: Tensor) -> Tensor:
        """Returns the sum of the losses of a user's own function, called for each document or pair alone.

        logits: those of all tokens in order, [tokens, vocabulary], or their hidden states, [tokens, width].
        """
        objective = self.recipe.objective
        function = import_object(objective.name, self.recipe.code_dir)
        documents = [document for documents in sequences for document in documents]
        head = () if self._head_weight is None or not objective.hidden_states else (self._head_weight,)
        values = logits.to(head[0].dtype) if head else logits.float()
        parts = torch.split(values, [len(document.inputs) for document in documents])
        total = 0 * logits.sum().double()  # gives a micro-batch without targets a gradient of 0
        for unit in _units([*zip(documents, parts, strict=True)], objective.unit):
            targets = _pad([document.targets for document, _ in unit], NO_TARGET).to(self.device)
            columns = _columns([document for document, _ in unit], objective, self.device)
            result = function(_pad([part for _, part in unit]), *head, targets, **columns, **objective.options)
            total = total + (result["loss"] if isinstance(result, Mapping) else result)[0]
        return total

    def _forward(
        self, rows: list[tuple[ReferenceDocument, Tensor]], weights: Mapping[str, Tensor]
    ) -> tuple[Tensor, Sequence[Tensor], Tensor]:
        """Returns the sum of the cross-entropies of each row, the logits of each layer's router, and the logits.

        Those of routers are of all tokens except for the padding of shorter rows.
        """
        inputs: dict[str, Any] = {
            "input_ids": _pad([document.inputs for document, _ in rows]).to(self.device),
            "position_ids": _pad([positions for _, positions in rows]).to(self.device),
            "use_cache": False,
        }
        targets = _pad([document.targets for document, _ in rows], NO_TARGET).to(self.device)
        if self.recipe.model.build is not None:
            logits, auxiliary = self._own_forward(inputs["input_ids"], weights, inputs["position_ids"])
            return _losses_of_rows(logits, targets), () if auxiliary is None else (auxiliary.reshape(1),), logits
        with self._autocast(), self._at_head() as seen:
            output = functional_call(self.model, dict(weights), kwargs=inputs)
        if self.recipe.model.num_labels is not None:
            return seen[0].new_zeros(len(rows)), (), seen[0]
        loss = _losses_of_rows(output.logits, targets)
        values = seen[0] if self.recipe.objective.hidden_states else output.logits
        if getattr(output, "aux_loss", None) is None:
            return loss, (), values
        real = (
            _pad([torch.ones_like(document.inputs, dtype=torch.bool) for document, _ in rows]).flatten().to(self.device)
        )
        return loss, [layer.flatten(0, -2)[real] for layer in output.router_logits], values

    @contextmanager
    def _at_head(self) -> Iterator[list[Tensor]]:
        """Collects the hidden states that reach the head, or the scores of all tokens that it computes from them.

        The classifiers of `transformers` return the scores of the last token only.
        """
        seen: list[Tensor] = []
        labels, hidden = self.recipe.model.num_labels, self.recipe.objective.hidden_states
        if labels is None and not hidden:
            yield seen
            return
        if labels is not None and self.model.config.pad_token_id is None:
            self.model.config.pad_token_id = 0  # by which it would look for the last token of each of several rows
        head = self.model.get_output_embeddings() if labels is None else self.model.score

        def note(module: nn.Module, given: tuple[Tensor], scores: Tensor) -> None:
            seen.append(given[0] if hidden else scores)
            assert isinstance(module.weight, Tensor)
            self._head_weight = module.weight  # the rounded one, which is no parameter

        handle = head.register_forward_hook(note)
        yield seen
        handle.remove()

    def _own_forward(
        self, tokens: Tensor, weights: Mapping[str, Tensor], positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the logits and the auxiliary loss of a user's own model."""
        takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters
        named = {"position_ids": positions} if takes_positions and positions is not None else {}
        with self._autocast():
            return own_output(functional_call(self.model, dict(weights), (tokens.to(self.device),), named))

    def _router_loss(self, logits: Sequence[Tensor]) -> Tensor:
        """Returns how unevenly a micro-batch uses the experts, by the family's own function.

        It counts all tokens, including the padding of sequences. It is a product of two means over tokens, so the
        losses of documents cannot be summed.
        """
        if not logits:
            return torch.zeros((), device=self.device)
        if self.adds_auxiliary_loss:
            return logits[0].sum()
        family = sys.modules[type(self.model).__module__]
        loss: Tensor = family.load_balancing_loss_func(
            tuple(logits), self.model.num_experts, self.model.num_experts_per_tok
        )
        named = "aux_loss_coef" if hasattr(self.model, "aux_loss_coef") else "router_aux_loss_coef"
        return loss * float(getattr(self.model, named))

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = AUTOCAST.get(self.recipe.parallel.precision) if self.rounds else None
        return torch.autocast(self.device.type, dtype) if dtype else nullcontext()


def count_items(sequences: Sequences, recipe: Recipe) -> int:
    """Returns the number of items in all documents: what the user counts, pairs, labelled completions or targets."""
    objective = recipe.objective
    units = _units([(document,) for documents in sequences for document in documents], objective.unit)
    if objective.count is not None:
        count = import_object(objective.count, recipe.code_dir)
        total = 0
        for unit in units:
            of_unit = [document for (document,) in unit]
            targets = _pad([document.targets for document in of_unit], NO_TARGET)
            total += int(count(targets, **_columns(of_unit, objective), **objective.options))
        return total
    if objective.unit == "document":
        return len(units)
    conversations = sum(document.pair is not None for documents in sequences for document in documents)
    labelled = sum(document.desirable is not None for documents in sequences for document in documents)
    return conversations // 2 or labelled or count_targets(sequences)


def _units(rows: Sequence[Row], unit: str) -> list[Sequence[Row]]:
    """Returns the rows that a user's own loss is given together: a document, or the two of a pair, with targets.

    rows: tuples that begin with a document; those of a pair are adjacent.
    """
    seen = [row for row in rows if count_targets([[row[0]]])]
    size = 2 if unit == "pair" else 1
    return [seen[first : first + size] for first in range(0, len(seen), size)]


def _columns(
    documents: Sequence[ReferenceDocument], objective: ObjectiveConfig, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Returns the arguments of a user's own function for its columns: of each document, or of each of its tokens."""
    columns = {}
    for number, name in enumerate(objective.columns):
        rows = [document.values[:, number] for document in documents if document.values is not None]
        columns[name] = (_pad(rows) if objective.unit == "token" else torch.stack([row[0] for row in rows])).to(device)
    return columns


def count_targets(sequences: Sequences) -> int:
    """Returns the number of targets in all documents."""
    return sum(int((document.targets != NO_TARGET).sum()) for documents in sequences for document in documents)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Returns the learning rate of the update after `step` others."""
    optim, steps = recipe.optim, recipe.train.steps
    if is_path(optim.schedule):
        return optim.lr * float(import_object(optim.schedule, recipe.code_dir)(step, recipe))
    peak, least, warmup = optim.lr, optim.min_lr_ratio, optim.with_warmup_steps(steps).warmup_steps
    if step < warmup:
        rise = step / warmup
        # `wsd` of transformers starts from the rate at which it ends.
        return peak * (rise * (1 - least) + least if optim.schedule == "wsd" else rise)
    share = (step - warmup) / max(1, steps - warmup)
    if optim.schedule == "constant":
        return peak
    if optim.schedule == "linear":
        return peak * ((steps - step) / max(1, steps - warmup))
    if optim.schedule == "cosine":
        return peak * ((1 + math.cos(math.pi * share)) / 2 * (1 - least) + least)
    if optim.schedule == "inverse_sqrt":
        scale = warmup or 10_000
        return peak * (1 / math.sqrt((step + scale - warmup) / scale))
    decayed = max(0, step - (steps - optim.decay_steps)) / max(1, optim.decay_steps)
    return peak * ((1 - decayed) * (1 - least) + least if decayed else 1.0)


def _callback(recipe: Recipe, number: int) -> Any:
    """Returns one of the user's callbacks that change gradients."""
    config = recipe.gradient_callbacks[number]
    found = import_object(config.object, recipe.code_dir)
    return found(**config.options) if inspect.isclass(found) else found


def _runs_whole(config: PreTrainedConfig, length: int) -> bool:
    """Whether whole sequences of this length must run, in a family whose documents cannot run alone.

    Some families let packed documents influence each other whatever the attention mask. Others attend to the few tokens
    with the best scores, and among equal scores (many are 0) choose by the position in the row.
    """
    chosen = min(getattr(config, name, length) for name in SELECTED_TOKENS)
    return config.get_text_config().model_type in MIXES_DOCUMENTS or chosen < length


def _losses_of_rows(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the sum of the cross-entropies of each row. logits: [rows, T, vocab]; targets: [rows, T]."""
    losses = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.double().view_as(targets).sum(1)


def join_documents(documents: Sequence[ReferenceDocument]) -> ReferenceDocument:
    """Concatenates documents into one."""
    values = [document.values for document in documents if document.values is not None]
    return ReferenceDocument(
        torch.cat([document.inputs for document in documents]),
        torch.cat([document.targets for document in documents]),
        values=torch.cat(values) if values else None,
    )


def _pad(rows: Sequence[Tensor], value: int = 0) -> Tensor:
    """Returns [rows, longest]."""
    return pad_sequence(list(rows), batch_first=True, padding_value=value)
