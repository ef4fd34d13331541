# SPDX-License-Identifier: Apache-2.0
"""One real server with authentication on, and one headless Chromium, for all tests of this folder.

Without a browser the tests are skipped, unless ``XAVIER_BROWSER`` names one, which must then start.
With ``XAVIER_SCREENSHOTS=docs/images`` they also write the pictures of the documentation; those in
Chinese need a font for it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, sync_playwright

from tests.browser.accounts import ADMIN, OPERATOR, Accounts
from tests.browser.launch_page import Deployment, LaunchPage
from tests.extension.server import XinferenceServer
from tests.models import make_tiny_llama
from xinference_xavier.extension import web

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WINDOW = {"width": 1280, "height": 1180}

# A busy machine may need longer than Xinference's own minute to start a replica's process.
ENVIRONMENT = {"XINFERENCE_AUTH_ADVANCED": "1", "XINFERENCE_SUBPOOL_LAUNCH_TIMEOUT": "240"}

# React's complaint about the stock page in dark mode, with our script and without it.
STOCK_ERROR = "React error #418"

NewPage = Callable[..., Page]
Screenshot = Callable[[Locator | Page, str], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    path = os.environ.get("XAVIER_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    # Chromium has no sandbox for root, and containers often have little shared memory.
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Accounts]:
    if not (web.FOLDER / web.SCRIPT).is_file() and shutil.which("npm") is None:
        pytest.skip("the launch dialog has no card: npm, which builds it, is not installed")
    root = tmp_path_factory.mktemp("browser")
    server = XinferenceServer(root / "home", ENVIRONMENT)
    try:
        accounts = Accounts(server)
        server.register(make_tiny_llama(root / "model"))
        yield accounts
    finally:
        left = server.stop()
        print(server.tail())
    assert left == []


def open_context(
    browser: Browser, server: Accounts, user: str, stored: dict[str, str] | None = None
) -> BrowserContext:
    """Return a context of a user who has logged in, with choices that the web UI has stored."""
    context = browser.new_context(base_url=server.url, viewport=WINDOW, locale="en-US")
    context.set_default_timeout(60_000)
    context.add_init_script(
        f"sessionStorage.setItem('token', '{server.token(user)}');"
        + "".join(f"localStorage.setItem('{k}', '{v}');" for k, v in (stored or {}).items())
    )
    return context


@pytest.fixture
def new_page(browser: Browser, server: Accounts) -> Iterator[NewPage]:
    """Open a page as a user, as :func:`open_context`. Errors of its scripts fail the test."""
    contexts, errors = [], []

    def new_page(user: str = ADMIN, stored: dict[str, str] | None = None) -> Page:
        contexts.append(open_context(browser, server, user, stored))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        return page

    yield new_page
    for context in contexts:
        context.close()
    assert [error for error in errors if STOCK_ERROR not in error] == []


@pytest.fixture
def launch_page(new_page: NewPage) -> LaunchPage:
    """The launch dialog of the registered model, opened by the administrator."""
    return LaunchPage(new_page()).open()


@pytest.fixture
def screenshot() -> Screenshot:
    """Write a picture for the documentation, if asked to."""
    folder = os.environ.get("XAVIER_SCREENSHOTS")

    def screenshot(what: Locator | Page, name: str) -> None:
        if folder is not None:
            what.screenshot(path=Path(folder) / f"{name}.png", animations="disabled")

    return screenshot


@pytest.fixture(scope="package")
def deployment(browser: Browser, server: Accounts) -> Deployment:
    """Two replicas of the tiny model, deployed from the page by the operator."""
    context = open_context(browser, server, OPERATOR)
    try:
        return LaunchPage(context.new_page()).open().deploy_two()
    finally:
        context.close()
