# SPDX-License-Identifier: Apache-2.0
"""The console below the server's own address, in a real browser over real replicas."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.accounts import OPERATOR, READER, Accounts
from tests.browser.conftest import NewPage, Screenshot
from tests.browser.launch_page import Deployment, LaunchPage

pytest.importorskip("gradio")

PROMPT = "".join(f"line {number} of a document that is shared\n" for number in range(20))

# The first visit imports Gradio; on a busy machine that takes a while.
FIRST_MS = 120_000


def open_console(page: Page, deployment: Deployment) -> Locator:
    """Open the console, and return the cards of the model's replicas."""
    page.goto("/xavier")
    cards = page.get_by_role("region", name=deployment.uid)
    expect(cards).to_have_count(2, timeout=FIRST_MS)
    return cards


def complete(server: Accounts, deployment: Deployment) -> None:
    """Send the prompt; requests go round, so that the second one reaches the other replica."""
    body = {"model": deployment.uid, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    server.request("POST", "/v1/completions", json=body)


def test_hits_rise_and_the_cache_is_cleared(
    deployment: Deployment, server: Accounts, new_page: NewPage, screenshot: Screenshot
) -> None:
    page = new_page(OPERATOR)
    cards = open_console(page, deployment)
    expect(cards.filter(has_text="No prompt yet.")).to_have_count(2)
    complete(server, deployment)
    stored = cards.filter(has_text=re.compile(r"GPU tier \(in host memory\) [1-9]"))
    expect(stored).to_have_count(1, timeout=30_000)
    complete(server, deployment)
    hit = cards.filter(has_text=re.compile(r"peers' GPU tier 9\d\.\d %"))
    expect(hit).to_have_count(1, timeout=30_000)
    expect(page.get_by_role("row").filter(has_text="shm")).to_contain_text("ready")
    expect(hit.get_by_text("Load speed")).to_be_visible()
    screenshot(page, "console")

    page.get_by_role("button", name="Clear the cache of all replicas").click()
    expect(page.get_by_text(f"of all replicas of {deployment.uid} are dropped")).to_be_visible()
    page.get_by_role("button", name="Yes, clear it").click()
    expect(page.get_by_text(f"{deployment.uid}: cleared")).to_be_visible()
    empty = cards.filter(has_text=re.compile(r"GPU tier \(in host memory\) 0 of"))
    expect(empty).to_have_count(2, timeout=30_000)


def test_a_tier_is_limited_and_given_back(deployment: Deployment, new_page: NewPage) -> None:
    page = new_page(OPERATOR)
    cards = open_console(page, deployment)
    limit = page.get_by_label("GPU tier of each replica")
    limit.fill("50%")
    page.get_by_role("button", name="Apply to all replicas").click()
    expect(page.get_by_text("no memory is returned")).to_be_visible()
    expect(cards.filter(has_text="limited to 32 MiB")).to_have_count(2)
    limit.fill("100%")
    page.get_by_role("button", name="Apply to all replicas").click()
    expect(cards.filter(has_text="limited to")).to_have_count(0)
    limit.fill("1TiB")
    page.get_by_role("button", name="Apply to all replicas").click()
    expect(page.get_by_text("relaunch the model with a larger")).to_be_visible()


def test_a_reader_looks_and_may_not_clear(deployment: Deployment, new_page: NewPage) -> None:
    page = new_page(READER)
    open_console(page, deployment)
    page.get_by_role("button", name="Clear the cache of all replicas").click()
    page.get_by_role("button", name="Yes, clear it").click()
    expect(page.get_by_text("Not enough permissions")).to_be_visible()


def test_who_is_not_logged_in_is_asked_for_a_key(
    deployment: Deployment, server: Accounts, new_page: NewPage
) -> None:
    page = new_page()
    page.add_init_script("sessionStorage.clear()")
    page.goto("/xavier/")
    field = page.get_by_label("API key, or token of a login")
    expect(field).to_be_visible(timeout=FIRST_MS)
    expect(page.get_by_role("region")).to_have_count(0)
    field.fill(server.api_key(OPERATOR))
    page.get_by_role("button", name="Use it").click()
    expect(page.get_by_role("region", name=deployment.uid)).to_have_count(2)
    expect(field).to_be_hidden()


def test_the_launch_dialog_opens_it_with_the_visitor_s_login(
    deployment: Deployment, new_page: NewPage
) -> None:
    launch_page = LaunchPage(new_page()).open().choose_vllm()
    with launch_page.page.expect_popup() as opened:
        launch_page.card.get_by_role("link").click()
    console = opened.value
    # The opener's login is enough, and it is the one that is kept fresh.
    console.evaluate("sessionStorage.clear()")
    console.reload()
    expect(console.get_by_role("region", name=deployment.uid)).to_have_count(2, timeout=FIRST_MS)


def test_it_has_the_colours_of_the_web_ui(
    deployment: Deployment, new_page: NewPage, screenshot: Screenshot
) -> None:
    page = new_page(OPERATOR, stored={"theme": "dark"})
    open_console(page, deployment)
    expect(page.locator("body")).to_have_class(re.compile("dark"))
    screenshot(page, "console-dark")


def test_the_planner_tells_what_a_budget_holds(new_page: NewPage, screenshot: Screenshot) -> None:
    page = new_page()
    page.goto("/xavier/")
    page.get_by_role("tab", name="Planner").click(timeout=FIRST_MS)
    expect(page.get_by_text("1,365 blocks = 21,840 tokens")).to_be_visible()
    page.get_by_label("GPU budget of a replica").fill("8MiB")
    expect(page.get_by_text("42 blocks = 672 tokens")).to_be_visible()
    screenshot(page, "console-planner")
    page.get_by_label("GPU budget of a replica").fill("8 parsec")
    expect(page.get_by_text("unknown unit 'parsec'")).to_be_visible()
