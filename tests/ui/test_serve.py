# SPDX-License-Identifier: Apache-2.0
"""The command that serves the console by itself."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest
from click.testing import CliRunner, Result

from xinference_xavier import cli


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["console", *arguments])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
def test_a_key_is_not_given_to_whoever_reaches_this_host(host: str) -> None:
    done = run("--api-key", "secret", "--host", host)
    assert done.exit_code == 2
    assert "every visitor would have the rights" in done.output
    assert "secret" not in done.output


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    done = run("--endpoint", "localhost:9997")
    assert done.exit_code == 2
    assert "http://127.0.0.1:9997" in done.output


def test_without_gradio_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("xinference_xavier.ui.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gradio", None)
    done = run()
    assert done.exit_code == 1
    assert "pip install 'xinference-xavier[ui]'" in done.output


def test_a_port_that_is_taken_ends_it() -> None:
    pytest.importorskip("gradio")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("--port", str(taken.getsockname()[1]))
    assert done.exit_code == 1
    assert "cannot be used" in done.output


def test_only_names_of_this_host_lead_to_a_page_that_has_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("gradio")
    import uvicorn
    from starlette.testclient import TestClient

    served: list[Any] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: served.append(self.config.app))
    done = run("--port", "0", "--api-key", "secret")
    assert done.exit_code == 0
    assert " is at http://127.0.0.1:" in done.output
    client = TestClient(served[0])
    for name, status in (("127.0.0.1", 200), ("localhost", 200), ("evil.example", 400)):
        assert client.get("/", headers={"Host": f"{name}:7860"}).status_code == status
