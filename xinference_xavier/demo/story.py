# SPDX-License-Identifier: Apache-2.0
"""The demo's course: what is launched, asked and looked at, in this order.

One replica, the source, reads two documents. The other one, the reader, is asked about the
second: a prefix from the source's device tier. Then the source reads more, until its device tier
overflows, beginning with the first document, and until vLLM's own cache, which is smaller, has
evicted both. Now the reader is asked about the first document, which it has not seen and the
source's CPU tier has; and the source about the second one, which its own tiers restore.

One reader may lease a quarter of the store, so that both tiers together hold more than four
documents. And vLLM's cache holds less than what the source reads after the second one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from xinference.client import RESTfulClient

from xinference_xavier.demo.answers import Answer
from xinference_xavier.demo.judge import (
    Part,
    Shutdown,
    judge_answers,
    judge_overflow,
    judge_restore,
    judge_sharing,
    judge_shutdown,
)
from xinference_xavier.demo.leftovers import described
from xinference_xavier.demo.replicas import Replicas, Served, ask, read_statuses
from xinference_xavier.demo.server import MODEL_NAME, DemoError, Server
from xinference_xavier.extension.vllm import cpu

SHARED_UID: Final = "shared"
CONTROL_UID: Final = "control"

BLOCK_TOKENS: Final = 16
BLOCK_BYTES: Final = BLOCK_TOKENS * 30 * 2 * 3 * 64 * 4
"""SmolLM2-135M in float32: 30 layers, K and V, 3 heads of 64."""
KV_BLOCKS: Final = 300
"""vLLM's own cache; a document takes about 110, and what is read after them 310."""

ENGINE: Final[Mapping[str, Any]] = {
    "model_name": MODEL_NAME,
    "model_engine": "vLLM",
    "model_format": "pytorch",
    "model_size_in_billions": "0_135",
    "quantization": "none",
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "block_size": BLOCK_TOKENS,
    "kv_cache_memory_bytes": KV_BLOCKS * BLOCK_BYTES,
    "max_model_len": 3072,
    "max_num_seqs": 4,
    # Small steps: blocks are saved step by step, and few of them are pinned at a time.
    "max_num_batched_tokens": 256,
}
"""What the replicas and the control have in common."""

FIRST: Final = "What is the text about? Answer in one sentence."
SECOND: Final = "Name one thing that the text explains."
THIRD: Final = "Name one place that the text mentions."
FOURTH: Final = "Name one person that the text mentions."
"""One question each, so that never more than the document is shared."""

LEAST_CHARACTERS: Final = 7400
"""Whole paragraphs of at least so many characters are a document: 1650 to 1750 tokens."""

Step = Callable[[str], AbstractContextManager[None]]
"""Shows what is done, while it is done."""


@dataclass(frozen=True)
class Settings:
    """What the user chose. Sizes as options take them."""

    model: Path
    transport: str
    gpu_cache_bytes: str
    cpu_cache_bytes: str

    def options(self) -> dict[str, Any]:
        """Return the launch options of GPU-first Xavier."""
        return {
            "enable_xavier": True,
            "xavier_gpu_first": True,
            "xavier_gpu_cache_bytes": self.gpu_cache_bytes,
            "xavier_cpu_cache_bytes": self.cpu_cache_bytes,
            "xavier_transport": self.transport,
            "xavier_verify": "checksum",
            # This is about what happens, not how fast: a busy machine may answer late.
            "xavier_lookup_timeout": 2.0,
            "xavier_load_timeout": 60.0,
        }


@dataclass(frozen=True)
class Seen:
    """What the two replicas did."""

    warm_up: Served
    cold: Served
    remote: Served
    local: Served
    demotions: int
    overflow: Served
    restored: Served


@dataclass(frozen=True)
class Control:
    """The same prompts as local hits of a replica without Xavier."""

    remote: Answer
    overflow: Answer
    restored: Answer


@dataclass(frozen=True)
class Documents:
    """English prose, no two of which begin alike."""

    first: str
    second: str
    more: tuple[str, ...]
    short: str


def documents() -> Documents:
    """Return two documents, two longer ones of the same texts backwards, and one paragraph."""
    folder = files("xinference_xavier") / "data"
    canals, lighthouses = (
        (folder / f"{name}.txt").read_text().strip().split("\n\n")
        for name in ("canals", "lighthouses")
    )
    more = ("\n\n".join(reversed(text)) for text in (canals, lighthouses))
    return Documents(_beginning(canals), _beginning(lighthouses), tuple(more), canals[1])


def _beginning(paragraphs: Sequence[str]) -> str:
    text = ""
    for paragraph in paragraphs:
        if len(text) >= LEAST_CHARACTERS:
            break
        text += f"{paragraph}\n\n"
    return text


def prompt(document: str, question: str) -> str:
    """Return a question about a document, as this model is asked."""
    return f"<|im_start|>user\n{document.strip()}\n\n{question}<|im_end|>\n<|im_start|>assistant\n"


