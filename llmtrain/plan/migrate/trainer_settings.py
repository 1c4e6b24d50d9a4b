"""The settings of the Trainer (`TrainingArguments` of transformers 5.24), and what each becomes."""

from __future__ import annotations

from llmtrain.plan.migrate.model_arguments import ADAPTER, MODEL
from llmtrain.plan.migrate.translation import Setting

PLACEHOLDER_STEPS = 100
"""Steps between evaluations where they follow from the data."""
LOADING = "workers of its own read and collate; how many does not change what is trained on"
DDP = "the engine chooses it; the result does not depend on it"
SHOWS = "only what is shown depends on it"
PUSH = "`llmtrain export RUN OUT --push OWNER/NAME` uploads a finished run"
OWN_SCHEDULE = "no schedule here has this form: name a function of yours in optim.schedule"

OPTIMIZERS: dict[str, str] = {
    **dict.fromkeys(
        ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_anyprecision"), "adamw"
    ),
    **dict.fromkeys(("adamw_torch_xla", "adamw_torch_npu_fused", "paged_adamw", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw_8bit"),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "lion", "lion_8bit", "paged_lion_8bit"), "lion"),
    "adafactor": "adafactor",
    "sgd": "sgd",
    "schedule_free_adamw": "schedule_free_adamw",
    "adagrad": "torch.optim:Adagrad",
    "rmsprop": "torch.optim:RMSprop",
}
"""`optim` → `optim.name`."""
OPTIMIZERS_DIFFER = {
    "adafactor": "the Trainer's takes the learning rate as it is; here it is relative to the root mean square of a "
    "weight and at most 1/√t: choose optim.lr anew",
    "adamw_bnb_8bit": "blocks of 8-bit moments lie within a row, and small tensors keep fp32: losses differ slightly",
    "adamw_8bit": "blocks of 8-bit moments lie within a row, and small tensors keep fp32: losses differ slightly",
    "paged_adamw_8bit": "moments of 8 bits are not paged; parallel.offload_optimizer=cpu saves the memory",
    "paged_adamw": "moments are not paged; parallel.offload_optimizer=cpu saves the memory",
    "paged_adamw_32bit": "moments are not paged; parallel.offload_optimizer=cpu saves the memory",
    "lion_8bit": "its momentum has 32 bits: more memory",
    "paged_lion_8bit": "its momentum has 32 bits and is not paged: more memory",
    "paged_lion_32bit": "its momentum is not paged; parallel.offload_optimizer=cpu saves the memory",
    "adamw_anyprecision": "moments have 32 bits",
}
"""What differs in an optimizer."""
SCHEDULES: dict[str, str] = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}
"""`lr_scheduler_type` → `optim.schedule`."""
TRACKERS = ("tensorboard", "wandb", "mlflow")

LENGTH = (
    Setting(
        key="per_device_train_batch_size",
        field="batch.micro_batch_size",
        default=8,
        joint="rows of a forward pass on a device; the Trainer's default is 8",
    ),
    Setting(
        key="gradient_accumulation_steps",
        field="batch.global_batch_size",
        joint="per_device_train_batch_size × gradient_accumulation_steps × devices",
    ),
    Setting(key="num_train_epochs", field="train.epochs", joint="unless max_steps is positive; the default is 3"),
    Setting(key="max_steps", field="train.max_steps", joint="instead of epochs, if it is positive"),
    Setting(key="seed", field="train.seed", default=42),
    Setting(
        key="data_seed",
        unsupported="train.seed also determines the order of the rows, which is not the Trainer's for any seed",
    ),
    Setting(key="full_determinism", harmless="a run is repeated bit by bit on the same plan"),
    Setting(
        key="auto_find_batch_size",
        unsupported="the memory of a plan is predicted: `llmtrain plan --search` finds the batch sizes that fit",
    ),
    Setting(
        key="average_tokens_across_devices",
        joint="the loss is always a mean over the tokens of the global batch",
    ),
    Setting(key="per_gpu_train_batch_size", field="batch.micro_batch_size", joint="as above", older=True),
)
OPTIMIZER = (
    Setting(key="learning_rate", field="optim.lr", default=5e-5),
    Setting(key="optim", field="optim.name", joint="with its betas", values=OPTIMIZERS),
    Setting(key="optim_args", joint="arguments of the optimizer, one by one"),
    Setting(
        key="optim_target_modules", unsupported="GaLore and APOLLO are not here; an adapter saves more memory (LoRA)"
    ),
    Setting(key="weight_decay", field="optim.weight_decay", default=0.0),
    Setting(key="adam_beta1", field="optim.betas", joint="the Trainer's default is 0.9"),
    Setting(key="adam_beta2", field="optim.betas", joint="the Trainer's default is 0.999"),
    Setting(key="adam_epsilon", field="optim.eps"),
    Setting(key="max_grad_norm", field="optim.clip_grad_norm"),
    Setting(key="lr_scheduler_type", field="optim.schedule", joint="the Trainer's default is linear", values=SCHEDULES),
    Setting(key="lr_scheduler_kwargs", field="optim.min_lr_ratio", joint="min_lr_rate, min_lr, num_decay_steps"),
    Setting(
        key="warmup_steps", field="optim.warmup_steps", joint="below 1 it is a share of the steps: optim.warmup_ratio"
    ),
    Setting(key="warmup_ratio", field="optim.warmup_ratio", joint="a share of the steps", older=True),
    Setting(
        key="label_smoothing_factor",
        joint="not supported unless it is 0; a loss of yours can have it (objective.name)",
    ),
    Setting(key="neftune_noise_alpha", field="train.neftune_alpha"),
    Setting(key="adafactor", joint="optim=adafactor", older=True),
)
PRECISION = (
    Setting(
        key="bf16",
        field="parallel.precision",
        joint="autocast_bf16, as on fp32 weights; bf16 with DeepSpeed and for weights that are loaded in bf16",
    ),
    Setting(key="fp16", field="parallel.precision", joint="autocast_fp16; fp16 with DeepSpeed"),
    Setting(key="bf16_full_eval", joint="evaluations have the precision of the run"),
    Setting(key="fp16_full_eval", joint="evaluations have the precision of the run"),
    Setting(
        key="tf32", harmless="parallel.precision leaves it to torch: TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 turns TF32 on"
    ),
    Setting(key="fp16_opt_level", harmless="of Apex, which the Trainer does not use any more", older=True),
    Setting(key="half_precision_backend", harmless="torch's is the only one", older=True),
    Setting(key="fp16_backend", harmless="torch's is the only one", older=True),
)
ENGINE = (
    Setting(
        key="activation_checkpointing",
        field="parallel.activation_checkpointing",
        joint="full; selective recomputes less",
    ),
    Setting(
        key="gradient_checkpointing",
        field="parallel.activation_checkpointing",
        joint="full; selective recomputes less",
    ),
    Setting(key="activation_checkpointing_kwargs", harmless="the recomputation is exact in either form"),
    Setting(key="gradient_checkpointing_kwargs", harmless="the recomputation is exact in either form"),
    Setting(key="deepspeed", field="parallel.zero_stage", joint="the file is translated, too"),
    Setting(key="fsdp", field="parallel.accelerate", joint="fsdp2, with parallel.backend=accelerate"),
    Setting(key="fsdp_config", field="parallel.zero_stage", joint="what is sharded, and what is recomputed"),
    Setting(
        key="parallelism_config",
        field="parallel.tensor",
        joint="tp_size is parallel.tensor, sp_size and cp_size are parallel.sequence",
    ),
    Setting(key="accelerator_config", joint="split_batches divides the micro-batch among the devices"),
    Setting(key="torch_compile", field="kernels.blocks", joint="compiled: each layer on its own"),
    Setting(key="torch_compile_backend", field="kernels.blocks", joint="inductor; others are not supported"),
    Setting(key="torch_compile_mode", joint="inductor's default mode"),
    Setting(key="use_liger_kernel", field="kernels.blocks", joint="kernels.blocks=liger and kernels.loss=liger"),
    Setting(key="liger_kernel_config", joint="kernels.blocks and kernels.loss choose"),
    Setting(
        key="use_cpu", harmless="the cluster says on what a run trains: `--device cpu`, or none where there is no GPU"
    ),
    Setting(key="no_cuda", harmless="the cluster says on what a run trains", older=True),
    Setting(key="use_mps_device", unsupported="Apple's GPUs are not supported", older=True),
    Setting(key="use_ipex", unsupported="torch itself has what IPEX had for CPUs", older=True),
    Setting(key="jit_mode_eval", unsupported="kernels.blocks=compiled compiles", older=True),
    Setting(key="use_cache", harmless="training never keeps keys and values"),
    Setting(key="torch_empty_cache_steps", harmless="the allocator's cache is left alone"),
    Setting(key="ddp_find_unused_parameters", harmless=DDP),
    Setting(key="ddp_bucket_cap_mb", harmless=DDP),
    Setting(key="ddp_broadcast_buffers", harmless=DDP),
    Setting(key="ddp_static_graph", harmless=DDP),
    Setting(key="ddp_backend", harmless="NCCL on GPUs, Gloo on CPUs"),
    Setting(key="ddp_timeout", harmless="watchdog.min_seconds and watchdog.phase_seconds end a run that hangs"),
    Setting(key="local_rank", harmless="the launcher sets it"),
    Setting(key="tpu_num_cores", unsupported="TPUs are not supported", older=True),
    Setting(key="tpu_metrics_debug", unsupported="TPUs are not supported", older=True),
    Setting(key="sharded_ddp", unsupported="parallel.zero_stage shards", older=True),
    Setting(key="fsdp_min_num_params", harmless="each layer is sharded on its own", older=True),
    Setting(key="fsdp_transformer_layer_cls_to_wrap", harmless="each layer is sharded on its own", older=True),
    Setting(key="xpu_backend", unsupported="only NVIDIA's and AMD's GPUs and CPUs are supported", older=True),
    Setting(key="mp_parameters", unsupported="of SageMaker; parallel.tensor and parallel.pipeline split", older=True),
    Setting(key="ray_scope", unsupported="there is no search of hyperparameters", older=True),
    Setting(key="torchdynamo", unsupported="kernels.blocks=compiled compiles", older=True),
)
DATA = (
    Setting(key="dataloader_num_workers", harmless=LOADING),
    Setting(key="dataloader_pin_memory", harmless=LOADING),
    Setting(key="dataloader_persistent_workers", harmless=LOADING),
    Setting(key="dataloader_prefetch_factor", harmless=LOADING),
    Setting(key="dataloader_multiprocessing_context", harmless=LOADING),
    Setting(key="dataloader_in_order", harmless=LOADING),
    Setting(
        key="dataloader_drop_last",
        harmless="with epochs, the last step of the run reads the rows that are left; no row is dropped before",
    ),
    Setting(key="remove_unused_columns", harmless="only the columns that a format names are read"),
    Setting(key="label_names", harmless="the labels are made from the tokens"),
    Setting(
        key="train_sampling_strategy",
        joint="rows are read in a random order, packed by their lengths; another order is not supported",
    ),
    Setting(key="length_column_name", harmless="the lengths are those of the tokens"),
    Setting(
        key="group_by_length",
        joint="data.packing=best_fit, which fills sequences, saves more padding",
        older=True,
    ),
    Setting(key="dispatch_batches", harmless=LOADING, older=True),
    Setting(key="split_batches", joint="divides the micro-batch among the devices", older=True),
)
EVALUATION = (
    Setting(key="do_train", harmless="a run trains"),
    Setting(key="do_eval", harmless="evaluation.every_steps says when"),
    Setting(key="do_predict", harmless="`llmtrain generate` and `llmtrain eval` are commands of their own"),
    Setting(key="eval_strategy", field="evaluation.every_steps", joint="no: 0; steps: eval_steps; epoch: in steps"),
    Setting(key="evaluation_strategy", field="evaluation.every_steps", joint="as eval_strategy", older=True),
    Setting(key="eval_steps", field="evaluation.every_steps", joint="below 1 it is a share of max_steps"),
    Setting(key="eval_delay", unsupported="evaluations begin with the first multiple of evaluation.every_steps"),
    Setting(key="eval_on_start", field="evaluation.at_start", joint="with an evaluation"),
    Setting(key="per_device_eval_batch_size", harmless="evaluations use batch.micro_batch_size; the loss is the same"),
    Setting(key="per_gpu_eval_batch_size", harmless="evaluations use batch.micro_batch_size", older=True),
    Setting(key="eval_accumulation_steps", harmless="only sums leave the device"),
    Setting(key="prediction_loss_only", harmless="only the loss and evaluation.metrics are computed"),
    Setting(key="eval_do_concat_batches", harmless="evaluation.metrics get the tokens of a batch"),
    Setting(key="eval_use_gather_object", harmless="only sums are gathered"),
    Setting(key="include_for_metrics", unsupported="evaluation.metrics are given logits and labels"),
    Setting(key="include_inputs_for_metrics", unsupported="evaluation.metrics are given logits and labels", older=True),
    Setting(key="batch_eval_metrics", harmless="evaluation.metrics are always computed batch by batch"),
)
CHECKPOINTS = (
    Setting(key="output_dir", field="name", joint="the folder is runs/NAME, or --run-dir"),
    Setting(key="overwrite_output_dir", harmless="`--fresh` of `llmtrain train` starts anew", older=True),
    Setting(key="save_strategy", field="checkpoint.every_steps", joint="no: only at the end; epoch: in steps; best"),
    Setting(key="save_steps", field="checkpoint.every_steps", joint="the Trainer's default is 500"),
    Setting(key="save_total_limit", field="checkpoint.keep_last"),
    Setting(key="load_best_model_at_end", field="checkpoint.keep_best", joint="1; `llmtrain export RUN OUT --best`"),
    Setting(key="metric_for_best_model", field="checkpoint.best_metric", joint="with load_best_model_at_end"),
    Setting(key="greater_is_better", field="checkpoint.best_mode", joint="with load_best_model_at_end"),
    Setting(key="save_only_model", joint="checkpoints always have the optimizer's state, so that runs continue"),
    Setting(key="save_on_each_node", harmless="a checkpoint is one folder, which every node writes its part of"),
    Setting(key="save_safetensors", harmless="exports are always safetensors", older=True),
    Setting(key="enable_jit_checkpoint", harmless="a run saves its state on SIGTERM"),
    Setting(
        key="resume_from_checkpoint",
        unsupported="the same command continues a run of ours; `llmtrain checkpoint import` begins one with a state of "
        "the Trainer",
    ),
    Setting(key="ignore_data_skip", unsupported="a continued run reads the rows that it has not read"),
    Setting(key="restore_callback_states_from_checkpoint", harmless="callbacks are restored if they have a state"),
    Setting(key="push_to_hub", joint=PUSH),
    Setting(key="hub_model_id", joint=PUSH),
    Setting(key="hub_strategy", joint=PUSH),
    Setting(key="hub_token", joint=PUSH),
    Setting(key="hub_private_repo", joint=PUSH),
    Setting(key="hub_always_push", joint=PUSH),
    Setting(key="hub_revision", joint=PUSH),
    Setting(key="push_to_hub_model_id", joint=PUSH, older=True),
    Setting(key="push_to_hub_organization", joint=PUSH, older=True),
    Setting(key="push_to_hub_token", joint=PUSH, older=True),
)
LOGGING = (
    Setting(key="run_name", field="name", joint="before output_dir"),
    Setting(key="logging_strategy", field="logging.every_steps", joint="steps: logging_steps"),
    Setting(key="logging_steps", field="logging.every_steps", joint="the Trainer's default is 500"),
    Setting(key="logging_dir", harmless="trackers write to the run's directory", older=True),
    Setting(key="logging_first_step", harmless="the first step is always shown"),
    Setting(key="logging_nan_inf_filter", joint="a loss that is not finite is shown, and its update is skipped"),
    Setting(key="log_on_each_node", harmless=SHOWS),
    Setting(key="log_level", harmless=SHOWS),
    Setting(key="log_level_replica", harmless=SHOWS),
    Setting(key="disable_tqdm", harmless=SHOWS),
    Setting(key="include_num_input_tokens_seen", harmless="metrics.jsonl always has the tokens"),
    Setting(key="include_tokens_per_second", harmless="metrics.jsonl always has the tokens per second", older=True),
    Setting(key="skip_memory_metrics", harmless="metrics.jsonl always has the memory"),
    Setting(
        key="report_to", field="logging.trackers", joint="tensorboard, wandb, mlflow; the Trainer's default is none"
    ),
    Setting(key="project", joint="of Trackio"),
    Setting(key="trackio_space_id", joint="of Trackio"),
    Setting(key="trackio_bucket_id", joint="of Trackio"),
    Setting(key="trackio_static_space_id", joint="of Trackio"),
    Setting(key="debug", joint="activations and TPUs are not traced; `llmtrain profile` records steps"),
)
ROWS = (
    Setting(key="dataset_name", field="data.sources", joint="a hub dataset"),
    Setting(key="dataset_config_name", field="data.sources", joint="`subset` of the source"),
    Setting(key="dataset_config", field="data.sources", joint="`subset` of the source, of `load_dataset`"),
    Setting(key="dataset_train_split", field="data.sources", joint="`split` of the source, of `load_dataset`"),
    Setting(key="data_files", field="data.sources", joint="local files, of `load_dataset`"),
    Setting(key="train_file", field="data.sources", joint="a local file"),
    Setting(key="validation_file", field="evaluation.sources", joint="a local file"),
    Setting(
        key="validation_split_percentage", field="data.eval_fraction", joint="of run_clm.py; by the hash of a text"
    ),
    Setting(key="block_size", field="data.sequence_length", joint="of run_clm.py, which joins texts and cuts them"),
    Setting(key="max_seq_length", field="data.sequence_length", joint="tokens of a row"),
    Setting(key="max_length", field="data.sequence_length", joint="tokens of a row"),
    Setting(key="model_max_length", field="data.sequence_length", joint="tokens of a row"),
    Setting(key="max_train_samples", joint="not supported; name files with fewer rows"),
    Setting(key="max_eval_samples", joint="rows; evaluation.max_sequences counts sequences"),
    Setting(key="streaming", unsupported="data are read once, and their tokens are stored"),
    Setting(key="preprocessing_num_workers", harmless="tokens are made in as many processes as there are cores"),
    Setting(key="overwrite_cache", harmless="tokens are stored by what they are made from"),
    Setting(key="keep_linebreaks", harmless="texts are read as they are"),
)
TABLES: dict[str, tuple[Setting, ...]] = {
    "Length and batch": LENGTH,
    "Optimizer": OPTIMIZER,
    "Precision": PRECISION,
    "Engine": ENGINE,
    "Data loading": DATA,
    "Evaluation": EVALUATION,
    "Checkpoints": CHECKPOINTS,
    "Logging": LOGGING,
}
"""All fields of `TrainingArguments`, as the page shows them."""
OF_SCRIPTS: dict[str, tuple[Setting, ...]] = {"Model": MODEL, "Adapter and quantization": ADAPTER, "Rows": ROWS}
"""Arguments of scripts around it."""
