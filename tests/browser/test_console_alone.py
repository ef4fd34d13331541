# SPDX-License-Identifier: Apache-2.0
"""The console by itself, as the command serves it, in a real browser over an API that is a stub."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.stub_api import TOKEN, StubApi, a_link, a_model, a_replica, a_tier
from xinference_xavier.schemas import ClearedModel, ClearedReplica, ModelList

pytest.importorskip("gradio")

EVIL = "<b>m</b>${1+1}{{value}}`"


class Console:
    """The command, its server, and a page of it."""

    def __init__(self, stub: StubApi, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r" is at (http://127\.0\.0\.1:\d+)/", line)
        assert found is not None, line
        self.url = found[1]
        self.stub = stub
        self.process = process


@pytest.fixture(scope="module")
def console(browser: Browser) -> Iterator[Console]:
    with StubApi().running() as stub:
        command = [Path(sys.executable).with_name("xinference-xavier"), "console"]
        process = subprocess.Popen(
            [*command, "--endpoint", stub.url, "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield Console(stub, process)
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def page(console: Console, browser: Browser) -> Iterator[Page]:
    """A page of the console, with two models. Errors of its scripts, and requests to anybody
    else, fail the test."""
    console.stub.token = None
    one, two = a_model(a_replica("m-rep0", requests=1)), a_model(a_replica("other-rep0"))
    console.stub.has(one)
    models = console.stub.answers["GET", "models"].models
    console.stub.has(two.model_copy(update={"model_uid": "other"}))
    models += console.stub.answers["GET", "models"].models
    console.stub.answers["GET", "models"] = ModelList(models=models)
    context = browser.new_context(base_url=console.url)
    context.set_default_timeout(60_000)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request", lambda r: None if r.url.startswith(f"{console.url}/") else wrong.append(r.url)
    )
    page.goto("/")
    yield page
    context.close()
    assert wrong == []


def card(page: Page, replica: str) -> Locator:
    return page.get_by_role("region", name=replica)


def row(page: Page, name: str) -> Locator:
    return page.get_by_role("row").filter(has_text=name).first


def wait_for_refreshes(page: Page, console: Console, times: int = 2) -> None:
    before = len(console.stub.asked)
    while len(console.stub.asked) < before + times:
        page.wait_for_timeout(100)


def test_values_change_and_what_is_selected_stays(page: Page, console: Console) -> None:
    expect(row(page, "Requests")).to_have_text("Requests1")
    card(page, "m-rep0").get_by_role("heading").evaluate(
        "element => { window.kept = element; getSelection().selectAllChildren(element); }"
    )
    console.stub.has(a_model(a_replica("m-rep0", a_link("m-rep1"), requests=2, gpu=a_tier(60))))
    expect(row(page, "Requests")).to_have_text("Requests2")
    expect(card(page, "m-rep0")).to_contain_text("60 of 100 blocks")
    assert page.evaluate("window.kept.isConnected")
    assert page.evaluate("String(getSelection())") == "m-rep0"


def test_a_chosen_model_stays_chosen_and_an_open_list_open(page: Page, console: Console) -> None:
    expect(card(page, "m-rep0")).to_be_visible()
    page.get_by_label("Model", exact=True).click()
    option = page.get_by_role("option", name="other")
    wait_for_refreshes(page, console)
    expect(option).to_be_visible()
    option.click()
    expect(card(page, "other-rep0")).to_be_visible()
    wait_for_refreshes(page, console)
    expect(card(page, "other-rep0")).to_be_visible()
    expect(page.get_by_label("Model", exact=True)).to_have_value("other")


def test_clearing_asks_first_and_means_the_model_that_was_asked_about(
    page: Page, console: Console
) -> None:
    cleared = ClearedReplica(replica="m-rep0", address="a", cleared=True, error=None)
    console.stub.answers["POST", "models/m/clear"] = ClearedModel(
        model_uid="m", complete=True, replicas=[cleared]
    )
    console.stub.asked.clear()
    start = page.get_by_role("button", name="Clear the cache of all replicas")
    yes = page.get_by_role("button", name="Yes, clear it")
    start.click()
    expect(page.get_by_text("of all replicas of m are dropped")).to_be_visible()
    page.get_by_role("button", name="No", exact=True).click()
    expect(yes).to_be_hidden()
    start.click()
    expect(yes).to_be_visible()
    page.get_by_label("Model", exact=True).click()
    page.get_by_role("option", name="other").click()
    expect(card(page, "other-rep0")).to_be_visible()
    yes.click()
    expect(page.get_by_text("m: cleared m-rep0.")).to_be_visible()
    expect(yes).to_be_hidden()
    assert [path for method, path, _ in console.stub.asked if path.endswith("clear")] == [
        "models/m/clear"
    ]


def test_a_name_is_never_markup_nor_a_template(page: Page, console: Console) -> None:
    console.stub.has(a_model(a_replica(EVIL, error=EVIL)))
    expect(card(page, EVIL).get_by_role("heading")).to_have_text(EVIL)


def test_it_is_dark_where_the_web_ui_is(console: Console, browser: Browser, page: Page) -> None:
    expect(page.locator("body")).not_to_have_class(re.compile("dark"))
    page.evaluate("localStorage.setItem('theme', 'dark')")
    page.reload()
    expect(page.locator("body")).to_have_class(re.compile("dark"))


def test_a_key_is_asked_for_and_tried_when_it_is_complete(page: Page, console: Console) -> None:
    console.stub.token = TOKEN
    field = page.get_by_label("API key, or token of a login")
    expect(page.get_by_text("Could not validate credentials")).to_be_visible()
    refused = len(console.stub.asked)
    field.press_sequentially(TOKEN, delay=300)
    assert len(console.stub.asked) == refused
    field.press("Enter")
    expect(card(page, "m-rep0")).to_be_visible()
    expect(field).to_be_hidden()


def test_it_stops_at_once_with_a_page_open(page: Page, console: Console) -> None:
    expect(page.get_by_role("tab", name="Planner")).to_be_visible()
    console.process.terminate()
    # Streams would keep it: a server waits for those until they end.
    console.process.wait(30)
