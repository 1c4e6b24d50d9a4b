"""Rules for the model: its sizes compared with the data, its attention kernel, and its families' restrictions."""

from __future__ import annotations

from collections.abc import Iterator
from posixpath import commonpath

from llmtrain.plan.axes import SEQUENCE
from llmtrain.plan.draft import BYTES_OF, COMPUTE_DTYPE, Draft
from llmtrain.plan.facts.families import CONTINUES_FROM_STATES, MIXES_DOCUMENTS, MIXING_PARTS, WITHOUT_SDPA
from llmtrain.plan.rules.backends import STRATEGIES
from llmtrain.plan.rules.rule import Fault, assignment, fault_for, rule
from llmtrain.recipe import TrainedTokenizer
from llmtrain.system.hub import INDEX, SINGLE
from llmtrain.system.quantities import readable_bytes
from llmtrain.system.untrusted import expanded, is_file

NAMED = 3
"""Number of parts that a message lists."""
FLASH_HEAD = 256
"""Largest head size of FlashAttention's kernels (flash-attn's README, torch's `flash_api.cpp`)."""
WITHOUT_FLASH_3 = ("b200",)
"""Devices that FlashAttention 3 has no machine code for (`hopper/setup.py` in flash-attn's source)."""
EXAMPLE = "llmtrain.objectives:classification"
EXPERT_ROW_BYTES = 16
"""Rows of the experts' matrices must be multiples of this many bytes."""


@rule("model.vocabulary", "arithmetic")
def vocabulary(draft: Draft) -> Iterator[Fault]:
    """Refuses an embedding smaller than the tokenizer that the recipe trains. A token without a row in the embedding is
    an index out of range."""
    tokenizer, facts = draft.recipe.data.tokenizer, draft.facts
    if facts is None or not isinstance(tokenizer, TrainedTokenizer) or facts.vocab_size >= tokenizer.vocab_size:
        return
    message = f"the model has {facts.vocab_size} embedding rows for a tokenizer of {tokenizer.vocab_size} tokens"
    fix = assignment(data__tokenizer__vocab_size=facts.vocab_size)
    yield Fault("data.tokenizer.vocab_size", message, fix)


@rule("model.pretrained_tokenizer", "arithmetic")
def pretrained_tokenizer(draft: Draft) -> Iterator[Fault]:
    """Refuses to train a new tokenizer for pretrained weights, which only work with the token ids of their own."""
    model, tokenizer = draft.recipe.model, draft.recipe.data.tokenizer
    if model.pretrained is not None and isinstance(tokenizer, TrainedTokenizer):
        message = "a tokenizer would be trained, but pretrained weights need the one they were trained with"
        yield Fault("data.tokenizer", message, assignment(data__tokenizer=model.pretrained))


@rule("model.quantized", "read")
def quantized(draft: Draft) -> Iterator[Fault]:
    """Refuses pretrained weights that are quantized in a way that is not read. Quantized weights have no gradient, so
    they are dequantized."""
    facts = draft.facts
    if facts is not None and facts.quantization_fault:
        pretrained = draft.recipe.model.pretrained
        message = f"{pretrained} is quantized by {facts.quantization}: {facts.quantization_fault}"
        fix = (
            "name the repository with plain weights that it was made from (its model card names it as base_model), "
            "or dequantize it (model.dequantize() and save_pretrained of transformers)"
        )
        yield Fault("model.pretrained", message, fix)


@rule("model.dequantized", "read", refuses=False)
def dequantized(draft: Draft) -> Iterator[Fault]:
    """Notes that pretrained weights are quantized in their files. They are read as the values that they stand for, and
    exports are plain; only an adapter is added to its quantized base again."""
    facts, recipe = draft.facts, draft.recipe
    if facts is None or not facts.quantization or facts.quantization_fault:
        return
    held = COMPUTE_DTYPE[recipe.parallel.precision]
    files = sum(file.stat().st_size for file in expanded(str(recipe.model.pretrained)).glob("*.safetensors"))
    before = f"{readable_bytes(files)} of files become " if files else ""
    message = (
        f"{recipe.model.pretrained} is quantized by {facts.quantization}: its weights are dequantized as they are read "
        f"({before}{readable_bytes(facts.parameters * BYTES_OF[held])} in {held}), without scales of activations"
    )
    if recipe.model.quantize != "none":
        message += f", and the frozen ones are then quantized to {recipe.model.quantize}"
    if recipe.model.adapter is None or recipe.model.changes_pretrained:
        yield Fault("model.pretrained", f"{message}; exports are not quantized")
    else:
        message += "; the export of the adapter names the quantized base"
        yield Fault("model.pretrained", message, "export --merge writes plain weights that include the adapter")


