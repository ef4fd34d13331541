# SPDX-License-Identifier: Apache-2.0
"""Our HTTP API against its own OpenAPI document, and launches with whatever in them.

Every answer has a status and a form that the document promises, and none is a 500.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.extension.stock_api import (
    GPU_FIRST,
    Stock,
    client_of,
    directory_of,
    small_index,
    status_of,
)
from tests.fuzz.lanes import in_both_lanes
from tests.fuzz.mutations import mutated
from xinference_xavier.extension.routes import models

FEW = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
MANY = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


def app() -> FastAPI:
    made = client_of(Stock(ready=["m-rep0", "m-rep1"])).app
    assert isinstance(made, FastAPI)
    return made


APP = app()
PROMISES = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
schema = schemathesis.openapi.from_asgi("/openapi.json", APP)


@pytest.fixture(autouse=True, scope="module")
def replicas() -> Iterator[None]:
    """One replica that answers and one that does not; the index of the first is real."""
    index = small_index()

    async def call(contact: Any, method: str, *arguments: Any, timeout_s: float) -> dict[str, Any]:
        if contact.address.startswith("m-rep1"):
            raise TimeoutError("hung")
        if method == "set_limits":
            changes = index.set_limits(device_slots=arguments[0], host_slots=arguments[1])
            return {
                "limited": True,
                "evicted_blocks": len(changes.removed),
                "store": status_of(index)["store"],
            }
        answers: dict[str, Any] = {
            "describe": status_of(index),
            "clear": {"cleared": True},
            "audit": {"contradiction": None, "in_use": {"leases": 0}},
        }
        return dict(answers[method])

    with pytest.MonkeyPatch.context() as patch:
        directory_of(patch, "m-rep0", "m-rep1")
        patch.setattr(models, "peer_call", call)
        yield


@pytest.mark.parametrize("known", [False, True])
@schema.parametrize()
@FEW
def test_answers_have_the_documented_form(case: schemathesis.Case, known: bool) -> None:
    check(case, known)


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True])
@schema.parametrize()
@MANY
def test_answers_have_the_documented_form_in_many_cases(
    case: schemathesis.Case, known: bool
) -> None:
    check(case, known)


def check(case: schemathesis.Case, known: bool) -> None:
    """Send a request, about the model that there is if it is a ``known`` one."""
    if known and "model_uid" in (case.path_parameters or {}):
        case.path_parameters["model_uid"] = "m"
    # What the document cannot say is refused as well, such as a budget that is too large.
    case.call_and_validate(checks=PROMISES)


LAUNCH = {**GPU_FIRST, "envs": {"A": "1"}, "gpu_idx": [0], "replica_config": [{"role": "both"}]}

json_like = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**18), 10**18),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=20),
        st.sampled_from(["1.5GB", "512 mib", "-1", "1e999", "NaN", "9" * 400]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)


@in_both_lanes(few=60, many=3_000)
@given(body=mutated(LAUNCH, json_like))
def test_a_launch_is_passed_on_or_refused_with_400(body: Any) -> None:
    stock = Stock()
    answer = TestClient(client_of(stock).app, raise_server_exceptions=False).post(
        "/v1/models", content=json.dumps(body)
    )
    assert answer.status_code in (200, 400, 422), answer.text
    assert bool(stock.launched) == (answer.status_code == 200)
