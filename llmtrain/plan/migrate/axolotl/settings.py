"""The settings of axolotl, and what each becomes. What is said of axolotl was read in the sources of release 0.19.0."""

from __future__ import annotations

from typing import Any

from llmtrain.plan.migrate import trainer_settings
from llmtrain.plan.migrate.translation import Setting, without_counterpart

TITLE = "axolotl"


def number(value: Any) -> float:
    """Returns a number, also of a text; anything else as it is, so that the recipe refuses it."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value  # type: ignore[no-any-return]


def whole(value: Any) -> int:
    """Returns a whole number, also of the text 500_000; anything else as it is, so that the recipe refuses it."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return value  # type: ignore[no-any-return]


def share_of_peak(value: Any) -> float:
    """Returns a learning rate at the end of a schedule, relative to the peak; the peak itself is `constant`."""
    return number(value) if number(value) < 1 else 0.0


def names_in(value: Any) -> list[str]:
    """Returns the items of a list, or one text."""
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else [str(value)]


OPTIMIZERS: dict[str, str] = trainer_settings.OPTIMIZERS | {
    "adamw": "adamw",
    "optimi_adamw": "adamw",
    "ao_adamw_8bit": "adamw_8bit",
    "adamw_torch_4bit": "adamw_8bit",
    "ao_adamw_4bit": "adamw_8bit",
    "muon": "muon",
}
"""`optimizer` → optim.name."""
OPTIMIZERS_DIFFER: dict[str, str] = trainer_settings.OPTIMIZERS_DIFFER | {
    "adamw_torch_4bit": "moments have 8 bits in place of 4",
    "ao_adamw_4bit": "moments have 8 bits in place of 4",
    "muon": "matrices of decoder layers; all other weights are updated as by adamw, at the same learning rate",
}
"""What differs in an optimizer."""