@rule("model.weights_twice", "read", refuses=False)
def weights_twice(draft: Draft) -> Iterator[Fault]:
    """Gives a note for a local folder with a single file of weights and an index of several: `transformers` reads the
    former."""
    pretrained = draft.recipe.model.pretrained
    folder = expanded(pretrained or "")
    if pretrained is not None and is_file(folder / SINGLE) and is_file(folder / INDEX):
        message = f"{pretrained} has {SINGLE} and {INDEX}: {SINGLE} is read, as transformers does"
        yield Fault("model.pretrained", message, f"remove {SINGLE} if it is out of date, or the index")


@rule("model.new_tokens", "read")
def new_tokens(draft: Draft) -> Iterator[Fault]:
    """Refuses new tokens for a new model, and rows to keep if there are no new tokens. Only pretrained weights have
    rows to keep; a new model has the rows that it needs."""
    model = draft.recipe.model
    if model.new_tokens and model.pretrained is None:
        message = "are only supported with pretrained weights: a new model has model.config.vocab_size rows"
        fix = (
            "add them to a tokenizer (add_tokens and save_pretrained of transformers), name its folder as "
            "data.tokenizer, and set model.config.vocab_size; model.new_tokens=[]"
        )
        yield Fault("model.new_tokens", message, fix)
    if model.kept_rows and not model.new_tokens:
        yield Fault("model.kept_rows", "has an effect only with model.new_tokens", assignment(model__kept_rows="null"))


@rule("model.new_tokens_trained", "arithmetic")
def new_tokens_trained(draft: Draft) -> Iterator[Fault]:
    """Refuses new tokens whose rows are frozen. New rows of embedding and head are equal until they are trained: the
    model could not tell their tokens apart."""
    model, facts = draft.recipe.model, draft.facts
    if facts is None or not model.kept_rows or model.kept_rows >= facts.vocab_size:
        return
    if facts.trains_embedding and facts.trains_head:
        return
    frozen = "the embedding" if facts.trains_head else "the head" if facts.trains_embedding else "embedding and head"
    fix = "name both in model.adapter.modules_to_save, such as embed_tokens and lm_head"
    if model.trainable:
        fix = "add their patterns to model.trainable"
    elif facts.tied_embeddings:
        fix = "name the table that embedding and head share in model.adapter.modules_to_save, such as embed_tokens"
    yield Fault("model.new_tokens", f"need a trained embedding and head, but {frozen} would be frozen", fix)


@rule("model.positions", "arithmetic")
def positions(draft: Draft) -> Iterator[Fault]:
    """Refuses sequences longer than the table of learned positions."""
    facts, length = draft.facts, draft.recipe.data.sequence_length
    if facts is not None and facts.learned_positions and facts.max_positions and length > facts.max_positions:
        message = (
            f"must be at most {facts.max_positions}, the number of positions of '{facts.model_type}', not {length}"
        )
        yield Fault("data.sequence_length", message, assignment(data__sequence_length=facts.max_positions))


@rule("model.rotary_length", "arithmetic", refuses=False)
def rotary_length(draft: Draft) -> Iterator[Fault]:
    """Gives a note for sequences longer than the configuration declares; rotary positions continue beyond that. A
    checkpoint declares the length that it was trained for."""
    facts, length = draft.facts, draft.recipe.data.sequence_length
    if facts is not None and not facts.learned_positions and facts.max_positions and length > facts.max_positions:
        message = f"{length} exceeds max_position_embeddings = {facts.max_positions}, which the export will declare"
        yield Fault("data.sequence_length", message, assignment(model__config__max_position_embeddings=length))


@rule("model.yarn_length", "arithmetic", refuses=False)
def yarn_length(draft: Draft) -> Iterator[Fault]:
    """Gives a note for YaRN whose factor does not lead from the original length to the declared one, or to the length
    of the sequences. Programs that read the export take the context from `max_position_embeddings`."""
    facts, length = draft.facts, draft.recipe.data.sequence_length
    if facts is None or facts.yarn_length is None:
        return
    reach, declared = facts.yarn_length, facts.max_positions
    product = f"factor · original_max_position_embeddings = {reach}"
    if length > reach:
        message = f"{length} exceeds {product}: later positions were in neither the old nor the extended context"
        yield Fault("data.sequence_length", message, "a larger factor in model.config.rope_parameters")
    if declared is not None and declared != reach:
        message = f"{declared} is not {product} of YaRN"
        fix = f"{assignment(model__config__max_position_embeddings=reach)}, or another factor"
        yield Fault("model.config.max_position_embeddings", message, fix)


