"""Llama 3 8B on whole books with sequences of 128k tokens, each shared by eight devices.

It is meant to continue from trained weights, for example those of `llama3_8b`:

    llmtrain train recipes/llama3_8b_long.py --set model.architecture=null --set model.pretrained=RUN/export

Rotary positions: huggingface.co/meta-llama/Llama-3.1-8B. Batch size and learning rate: ProLong (arXiv 2410.02660): 4M
tokens per step, 1e-5 decaying to a tenth, warm-up for a tenth of the steps, 20 billion tokens. The attention kernel
of `llama3_8b` receives the boundaries of packed documents, because a mask would have 128k × 128k entries.
"""

from llama3_8b import recipe as llama3_8b

from llmtrain import Cluster, Recipe, Source, main

ROPE_128K = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def recipe() -> Recipe:
    """Ulysses across the eight devices of a node (arXiv 2309.14509) and ZeRO 2 across all devices.

    The fastest plan that `llmtrain plan --search` predicts. Norms and activation functions are computed again, so that
    the rest of the activations fits.
    """
    return llama3_8b().with_(
        name="llama3_8b_long",
        **{"model.config.rope_parameters": ROPE_128K, "model.config.max_position_embeddings": 131072},
        **{"data.sources": [Source("emozilla/pg19")], "data.sequence_length": 131072, "data.eval_fraction": 0.005},
        **{"optim.lr": 1e-5, "optim.warmup_steps": 477, "optim.min_lr_ratio": 0.1},
        **{"batch.global_batch_size": 32, "parallel.sequence": 8, "parallel.activation_checkpointing": "selective"},
        **{"train.max_steps": 4_768, "evaluation.every_steps": 200, "evaluation.max_sequences": 64},
    )


def recipe_512k() -> Recipe:
    """ProLong's second stage: all nodes share each sequence, the rotary base is 1.28e8, and a step has 8M tokens."""
    return recipe().with_(
        name="llama3_8b_512k",
        **{"model.config.rope_parameters": {"rope_type": "default", "rope_theta": 1.28e8}},
        **{"model.config.max_position_embeddings": 524288, "data.sequence_length": 524288},
        **{"batch.global_batch_size": 16, "parallel.sequence": 32, "train.max_steps": 2_384},
        **{"optim.warmup_steps": 238},
    )


def cluster() -> Cluster:
    """Four nodes with eight devices each."""
    return Cluster(nodes=4, devices_per_node=8, device="h100")


if __name__ == "__main__":
    main(recipe)
