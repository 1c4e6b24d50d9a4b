"""Names of the recipe's fields in Hugging Face's TrainingArguments, axolotl and DeepSpeed."""

from __future__ import annotations

ALIASES: dict[str, tuple[str, ...]] = {
    "model.pretrained": ("base_model", "model_name", "model_name_or_path", "pretrained_model_name_or_path"),
    "model.architecture": ("model_type",),
    "model.revision": ("model_revision",),
    "model.attention": ("attn_implementation", "flash_attention", "sdp_attention", "eager_attention"),
    "data.sources": ("datasets", "dataset", "dataset_name", "train_file", "train_files", "pretraining_dataset"),
    "data.tokenizer": ("tokenizer_config", "tokenizer_name", "tokenizer_name_or_path", "tokenizer_path"),
    "data.sequence_length": (
        *("sequence_len", "seq_len", "seq_length", "max_length", "max_seq_length", "max_seq_len"),
        *("block_size", "context_length", "model_max_length"),
    ),
    "data.packing": ("sample_packing",),
    "data.eval_fraction": ("val_set_size", "validation_split_percentage", "test_size", "eval_split"),
    "data.cache_dir": ("dataset_prepared_path",),
    "optim.name": ("optimizer", "optim", "type"),
    "optim.lr": ("learning_rate", "peak_lr", "max_lr", "warmup_max_lr"),
    "optim.betas": ("adam_beta1", "adam_beta2", "adam_betas", "beta1", "beta2"),
    "optim.eps": ("adam_epsilon", "epsilon", "adam_eps"),
    "optim.weight_decay": ("wd",),
    "optim.schedule": ("lr_scheduler", "lr_scheduler_type", "scheduler"),
    "optim.warmup_steps": ("warmup_num_steps", "num_warmup_steps", "warmup"),
    "optim.decay_steps": ("num_decay_steps", "lr_decay_steps"),
    "optim.min_lr_ratio": ("cosine_min_lr_ratio", "min_lr", "min_lr_rate", "cos_min_ratio"),
    "optim.clip_grad_norm": ("max_grad_norm", "gradient_clipping", "grad_clip", "gradient_clip_val", "clip_grad"),
    "batch.global_batch_size": ("train_batch_size", "total_batch_size", "gradient_accumulation_steps", "batch_size"),
    "batch.micro_batch_size": (
        *("per_device_train_batch_size", "train_micro_batch_size_per_gpu", "per_device_batch_size"),
        *("micro_batch_size_per_gpu", "per_gpu_train_batch_size"),
    ),
    "parallel.zero_stage": ("stage", "zero_optimization", "zero", "zero_optimization_stage"),
    "parallel.hierarchical_partition": ("zero_hpz_partition_size", "hpz", "mics_shard_size"),
    "parallel.pipeline": ("pipeline_parallel_size", "pipeline_parallel_degree", "pp_size", "pp"),
    "parallel.tensor": (
        *("tensor_parallel_size", "tensor_parallel", "autotp_size", "tp_size", "tp", "tensor_model_parallel_size"),
    ),
    "parallel.sequence": (
        *("context_parallel_size", "sequence_parallel_size", "sequence_parallel_degree", "sp_size", "cp_size"),
    ),
    "parallel.sequence_ring": ("ring_degree", "ring_attention", "ring_attn_func"),
    "parallel.expert": ("expert_parallel_size", "ep_size", "moe_expert_parallel_size"),
    "parallel.precision": ("bf16", "fp16", "tf32", "dtype", "torch_dtype", "mixed_precision", "bfloat16", "float16"),
    "parallel.grad_accum_dtype": ("data_types", "grad_dtype"),
    "parallel.activation_checkpointing": ("gradient_checkpointing", "activation_checkpoint", "recompute"),
    "parallel.offload_optimizer": ("cpu_offload", "optimizer_offload"),
    "parallel.offload_param": ("cpu_offload_param", "offload_params", "param_offload"),
    "parallel.backend": ("strategy", "distributed_type"),
    "train.max_steps": ("total_num_steps", "training_steps", "max_iters"),
    "train.epochs": ("num_train_epochs", "num_epochs"),
    "train.early_stopping": ("early_stopping_patience", "patience", "early_stopping_threshold"),
    "train.seed": ("data_seed", "random_seed"),
    "evaluation.every_steps": (
        *("eval_steps", "evals_per_epoch", "eval_strategy", "evaluation_strategy", "eval_interval"),
    ),
    "evaluation.max_sequences": ("max_eval_samples", "eval_max_samples"),
    "evaluation.metrics": ("compute_metrics",),
    "checkpoint.every_steps": ("save_steps", "saves_per_epoch", "save_strategy", "save_interval"),
    "checkpoint.keep_last": ("save_total_limit",),
    "checkpoint.keep_best": ("load_best_model_at_end", "save_best"),
    "checkpoint.best_metric": ("metric_for_best_model", "monitor"),
    "checkpoint.best_mode": ("greater_is_better",),
    "checkpoint.background": ("async_save", "async_checkpointing"),
    "logging.every_steps": ("logging_steps", "steps_per_print", "log_interval", "log_every_n_steps"),
    "logging.trackers": ("report_to", "use_wandb", "use_mlflow", "wandb_mode", "tensorboard", "wandb", "mlflow"),
    "logging.project": ("wandb_project", "mlflow_experiment_name", "project_name"),
    "kernels.blocks": ("torch_compile", "use_liger_kernel", "liger"),
    "kernels.fp8": ("fp8_training",),
    "name": ("run_name", "wandb_name", "experiment_name", "output_dir"),
}
"""Field of a recipe → names that other tools use for it, or for what it determines."""

FIELD_OF_ALIAS = {theirs: field for field, names in ALIASES.items() for theirs in names}
"""Name in another tool → field of a recipe."""