SETTINGS = (
    # Model
    Setting(key="base_model", field="model.pretrained", joint="also data.tokenizer"),
    Setting(key="tokenizer_config", field="data.tokenizer", joint="by default that of `base_model`"),
    Setting(key="base_model_config", joint="model.pretrained has the configuration; another folder is not supported"),
    Setting(key="revision_of_model", field="model.revision"),
    Setting(key="model_revision", field="model.revision"),
    Setting(key="trust_remote_code", field="model.trust_remote_code"),
    Setting(key="overrides_of_model_config", field="model.config"),
    Setting(key="model_config", field="model.config"),
    Setting(key="tokens", field="model.new_tokens", joint="with `special_tokens.additional_special_tokens`"),
    Setting(key="special_tokens", joint="of the tokenizer's own; other texts are not supported"),
    Setting(key="unfrozen_parameters", field="model.trainable", joint="regular expressions become patterns"),
    # Adapter
    Setting(key="adapter", field="model.adapter", joint="`lora`; `qlora` also sets model.quantize=nf4"),
    Setting(key="load_in_4bit", field="model.quantize", joint="`nf4`, with an adapter"),
    Setting(key="load_in_8bit", joint="the weights stay in the precision of the run; model.quantize=nf4 is nearest"),
    Setting(key="lora_r", field="model.adapter.rank"),
    Setting(key="lora_alpha", field="model.adapter.alpha"),
    Setting(key="lora_dropout", field="model.adapter.dropout"),
    Setting(key="lora_target_modules", field="model.adapter.targets", joint="names, not a regular expression"),
    Setting(key="lora_target_linear", field="model.adapter.targets", joint="`all-linear`"),
    Setting(key="lora_target_parameters", field="model.adapter.target_parameters", convert=names_in),
    Setting(key="lora_modules_to_save", field="model.adapter.modules_to_save", convert=names_in),
    Setting(key="peft_use_dora", field="model.adapter.dora"),
    Setting(key="peft_use_rslora", field="model.adapter.rslora"),
    Setting(key="lora_model_dir", field="model.adapter.pretrained", joint="replaces the other fields of the adapter"),
    # Data
    Setting(key="datasets", field="data.sources", joint="see the table of a data set"),
    Setting(key="test_datasets", field="evaluation.sources", joint="see the table of a data set"),
    Setting(key="pretraining_dataset", field="data.sources", joint="texts; the data are stored once, not streamed"),
    Setting(key="dataset_prepared_path", field="data.cache_dir"),
    Setting(key="shuffle_merged_datasets", joint="rows are always read in a random order"),
    Setting(key="val_set_size", field="data.eval_fraction", default=0, joint="a share, not a number of rows"),
    Setting(key="sequence_len", field="data.sequence_length", default=512, convert=whole),
    Setting(
        key="excess_length_strategy",
        field="data.too_long",
        values={"drop": "drop", "truncate": "cut_turns", "raise": "drop"},
        joint="`drop`; `truncate` becomes `cut_turns`, which removes whole turns; `raise` drops and counts",
    ),
    Setting(key="sample_packing", field="data.packing", joint="`best_fit`; false is `none`"),
    Setting(key="pretraining_sample_concatenation", field="data.packing", joint="with `pretraining_dataset`"),
    Setting(key="pretrain_multipack_attn", field="data.mask_documents", joint="with `pretraining_dataset`"),
    Setting(key="chat_template", field="data.chat_template", joint="the tokenizer's own, or a text"),
    Setting(key="chat_template_jinja", field="data.chat_template", joint="a text or a file"),
    Setting(key="default_system_message", field="data.sources", joint="`system` of each source"),
    Setting(key="train_on_inputs", field="data.train_on", values={True: "all", False: "assistant"}),
    # Optimizer
    Setting(key="learning_rate", field="optim.lr", convert=number),
    Setting(key="optimizer", field="optim.name", default="adamw_torch_fused", joint="by name"),
    Setting(
        key="optim_args", field="optim.options", joint="only those of `muon` and `adafactor` that have the same name"
    ),
    Setting(key="weight_decay", field="optim.weight_decay", default=0.0, convert=number),
    Setting(key="adam_beta1", field="optim.betas", joint="default 0.9"),
    Setting(key="adam_beta2", field="optim.betas", joint="default 0.999"),
    Setting(key="adam_epsilon", field="optim.eps", convert=number),
    Setting(key="max_grad_norm", field="optim.clip_grad_norm", convert=number),
    Setting(key="lr_scheduler", field="optim.schedule", default="cosine", joint="by name"),
    Setting(key="lr_scheduler_kwargs", joint="`min_lr_rate` and `num_decay_steps`"),
    Setting(key="cosine_min_lr_ratio", field="optim.min_lr_ratio", convert=share_of_peak),
    Setting(key="warmup_steps", field="optim.warmup_steps", joint="axolotl takes 2 for 1"),
    Setting(key="warmup_ratio", field="optim.warmup_ratio", joint="by default 0.03, at most 100 steps"),
    # Batch and length
    Setting(
        key="micro_batch_size", field="batch.micro_batch_size", joint="1 by default; rows of a forward pass on a device"
    ),
    Setting(key="gradient_accumulation_steps", field="batch.global_batch_size", joint="× micro-batch × devices"),
    Setting(key="batch_size", field="batch.global_batch_size", joint="of a device, in place of the accumulation"),
    Setting(key="num_epochs", field="train.epochs", default=1.0, joint="unless `max_steps` is given"),
    Setting(key="max_steps", field="train.max_steps", joint="`num_epochs` may end the run earlier in axolotl"),
    Setting(key="seed", field="train.seed", default=42),
    Setting(key="early_stopping_patience", field="train.early_stopping.patience"),
    Setting(key="neftune_noise_alpha", field="train.neftune_alpha", convert=number),
    Setting(key="noisy_embedding_alpha", field="train.neftune_alpha", convert=number, older=True),
    # Objective
    Setting(key="rl", field="objective.name", joint="`dpo`, `ipo`, `orpo`, `kto`"),
    Setting(key="rl_beta", field="objective.beta", joint="default 0.1"),
    Setting(key="dpo_beta", field="objective.beta", joint="the earlier name of `rl_beta`", older=True),
    Setting(key="orpo_alpha", field="objective.beta", joint="with `rl: orpo`"),
    Setting(key="trl.beta", field="objective.beta", joint="before `rl_beta`"),
    Setting(key="dpo_label_smoothing", field="objective.label_smoothing", convert=number),
    Setting(key="dpo_loss_type", field="objective.name", joint="`sigmoid` and `ipo`, also with `sft`"),
    Setting(key="dpo_loss_weights", field="objective.sft_weight", joint="with `dpo_loss_type: [sigmoid, sft]`"),
    Setting(key="kto_desirable_weight", field="objective.desirable_weight", convert=number),
    Setting(key="kto_undesirable_weight", field="objective.undesirable_weight", convert=number),
    Setting(key="num_labels", harmless="1 with reward_model"),
    Setting(key="reward_model", field="model.num_labels", joint="with objective.name of a reward model"),
    # Precision, memory, devices
    Setting(key="bf16", field="parallel.precision", default="auto", joint="see what differs"),
    Setting(key="fp16", field="parallel.precision", joint="`fp16`"),
    Setting(key="bfloat16", field="parallel.precision", joint="`bf16`"),
    Setting(key="float16", field="parallel.precision", joint="`fp16`"),
    Setting(key="float32", field="parallel.precision", joint="`fp32`, if neither bf16 nor fp16 is set"),
    Setting(key="gradient_checkpointing", field="parallel.activation_checkpointing", joint="`full`"),
    Setting(key="selective_checkpointing", field="parallel.activation_checkpointing", joint="`selective`"),
    Setting(
        key="activation_offloading", field="parallel.offload_activations", joint="inputs of layers, in host memory"
    ),
    Setting(key="deepspeed", field="parallel.zero_stage", joint="as for plain DeepSpeed; axolotl's own files by name"),
    Setting(key="fsdp", field="parallel.accelerate", joint="`fsdp2`"),
    Setting(key="fsdp_version", field="parallel.accelerate", joint="`fsdp2`"),
    Setting(key="fsdp_config", field="parallel.accelerate", joint="`fsdp2`"),
    Setting(key="fsdp_config.reshard_after_forward", field="parallel.zero_stage", joint="3; false is 2"),
    Setting(key="fsdp_config.offload_params", field="parallel.offload_param", joint="not with FSDP2 here"),
    Setting(key="fsdp_config.activation_checkpointing", field="parallel.activation_checkpointing", joint="`full`"),
    Setting(key="context_parallel_size", field="parallel.sequence", joint="Ulysses, or a ring"),
    Setting(key="sequence_parallel_degree", field="parallel.sequence", joint="Ulysses, or a ring", older=True),
    Setting(key="tensor_parallel_size", field="parallel.tensor"),
    Setting(key="expert_parallel_size", field="parallel.expert"),
    Setting(key="tiled_mlp", field="parallel.tiled_mlp"),
    Setting(key="torch_compile", field="kernels.blocks", joint="`compiled`; `auto` measures whether it is faster"),
    Setting(key="attn_implementation", field="model.attention", joint="`auto` chooses the fastest exact kernel"),
    Setting(key="plugins", joint="kernels of Liger and Cut Cross Entropy: `kernels` chooses"),
    # Evaluation, checkpoints, logs
    Setting(key="eval_steps", field="evaluation.every_steps", joint="steps; a share needs `max_steps`"),
    Setting(key="evals_per_epoch", field="evaluation.every_steps", joint="steps"),
    Setting(key="eval_strategy", field="evaluation.every_steps", joint="`no`: 0"),
    Setting(key="evaluation_strategy", field="evaluation.every_steps", joint="`no`: 0", older=True),
    Setting(key="save_steps", field="checkpoint.every_steps", joint="steps; a share needs `max_steps`"),
    Setting(key="saves_per_epoch", field="checkpoint.every_steps", joint="steps"),
    Setting(key="save_strategy", field="checkpoint.every_steps", joint="`no`: 0"),
    Setting(key="save_total_limit", field="checkpoint.keep_last", default=4),
    Setting(
        key="load_best_model_at_end", field="checkpoint.keep_best", joint="`1`; `llmtrain export --best` writes it"
    ),
    Setting(key="metric_for_best_model", field="checkpoint.best_metric", joint="`eval_loss` and `perplexity`"),
    Setting(key="greater_is_better", field="checkpoint.best_mode", values={True: "max", False: "min"}),
    Setting(key="logging_steps", field="logging.every_steps"),
    Setting(key="use_wandb", field="logging.trackers", joint="`wandb`"),
    Setting(key="use_mlflow", field="logging.trackers", joint="`mlflow`"),
    Setting(key="use_tensorboard", field="logging.trackers", joint="`tensorboard`"),
    Setting(key="wandb_project", field="logging.project", joint="with the tracker `wandb`"),
    Setting(key="mlflow_experiment_name", field="logging.project", joint="with the tracker `mlflow`"),
    Setting(key="output_dir", field="name", default="./model-out", joint="its last part; the folder is `runs/NAME`"),
    Setting(key="wandb_name", joint="the run is called by `name`"),
    Setting(key="mlflow_run_name", joint="the run is called by `name`"),
    Setting(key="profiler_steps", field="profile.steps"),
    Setting(key="profiler_steps_start", field="profile.after_step"),
)
"""Settings with a counterpart."""

