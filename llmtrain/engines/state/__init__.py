"""The state of an engine as checkpoint shards: what each rank holds of each weight, how it is saved and loaded.

The vocabulary is that of `torch.distributed.checkpoint` where it has one:

- A **chunk** is a range in each dimension of a whole weight.
- A **weight slice** is what tensor, expert or no parallelism gives to a rank: chunks joined along one dimension.
- A **shard** is a flat range of a weight slice. ZeRO divides slices into such ranges; otherwise it is the whole slice.
  An `OptimizerShard` is one in the memory of an optimizer, a `CheckpointShard` is one with its place in the whole
  weight, and a `StoredShard` is one in a file.
- A **replica** is one of the ranks that hold equal shards. Each of them saves a part.
"""
