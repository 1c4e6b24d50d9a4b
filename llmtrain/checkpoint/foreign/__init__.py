"""Training states of other programs, read as data: DeepSpeed, the Trainer, Accelerate, `torch.distributed.checkpoint`.

`pickles` reads the files without running what they name, `state` is what each reader returns, and `detect` chooses the
reader of a folder.
"""
