"""The state of an engine as checkpoint shards: what each rank holds of each weight, how it is saved and loaded.

From an optimizer to a file: `optimizer_shards` finds what an optimizer holds on this rank, at every ZeRO stage (for
DeepSpeed's optimizers with `overrides.deepspeed.flat_tensors`); `save_load.checkpoint_shards` adds the place in the
whole weight; `files.write` writes the shards. Loading reads, from the files of all ranks, what this rank needs.

    whole weight  ⊃  weight slice (one rank of an axis)  ⊃  shard (one rank of ZeRO)

The vocabulary is that of `torch.distributed.checkpoint` where it has one:

- A **chunk** is a range in each dimension of a whole weight.
- A **weight slice** is what tensor, expert or no parallelism gives to a rank: chunks joined along one dimension.
- A **shard** is a flat range of a weight slice. ZeRO divides slices into such ranges; otherwise it is the whole slice.
  An `OptimizerShard` is one in the memory of an optimizer, a `CheckpointShard` is one with its place in the whole
  weight, and a `StoredShard` is one in a file.
- A **replica** is one of the ranks that hold equal shards. Each of them saves a part.

Files of checkpoints keep the names of their first version: pieces (shards), regions (weight slices), boxes (chunks).
"""
