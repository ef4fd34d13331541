# SPDX-License-Identifier: Apache-2.0
"""The table of ``scripts/fence_mutations.py`` is complete. A run of it takes minutes, not in CI."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import fence_mutations

    return fence_mutations


def test_every_statement_that_orders_copies_is_in_the_table(script: ModuleType) -> None:
    assert script.problems(script.sources()) == []


@pytest.mark.parametrize(
    "statement",
    [
        "device.fence()",
        "self._means.device.after(mark)",
        "mark = self._device.mark()",
        "withdraw(arena.meta, slots)",
        "publish(arena.meta, slots, generations, sums)",
        "api.stream_wait(stream, event)",
    ],
)
def test_a_new_one_is_missed(script: ModuleType, statement: str) -> None:
    (problem,) = script.problems(script.sources() | {"new.py": f"def f():\n    {statement}\n"})
    assert problem == f"new.py:2: not in the table: {statement}"


def test_a_statement_that_is_gone_or_doubled_is_noticed(script: ModuleType) -> None:
    sources = script.sources()
    copier = sources["store/copier.py"]
    for text in (copier.replace("withdraw(target.meta, slots)", "pass"), copier * 2):
        assert script.problems(sources | {"store/copier.py": text})


def test_each_mutation_changes_its_file_into_another_program(script: ModuleType) -> None:
    sources = script.sources()
    for mutation in script.MUTATIONS:
        text = sources[mutation.file].replace(mutation.old, mutation.new)
        assert text != sources[mutation.file]
        compile(text, mutation.file, "exec")


def test_each_mutation_has_tests_and_a_name_of_its_own(script: ModuleType) -> None:
    names = [mutation.name for mutation in script.MUTATIONS]
    assert len(set(names)) == len(names)
    for mutation in script.MUTATIONS:
        assert mutation.tests
        for test in mutation.tests:
            assert (SCRIPTS.parent / test.partition("::")[0]).is_file()
