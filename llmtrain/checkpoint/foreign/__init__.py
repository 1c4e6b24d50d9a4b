"""Training states of other programs, read as data: DeepSpeed, the Trainer, Accelerate, Megatron, torch's own.

`pickles` reads the files without running what they name, `state` is what each reader returns, and `detect` chooses the
reader of a folder.
"""
