"""Starts a command and passes its start time in an environment variable: `timed COMMAND ...`."""

import os
import sys
import time

if __name__ == "__main__":
    os.environ["BENCHMARK_STARTED"] = str(time.time())
    words = [sys.executable if word == "python" else word for word in sys.argv[1:]]
    os.execv(words[0], words)
