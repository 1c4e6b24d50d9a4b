"""Checkpoints, which are complete or absent, and what is made from them (docs/guides/checkpoints.md).

Import from the modules. `manifest`, `folder` and `contents` load without torch.
"""