@rule("model.rotary_follows", "run")
def rotary_follows(draft: Draft) -> Iterator[Fault]:
    """Refuses `dynamic` rotary embeddings beyond the declared length, and `longrope` beyond its original length. The
    frequencies depend on the longest position of each forward pass, so a run would depend on its micro-batches."""
    facts, length = draft.facts, draft.recipe.data.sequence_length
    if facts is None or facts.rotary_follows is None or length <= facts.rotary_follows[1]:
        return
    kind, fixed = facts.rotary_follows
    message = (
        f"{length} is too long for rope_type '{kind}': beyond {fixed} positions its frequencies depend "
        "on the longest document of each forward pass, so each micro-batch would train a different model"
    )
    fixes = [assignment(data__sequence_length=fixed)] if fixed else []
    if "dynamic" in kind:
        fixes.append(assignment(model__config__max_position_embeddings=length))
    fixes.append("a rope_type with fixed frequencies, such as 'yarn', 'linear' or 'llama3'")
    yield Fault("data.sequence_length", message, ", or ".join(fixes))


@rule("model.without_gradient", "run", refuses=False)
def without_gradient(draft: Draft) -> Iterator[Fault]:
    """Gives a note for parameters that the loss of texts does not depend on, which are frozen (`freeze_unused`). Plain
    PyTorch does not change a parameter without a gradient. ZeRO and pipelines reduce zeros for it and apply weight
    decay; DistributedDataParallel waits for its gradient."""
    names = draft.facts.without_gradient if draft.facts is not None else ()
    if names:
        parts: dict[tuple[str, ...], list[str]] = {}
        for name in names:
            words = ["*" if word.isdigit() else word for word in name.split(".")[:-1]]
            parts.setdefault(tuple(words[:2]), []).append("/".join(words))
        shown = [f"{commonpath(part).replace('/', '.')} ({len(part)} weights)" for part in parts.values()]
        more = f" and {len(shown) - NAMED} more parts" if len(shown) > NAMED else ""
        named = ", ".join(shown[:NAMED])
        message = f"the loss of texts does not depend on {named}{more}: they are frozen, and exported unchanged"
        yield Fault("model", message)


@rule("model.num_labels", "read")
def num_labels(draft: Draft) -> Iterator[Fault]:
    """Refuses another head than that over the vocabulary for what needs logits of tokens, and where it would not be
    trained as in `transformers`. Only a loss of one's own knows what the outputs mean; the classifiers of
    `transformers` compute no loss of routers."""
    recipe = draft.recipe
    labels, objective = recipe.model.num_labels, recipe.objective
    if labels is None:
        return
    without = "leave out model.num_labels"
    if not objective.is_own:
        message = f"'{objective.name}' needs logits over the vocabulary, which model.num_labels={labels} replaces"
        yield Fault("objective.name", message, f"name a loss of your own, such as {EXAMPLE}, or {without}")
    if recipe.samples.prompts:
        message = f"cannot be continued: with model.num_labels={labels} the model has no logits of tokens"
        yield Fault("samples.prompts", message, f"{assignment(samples__prompts='[]', samples__every_steps=0)}")
    if recipe.tasks.names:
        message = f"cannot be scored: with model.num_labels={labels} the model has no probabilities of texts"
        yield Fault("tasks.names", message, assignment(tasks__names="[]"))
    reasons = {
        "adapters are exported and merged as those of a causal LM": recipe.model.adapter is not None,
        "its classifier computes no loss of its routers": draft.facts is not None and draft.facts.router_loss,
    }
    yield from fault_for(reasons, "model.num_labels", f"{labels} is not supported", without)


@rule("model.router_loss", "read", refuses=False)
def router_loss(draft: Draft) -> Iterator[Fault]:
    """Gives a note for a mixture of experts whose router's loss is not trained, unless the recipe says so itself.
    `transformers` computes the load balance loss only if the configuration asks for router logits."""
    facts, key = draft.facts, "output_router_logits"
    if facts is None or facts.num_labels is not None:
        return
    if facts.router_loss_off and key not in draft.recipe.model.config:
        message = (
            f"the load balance loss of '{facts.model_type}' (coefficient {facts.router_loss_off:g}) is not trained, "
            "because its configuration does not ask for router logits"
        )
        fix = f"{assignment(model__config__output_router_logits='true')} trains it, false silences this note"
        yield Fault(f"model.config.{key}", message, fix)


