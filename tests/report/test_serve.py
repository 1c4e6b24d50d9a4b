"""The live page is served to this machine only, and only again if the run has changed."""

import http.client
import json
import threading

import pytest

from llmtrain.report.serve import LivePage, PageServer
from tests.helpers.recorded_runs import step_record


@pytest.fixture
def server(run):
    server = PageServer(LivePage([run]))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def _get(server, path="/", **headers):
    connection = http.client.HTTPConnection(*server.server_address, timeout=20)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_server_listens_on_the_loopback_only(server):
    assert server.server_address[0] == "127.0.0.1"


def test_the_page_is_served_once_per_change(server, run):
    status, text = _get(server)
    assert status == 200
    revision = json.loads(text.partition('id="data">')[2].partition("</script>")[0])["revision"]
    assert _get(server, If_None_Match=f'"{revision}"') == (304, "")
    with (run / "metrics.jsonl").open("a") as more:
        more.write(json.dumps(step_record(61, 1.25)) + "\n")
    status, text = _get(server, If_None_Match=f'"{revision}"')
    assert status == 200
    assert "step 61" in text


DISGUISED = (
    "evil.example@127.0.0.1",
    "127.0.0.1#evil.example",
    "127.0.0.1/x",
    "localhost:1@x",
    "localhost:",
)
"""URLs that have the host of this machine; a host is not a URL."""


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[", "10.0.0.1:80", *DISGUISED])
def test_other_names_of_this_machine_are_refused(server, host):
    assert _get(server, Host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost", "LocalHost:1", "127.0.0.1:99"])
def test_a_tunnel_may_have_another_port(server, host):
    assert _get(server, Host=host)[0] == 200


@pytest.mark.parametrize("path", ["/../recipe.json", "/recipe.json", "/metrics.jsonl"])
def test_nothing_but_the_page_is_served(server, path):
    assert _get(server, path)[0] == 404


def test_a_closed_tab_prints_nothing(server, capsys):
    for error, is_printed in (
        (BrokenPipeError("closed"), False),
        (ConnectionResetError("closed"), False),
        (KeyError("x"), True),
    ):
        try:
            raise error
        except (OSError, KeyError):
            server.handle_error(None, ("127.0.0.1", 1))
        assert bool(capsys.readouterr().err) == is_printed
