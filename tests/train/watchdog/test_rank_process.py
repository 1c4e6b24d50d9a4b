"""The end of a stopped rank, by real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from llmtrain.train.watchdog.rank_process import RankProcess

RANKS = 8
RANK = """
import threading, time
from llmtrain.train.watchdog.rank_process import install_signal_handlers
def stands_still():
    print("ready", flush=True)
    time.sleep(600)
install_signal_handlers()
for _ in range(16):  # as those of OpenMP and gloo, which leave signals unblocked
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
stands_still()
"""


def _stopped(log) -> subprocess.Popen[str]:
    """A process that waits for a command, with its standard error in the log."""
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, stderr=file, text=True)
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGSTOP)
    while RankProcess(process.pid, log).state != "T":
        time.sleep(0.01)
    return process


def test_a_stopped_rank_writes_its_stack_before_it_ends(tmp_path):
    """Whichever of its threads continues first."""
    logs = [tmp_path / f"rank_{rank}.log" for rank in range(RANKS)]
    processes = [_stopped(log) for log in logs]
    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(lambda process, log: RankProcess(process.pid, log).end(), processes, logs))
    assert [process.wait() for process in processes] == [5] * RANKS
    assert all("in stands_still" in log.read_text() for log in logs)
