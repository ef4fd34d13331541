# SPDX-License-Identifier: Apache-2.0
"""Tokens that the server does not take are not shown to it again and again."""

from __future__ import annotations

import pytest

from xinference_xavier.rest import ApiError
from xinference_xavier.ui import visitors
from xinference_xavier.ui.visitors import Refused


class Server:
    """Refuses with ``status``, or answers when that is None."""

    def __init__(self, status: int | None) -> None:
        self.status = status
        self.asked = 0

    def __call__(self) -> str:
        self.asked += 1
        if self.status is None:
            return "answer"
        raise ApiError(self.status, "who are you")


@pytest.mark.parametrize(
    ("token", "while_s"), [("ended", visitors.REPEAT_S), ("", visitors.REPEAT_WITHOUT_S)]
)
def test_a_refused_token_is_tried_once_and_again_after_a_while(token: str, while_s: float) -> None:
    now = [0.0]
    refused, server = Refused(lambda: now[0]), Server(401)
    for _ in range(5):
        with pytest.raises(ApiError, match="who are you") as told:
            refused.ask(token, server)
        assert told.value.status == 401
    assert server.asked == 1
    now[0] = while_s
    server.status = None
    assert refused.ask(token, server) == "answer"
    assert server.asked == 2


def test_another_token_is_tried_at_once() -> None:
    refused, server = Refused(), Server(401)
    for token in ("", "one", "two", "\udcff"):
        with pytest.raises(ApiError):
            refused.ask(token, server)
    assert server.asked == 4


@pytest.mark.parametrize("status", [403, 404, 503])
def test_other_refusals_are_no_matter_of_the_token(status: int) -> None:
    refused, server = Refused(), Server(status)
    for _ in range(2):
        with pytest.raises(ApiError):
            refused.ask("token", server)
    assert server.asked == 2


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors, "MOST", 2)
    refused, server = Refused(), Server(401)
    for token in ("a", "b", "c", "c", "a"):
        with pytest.raises(ApiError):
            refused.ask(token, server)
    assert server.asked == 4
