"""Llama 3 70B from scratch on FineWeb-Edu, on 256 devices.

Sizes: huggingface.co/meta-llama/Meta-Llama-3-70B. Learning rate and batch size: The Llama 3 Herd of Models (arXiv
2407.21783): peak 1.5e-4 (table 3), 8000 steps of warm-up, cosine decay to a hundredth; 8M tokens per step, as in the
second phase of the batch size's ramp (section 3.4.1).

    llmtrain plan recipes/llama3_70b.py
    llmtrain train recipes/llama3_70b.py --hostfile hosts
"""

from llama3_8b import recipe as llama3_8b

from llmtrain import Cluster, Recipe, main


def recipe() -> Recipe:
    """70,553,706,496 parameters; the fastest plan that `llmtrain plan --search` predicts for 256 H100.

    ZeRO 3 hides the gathering of weights behind computation. Two devices share each sequence, and norms and activation
    functions are computed again, so that activations fit. Attention skips other documents, and layers are compiled.
    """
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    return llama3_8b().with_(
        name="llama3_70b",
        **{f"model.config.{key}": value for key, value in sizes.items()},
        **{"data.tokenizer": "meta-llama/Meta-Llama-3-70B", "optim.lr": 1.5e-4},
        **{"batch.global_batch_size": 1024, "train.max_steps": 119_210},
        **{"parallel.zero_stage": 3, "parallel.sequence": 2, "parallel.activation_checkpointing": "selective"},
    )


def recipe_pipeline() -> Recipe:
    """For a network that is too slow to gather weights: 16 stages of 5 layers, 16 replicas, 64 micro-batches."""
    return recipe().with_(
        **{"parallel.zero_stage": 1, "parallel.sequence": 1, "parallel.pipeline": 16},
        **{"parallel.activation_checkpointing": "full"},
    )


def recipe_h200() -> Recipe:
    """Devices with enough memory for whole sequences."""
    return recipe().with_(**{"parallel.sequence": 1})


def cluster() -> Cluster:
    """32 nodes with eight devices each."""
    return Cluster(nodes=32, devices_per_node=8, device="h100")


def cluster_h200() -> Cluster:
    """32 nodes with eight devices each."""
    return Cluster(nodes=32, devices_per_node=8, device="h200")


if __name__ == "__main__":
    main(recipe)
