"""The settings of LLaMA-Factory, and what each becomes."""

from __future__ import annotations

from llmtrain.plan.migrate.translation import Setting, without_counterpart

TITLE = "LLaMA-Factory"

DATASET_INFO = "dataset_info.json"
TEMPLATES = {"llama3": "llama3", "chatml": "chatml", "gemma": "gemma", "phi": "phi_3", "zephyr": "zephyr"}
"""Template → that of ours that writes the same turns."""
LINE_END_IS_TRAINED = (
    "chatml",
    "qwen",
    "gemma",
    "phi",
    "intern",
    "granite",
    "falcon",
    "exaone",
    "lfm",
    "dbrx",
    "alpaca",
)
"""What the names begin with of templates whose turns of the assistant end in a line end, which is trained on."""

MODEL = (
    Setting(key="model_name_or_path", field="model.pretrained", joint="also data.tokenizer"),
    Setting(key="model_revision", field="model.revision", joint="main is the default"),
    Setting(key="trust_remote_code", field="model.trust_remote_code"),
    Setting(key="add_tokens", field="model.new_tokens", joint="with add_special_tokens"),
    Setting(key="add_special_tokens", field="model.new_tokens", joint="with add_tokens"),
    Setting(key="resize_vocab", harmless="the vocabulary grows with model.new_tokens"),
    Setting(key="flash_attn", field="model.attention", joint="sdpa; disabled is eager; auto chooses an exact kernel"),
    Setting(key="rope_scaling", joint="fields of model.config; LLaMA-Factory takes the factor from cutoff_len"),
    Setting(key="enable_liger_kernel", field="kernels.blocks", joint="liger, also for kernels.loss"),
    Setting(key="disable_gradient_checkpointing", field="parallel.activation_checkpointing", joint="none; else full"),
    Setting(key="quantization_bit", field="model.quantize", joint="4 is nf4, with an adapter"),
    Setting(key="quantization_method", joint="bnb"),
    Setting(key="quantization_type", joint="nf4"),
    Setting(key="double_quantization", joint="scales are always quantized, too"),
)
TUNING = (
    Setting(key="stage", field="objective.name", joint="pt and sft: language_model; dpo; kto; rm: a reward model"),
    Setting(key="finetuning_type", field="model.adapter", joint="lora is the default; full; freeze: model.trainable"),
    Setting(key="lora_rank", field="model.adapter.rank", joint="8 by default"),
    Setting(key="lora_alpha", field="model.adapter.alpha", joint="twice lora_rank by default"),
    Setting(key="lora_dropout", field="model.adapter.dropout", joint="as given"),
    Setting(key="lora_target", field="model.adapter.targets", joint="all is all-linear"),
    Setting(key="additional_target", field="model.adapter.modules_to_save", joint="names, with commas"),
    Setting(key="use_rslora", field="model.adapter.rslora", joint="as given"),
    Setting(key="use_dora", field="model.adapter.dora", joint="as given"),
    Setting(key="adapter_name_or_path", field="model.adapter.pretrained", joint="one; its configuration counts"),
    Setting(key="create_new_adapter", joint="not with adapter_name_or_path: merge that one first"),
    Setting(key="freeze_trainable_layers", field="model.trainable", joint="the last layers, or the first if negative"),
    Setting(key="freeze_trainable_modules", field="model.trainable", joint="of these layers"),
    Setting(key="freeze_extra_modules", field="model.trainable", joint="outside of the layers"),
    Setting(key="pref_beta", field="objective.beta", joint="0.1 by default"),
    Setting(key="pref_loss", field="objective.name", joint="sigmoid is dpo; ipo; orpo"),
    Setting(key="pref_ftx", field="objective.sft_weight", joint="of dpo and ipo"),
    Setting(key="dpo_label_smoothing", field="objective.label_smoothing", joint="of dpo"),
    Setting(key="kto_chosen_weight", field="objective.desirable_weight", joint="of kto"),
    Setting(key="kto_rejected_weight", field="objective.undesirable_weight", joint="of kto"),
    Setting(key="use_muon", field="optim.name", joint="muon"),
    Setting(key="pure_bf16", field="parallel.precision", joint="bf16, which keeps fp32 master weights"),
    Setting(key="early_stopping_steps", field="train.early_stopping.patience", joint="evaluations"),
)
DATA = (
    Setting(key="dataset", field="data.sources", joint=f"as {DATASET_INFO} describes them"),
    Setting(key="eval_dataset", field="evaluation.sources", joint=f"as {DATASET_INFO} describes them"),
    Setting(key="dataset_dir", joint=f"the folder of {DATASET_INFO}, beside the file or below the working directory"),
    Setting(key="template", field="data.chat_template", joint="a text for llama3, chatml, gemma, phi, zephyr"),
    Setting(key="default_system", field="data.sources", joint="system of each source"),
    Setting(key="cutoff_len", field="data.sequence_length", joint="2048 by default"),
    Setting(key="packing", field="data.packing", joint="pt: concat; sft: best_fit if it is set, else none"),
    Setting(key="neat_packing", field="data.mask_documents", joint="true is the default here"),
    Setting(key="train_on_prompt", field="data.train_on", joint="all"),
    Setting(key="mask_history", field="data.train_on", joint="last_assistant"),
    Setting(key="val_size", field="data.eval_fraction", joint="a share, not a number of rows"),
    Setting(key="mix_strategy", joint="concat: sources are mixed by their sizes with epochs"),
    Setting(key="interleave_probs", field="data.sources", joint="weight of each source, with max_steps"),
    Setting(key="eval_on_each_dataset", field="evaluation.sets", joint="a set for each of eval_dataset"),
    Setting(key="split_special_tokens", field="data.special_tokens", joint="text; they are never parsed by default"),
)
WITHOUT_EFFECT = without_counterpart(
    {
        "rows are read once, and their tokens are stored": (
            "streaming buffer_size overwrite_cache preprocessing_batch_size preprocessing_num_workers tokenized_path "
            "data_shared_file_system"
        ),
        "padding is left out of the loss": "ignore_pad_token_for_loss",
        "the weights are read in parts, to the devices that need them": "low_cpu_mem_usage device_map offload_folder",
        "kernels chooses kernels with the same results; auto takes the fastest ones measured": (
            "use_unsloth use_v1_kernels use_unsloth_gc use_reentrant_gc"
        ),
        "only used after the training": (
            "infer_backend infer_dtype use_kv_cache export_dir export_size export_device export_quantization_bit "
            "export_quantization_dataset export_quantization_nsamples export_quantization_maxlen export_legacy_format "
            "export_hub_model_id vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config "
            "sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend do_sample temperature "
            "top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty skip_special_tokens "
            "eval_num_beams predict_with_generate generation_max_length generation_num_beams generation_config"
        ),
        "only what is shown depends on it": (
            "plot_loss print_param_status include_effective_tokens_per_second hf_hub_token ms_hub_token om_hub_token "
            "use_fast_tokenizer cache_dir"
        ),
        "`llmtrain train` starts the workers": "ray_num_workers ray_init_kwargs master_addr master_port",
    },
    harmless=True,
)
NOT_SUPPORTED = without_counterpart(
    {
        "all rows are read; name files with fewer rows, or a function in filter of the source": "max_samples",
        "the order of the rows is always random, and depends on train.seed": ("disable_shuffling sortish_sampler"),
        "set a template that has this written in: data.chat_template": (
            "tool_format enable_thinking preserve_thinking"
        ),
        "conversations with images are trained with model.images, at the size of the processor": (
            "media_dir image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels "
            "video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate freeze_vision_tower "
            "freeze_multi_modal_projector freeze_language_model"
        ),
        "rows of new tokens begin as the mean of the others": "new_special_tokens_config init_special_tokens",
        "the model is that of transformers": "shift_attn mixture_of_depths use_llama_pro use_kt kt_weight_path "
        "kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num kt_lora_expert_intermediate_size "
        "kt_config kt_cpu_activation kt_non_expert_weight_path",
        "a field of model.config: router_aux_loss_coef, with output_router_logits": "moe_aux_loss_coef",
        "norms and logits follow the precision of the run; the loss is computed in fp32": (
            "upcast_layernorm upcast_lmhead_output"
        ),
        "for a new model, set model.architecture and model.config in place of model.pretrained": "train_from_scratch",
        "quantized weights lie on the device that trains them": "quantization_device_map",
        "adapters are LoRA, DoRA and rsLoRA, with PEFT's initialization": (
            "pissa_init pissa_iter pissa_convert module_dropout oft_rank oft_block_size oft_target adapter_folder"
        ),
        "an optimizer of your own can do this (optim.name)": (
            "loraplus_lr_ratio loraplus_lr_embedding use_galore galore_target galore_rank galore_update_interval "
            "galore_scale galore_proj_type galore_layerwise use_apollo apollo_target apollo_rank "
            "apollo_update_interval apollo_scale apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise "
            "apollo_scale_front use_badam badam_mode badam_start_block badam_switch_mode badam_switch_interval "
            "badam_update_ratio badam_mask_mode badam_verbose use_adam_mini"
        ),
        "a loss of your own can do this (objective.name)": (
            "pref_bco_weight simpo_gamma ld_alpha use_dft_loss use_asft_loss asft_alpha use_eaft_loss eaft_alpha"
        ),
        "the reference is the model from which training starts": (
            "ref_model ref_model_adapters ref_model_quantization_bit"
        ),
        "there is no reinforcement learning with generation": (
            "ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards reward_model "
            "reward_model_adapters reward_model_quantization_bit reward_model_type"
        ),
        "give a function in evaluation.metrics": "compute_accuracy",
        "name a tracker of your own in logging.trackers": (
            "use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key "
            "swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret"
        ),
        "`llmtrain profile RECIPE` records steps": (
            "enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps "
            "profiler_active_steps profiler_repeat profiler_record_shapes profiler_profile_memory "
            "profiler_with_stack profile_modules"
        ),
        "kernels.fp8 computes the matrix products of layers in fp8": (
            "fp8 fp8_backend fp8_enable_fsdp_float8_all_gather"
        ),
        "parallel divides the model: tensor, pipeline, sequence, expert": (
            "use_mca use_hyper_parallel hyper_parallel_args tensor_model_parallel_size pipeline_model_parallel_size "
            "expert_model_parallel_size context_parallel_size sequence_parallel use_distributed_optimizer "
            "bias_activation_fusion apply_rope_fusion overlap_param_gather overlap_grad_reduce moe_grouped_gemm "
            "moe_token_dispatcher_type recompute_granularity"
        ),
    }
)
DESCRIBED = (
    Setting(key="hf_hub_url", field="data.sources.name", joint="a hub data set"),
    Setting(key="file_name", field="data.sources.name", joint="a file or folder below dataset_dir"),
    Setting(key="subset", field="data.sources.subset"),
    Setting(key="split", field="data.sources.split"),
    Setting(key="formatting", field="data.sources.format", joint="alpaca: instruction; sharegpt, openai: messages"),
    Setting(key="ranking", field="data.sources.format", joint="preference"),
    Setting(key="columns", field="data.sources.columns", joint="parts under their names here"),
    Setting(key="tags", joint="role and content, or from and value, with the usual roles; others need map"),
    Setting(key="num_samples", unsupported="all rows are read; name a file with fewer rows"),
    Setting(key="folder", unsupported="all files of the data set are read; name a folder of a local copy"),
    Setting(key="script_url", unsupported="scripts are not run; a function of yours in reader reads rows"),
    Setting(key="cloud_file_name", unsupported="copy the file, and name it as a source"),
    Setting(key="ms_hub_url", joint="not supported; hf_hub_url is"),
    Setting(key="om_hub_url", joint="not supported; hf_hub_url is"),
    Setting(key="load_from", harmless="a name that is no file is a hub data set"),
)
"""What `dataset_info.json` says of a data set."""
USUAL_TAGS = {
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant", "model", "chatgpt", "bot"),
    "observation_tag": ("observation", "tool", "function_response", "tool_response", "function"),
    "function_tag": ("function_call", "tool_call"),
    "system_tag": ("system", "developer"),
}
NUMBERS = "val_size freeze_trainable_layers lora_alpha lora_dropout"
COUNTS = "lora_rank cutoff_len early_stopping_steps per_device_train_batch_size gradient_accumulation_steps"
NAMES = (
    "model_name_or_path dataset eval_dataset lora_target additional_target freeze_trainable_modules "
    "freeze_extra_modules add_tokens add_special_tokens adapter_name_or_path interleave_probs"
)
TEXTS = "stage finetuning_type template pref_loss dataset_dir mix_strategy quantization_method optim lr_scheduler_type"
"""Settings that are translated together with others, by the kind of their values."""
ALPACA_PARTS = {"prompt": "instruction", "query": "input", "response": "output"}