@rule("model.text_part", "read", refuses=False)
def text_part(draft: Draft) -> Iterator[Fault]:
    """Notes what is trained of a multimodal model: its text model. Its other parts are not loaded, and an export has
    them as they are in the pretrained weights."""
    if draft.facts is not None and (part := draft.facts.part) is not None:
        _, decoder = part.prefixes[0]
        beside = ", ".join(f"{name} ({number:,} parameters)" for name, number in part.untouched) or "none"
        message = (
            f"of '{part.wrapper}', the text model {decoder[:-1]} is trained ({draft.facts.parameters:,} parameters); "
            f"the other parts are not loaded, and exports have them unchanged: {beside}"
        )
        yield Fault("model.pretrained", message, "export --text-only writes the text model alone")


@rule("data.documents_mixed", "run", refuses=False)
def documents_mixed(draft: Draft) -> Iterator[Fault]:
    """Gives a note for families in which documents influence each other in spite of `data.mask_documents`. They meet
    outside of the parts that can compute each document on its own."""
    facts = draft.facts
    if facts is not None and facts.text_type in MIXES_DOCUMENTS and draft.recipe.data.has_document_mask:
        message = (
            f"'{facts.text_type}' lets packed documents influence each other, whatever the attention mask; "
            "if a source turns out to hold conversations, preparing the data refuses to pack them"
        )
        yield Fault(
            "data.mask_documents",
            message,
            f"{assignment(data__packing='none')}, or {assignment(data__mask_documents='false')}",
        )


@rule("model.recurrences_in_slices", "run", axis=SEQUENCE, refuses=False)
def recurrences_in_slices(draft: Draft) -> Iterator[Fault]:
    """Notes what long documents cost sequence parallel ranks of a family with recurrences or convolutions. A rank waits
    for the states of the rank before, or computes the state at the beginning of its slice again, from the beginning of
    the documents that reach into it."""
    facts, degree, rows = draft.facts, draft.parallel.sequence, draft.recipe.batch.micro_batch_size
    if facts is None or facts.text_type not in MIXING_PARTS:
        return
    if facts.text_type in CONTINUES_FROM_STATES:
        factor = (degree + rows - 1) / rows
        message = (
            f"each rank continues the recurrences of '{facts.text_type}' from the states of the rank before, and waits "
            f"for them: with documents as long as the sequence, the recurrences of a micro-batch of {rows} take "
            f"{factor:.3g} times as long as those of a slice, which the predicted time leaves out"
        )
        yield Fault("parallel.sequence", message, "documents that are shorter than a slice do not wait")
    else:
        message = (
            f"each rank computes the recurrences of '{facts.text_type}' from the beginning of the documents that reach "
            f"into its slice: with documents as long as the sequence, the last rank computes {degree} times its slice, "
            "which the predicted time leaves out"
        )
        yield Fault("parallel.sequence", message, "documents that are short for a slice are hardly repeated")


@rule("data.conversations_mixed", "run")
def conversations_mixed(draft: Draft) -> Iterator[Fault]:
    """Refuses to pack conversations for families in which packed conversations influence each other. If only the data
    tell whether a source holds conversations, the data preparation refuses this instead. They meet outside of the parts
    that can compute each conversation on its own."""
    facts, recipe = draft.facts, draft.recipe
    is_packed = recipe.data.packing == "best_fit" and not recipe.objective.reads_whole_documents
    sources = (*recipe.data.sources, *recipe.evaluation.all_sources.values())
    if facts is not None and is_packed and any(source.declares_conversations for source in sources):
        yield from packed_conversations(facts.text_type)


def packed_conversations(family: str | None) -> Iterator[Fault]:
    """Yields a fault if packed conversations influence each other in this family."""
    if family in MIXES_DOCUMENTS:
        message = f"'{family}' lets packed conversations influence each other, whatever the attention mask"
        yield Fault("data.packing", message, assignment(data__packing="none"))


