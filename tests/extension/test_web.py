# SPDX-License-Identifier: Apache-2.0
"""Our script in the stock pages, as Xinference's own code serves them."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from starlette.testclient import TestClient
from xinference.api.frontend_static import mount_frontend

from xinference_xavier.extension import web
from xinference_xavier.options import XavierOptions

PAGE = "<!DOCTYPE html><html><head><title>x</title></head><body>é</head></body></html>"


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    folder = tmp_path / "dist"
    (folder / "launch-model").mkdir(parents=True)
    for name in ("index.html", "404.html", "launch-model/__shell__.html"):
        (folder / name).write_text(PAGE)
    (folder / "index.txt").write_text(PAGE)
    return folder


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "web"
    folder.mkdir()
    (folder / web.SCRIPT).write_text("export {};")
    monkeypatch.setattr(web, "FOLDER", folder)
    return folder


def client(dist: Path) -> TestClient:
    app = FastAPI()

    @app.get("/own", response_class=HTMLResponse)
    async def own() -> str:
        return PAGE

    web.add_script(app)
    assert mount_frontend(app, dist)
    return TestClient(app)


def told(page: str) -> dict[str, Any]:
    found = re.search(r' data-xavier="([^"]*)"', page)
    assert found is not None
    result: dict[str, Any] = json.loads(html.unescape(found[1]))
    return result


@pytest.mark.parametrize("path", ["/", "/launch-model/llm", "/nowhere/at/all"])
def test_each_stock_page_names_the_script_once_and_is_otherwise_the_same(
    dist: Path, built: Path, path: str
) -> None:
    answer = client(dist).get(path)
    [tag] = re.findall(r'<script type="module".*?</script>', answer.text)
    assert answer.text.replace(tag, "") == PAGE
    assert answer.text.index(tag) < answer.text.index("</head>")
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["cache-control"] == "no-cache"
    assert "accept-ranges" not in answer.headers


def test_the_script_is_served_under_the_name_in_the_page(dist: Path, built: Path) -> None:
    browser = client(dist)
    source = re.search(r'src="(/xavier-ui/[^"]+)"', browser.get("/").text)
    assert source is not None
    answer = browser.get(source[1])
    assert answer.text == "export {};"
    assert "javascript" in answer.headers["content-type"]
    again = browser.get(source[1], headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304


def test_a_new_script_changes_its_address_and_the_page_s_tag(dist: Path, built: Path) -> None:
    before = client(dist).get("/")
    (built / web.SCRIPT).write_text("export const next = 1;")
    after = client(dist).get("/")
    assert before.headers["etag"] != after.headers["etag"]
    assert re.findall(r"v=\w+", before.text) != re.findall(r"v=\w+", after.text)


def test_the_page_tells_the_options_as_they_are_defined(dist: Path, built: Path) -> None:
    options = told(client(dist).get("/").text)
    defaults = XavierOptions()
    assert options["gpu"] == defaults.xavier_gpu_cache_bytes.to_plain()
    assert options["cpu"] == defaults.xavier_cpu_cache_bytes.to_plain()
    assert options["transport"] in options["transports"]
    for transport in options["transports"]:
        XavierOptions.from_mapping({"xavier_transport": transport})


def test_the_console_is_named_once_it_is_mounted(dist: Path, built: Path) -> None:
    browser = client(dist)
    assert told(browser.get("/").text)["console"] is None
    browser.app.mount(web.CONSOLE, FastAPI())  # type: ignore[attr-defined]
    browser.app.router.routes.insert(0, browser.app.router.routes.pop())  # type: ignore[attr-defined]
    assert told(browser.get("/").text)["console"] == web.CONSOLE


@pytest.mark.parametrize("path", ["/own", "/docs", "/openapi.json", "/index.txt"])
def test_what_is_no_stock_page_is_not_touched(dist: Path, built: Path, path: str) -> None:
    answer = client(dist).get(path)
    assert answer.status_code == 200
    assert "xavier" not in answer.text


def test_a_range_of_a_page_is_the_stock_one(dist: Path, built: Path) -> None:
    answer = client(dist).get("/", headers={"Range": "bytes=0-14"})
    assert answer.status_code == 206
    assert answer.text == "<!DOCTYPE html>"


def test_without_the_built_script_nothing_is_added(
    dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(web, "FOLDER", tmp_path / "missing")
    assert client(dist).get("/").text == PAGE
    assert "no Xavier card" in caplog.text
