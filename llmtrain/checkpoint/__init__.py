"""Checkpoints that are whole or not there, and what is made of them.

Import from the modules: `folder` (what a checkpoint is; pure), `state`, `save`, `pickles` and `export`,
which import torch and DeepSpeed.
"""