def run(server: Server, settings: Settings, step: Step) -> tuple[list[Part], dict[str, Any]]:
    """Run the demo with a server that is not started; it is stopped when this returns.

    Returns the five parts, and more for JSON. Raises :class:`DemoError`.
    """
    with step("Xinference starts"):
        client = server.start()
        register(client, settings.model)
        before = {process.pid for process in server.look()}
    with step("Two replicas of SmolLM2 with GPU-first Xavier start"):
        launch(client, SHARED_UID, replica=2, **settings.options())
    replicas = Replicas(
        client.get_model(SHARED_UID), lambda: read_statuses(server.replicas(SHARED_UID))
    )
    seen, names = share(replicas, step)
    server.look()
    states = replicas.statuses()
    with step("The replicas close their stores and end"):
        client.terminate_model(SHARED_UID)
        reports = sorted(
            server.replicas(SHARED_UID)["closed"], key=lambda report: str(report["replica"])
        )
        left = [
            f"process {described(process)}"
            for process in server.look()
            if process.pid not in before
        ]
        left += server.memory_held()
    arenas = server.arenas()
    with step("A replica without Xavier starts, for comparison"):
        core = cpu.binding(cpu.cores_of(0, 2, cpu.allowed_cores())[0])
        on_cpu = cpu.cpu_build_installed()
        # As many cores as each of the two had: else its sums would be rounded otherwise.
        envs = {cpu.BINDING_VARIABLE: core} if on_cpu else None
        launch(client, CONTROL_UID, replica=1, envs=envs)
    control = compare_with(client.get_model(CONTROL_UID), step)
    server.look()
    with step("Xinference ends"):
        client.terminate_model(CONTROL_UID)
        client.close()
        server.stop()
        left += server.left()
    forced = None if settings.transport == "auto" else settings.transport
    parts = [
        judge_sharing(seen.cold, seen.remote, seen.local, transport=forced),
        judge_answers(seen.remote, control.remote, seen.overflow.answer),
        judge_overflow(seen.demotions, seen.overflow, control.overflow),
        judge_restore(seen.restored, control.restored),
        judge_shutdown(Shutdown(names, reports, arenas, left)),
    ]
    more = {
        "options": settings.options(),
        "engine": dict(ENGINE),
        "warm_up": seen.warm_up.to_dict(),
        "replicas": states,
    }
    return parts, more


def register(client: RESTfulClient, model: Path) -> None:
    """Register the model's folder as a custom model."""
    definition = {
        "version": 2,
        "model_name": MODEL_NAME,
        "model_lang": ["en"],
        "model_ability": ["generate", "chat"],
        "context_length": 8192,
        "model_family": MODEL_NAME,
        "architectures": ["LlamaForCausalLM"],
        "chat_template": (model / "chat_template.jinja").read_text(),
        "stop_token_ids": [2],
        "stop": ["<|im_end|>"],
        "model_specs": [
            {
                "model_format": "pytorch",
                "model_size_in_billions": ENGINE["model_size_in_billions"],
                "quantization": "none",
                "model_id": f"demo/{MODEL_NAME}",
                "model_uri": model.resolve().as_uri(),
            }
        ],
    }
    client.register_model("LLM", json.dumps(definition), persist=False)


def launch(client: RESTfulClient, uid: str, **options: Any) -> None:
    """Launch the model and wait for it. Raises :class:`DemoError` with the server's reason."""
    try:
        client.launch_model(model_uid=uid, **ENGINE, **options)
    except RuntimeError as error:
        raise DemoError(str(error)) from error


def share(replicas: Replicas, step: Step) -> tuple[Seen, list[str]]:
    """Do what the first four parts are about; return it, and the names of the replicas."""
    texts = documents()
    with step("The replicas warm up, and the first block is loaded"):
        source, reader = replicas.wait_for(2)
        replicas.ask(source, prompt(texts.short, FIRST))
        replicas.settle(source, reader)
        warm_up = replicas.ask(reader, prompt(texts.short, SECOND))
    with step(f"{source} reads two documents"):
        before = _demotions(replicas, source)
        replicas.ask(source, prompt(texts.first, FIRST))
        cold = replicas.ask(source, prompt(texts.second, FIRST))
        replicas.settle(source, reader)
    with step(f"{reader} is asked about the second one, twice"):
        remote = replicas.ask(reader, prompt(texts.second, SECOND))
        local = replicas.ask(reader, prompt(texts.second, THIRD))
    with step(f"{source} reads on: its device tier overflows, and vLLM's cache"):
        for text in texts.more:
            replicas.ask(source, prompt(text, FIRST))
        replicas.settle(source, reader)
        demotions = _demotions(replicas, source) - before
    with step(f"{reader} is asked about the first document, {source} about the second"):
        overflow = replicas.ask(reader, prompt(texts.first, SECOND))
        restored = replicas.ask(source, prompt(texts.second, FOURTH))
    seen = Seen(warm_up, cold, remote, local, demotions, overflow, restored)
    return seen, [source, reader]


def compare_with(model: Any, step: Step) -> Control:
    """Let a replica without Xavier compute the documents, and answer the same as local hits."""
    texts = documents()
    with step("It reads the documents and answers the same questions"):
        ask(model, prompt(texts.short, FIRST))
        ask(model, prompt(texts.first, FIRST))
        overflow = ask(model, prompt(texts.first, SECOND))
        ask(model, prompt(texts.second, FIRST))
        remote = ask(model, prompt(texts.second, SECOND))
        restored = ask(model, prompt(texts.second, FOURTH))
    return Control(remote, overflow, restored)


def _demotions(replicas: Replicas, name: str) -> int:
    return int(replicas.statuses()[name]["store"]["totals"]["demotions"])
