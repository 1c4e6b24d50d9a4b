"""Checkpoints that are whole or not there, and what is made of them (docs/guides/checkpoints.md).

Import from the modules. `manifest`, `folder`, `retention` and `commands` load without torch.
"""
