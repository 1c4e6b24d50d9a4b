"""The doctor's agent on a host: exchanges lines of JSON with the doctor, over ssh or locally. `python -m ...`

It ends when its input ends, whatever it is doing, and ends the processes that it has started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NoReturn, TextIO

from llmtrain.errors import RecipeError
from llmtrain.launch import host_agent
from llmtrain.launch.discovery.interfaces import addresses
from llmtrain.launch.disks import has_disk_operator
from llmtrain.launch.doctor import devices, limits, network, versions
from llmtrain.launch.doctor.finding import Finding, HostContext, warning
from llmtrain.system.host import cache_root
from llmtrain.system.kernel_caches import use_kernel_caches
from llmtrain.system.parent import start_child
from llmtrain.system.streams import reserved_stdout

Check = Callable[[HostContext], Iterable[Finding]]
"""Examines one thing and judges it."""
CHECKS: dict[str, Check] = {
    "versions.python": versions.python,
    "versions.packages": versions.packages,
    "versions.torch": versions.torch_build,
    "versions.optional": versions.optional,
    "devices.host": devices.host,
    "devices.gpus": devices.gpus,
    "devices.slots": devices.slots,
    "interconnect.gpus": devices.gpu_links,
    "interconnect.adapters": devices.adapters,
    "network.interfaces": network.interfaces,
    "network.host_name": network.host_name,
    "network.choices": network.choices,
    "storage.shm": limits.shared_memory,
    "storage.folders": limits.folders,
    "limits.limits": limits.limits,
    "tools.compilers": versions.compilers,
    "tools.operators": versions.operators,
    "tools.launchers": versions.launchers,
}
"""Group and name, reported if the check itself fails → check."""


class Agent:
    """Serves the doctor's requests."""

    def __init__(self, replies: TextIO) -> None:
        self._replies = replies
        self._lock = Lock()
        self._children: list[subprocess.Popen[bytes]] = []

    def serve(self, requests: TextIO) -> NoReturn:
        """Answers the requests in order; workers run meanwhile."""
        waiting: SimpleQueue[dict[str, Any]] = SimpleQueue()
        Thread(target=self._listen, args=(requests, waiting), daemon=True).start()
        while True:
            request = waiting.get()
            getattr(self, f"do_{request.pop('do')}")(**request)

    def do_begin(self, env: Mapping[str, str]) -> None:
        """Sets the environment variables that workers would have."""
        os.environ.update(env)
        self._reply(begun=True)

    def do_clock(self) -> None:
        """Replies with this host's time in seconds since the epoch."""
        self._reply(time=time.time())

    def do_addresses(self) -> None:
        """Replies with addresses of this host that others may reach, IPv4 first."""
        self._reply(addresses=addresses())

    def do_check(self, run_root: str, master: str | None, devices: list[int]) -> None:
        """Runs all checks."""
        context = HostContext(
            dict(os.environ), Path(run_root).absolute(), cache_root().absolute(), master, tuple(devices)
        )
        findings = [finding.as_dict() for finding in run_checks(context)]
        self._reply(findings=findings, facts=host_facts(context))

    def do_ranks(self, ranks: list[dict[str, Any]]) -> None:
        """Starts ranks of an all-reduce, each of which reports its progress itself."""
        for rank in ranks:
            visible = rank.pop("visible", None)
            env = {**os.environ, **({"CUDA_VISIBLE_DEVICES": visible} if visible is not None else {})}
            command = [
                sys.executable,
                "-m",
                "llmtrain.launch.doctor.all_reduce_worker",
                json.dumps(rank),
                str(self._replies.fileno()),
            ]
            child = self._start(command, env=env, stdout=sys.stderr, pass_fds=(self._replies.fileno(),))
            Thread(target=self._wait, args=(rank["rank"], child), daemon=True).start()

    def do_build(self, operators: list[str], accelerator: str) -> None:
        """Compiles DeepSpeed operators into torch's cache, in order; none if the disk operator cannot be built."""
        env, refusal = dict(os.environ), ""
        try:
            use_kernel_caches(env)
        except RecipeError as error:
            refusal = str(error)
        if "async_io" in operators and not has_disk_operator():
            refusal = "libaio was not found"
        for name in operators:
            built = {"operator": name, "seconds": 0.0, "file": "", "error": refusal}
            if not refusal:
                command = [sys.executable, "-m", "llmtrain.engines.deepspeed.ops", name, accelerator]
                child = self._start(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                output, errors = child.communicate()
                try:
                    built = json.loads(output.splitlines()[-1])
                except (IndexError, ValueError):
                    last_lines = errors.decode(errors="replace").splitlines()[-20:]
                    built["error"] = "\n".join(last_lines) or f"code {child.returncode}"
            self._reply(**built)

    def _listen(self, requests: TextIO, waiting: SimpleQueue[dict[str, Any]]) -> None:
        """Passes requests on. When the input ends, the requester is gone, and everything is ended."""
        for line in requests:
            waiting.put(json.loads(line))
        for child in self._children:
            if child.poll() is None:  # otherwise its process id may belong to another process
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        os._exit(0)

    def _start(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Starts a process in a session of its own that ends with this one."""
        child = start_child(command, start_new_session=True, **options)
        self._children.append(child)
        return child

    def _wait(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        self._reply(rank=rank, state="ended", code=child.wait())

    def _reply(self, **fields: Any) -> None:
        with self._lock:
            print(json.dumps(fields), file=self._replies, flush=True)


def run_checks(context: HostContext, checks: Mapping[str, Check] = CHECKS) -> list[Finding]:
    """Runs the checks and returns all findings.

    A check that raises an exception is reported as a warning and does not hide the others.
    """
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += check(context)
        except Exception as error:  # machines vary more than expected: the other checks still report
            text = f"the check failed: {type(error).__name__}: {error}"
            findings.append(warning(name, text, "please report this"))
    return findings


def host_facts(context: HostContext) -> dict[str, Any]:
    """Returns what is compared between hosts."""
    facts = host_agent.version_facts(Path("/nonexistent"))
    return {
        "host": facts["host"],
        "versions": {"python": facts["python"], **facts["packages"], "llmtrain's sources": facts["llmtrain"]},
        "devices": devices.seen_by_torch()[0],
        "addresses": addresses(),
        "run_root": str(context.run_root),
    }


def main() -> None:
    """Serves the requests on standard input."""
    with reserved_stdout() as replies:
        Agent(replies).serve(sys.stdin)


if __name__ == "__main__":
    main()
