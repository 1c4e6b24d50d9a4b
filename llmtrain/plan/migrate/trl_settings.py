"""The settings of TRL's trainers, and what each becomes."""

from __future__ import annotations

from typing import Any

from llmtrain.plan.migrate.model_arguments import ADAPTER, MODEL
from llmtrain.plan.migrate.translation import Setting

METHODS = ("sft", "dpo", "kto", "orpo", "reward")
PAIRS = ("dpo", "orpo", "reward")
PADDED = "sequences are padded as their kernels need"
TEMPLATE = "a file with a template, or `chatml`"
NO_GENERATION = "texts are not generated while a run evaluates; samples.prompts are continued"
DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {"learning_rate": 2e-5},
    "dpo": {"learning_rate": 1e-6},
    "kto": {"learning_rate": 1e-6},
    "orpo": {"learning_rate": 1e-6},
    "reward": {"learning_rate": 1e-4},
}
"""Defaults of a trainer in which it differs from `TrainingArguments`; all share the following ones."""
SHARED_DEFAULTS: dict[str, Any] = {"bf16": True, "gradient_checkpointing": True, "logging_steps": 10}
MAX_LENGTH = 1024
"""TRL's default for `max_length`."""

ROWS = (
    Setting(key="dataset_name", field="data.sources", joint="a hub dataset, or a local file or folder"),
    Setting(key="dataset_config", field="data.sources", joint="`subset` of the source"),
    Setting(key="dataset_train_split", field="data.sources", joint="`split` of the source; the default is train"),
    Setting(key="dataset_test_split", field="evaluation.sources", joint="with eval_strategy; the default is test"),
    Setting(key="dataset_revision", field="data.sources", joint="`revision` of the source"),
    Setting(key="datasets", field="data.sources", joint="a list of sources; `path` is the name, and `name` the subset"),
    Setting(key="dataset_mixture", field="data.sources", joint="the alignment handbook's: `id`, `config`, `split`"),
    Setting(key="dataset_mixer", field="data.sources", joint="the alignment handbook's: name → share of the rows"),
    Setting(key="dataset_splits", field="data.sources", joint="names with `train` are trained on, others evaluated"),
    Setting(key="dataset_configs", field="data.sources", joint="`subset` of each source"),
    Setting(key="data_files", field="data.sources", joint="local files"),
    Setting(key="test_split_size", field="data.eval_fraction", joint="held out by the hash of a row"),
    Setting(key="dataset_streaming", unsupported="data are read once, and their tokens are stored"),
    Setting(key="streaming", unsupported="data are read once, and their tokens are stored"),
    Setting(key="dataset_num_proc", harmless="tokens are made in as many processes as there are cores"),
    Setting(key="dataset_batch_size", harmless="only the speed of reading depends on it", older=True),
    Setting(key="preprocessing_num_workers", harmless="tokens are made in as many processes as there are cores"),
    Setting(key="dataset_kwargs", joint="skip_prepare_dataset is not supported; the template writes special tokens"),
    Setting(key="auto_insert_empty_system_msg", joint="`system` of a source has a text, which must not be empty"),
    Setting(key="ignore_bias_buffers", harmless="buffers are not synchronised"),
    Setting(key="chat_template_path", field="data.chat_template", joint=TEMPLATE),
    Setting(key="chat_template", field="data.chat_template", joint="the alignment handbook's: a template's text"),
    Setting(key="eos_token", joint="the template's end of a turn, which the export declares"),
    Setting(key="pad_token", harmless="padding is masked, whatever its token"),
    Setting(key="max_length", field="data.sequence_length", joint="the default is 1024; twice it for pairs"),
    Setting(key="max_seq_length", field="data.sequence_length", joint="as max_length", older=True),
    Setting(key="truncation_mode", joint="conversations are never cut within a turn: data.too_long"),
    Setting(key="pad_to_multiple_of", harmless=PADDED),
    Setting(key="padding_value", harmless=PADDED, older=True),
    Setting(key="label_pad_token_id", harmless=PADDED, older=True),
    Setting(key="activation_offloading", field="parallel.offload_activations", joint="with recomputation"),
    Setting(key="router_aux_loss_coef", field="model.config", joint="output_router_logits with this coefficient"),
    Setting(key="model_init_kwargs", joint="its keys are those of the model"),
    Setting(key="is_encoder_decoder", joint="decoders only"),
    Setting(key="num_labels", field="model.num_labels"),
    Setting(key="logging_first_step", harmless="the first step is always shown"),
)
SFT = (
    Setting(key="dataset_text_field", field="data.sources", joint="`text_column` of the source; the default is text"),
    Setting(
        key="packing",
        field="data.packing",
        joint="true: best_fit, where texts do not see each other; TRL's do without flash attention; false: none",
    ),
    Setting(
        key="packing_strategy",
        field="data.packing",
        joint="bfd: best_fit; bfd_split: best_fit, which drops long conversations; wrapped: concat",
    ),
    Setting(key="eval_packing", joint="evaluations are packed as the training data"),
    Setting(key="padding_free", harmless="rows of a micro-batch do not see each other in either layout"),
    Setting(key="shuffle_dataset", harmless="rows are read in a random order"),
    Setting(
        key="assistant_only_loss",
        field="data.train_on",
        joint="true: assistant, for every template; false, the default, trains on whole conversations: all",
    ),
    Setting(
        key="completion_only_loss",
        field="data.train_on",
        joint="true, the default for rows of a prompt and a completion: last_assistant",
    ),
    Setting(key="loss_type", field="objective.name", joint="nll; dft is not supported"),
    Setting(key="num_of_sequences", harmless="of constant-length packing", older=True),
    Setting(key="chars_per_token", harmless="of constant-length packing", older=True),
    Setting(key="use_liger", field="kernels.blocks", joint="use_liger_kernel", older=True),
)
DPO = (
    Setting(
        key="loss_type",
        field="objective.name",
        joint="sigmoid: dpo; ipo: ipo; sigmoid with sft: dpo and objective.sft_weight; others are not supported",
    ),
    Setting(key="loss_weights", field="objective.sft_weight", joint="the weight of sft, relative to that of sigmoid"),
    Setting(key="beta", field="objective.beta"),
    Setting(key="label_smoothing", field="objective.label_smoothing", joint="of loss_type robust, and of cDPO"),
    Setting(key="rpo_alpha", field="objective.sft_weight", joint="a mean of the completions' means", older=True),
    Setting(key="f_divergence_type", joint="reverse_kl only"),
    Setting(key="f_alpha_divergence_coef", joint="reverse_kl only"),
    Setting(key="ld_alpha", joint="all tokens of a completion count alike"),
    Setting(key="use_weighting", joint="pairs are not weighted (WPO)"),
    Setting(key="discopop_tau", joint="of loss_type discopop"),
    Setting(key="reference_free", joint="the reference is the initial model; ORPO has none", older=True),
)
KTO = (
    Setting(key="loss_type", field="objective.name", joint="kto; apo_zero_unpaired is not supported"),
    Setting(key="beta", field="objective.beta"),
    Setting(key="desirable_weight", field="objective.desirable_weight"),
    Setting(key="undesirable_weight", field="objective.undesirable_weight"),
)
ORPO = (Setting(key="beta", field="objective.beta"),)
REWARD = (Setting(key="center_rewards_coefficient", joint="rewards are not centred; a loss of yours may do it"),)
OF_PREFERENCES = (
    Setting(key="disable_dropout", field="model.adapter.dropout", joint="true, the default, turns off dropout: 0"),
    Setting(key="precompute_ref_log_probs", harmless="they are always computed before the first step"),
    Setting(key="precompute_ref_batch_size", harmless="the batch is that of training"),
    Setting(key="ref_model_init_kwargs", unsupported="the reference is the model from which training starts"),
    Setting(key="model_adapter_name", unsupported="the reference is the model without its adapter"),
    Setting(key="ref_adapter_name", unsupported="the reference is the model without its adapter"),
    Setting(key="force_use_ref_model", harmless="the reference is the model from which training starts"),
    Setting(key="sync_ref_model", joint="the reference stays as it is"),
    Setting(key="ref_model_mixup_alpha", joint="the reference stays as it is"),
    Setting(key="ref_model_sync_steps", joint="the reference stays as it is"),
    Setting(key="max_prompt_length", joint="prompts are not cut; a row that does not fit is dropped", older=True),
    Setting(
        key="max_completion_length", joint="completions are not cut; a row that does not fit is dropped", older=True
    ),
    Setting(key="max_target_length", joint="completions are not cut", older=True),
    Setting(key="generate_during_eval", joint=NO_GENERATION),
    Setting(key="remove_unused_columns", harmless="only the columns that a format names are read"),
)
TABLES: dict[str, tuple[Setting, ...]] = {
    "Rows and lengths": ROWS,
    "SFT": SFT,
    "DPO": DPO,
    "KTO": KTO,
    "ORPO": ORPO,
    "Reward models": REWARD,
    "Preferences": OF_PREFERENCES,
    "Model": MODEL,
    "Adapter and quantization": ADAPTER,
}
OF_METHOD = {"sft": SFT, "dpo": DPO, "kto": KTO, "orpo": ORPO, "reward": REWARD}
LOSSES = {"sigmoid": "dpo", "ipo": "ipo"}
"""DPO's `loss_type` → `objective.name`."""
TITLES = {
    "sft": "TRL's SFT",
    "dpo": "TRL's DPO",
    "kto": "TRL's KTO",
    "orpo": "TRL's ORPO",
    "reward": "TRL's RewardTrainer",
}
CLASSES = {"sft": "SFTConfig", "dpo": "DPOConfig", "kto": "KTOConfig", "orpo": "ORPOConfig", "reward": "RewardConfig"}
MARKS = {
    "sft": ("packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "packing_strategy"),
    "dpo": ("rpo_alpha", "f_divergence_type", "loss_weights", "ld_alpha", "use_weighting", "reference_free"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "orpo": (),
    "reward": ("center_rewards_coefficient",),
}
"""Settings that only one of the trainers has."""
COMMON = frozenset(
    {
        *("beta", "loss_type", "max_prompt_length", "dataset_mixer", "dataset_mixture"),
        *("precompute_ref_log_probs", "dataset_num_proc", "chat_template_path", "model_init_kwargs"),
        *("dataset_train_split", "dataset_test_split"),
    }
)
"""Settings that TRL's trainers share, and `TrainingArguments` lacks."""

DATA = frozenset({"dataset_name", "datasets"})