DATA_SET = (
    Setting(
        key="path", field="data.sources.name", joint="also a folder or a file; `json` and the like name `data_files`"
    ),
    Setting(key="data_files", field="data.sources.name", joint="local files, one source for each"),
    Setting(key="name", field="data.sources.subset"),
    Setting(key="split", field="data.sources.split", joint="by default all splits of a hub data set"),
    Setting(key="revision", field="data.sources.revision"),
    Setting(key="type", field="data.sources.format", joint="by its name"),
    Setting(key="field", field="data.sources.text_column"),
    Setting(key="text_column", field="data.sources.text_column"),
    Setting(key="field_messages", field="data.sources.columns", joint="`messages`"),
    Setting(key="field_tools", field="data.sources.columns", joint="`tools`"),
    Setting(key="field_chosen", field="data.sources.columns", joint="`chosen`"),
    Setting(key="field_rejected", field="data.sources.columns", joint="`rejected`"),
    Setting(key="message_property_mappings", joint="`role` or `from`, `content` or `value`; others need `map`"),
    Setting(key="message_field_role", joint="`role` or `from`; others need `map`", older=True),
    Setting(key="message_field_content", joint="`content` or `value`; others need `map`", older=True),
    Setting(key="message_field_training", joint="`train`, `weight`, `loss`, `trainable`; others need `map`"),
    Setting(key="roles", joint="the usual names; others need `map`"),
    Setting(key="roles_to_train", field="data.train_on", joint="the assistant, or every role"),
    Setting(key="train_on_eos", joint="`turn`: the end of a trained turn is always trained"),
    Setting(key="train_on_eot", joint="`turn`: the end of a trained turn is always trained"),
    Setting(key="chat_template", field="data.chat_template", joint="of all sources"),
    Setting(key="chat_template_jinja", field="data.chat_template", joint="of all sources"),
    Setting(key="conversation", field="data.chat_template", joint="of all sources", older=True),
    Setting(key="ds_type", harmless="the suffix of a file says what it contains"),
    Setting(key="input_format", unsupported="convert the rows with `map` of the source"),
    Setting(key="input_transform", unsupported="convert the rows with `map` of the source"),
    Setting(key="shards", unsupported="all rows are read; name fewer files, or leave rows out with `filter`"),
    Setting(key="shards_idx", unsupported="all rows are read; name fewer files, or leave rows out with `filter`"),
    Setting(key="skip", unsupported="all rows are read; leave rows out with `filter`"),
    Setting(key="preprocess_shards", harmless="rows are read in batches of bounded memory"),
    Setting(
        key="message_field_training_detail", unsupported="turns are trained whole; give parts as turns of their own"
    ),
    Setting(key="drop_system_message", unsupported="remove the messages with `map` of the source"),
    Setting(key="split_thinking", unsupported="give `reasoning_content`; `map` of the source can split it"),
    Setting(key="field_thinking", joint="`reasoning_content`, `thinking` or `reasoning`; others need `map`"),
    Setting(key="template_thinking_key", unsupported="the template reads `reasoning_content`"),
    Setting(key="trust_remote_code", unsupported="scripts of data sets are not run; name files, or a `reader`"),
    Setting(key="field_human", joint="`prompt` of the columns", older=True),
    Setting(key="field_model", joint="`completion` of the columns", older=True),
    Setting(key="step_separator", unsupported="rewards of steps are not trained"),
    Setting(key="max_completion_length", unsupported="rewards of steps are not trained"),
    Setting(key="train_on_last_step_only", unsupported="rewards of steps are not trained"),
    Setting(key="logprobs_field", unsupported="there is no distillation"),
    Setting(key="temperature", unsupported="there is no distillation"),
)
"""Settings of a data set."""


