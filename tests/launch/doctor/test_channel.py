"""Hosts that cannot be reached, and the reasons; ssh is replaced by a program of the test."""

from __future__ import annotations

import pytest

from llmtrain.launch.doctor import channel as channels
from llmtrain.launch.doctor.channel import Channel, UnreachableError, explain_end, open_locally, open_over_ssh


@pytest.mark.parametrize(
    ("code", "said", "check", "meaning"),
    [
        (255, "Host key verification failed.", "ssh.connection", "its host key is not in ~/.ssh/known_hosts"),
        (
            255,
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "ssh.connection",
            "its host key differs",
        ),
        (255, "root@h2: Permission denied (publickey).", "ssh.connection", "none of your keys is accepted"),
        (255, "ssh: Could not resolve hostname h2: Name unknown", "ssh.connection", "its name is unknown here"),
        (255, "ssh: connect to host h2 port 22: No route to host", "ssh.connection", "no route leads there"),
        (255, "ssh: connect to host h2 port 22: Connection refused", "ssh.connection", "no ssh server listens"),
        (255, "ssh: connect to host h2 port 22: Connection timed out", "ssh.connection", "does not answer within 10 s"),
        (255, "kex_exchange_identification: read: Connection reset by peer", "ssh.connection", "ends the connection"),
        (255, "something new", "ssh.connection", "the connection was lost: something new"),
        (1, "bash: line 1: cd: /work: No such file or directory", "ssh.folder", "does not exist there"),
        (127, "env: 'python': No such file or directory", "ssh.llmtrain", "or llmtrain is not installed there"),
        (1, "ModuleNotFoundError: No module named 'llmtrain'", "ssh.llmtrain", "or llmtrain is not installed there"),
        (3, "", "ssh.llmtrain", "ended with code 3 there: no message"),
    ],
)
def test_messages_of_ssh_are_explained(code, said, check, meaning):
    finding = explain_end("h2", code, said.splitlines())
    assert (finding.check, finding.level) == (check, "fault")
    assert finding.text.startswith("h2: ")
    assert meaning in finding.text
    assert "HOST" not in finding.fix


def test_a_silent_host_times_out(programs, monkeypatch):
    programs("ssh", "").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(channels, "SSH_TIMEOUT_S", -0.8)  # and one second of grace
    with pytest.raises(UnreachableError, match="h2 did not answer within"):
        open_over_ssh("h2", {})


def test_the_message_of_a_refusing_host_is_reported(programs):
    programs("ssh", "").write_text("#!/bin/sh\necho 'h2: Permission denied (publickey).' >&2\nexit 255\n")
    with pytest.raises(UnreachableError, match="none of your keys is accepted"):
        open_over_ssh("h2", {})


def test_an_agent_behind_a_shell_that_prints_is_reached_and_gets_the_variables(programs):
    """Its variables are on no command line."""
    ssh = programs("ssh", "")
    ssh.write_text(f'#!/bin/sh\necho "$*" > {ssh}.line\necho Welcome to h2\nfor last; do :; done\neval "$last"\n')
    channel = open_over_ssh("h2", {"HF_TOKEN": "secret", "NCCL_DEBUG": "a b\n$(c)"})
    try:
        assert abs(channel.request("clock", 10)["time"] - channels.time.time()) < 60
        assert channel.request("addresses", 10)["addresses"] is not None
    finally:
        channel.close()
    assert "secret" not in (ssh.parent / "ssh.line").read_text()


def test_an_agent_ends_when_its_input_is_closed():
    """It was not so: a build went on for minutes after a Ctrl-C."""
    channel = open_locally()
    channel.request("clock", 60)
    channel.send("check", run_root="runs", master=None, devices=[])  # loads torch, which takes seconds
    channel.close()
    assert channel._process.poll() == 0  # by itself, and was not killed


def test_each_request_to_an_agent_that_has_ended_reports_it():
    channel = Channel("h2", ["sh", "-c", "echo out of order >&2; exit 3"])
    try:
        for _ in range(2):
            with pytest.raises(UnreachableError, match="ended with code 3 there: out of order"):
                channel.request("clock", 60)
    finally:
        channel.close()
