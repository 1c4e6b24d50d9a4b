"""Qwen3-30B-A3B from scratch on FineWeb-Edu: a mixture of 128 experts, of which 8 process each token.

Sizes: huggingface.co/Qwen/Qwen3-30B-A3B-Base. Its learning rate and batch size are not published; these are those of
DeepSeek-V2-Lite, a mixture of experts with as many active parameters (arXiv 2405.04434, appendix B): 4.2e-4, 2000 steps
of warm-up, 4608 sequences of 4096 tokens.

    llmtrain train recipes/qwen3_30b_a3b.py --hostfile hosts
"""

from llmtrain import (
    BatchConfig,
    CheckpointConfig,
    Cluster,
    DataConfig,
    EvalConfig,
    KernelsConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    Recipe,
    Source,
    TrainConfig,
    main,
)


def recipe() -> Recipe:
    """30,532,122,624 parameters, 3,353,032,704 of them active: 16 experts per layer and device, on eight nodes.

    The fastest plan that `llmtrain plan --search` predicts: attention skips other documents, and the loss is compiled.
    Two devices share each sequence, and optimizer states are in host memory, so that no activation is computed again.
    """
    return Recipe(
        name="qwen3_30b_a3b",
        model=ModelConfig(
            architecture="qwen3_moe",
            attention="varlen",
            config={
                "vocab_size": 151936,
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                # The balancing loss is part of the loss only if the router's logits are returned.
                "output_router_logits": True,
                "router_aux_loss_coef": 0.001,
                "max_position_embeddings": 32768,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
                "tie_word_embeddings": False,
            },
        ),
        data=DataConfig(
            sources=[Source("HuggingFaceFW/fineweb-edu")],
            tokenizer="Qwen/Qwen3-30B-A3B-Base",
            sequence_length=4096,
            eval_fraction=0.0001,
        ),
        optim=OptimConfig(
            lr=4.2e-4, weight_decay=0.1, schedule="wsd", warmup_steps=2000, decay_steps=5300, min_lr_ratio=0.1
        ),
        batch=BatchConfig(global_batch_size=4608, micro_batch_size=2),
        parallel=ParallelConfig(zero_stage=1, sequence=2, expert=8, precision="bf16", offload_optimizer="cpu"),
        kernels=KernelsConfig(loss="compiled"),
        train=TrainConfig(max_steps=53_000),
        evaluation=EvalConfig(every_steps=1000, max_sequences=1024),
        checkpoint=CheckpointConfig(every_steps=500, keep_last=3),
    )


def recipe_zero3() -> Recipe:
    """Whole experts, and nothing in host memory: ZeRO 3 shards everything, and each node has a copy of the weights."""
    return recipe().with_(
        **{"parallel.zero_stage": 3, "parallel.hierarchical_partition": 8, "parallel.offload_optimizer": "none"},
        **{"parallel.sequence": 1, "parallel.expert": 1, "parallel.activation_checkpointing": "selective"},
    )


def cluster() -> Cluster:
    """Eight nodes with eight devices each."""
    return Cluster(nodes=8, devices_per_node=8, device="h100")


if __name__ == "__main__":
    main(recipe)