HARMLESS = without_counterpart(
    {
        "the class follows from the model's configuration": (
            "model_type type_of_model cls_model_config tokenizer_type tokenizer_use_fast tokenizer_legacy "
            "is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model"
        ),
        "a run continues by itself, with the same command": "auto_resume_from_checkpoints",
        "padding is left out of the loss, and a micro-batch is no longer than it has to be": (
            "pad_to_sequence_len pad_to_multiple_of eval_sample_packing batch_flattening dataloader_drop_last "
            "sample_packing_group_size sample_packing_bin_size sample_packing_eff_est sample_packing_sequentially "
            "sample_packing_mp_start_method multipack_real_batches streaming_multipack_buffer_size "
            "pretrain_multipack_buffer_size total_num_tokens total_supervised_tokens min_sample_len "
            "dpo_padding_free"
        ),
        "rows are read in a process of their own and stored once, also those of a stream": (
            "dataset_processes dataset_num_proc dataset_keep_in_memory dataloader_pin_memory dataloader_num_workers "
            "dataloader_prefetch_factor accelerator_config remove_unused_columns streaming preprocess_iterable "
            "num_dataset_shards_to_save is_preprocess skip_prepare_dataset"
        ),
        "`kernels` chooses kernels with the same results; `auto` takes the fastest ones measured": (
            "flash_attention sdp_attention xformers_attention flex_attention eager_attention flex_attn_compile_kwargs "
            "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp flash_optimum "
            "sdpa_varlen fused_attn_kernel large_head_attention flash_attn_d512 gemma4_hybrid_attn_impl "
            "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel "
            "chunked_cross_entropy chunked_cross_entropy_num_chunks cut_cross_entropy liger_rope liger_rms_norm "
            "liger_rms_norm_gated liger_layer_norm liger_swiglu liger_glu_activation liger_cross_entropy "
            "liger_fused_linear_cross_entropy liger_kernel_impl unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o "
            "unsloth_cross_entropy_loss unsloth_rms_norm unsloth_rope use_kernels experts_implementation "
            "use_scattermoe use_sonicmoe expert_backend moe_grouped_backend moe_dequant_chunk_size moe_bnb_fast "
            "use_glm_dsa_kernels use_dsv4_kernels dsv4_fp8_lora_kernel dsv4_shared_mlp_lora_kernel "
            "torch_compile_backend torch_compile_mode torch_compile_options heads_k_stride "
            "ring_attn_func dpo_use_liger_kernel tiled_mlp_num_shards tiled_mlp_use_original_mlp deepcompile"
        ),
        "each device gets its own part of the weights while these are read": (
            "device device_map max_memory gpu_memory_limit low_cpu_mem_usage experimental_skip_move_to_device "
            "qlora_sharded_model_loading lora_on_cpu world_size local_rank"
        ),
        "has no effect on training": (
            "gc_steps gc_collect_steps torch_empty_cache_steps ddp ddp_bucket_cap_mb ddp_broadcast_buffers "
            "ddp_find_unused_parameters gradient_checkpointing_kwargs strict axolotl_config_path save_safetensors "
            "include_tokens_per_second include_tkps tokenizer_save_jinja_files merge_lora merge_method "
            "hf_use_auth_token use_reentrant gradio_title gradio_share gradio_server_name gradio_server_port "
            "gradio_max_new_tokens gradio_temperature precompute_ref_log_probs lora_fan_in_fan_out vllm "
            "eval_batch_size adam_epsilon2 adam_beta3 expert_parallel_backend"
        ),
        "torch's own setting is kept; TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 turns TF32 on": "tf32",
        "NF4 also holds fused experts": "quantize_moe_experts",
        "turns, and the tokens that end them, are found in what the template writes": "eot_tokens",
    },
    harmless=True,
)
"""Settings on which the result of a training does not depend here."""

