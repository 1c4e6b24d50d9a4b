"""Gives a program the device: with this folder on PYTHONPATH, and the folder of the libraries in CUDA_ON_HOST."""

import ctypes
import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

libraries = os.environ.get("CUDA_ON_HOST")


class SpecialTokenCounter(MetaPathFinder):
    """Loads the device before torch, which asks at its import what there is, and `torch.cuda` after it."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(Path(libraries) / "libdevice.so"), ctypes.RTLD_GLOBAL)
        load = spec.loader.exec_module

        def load_and_install(module):
            load(module)
            sys.path[:0] = [libraries, str(Path(__file__).parents[1])]
            import torch_cuda

            del sys.path[:2]
            torch_cuda.install()

        spec.loader.exec_module = load_and_install
        return spec


if libraries:
    sys.meta_path.insert(0, SpecialTokenCounter())
