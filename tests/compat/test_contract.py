# SPDX-License-Identifier: Apache-2.0
"""What of vLLM the connector plugs into is what was recorded when that version was tried.

After a failure here: read what changed, change `xinference_xavier/vllm` where it matters, run the
end-to-end tests on that version, then record it with `scripts/make_contract.py`.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from packaging.version import Version

from scripts.make_contract import IMPLEMENTED, USED, changes, contract, recorded, sources
from xinference_xavier.installed import vllm_version
from xinference_xavier.vllm.connector import KVConnectorBase_V1, XavierConnector

TRIED = ("0.27.1", "0.32.0")

HOOK = "distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1"


def test_the_installed_vllm_is_as_recorded() -> None:
    found = str(vllm_version()).split("+")[0]
    records = recorded()
    known = records.get(found) or records[max(records, key=Version)]
    changed = "\n".join(changes(known, contract(sources())))
    assert not changed, f"of what the connector uses, vLLM {found} has changed:\n{changed}"
    assert found in records, f"vLLM {found} is not recorded, but like the last one that is"


@pytest.mark.parametrize("version", TRIED)
def test_a_version_that_was_tried_is_recorded(version: str) -> None:
    assert version in recorded()


def test_every_name_that_is_used_is_one_that_the_first_version_had() -> None:
    record = recorded()[TRIED[0]]
    missing = [f"{o}.{n}" for o, names in USED.items() for n in names if f"{o}.{n}" not in record]
    assert missing == []
    assert all(any(name.startswith(f"{owner}.") for name in record) for owner in IMPLEMENTED[:2])


def test_the_record_of_the_hooks_is_what_python_sees() -> None:
    record = contract(sources())
    hooks = {name.removeprefix(f"{HOOK}.") for name in record if name.startswith(f"{HOOK}.")}
    methods = {n for n, _ in inspect.getmembers(KVConnectorBase_V1) if not n.startswith("_")}
    assert {name for name in hooks if not name.startswith("_")} == methods
    abstract = {name for name in hooks if record[f"{HOOK}.{name}"].startswith("abstractmethod ")}
    assert abstract == KVConnectorBase_V1.__abstractmethods__
    assert abstract <= vars(XavierConnector).keys()


BASE = """
class KVConnectorBase_V1(ABC):
    def __init__(self, role):
        self._role = role

    @property
    def role(self) -> "KVConnectorRole":
        return self._role

    @abstractmethod
    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]):
        pass
"""

RUNNER = """
class Runner:
    def step(self):
        def inner():
            self.connector.start_load_kv(1)
        kv_connector.get_finished(get_kv_transfer_group().role)
        self.ec_connector.get_finished(2)
"""


def vllm_at(folder: Path, *, base: str = BASE, runner: str = RUNNER) -> Path:
    """Write a package that has as much of vLLM as a record looks at."""
    files = {f"{HOOK.rpartition('.')[0].replace('.', '/')}.py": base, "v1/runner.py": runner}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_record_has_signatures_kinds_attributes_and_callers(tmp_path: Path) -> None:
    assert contract(vllm_at(tmp_path)) == {
        f"{HOOK}.__init__": "(self, role)",
        f"{HOOK}._role": "attribute",
        f"{HOOK}.role": "property (self) -> KVConnectorRole",
        f"{HOOK}.start_load_kv": (
            "abstractmethod (self, forward_context: ForwardContext, **kwargs: Any) -> None"
        ),
        f"{HOOK}.get_finished": "(self, finished_req_ids: set[str])",
        "calls in v1.runner.Runner.step": "start_load_kv, get_finished, role",
    }


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def get_finished", "def get_done", "removed: {HOOK}.get_finished"),
        ("def get_finished", "def get_done", "added: {HOOK}.get_done: (self"),
        (
            "finished_req_ids: set[str])",
            "finished_req_ids: list[str], now: float)",
            "changed: {HOOK}.get_finished: (self, finished_req_ids: set[str]) -> "
            "(self, finished_req_ids: list[str], now: float)",
        ),
        ("    @abstractmethod\n", "", "changed: {HOOK}.start_load_kv: abstractmethod (self"),
        ("self._role = role", "self._part = role", "removed: {HOOK}._role"),
    ],
)
def test_each_change_of_the_base_class_is_named(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert ast.parse(BASE.replace(old, new))
    before = contract(vllm_at(tmp_path / "before"))
    after = contract(vllm_at(tmp_path / "after", base=BASE.replace(old, new)))
    found = changes(before, after)
    assert any(line.startswith(said.format(HOOK=HOOK)) for line in found), found
    assert changes(before, before) == []


def test_another_order_of_the_calls_is_named(tmp_path: Path) -> None:
    before = contract(vllm_at(tmp_path / "before"))
    other = RUNNER.replace("kv_connector.get_finished(", "print(").replace(
        "start_load_kv(1)", "get_finished(1)"
    )
    after = contract(vllm_at(tmp_path / "after", runner=other))
    assert changes(before, after) == [
        "changed: calls in v1.runner.Runner.step: start_load_kv, get_finished, role -> "
        "get_finished, role"
    ]
