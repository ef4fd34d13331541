# SPDX-License-Identifier: Apache-2.0
"""The page of rules names tests that exist, for every rule of the design."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
RULES = {f"R{number}" for number in range(1, 21)}
ROW = re.compile(r"^\| (R\d+)\b(.*)\|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def names_in(path: str) -> set[str]:
    """Return the names of a file's tests."""
    tree = ast.parse((ROOT / path).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


def test_each_rule_of_the_design_has_its_proof() -> None:
    proofs = dict(ROW.findall((ROOT / "docs/rules.md").read_text()))
    design = dict(ROW.findall((ROOT / "docs/design.md").read_text()))
    assert proofs.keys() == design.keys() == RULES
    unproved = [rule for rule, row in proofs.items() if not TEST.search(row)]
    assert not unproved


def test_each_test_that_proves_a_rule_exists() -> None:
    named = TEST.findall((ROOT / "docs/rules.md").read_text())
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(path)]
    assert not missing
    assert len(named) > 2 * len(RULES)
