# SPDX-License-Identifier: Apache-2.0
"""The stock page's launch dialog with our card, as a person sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from playwright.sync_api import Locator, Page, expect

ENGINE = (
    ("Model Engine", "vLLM"),
    ("Model Format", "pytorch"),
    ("Model Size", "0_1"),
    ("Quantization", "none"),
)

# What lets two replicas of the tiny model start on a small machine.
PARAMETERS = {
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "dtype": "float32",
    "kv_cache_memory_bytes": 64 * 2**20,
}
DEPLOY_TIMEOUT_MS = 600_000


@dataclass(frozen=True)
class Deployment:
    """A model that was deployed from the page: its uid, and the body of the launch request."""

    uid: str
    body: dict[str, Any]


class LaunchPage:
    """Finds the card's parts by what they are called for screen readers, in English."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.dialog = page.get_by_role("dialog").filter(has=page.locator("form"))
        self.card = self.dialog.get_by_role("group", name="Share KV cache between replicas")
        self.switch = self.card.get_by_role("switch")
        self.gpu = self.card.get_by_label("GPU cache budget", exact=True)
        self.gpu_unit = self.card.get_by_label("GPU cache budget: unit")
        self.gpu_slider = self.card.get_by_label("GPU cache budget: slider")
        self.cpu = self.card.get_by_label("CPU cache budget", exact=True)
        self.cpu_unit = self.card.get_by_label("CPU cache budget: unit")
        self.plan = self.card.get_by_role("status")
        self.problems = self.card.get_by_role("alert")
        self.deploy = self.dialog.locator('button[type="submit"]')

    def open(self) -> Self:
        """Open the dialog of the only custom model; its button is English in any language."""
        self.page.goto("/launch-model/custom")
        self.page.get_by_role("button", name="Launch", exact=True).click()
        self.dialog.wait_for()
        return self

    def choose_vllm(self) -> Self:
        """Choose engine, format, size and quantization in the stock form."""
        for label, option in ENGINE:
            self.choose(label, option)
        return self

    def choose(self, label: str, option: str) -> None:
        """Choose in one of the page's own lists, which have no roles."""
        field = self.dialog.locator("form label", has_text=label)
        field.locator("xpath=following-sibling::*").first.click()
        self.page.locator('[data-slot="select-option"]', has_text=option).first.click()

    def fill(self, label: str, value: str) -> None:
        """Fill in one of the page's own inputs, whose labels are not tied to them."""
        field = self.dialog.locator("form label", has_text=label).first
        field.locator("xpath=following-sibling::input").fill(value)

    def turn_on(self, gpu: str, cpu: str) -> None:
        """Turn the card on, with budgets such as "64 MiB"."""
        self.switch.click()
        expect(self.switch).to_be_checked()
        for field, unit_field, budget in (
            (self.gpu, self.gpu_unit, gpu),
            (self.cpu, self.cpu_unit, cpu),
        ):
            number, unit = budget.split()
            unit_field.select_option(unit)
            field.fill(number)

    def launched(self) -> dict[str, Any]:
        """Deploy, and return the body of the launch request once it was sent."""
        with self.page.expect_request(is_launch) as sent:
            self.deploy.click()
        body: dict[str, Any] = sent.value.post_data_json
        return body

    def deploy_two(self, uid: str = "from-the-page") -> Deployment:
        """Deploy two replicas with 64 MiB per tier; return when the page says that they run."""
        self.choose_vllm()
        self.fill("Model UID", uid)
        self.fill("Replica", "2")
        self.turn_on(gpu="64 MiB", cpu="64 MiB")
        self.add_parameters(PARAMETERS)
        body = self.launched()
        self.page.wait_for_url("**/running-model", timeout=DEPLOY_TIMEOUT_MS)
        return Deployment(uid, body)

    def add_parameters(self, parameters: dict[str, Any]) -> None:
        """Add rows to the engine's additional parameters, as a person does."""
        self.advanced.click()
        section = self.dialog.locator("section").filter(has_text="Engine Parameters")
        for name, value in parameters.items():
            section.get_by_role("button", name="Add", exact=True).last.click()
            section.get_by_placeholder("key").last.fill(name)
            section.get_by_placeholder("value").last.fill(str(value))
        self.advanced.click()

    @property
    def advanced(self) -> Locator:
        return self.dialog.get_by_role("button", name="Advanced Configuration")


def is_launch(request: Any) -> bool:
    """Return whether a browser's request launches a model."""
    return bool(request.method == "POST" and request.url.endswith("/v1/models"))
