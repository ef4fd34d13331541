# SPDX-License-Identifier: Apache-2.0
"""The launched model: asks one chosen replica, and reads the replicas' counters around it.

Xinference deals requests out to the replicas in turn and does not say who got one. But each
replica counts its requests, so the demo sees who served what, and sends a word in between when it
is the other one's turn.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from xinference_xavier.demo.answers import Answer, read_stream
from xinference_xavier.demo.server import DemoError

ANSWER_TOKENS: Final = 24
SETTLE_S: Final = 60.0
POLL_S: Final = 0.1

Status = Mapping[str, Any]
"""What one replica says about itself."""


class Model(Protocol):
    """The part of Xinference's model handle that is used."""

    def generate(self, prompt: str, generate_config: dict[str, Any]) -> Any:
        """Return the chunks of a streamed completion."""


@dataclass(frozen=True)
class Served:
    """One answer, who gave it, and that replica's state before and after."""

    replica: str
    answer: Answer
    before: Status
    after: Status

    @property
    def loaded(self) -> dict[str, int]:
        """Tokens that were loaded for it, by source: ``own_``/``peer_``, ``device``/``host``."""
        old = Counter(self.before["traffic"]["loaded_tokens"])
        new = Counter(self.after["traffic"]["loaded_tokens"])
        return dict(new - old)

    @property
    def loaded_tokens(self) -> int:
        """All tokens that were loaded for it."""
        return sum(self.loaded.values())

    @property
    def verified_tokens(self) -> int:
        """Tokens in loaded blocks whose checksum was found to be the published one."""
        blocks = self._grown("traffic", "verified_blocks")
        return blocks * int(self.after["store"]["block_tokens"])

    @property
    def load_failures(self) -> dict[str, int]:
        """Failed parts of loads, by reason."""
        old = Counter(self.before["traffic"]["loads_failed"])
        return dict(Counter(self.after["traffic"]["loads_failed"]) - old)

    @property
    def sources(self) -> dict[str, dict[str, Any]]:
        """What was loaded, by member (``own`` for the own store): transport, bytes, seconds."""
        found = {}
        for name, now in self.after["sources"].items():
            then = self.before["sources"].get(name, {})
            nbytes = now["nbytes"] - then.get("nbytes", 0)
            seconds = now["seconds"] - then.get("seconds", 0.0)
            if nbytes:
                rate = nbytes / seconds / 1e6 if seconds else None
                found[name] = {
                    "transport": now["transport"],
                    "bytes": nbytes,
                    "seconds": seconds,
                    "mb_per_s": rate,
                }
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "replica": self.replica,
            **self.answer.to_dict(),
            "loaded_tokens": self.loaded,
            "verified_tokens": self.verified_tokens,
            "load_failures": self.load_failures,
            "sources": self.sources,
        }

    def _grown(self, *path: str) -> int:
        old: Any = self.before
        new: Any = self.after
        for name in path:
            old, new = old[name], new[name]
        return int(new) - int(old)


class Replicas:
    """Two replicas of one model behind Xinference's turn-taking."""

    def __init__(self, model: Model, statuses: Callable[[], dict[str, Status]]) -> None:
        self._model = model
        self._statuses = statuses
        self._last: str | None = None

    def statuses(self) -> dict[str, Status]:
        """Return each replica's state, by name."""
        return self._statuses()

    def wait_for(self, names: int) -> list[str]:
        """Wait until so many replicas are members of the group; return their names, sorted."""
        self._wait(
            lambda: len(self.statuses()) >= names, f"{names} replicas in the group's directory"
        )
        return sorted(self.statuses())

    def ask(self, replica: str, prompt: str) -> Served:
        """Let ``replica`` answer. Raises :class:`DemoError` when another one got the request."""
        for _ in range(len(self.statuses()) + 1):
            if self._last is not None and self._last != replica:
                break
            # Its turn is over, or nobody knows whose it is: a word takes the turn.
            self._serve("Hello", 1)
        served = self._serve(prompt, ANSWER_TOKENS)
        if served.replica != replica:
            raise DemoError(
                f"{served.replica} answered where it was the turn of {replica}: the replicas are "
                "not served in turn, or somebody else sends requests"
            )
        return served

    def settle(self, source: str, reader: str) -> None:
        """Wait until ``source`` has stored what it computed and ``reader`` knows of it."""

        def settled() -> bool:
            states = self.statuses()
            store = states[source]["store"]
            held = store["device_blocks"] + store["host_blocks"]
            saving = states[source]["pinned_blocks"] or states[source]["store_jobs"]
            known: int = states[reader]["control"]["mirror_blocks"]
            return not saving and known >= held

        self._wait(settled, f"{reader} knows what {source} holds")

    def _serve(self, prompt: str, tokens: int) -> Served:
        before = self.statuses()
        answer = ask(self._model, prompt, tokens)
        after: dict[str, Status] = {}

        def counted() -> bool:
            after.update(self.statuses())
            return len(_served_by(before, after)) == 1

        self._wait(counted, "exactly one replica counts one more request")
        (replica,) = _served_by(before, after)
        self._last = replica
        return Served(replica, answer, before[replica], after[replica])

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + SETTLE_S
        while not condition():
            if time.monotonic() > until:
                raise DemoError(f"not within {SETTLE_S:g} s: {what}")
            time.sleep(POLL_S)


def ask(model: Model, prompt: str, tokens: int = ANSWER_TOKENS) -> Answer:
    """Ask for a greedy answer of at most ``tokens`` tokens, streamed.

    Raises :class:`DemoError` when there is none.
    """
    started = time.perf_counter()
    config = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": tokens,
        "temperature": 0.0,
        "logprobs": 2,
    }
    try:
        return read_stream(model.generate(prompt, config), started)
    except Exception as error:
        # An error inside a stream is a bare Exception of Xinference's client.
        raise DemoError(f"a request failed: {error}") from error


def read_statuses(answer: Mapping[str, Any]) -> dict[str, Status]:
    """Return the replicas of the extension's answer that told their state, by name."""
    return {
        replica["replica"]: replica["status"]
        for replica in answer["replicas"]
        if "traffic" in (replica["status"] or {})
    }


def _served_by(before: Mapping[str, Status], after: Mapping[str, Status]) -> list[str]:
    return [
        name
        for name, status in after.items()
        if name in before and status["traffic"]["requests"] > before[name]["traffic"]["requests"]
    ]
