# SPDX-License-Identifier: Apache-2.0
"""The card in the stock launch dialog, in a real browser against a real server."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Route, expect

from tests.browser.accounts import ADMIN, OPERATOR, READER, Accounts
from tests.browser.conftest import NewPage, Screenshot
from tests.browser.launch_page import Deployment, LaunchPage, is_launch
from tests.extension.server import MODEL_NAME

OPTIONS = {
    "enable_xavier": True,
    "xavier_gpu_first": True,
    "xavier_gpu_cache_bytes": "64MiB",
    "xavier_cpu_cache_bytes": "64MiB",
    "xavier_transport": "auto",
}
# Two layers, two heads of 32 values, float32 keys and values, in blocks of 16 tokens.
BLOCK = 2 * 2 * 2 * 32 * 4 * 16


def test_the_card_is_there_for_vllm_above_the_advanced_configuration(
    launch_page: LaunchPage,
) -> None:
    expect(launch_page.card).to_be_hidden()
    launch_page.choose_vllm()
    expect(launch_page.card).to_be_visible()
    expect(launch_page.switch).not_to_be_checked()
    expect(launch_page.gpu).to_be_hidden()
    card, advanced = launch_page.card.bounding_box(), launch_page.advanced.bounding_box()
    assert card is not None
    assert advanced is not None
    assert card["y"] + card["height"] < advanced["y"]
    assert card["width"] == pytest.approx(advanced["width"], abs=4)


def test_the_plan_follows_what_is_entered(launch_page: LaunchPage, screenshot: Screenshot) -> None:
    launch_page.choose_vllm().turn_on(gpu="64 MiB", cpu="64 MiB")
    launch_page.fill("Replica", "2")
    expect(launch_page.plan).to_contain_text("8,192 blocks = 131,072 tokens in the GPU tier")
    expect(launch_page.plan).to_contain_text("All 2 replicas")
    expect(launch_page.plan).to_contain_text("16,384 blocks = 262,144 tokens in the GPU tier")
    launch_page.card.scroll_into_view_if_needed()
    screenshot(launch_page.dialog, "launch-dialog")
    launch_page.gpu_slider.press("ArrowRight")
    expect(launch_page.gpu).to_have_value("96")
    expect(launch_page.plan).to_contain_text("12,288 blocks")
    launch_page.gpu_unit.select_option("GiB")
    expect(launch_page.gpu).to_have_value("0.09")


def test_a_budget_that_does_not_fit_disables_deploy_with_the_reason(
    launch_page: LaunchPage, screenshot: Screenshot
) -> None:
    launch_page.choose_vllm().turn_on(gpu="9000 GiB", cpu="64 MiB")
    expect(launch_page.deploy).to_be_disabled()
    expect(launch_page.problems).to_contain_text(
        re.compile("Cannot deploy: xavier_gpu_cache_bytes")
    )
    expect(launch_page.gpu).to_have_attribute("aria-invalid", "true")
    expect(launch_page.deploy).to_have_attribute("title", re.compile("GiB"))
    launch_page.card.scroll_into_view_if_needed()
    screenshot(launch_page.dialog, "launch-dialog-refused")
    launch_page.gpu.fill("-1")
    expect(launch_page.deploy).to_have_attribute("title", re.compile("is not a size"))
    launch_page.gpu_unit.select_option("MiB")
    launch_page.gpu.fill("64")
    expect(launch_page.deploy).to_be_enabled()
    expect(launch_page.problems).to_be_hidden()
    launch_page.gpu.fill("")
    expect(launch_page.deploy).to_be_disabled()
    launch_page.switch.click()
    expect(launch_page.deploy).to_be_enabled()


def test_the_keyboard_is_enough(launch_page: LaunchPage) -> None:
    launch_page.choose_vllm()
    launched: list[str] = []
    launch_page.page.on("request", lambda r: launched.append(r.url) if is_launch(r) else None)
    press = launch_page.page.keyboard.press
    launch_page.dialog.get_by_placeholder("For PyTorch").focus()
    for target in (launch_page.card.get_by_role("link"), launch_page.switch):
        if target.count():
            press("Tab")
            expect(target).to_be_focused()
    press("Space")
    expect(launch_page.switch).to_be_checked()
    for target in (launch_page.gpu, launch_page.gpu_unit, launch_page.gpu_slider, launch_page.cpu):
        press("Tab")
        expect(target).to_be_focused()
    press("ArrowDown")
    press("Shift+Tab")
    press("Home")
    expect(launch_page.gpu).to_have_value("0")
    launch_page.gpu.focus()
    press("ControlOrMeta+A")
    launch_page.page.keyboard.type("-5")
    expect(launch_page.deploy).to_be_disabled()
    # Enter in a field submits a form, but not through a button that is disabled.
    press("Enter")
    assert launched == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_card_has_the_colours_of_the_page(
    new_page: NewPage, screenshot: Screenshot, theme: str
) -> None:
    page = LaunchPage(new_page(stored={"theme": theme})).open().choose_vllm()
    page.turn_on(gpu="64 MiB", cpu="64 MiB")
    stock = page.dialog.locator('[data-slot="collapsible"]')
    for name in ("background-color", "border-top-color", "border-top-left-radius"):
        read = f"element => getComputedStyle(element)['{name}']"
        assert page.card.evaluate(read) == stock.evaluate(read)
    expect(page.plan).to_contain_text("blocks")
    page.card.scroll_into_view_if_needed()
    screenshot(page.card, f"launch-card-{theme}")


def test_the_card_speaks_chinese_where_the_page_does(
    new_page: NewPage, screenshot: Screenshot
) -> None:
    page = LaunchPage(new_page(stored={"app_locale": "zh"})).open()
    for number, option in enumerate(("vLLM", "pytorch", "0_1", "none")):
        fields = page.dialog.locator("form label:has(.text-destructive)")
        fields.nth(number).locator("xpath=following-sibling::*").first.click()
        page.page.locator('[data-slot="select-option"]', has_text=option).first.click()
    card = page.dialog.get_by_role("group", name="在副本之间共享 KV 缓存")
    card.get_by_role("switch").click()
    card.get_by_label("GPU 缓存预算").nth(1).select_option("MiB")
    card.get_by_label("GPU 缓存预算", exact=True).fill("64")
    expect(card).to_contain_text("GPU 层 8,192 块")
    expect(card).to_contain_text("只有一个副本")
    screenshot(card, "launch-card-chinese")


def test_another_engine_gets_none_of_our_parameters(launch_page: LaunchPage) -> None:
    launch_page.choose_vllm().turn_on(gpu="64 MiB", cpu="64 MiB")
    launch_page.choose("Model Engine", "Transformers")
    expect(launch_page.card).to_be_hidden()
    launch_page.choose("Model Engine", "vLLM")
    expect(launch_page.switch).to_be_checked()
    expect(launch_page.gpu).to_have_value("64")


def test_a_page_of_another_build_is_left_alone(new_page: NewPage) -> None:
    page = new_page()
    page.route("**/_next/static/chunks/**", without_collapsibles)
    launch = LaunchPage(page).open()
    notice = launch.dialog.get_by_role("note")
    expect(notice).to_contain_text("leaves it as it is")
    launch.choose_vllm()
    expect(launch.dialog.locator(".xavier-card")).to_have_count(0)
    expect(launch.deploy).to_be_enabled()


def without_collapsibles(route: Route) -> None:
    answer = route.fetch()
    body = answer.text().replace('"data-slot":"collapsible"', '"data-slot":"folding"')
    route.fulfill(response=answer, body=body)


def test_a_reader_sees_the_plan_and_may_not_deploy(new_page: NewPage) -> None:
    page = LaunchPage(new_page(READER)).open().choose_vllm()
    page.turn_on(gpu="64 MiB", cpu="64 MiB")
    expect(page.plan).to_contain_text("blocks = ")
    with page.page.expect_response(lambda answer: is_launch(answer.request)) as answered:
        page.deploy.click()
    assert answered.value.status == 403


def test_an_api_key_may_plan_and_neither_launch_nor_clear(server: Accounts) -> None:
    key = server.api_key(ADMIN)
    body = {"model_name": MODEL_NAME, "replica": 2, **OPTIONS}
    assert server.send("POST", "/v1/xavier/plan", key, json=body).json()["valid"]
    assert server.send("POST", "/v1/models", key, json=body).status_code == 403
    assert server.send("POST", "/v1/xavier/models/any/clear", key).status_code == 403
    assert server.send("POST", "/v1/xavier/plan", None, json=body).status_code == 401


def test_two_replicas_are_deployed_from_the_page(
    deployment: Deployment, server: Accounts, new_page: NewPage
) -> None:
    assert {name: deployment.body.get(name) for name in OPTIONS} == OPTIONS
    page = new_page()
    page.goto("/running-model")
    expect(page.get_by_text(deployment.uid).first).to_be_visible()
    expect(page.get_by_text("READY", exact=True)).to_have_count(2)
    status = server.request("GET", f"/v1/xavier/models/{deployment.uid}")
    assert [replica["state"] for replica in status["replicas"]] == ["ready", "ready"]
    for replica in status["replicas"]:
        assert replica["gpu"]["capacity_blocks"] == 64 * 2**20 // BLOCK


def test_the_settings_come_back_when_the_dialog_is_opened_again(
    deployment: Deployment, new_page: NewPage
) -> None:
    launch_page = LaunchPage(new_page(OPERATOR)).open()
    expect(launch_page.switch).to_be_checked()
    expect(launch_page.gpu).to_have_value("64")
    expect(launch_page.gpu_unit).to_have_value("MiB")
    expect(launch_page.cpu).to_have_value("64")


def test_the_settings_come_back_from_the_launch_history(
    deployment: Deployment, new_page: NewPage
) -> None:
    launch_page = LaunchPage(new_page(OPERATOR)).open()
    expect(launch_page.switch).to_be_checked()
    launch_page.switch.click()
    expect(launch_page.switch).not_to_be_checked()
    launch_page.dialog.get_by_role("button", name=re.compile("^Config Cache")).click()
    history = launch_page.page.get_by_role("dialog", name="Config Cache")
    history.get_by_role("button", name="Use", exact=True).first.click()
    expect(launch_page.switch).to_be_checked()
    expect(launch_page.gpu).to_have_value("64")
