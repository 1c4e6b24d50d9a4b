"""Keeps the output of libraries off the output of a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from llmtrain.errors import UserError


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Holds back what is printed within the context, also by C++ and by children.

    If an error is not the user's, the held output is written to standard error, since it may explain the error.
    """
    held = os.memfd_create("llmtrain-libraries")
    own = {number: os.dup(number) for number in (1, 2)}
    is_wanted = False
    _redirect(dict.fromkeys(own, held))
    try:
        yield
    except BaseException as error:
        is_wanted = not isinstance(error, UserError | KeyboardInterrupt)
        raise
    finally:
        _redirect(own)
        if is_wanted:
            os.write(2, os.pread(held, os.fstat(held).st_size, 0))
        for descriptor in (held, *own.values()):
            os.close(descriptor)


def _redirect(descriptors: Mapping[int, int]) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number, descriptor in descriptors.items():
        os.dup2(descriptor, number)
