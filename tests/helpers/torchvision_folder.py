"""Adds torchvision, of which the package index has builds for CUDA only, to a torch without CUDA.

`pip install --no-deps --target $TORCHVISION torchvision==0.28.0`, of the release that belongs to the installed torch.
What resizes images in it is Python. Its compiled operators cannot be loaded, and `import torchvision` fails unless two
of them are declared, which is done here. Beside a torch with CUDA, or with a torchvision for CPUs, this is not needed.
"""

from __future__ import annotations

import os
import sys

DECLARED = ("nms", "qnms")
_libraries = []


def add_torchvision() -> None:
    """Makes the folder `TORCHVISION` importable, if there is one."""
    folder = os.environ.get("TORCHVISION")
    if folder is None or folder in sys.path:
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in DECLARED:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)  # its end would remove them
    sys.path.append(folder)


add_torchvision()
