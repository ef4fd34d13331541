# SPDX-License-Identifier: Apache-2.0
"""The demo's course: what is launched, asked and looked at, in this order.

Sizes are chosen so that everything happens with four prefills: vLLM's own cache holds two
documents, the device tier little more than one, the CPU tier all of them. One replica computes
the first document (the other loads it), the second one, which demotes the first, and a third one,
which demotes the second and makes vLLM evict the first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
KV_BLOCKS: Final = 340
"""vLLM's own cache; a document takes about 160."""

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
    "max_model_len": 4096,
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


def documents() -> tuple[str, str, str, str]:
    """Return two documents of 2500 tokens, a third one of their parts, and a short one."""
    folder = files("xinference_xavier") / "data"
    first, second = ((folder / f"{name}.txt").read_text() for name in ("lighthouses", "canals"))
    ends = [text.split("\n\n") for text in (second, first)]
    third = "\n\n".join(part for text in ends for part in reversed(text[len(text) // 2 :]))
    return first, second, third, ends[0][1]


def prompt(document: str, question: str) -> str:
    """Return a question about a document, as this model is asked."""
    turn = f"{document}\n\n{question}"
    return f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"


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
        reports = server.replicas(SHARED_UID)["closed"]
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
    first, second, third, short = documents()
    with step("The replicas warm up, and the first block is loaded"):
        source, reader = replicas.wait_for(2)
        replicas.ask(source, prompt(short, FIRST))
        replicas.settle(source, reader)
        warm_up = replicas.ask(reader, prompt(short, SECOND))
    with step(f"{source} reads a document of 2500 tokens"):
        cold = replicas.ask(source, prompt(first, FIRST))
        replicas.settle(source, reader)
    with step(f"{reader} is asked about it, twice"):
        remote = replicas.ask(reader, prompt(first, SECOND))
        local = replicas.ask(reader, prompt(first, THIRD))
    with step(f"{source} reads two more documents; the first ones overflow"):
        before = _demotions(replicas, source)
        replicas.ask(source, prompt(second, FIRST))
        replicas.ask(source, prompt(third, FIRST))
        replicas.settle(source, reader)
        demotions = _demotions(replicas, source) - before
    with step(f"{reader} is asked about the second document, {source} about the first"):
        overflow = replicas.ask(reader, prompt(second, SECOND))
        restored = replicas.ask(source, prompt(first, FOURTH))
    seen = Seen(warm_up, cold, remote, local, demotions, overflow, restored)
    return seen, [source, reader]


def compare_with(model: Any, step: Step) -> Control:
    """Let a replica without Xavier compute the documents, and answer the same as local hits."""
    first, second, _, short = documents()
    with step("It reads the documents and answers the same questions"):
        ask(model, prompt(short, FIRST))
        ask(model, prompt(first, FIRST))
        remote = ask(model, prompt(first, SECOND))
        restored = ask(model, prompt(first, FOURTH))
        ask(model, prompt(second, FIRST))
        overflow = ask(model, prompt(second, SECOND))
    return Control(remote, overflow, restored)


def _demotions(replicas: Replicas, name: str) -> int:
    return int(replicas.statuses()[name]["store"]["totals"]["demotions"])
