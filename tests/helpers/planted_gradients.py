"""Bugs in how the gradients of a run are changed by a callback. Each is `bug(patch)`, as in `planted`."""

from __future__ import annotations

from llmtrain.train.callbacks import Callbacks


def no_change(patch):
    patch.setattr(Callbacks, "gradient_hook", lambda self, step: None)


def another_step(patch):
    """The hook is told the next step."""
    original = Callbacks.gradient_hook
    patch.setattr(Callbacks, "gradient_hook", lambda self, step: original(self, step + 1))


def twice(patch):
    original = Callbacks._change_gradients

    def change(self, step, gradients):
        original(self, step, gradients)
        original(self, step, gradients)

    patch.setattr(Callbacks, "_change_gradients", change)


BUGS = [no_change, another_step, twice]