UNSUPPORTED = without_counterpart(
    {
        "there is no reinforcement learning with generation": (
            "ebft nemo_gym_enabled nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_config_paths nemo_gym_datasets "
            "nemo_gym_dir nemo_gym_head_port nemo_gym_max_turns nemo_gym_model_name nemo_gym_multi_turn "
            "nemo_gym_run_timeout nemo_gym_server_timeout nemo_gym_verify_timeout"
        ),
        "give model.pretrained a folder or hub name that has this tokenizer": (
            "added_tokens_overrides tokenizer_use_mistral_common"
        ),
        "rows are added for model.new_tokens, up to a multiple of 128, with the mean of the others": (
            "resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings fix_untrained_tokens"
        ),
        "for a new model, set model.architecture and model.config in place of model.pretrained": "reinit_weights",
        "states of other programs cannot be continued; start from the weights: a Hugging Face folder as "
        "model.pretrained, an adapter as model.adapter.pretrained": "resume_from_checkpoint",
        "the order of the rows is always random, and depends on train.seed": (
            "curriculum_sampling group_by_length shuffle_before_merging_datasets dataset_shard_num dataset_shard_idx"
        ),
        "remove repeated rows from the data, or with `filter` of the source": "dataset_exact_deduplication",
        "longer conversations are dropped under the same limit as in training": "eval_sequence_len max_prompt_len",
        "`llmtrain export RUN OUT --push OWNER/NAME` uploads after the run": (
            "hub_model_id hub_strategy hub_revision push_dataset_to_hub hf_mlflow_log_artifacts wandb_log_model"
        ),
        "name a tracker of your own in logging.trackers": (
            "use_comet comet_api_key comet_workspace comet_project_name comet_experiment_key comet_mode comet_online "
            "comet_experiment_config use_trackio trackio_project_name trackio_run_name trackio_space_id "
            "use_otel_metrics otel_metrics_host otel_metrics_port use_swanlab swanlab_project "
            "swanlab_experiment_name swanlab_description swanlab_mode swanlab_workspace swanlab_api_key "
            "swanlab_log_model swanlab_web_host swanlab_api_host "
            "swanlab_lark_webhook_url swanlab_lark_secret swanlab_log_completions swanlab_completion_log_interval "
            "swanlab_completion_max_buffer swanlab_completion_table_name"
        ),
        "set the variable of the tracker's own in the environment": (
            "wandb_entity wandb_run_id wandb_mode wandb_watch mlflow_tracking_uri"
        ),
        "texts are generated by `samples`: set samples.prompts and samples.every_steps": (
            "generate_samples num_generation_samples generation_max_new_tokens generation_temperature generation_top_p "
            "generation_top_k generation_prompt_ratio generation_do_sample eval_table_size eval_max_new_tokens"
        ),
        "set tasks.names, or functions of your own in evaluation.metrics": (
            "do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split lm_eval_tasks "
            "lm_eval_batch_size lm_eval_post_train lm_eval_model"
        ),
        "`guard` skips the updates of spikes, and rolls back after too many": (
            "loss_watchdog_threshold loss_watchdog_patience"
        ),
        "checkpoints are complete, and are also written when the run is asked to stop": (
            "save_only_model save_first_step dynamic_checkpoint"
        ),
        "the watchdog ends a run that hangs: watchdog.min_seconds": "ddp_timeout",
        "kernels.fp8 computes the matrix products of layers in fp8": (
            "fp8 fp8_config fp8_enable_fsdp_float8_all_gather"
        ),
        "weights are quantized by model.quantize=nf4 only; quantized checkpoints are read as they are": (
            "gptq model_quantization_config model_quantization_config_kwargs bnb_config_kwargs "
            "nonexpert_quantization dsv4_bf16_all dsv4_fp4_grouped_mode dsv4_fp8_nonexpert_mode gemma4_fp8_nonexpert "
            "gemma4_nf4_nonexpert nvfp4_merge_aware nvfp4_merge_aware_start_step qat quantization "
            "use_onebitllms llmcompressor"
        ),
        "weights between uses are kept elsewhere by ZeRO-3: parallel.offload_param": "layer_offloading ple_cpu_offload",
        "an optimizer of your own can do this (optim.name)": (
            "loraplus_lr_ratio loraplus_lr_embedding embedding_lr embedding_lr_scale lr_groups optim_target_modules "
            "torchdistx_path dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of qgalore_rank "
            "qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant qgalore_proj_bits "
            "qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size grokfast_alpha "
            "grokfast_lamb"
        ),
        "a schedule of your own can do this (optim.schedule)": (
            "lr_quadratic_warmup cosine_constant_lr_ratio lr_div_factor jagged_restart_steps "
            "jagged_restart_warmup_steps jagged_restart_anneal_steps"
        ),
        "a loss of your own can do this (objective.name)": (
            "use_eaft eaft_alpha eaft_k simpo_gamma cpo_alpha dpo_use_weighting rpo_alpha process_reward_model "
            "center_rewards_coefficient liger_use_token_scaling kd_trainer kd_ce_alpha kd_alpha kd_temperature kd_beta "
            "kd_normalize_topk kd_online_server_base_url kd_online_topk kd_online_server kd_online_timeout "
            "kd_temperature_min diffusion noise_schedule dpo_generate_during_eval dpo_norm_loss dpo_use_logits_to_keep"
        ),
        "name the layers in model.adapter.targets, with one rank for all": (
            "peft_layers_to_transform peft_layers_pattern lora_rank_pattern lora_alpha_pattern lora_exclude_modules "
            "peft_layer_replication"
        ),
        "adapters are LoRA, DoRA and rsLoRA, with PEFT's initialization": (
            "peft peft_init_lora_weights peft_trainable_token_indices peft_ensure_weight_tying use_mora mora relora "
            "relora_prune_ratio relora_prune_method relora_cpu_offload"
        ),
        "adapters have the data type of the model, and fp32 master weights": "peft_autocast_adapter_dtype",
        "layers are frozen for the whole run: model.trainable": (
            "lisa_n_layers lisa_step_interval lisa_layers_attribute spectrum_top_fraction spectrum_model_name "
            "freeze_mm_modules"
        ),
        "positions begin at 0 in each document": (
            "use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks"
        ),
        "code of your own: `callbacks` for the loop, model.build for the model": "trainer_cls",
        "conversations with images are trained with model.images, at the size of the processor": (
            "processor_type processor_kwargs image_size image_resize_algorithm role_boundaries"
        ),
        "the micro-batch is yours to choose: `llmtrain plan RECIPE` predicts its memory": "auto_find_batch_size",
        "`llmtrain train` starts the workers, also over several machines": (
            "use_ray ray_run_name ray_num_workers resources_per_worker"
        ),
        "ZeRO-3 in groups of devices: parallel.hierarchical_partition": "dp_shard_size dp_replicate_size",
        "the model is that of `transformers`": (
            "scaling_softmax scaling_softmax_factor scaling_softmax_bias llama4_linearized_experts dense_mixer "
            "overrides_of_model_kwargs model_kwargs sage_attention s2_attention"
        ),
        "rotary positions are fields of model.config": "rope_scaling",
        "norms follow the precision of the run": "fp32_norms fp32_norm_classes embeddings_skip_upcast",
        "checkpoints hold shards of every layout, and exports hold whole weights": ("fsdp_final_state_dict_type"),
        "set a template that has the values written in": "chat_template_kwargs",
        "conversations are packed by data.packing": "max_packed_sequence_len",
        "a bounded number of tokens of each expert is not needed": (
            "expert_parallel_token_capacity expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes "
            "expert_parallel_fallback_on_unsupported"
        ),
        "training by a remote service is not possible": "hatchery",
    }
)
"""Settings without a counterpart, with what comes nearest."""