@rule("model.attention_device", "run")
def attention_device(draft: Draft) -> Iterator[Fault]:
    """Refuses GPU kernels on a CPU, and on GPUs for which they are not compiled. Flash attention needs a GPU that it is
    compiled for, and torch has no backward pass of FlexAttention for CPUs."""
    attention = draft.recipe.model.attention_kernel
    if attention == "flash_attention_3" and draft.cluster.device in WITHOUT_FLASH_3:
        message = f"'{attention}' is compiled for Ampere and Hopper only, not for this Blackwell GPU"
        yield Fault("model.attention", message, assignment(model__attention="flash_attention_2"))
    if draft.cluster.spec.on_cpu and attention.startswith("fl"):
        fix = masked_attention(draft)
        if "sdpa" in fix:
            fix = f"{fix}, or {assignment(model__attention='varlen')}"
        yield Fault("model.attention", f"'{attention}' cannot train on CPUs", fix)


@rule("model.attention_family", "run")
def attention_family(draft: Draft) -> Iterator[Fault]:
    """Refuses `sdpa` for families that `transformers` does not build with it, because of soft caps, sinks, or attention
    of their own."""
    facts = draft.facts
    if facts and draft.recipe.model.attention == "sdpa" and facts.text_type in WITHOUT_SDPA:
        message = f"'{facts.text_type}' of transformers does not support 'sdpa'"
        yield Fault("model.attention", message, masked_attention(draft))


def masked_attention(draft: Draft) -> str:
    """Returns the fix that chooses an attention with masks, on any device: `sdpa`, if the family has it."""
    without = draft.facts is not None and draft.facts.text_type in WITHOUT_SDPA
    return assignment(model__attention="eager" if without else "sdpa")


def lower_precision(draft: Draft) -> str:
    """Returns the fix that chooses bf16, or autocast for strategies without fp32 master weights."""
    able = STRATEGIES.get(draft.parallel.strategy)
    return assignment(parallel__precision="autocast_bf16" if able and "bf16" not in able.precisions else "bf16")


@rule("model.attention_precision", "read")
def attention_precision(draft: Draft) -> Iterator[Fault]:
    """Refuses fp32 for kernels without fp32. On a CPU, `varlen` computes in any data type. The kernels compute in 16
    bits only; autocast is enough."""
    attention, computed = draft.recipe.model.attention_kernel, COMPUTE_DTYPE[draft.parallel.precision]
    takes_less = attention == "varlen" or attention.startswith("flash")
    if takes_less and computed == "fp32" and not draft.cluster.spec.on_cpu:
        message = (
            f"'{attention}' is not supported with {draft.parallel.precision}: its kernel computes in bf16 or fp16 only"
        )
        fix = f"{lower_precision(draft)}, or {masked_attention(draft)}"
        yield Fault("model.attention", message, fix)


@rule("model.attention_heads", "read")
def attention_heads(draft: Draft) -> Iterator[Fault]:
    """Refuses too large heads on GPUs for flash-attn's kernels and for torch's copy of them (`varlen_attn`). The
    kernels hold a row of a head in registers: at most 256 numbers."""
    attention, facts = draft.recipe.model.attention_kernel, draft.facts
    if facts is None or draft.cluster.spec.on_cpu or not (attention == "varlen" or attention.startswith("flash")):
        return
    if facts.head_dim > FLASH_HEAD:
        message = f"'{attention}' supports head sizes of at most {FLASH_HEAD}, but the model's is {facts.head_dim}"
        yield Fault("model.attention", message, masked_attention(draft))


@rule("model.experts_aligned", "run")
def experts_aligned(draft: Draft) -> Iterator[Fault]:
    """Refuses experts whose rows on a rank are not multiples of 16 bytes, as torch's grouped matrix products need them
    (`torch._grouped_mm`)."""
    facts = draft.facts
    if facts is None or facts.weights is None:
        return
    step = EXPERT_ROW_BYTES // BYTES_OF[draft.weight_dtype]
    ranks = draft.parallel.tensor if draft.parallel.expert == 1 else 1
    weights = {
        weight for run in facts.weights.runs for weight in run.weights if weight.is_expert and not weight.is_adapter
    }
    widths = {weight.stored[-1] // (ranks if "down_proj" in weight.name else 1) for weight in weights}
    uneven = sorted(width for width in widths if width % step)
    if uneven:
        text = " and ".join(str(width) for width in uneven)
        message = (
            f"experts of width {text} are not a multiple of {step} {draft.weight_dtype} numbers "
            f"({EXPERT_ROW_BYTES} bytes)"
        )
        yield Fault("model.config", message, f"use widths that are multiples of {step * ranks}")
