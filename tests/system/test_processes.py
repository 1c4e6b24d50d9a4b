"""What the kernel says of a process."""

import os
import subprocess
import sys

import pytest

from llmtrain.system.host import process_fields, process_state


def test_a_process_may_have_any_name():
    """Such as that of a process which has the number of an ended one."""
    renamed = "import pathlib; pathlib.Path('/proc/self/comm').write_bytes(b'\\xff) Z ('); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", renamed], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert process_fields(process.pid)[1] == str(os.getpid())
        assert process_state(process.pid) in "RSD"
        process.kill()
    assert process_state(process.pid) == ""
    with pytest.raises(OSError, match="No such file"):
        process_fields(process.pid)
