"""Which keys a DeepSpeed configuration may have: DeepSpeed ignores any other at the top level.

Read from every place of the DeepSpeed 0.19.8 sources that takes a key from the configuration; a test
looks for the keys in the sources.
"""

from __future__ import annotations

TOP_LEVEL_KEYS = frozenset(
    {
        # runtime/config.py, runtime/constants.py
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "managed_gradient_accumulation",
        "steps_per_print",
        "dump_state",
        "disable_python_gc",
        "disable_allgather",
        "communication_data_type",
        "seq_parallel_communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "gradient_allreduce_op",
        "gradient_clipping",
        "zero_optimization",
        "fp16",
        "bf16",
        "bfloat16",
        "torch_autocast",
        "data_types",
        "optimizer",
        "scheduler",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "wall_clock_breakdown",
        "memory_breakdown",
        "use_data_before_expert_parallelism",
        "hybrid_engine",
        "pipeline",
        "checkpoint",
        "dataloader_drop_last",
        "log_level",
        "weight_quantization",
        "compile",
        "vocabulary_size",
        "expert_parallel",
        # each in the module of its feature
        "activation_checkpointing",
        "aio",
        "autotuning",
        "comms_logger",
        "data_efficiency",
        "datastates_ckpt",
        "flops_profiler",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "tensor_parallel",
        "timers",
        # __init__.py: the mesh of data and sequence parallelism
        "sequence_parallel_size",
        "data_parallel_size",
    }
)

REMOVED_KEYS = {
    "elasticity": "set train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps directly",
    "curriculum_learning": "move it to data_efficiency.data_sampling.curriculum_learning",
    "compression_training": "remove it; compress the trained model with another tool",
    "amp": "use bf16, fp16 or torch_autocast",
    "nebula": "remove it; checkpoints are written with torch.save",
    "sparse_attention": "remove it; choose an attention implementation of the model",
    "sparse_gradients": "remove it; a torch.nn.Embedding with sparse=True is reduced sparsely by itself",
    "eigenvalue": "remove it together with quantize_training",
    "quantize_training": "remove it; quantize the trained model with another tool",
    "progressive_layer_drop": "remove it",
    "graph_harvesting": "remove it; torch.compile captures graphs",
}
"""Top-level keys that DeepSpeed now raises on, and the way to migrate (DeepSpeed issue 8489)."""

REMOVED_ZERO_KEYS = {
    "mics_shard_size": "use zero_hpz_partition_size (ZeRO++) to shard within a node",
    "mics_hierarchical_params_gather": "use zero_hpz_partition_size (ZeRO++) to shard within a node",
    "zeropp_loco_param": "remove it; zero_quantized_gradients works without error feedback",
}
"""Keys of `zero_optimization` that DeepSpeed now raises on."""
