"""Training states of other programs, read as data and written: DeepSpeed, the Trainer, Accelerate, Megatron, torch.

`pickles` reads the files without running what they name, `state` is what each reader returns, and `detect` chooses the
reader of a folder.
"""
