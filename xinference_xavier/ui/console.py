# SPDX-License-Identifier: Apache-2.0
"""The console's page, in Gradio.

Every function that the page calls gets the visitor's own token and asks the server's API with it:
whoever may not see or clear something there may not here either. Nothing is kept per visitor,
neither by us nor, with ``gr.State``, by Gradio, and no call waits in Gradio's queue: so the page
holds no connection open, outlives a restart of its server, and keeps none from stopping.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

import gradio as gr

from xinference_xavier.options import XavierOptions
from xinference_xavier.planner import DTYPE_BYTES
from xinference_xavier.rest import Api, ApiError
from xinference_xavier.schemas import BudgetsRequest, PlanRequest
from xinference_xavier.ui import view
from xinference_xavier.ui.history import History
from xinference_xavier.ui.visitors import Answer, Refused

REFRESH_S: Final = 3.0
TITLE: Final = "Xavier console"
LIMIT_HINT: Final = "64MiB, 50%, 0; empty: unchanged"

OPTIONS: Final[dict[str, Any]] = {
    "js": (Path(__file__).parent / "token.js").read_text(encoding="utf-8"),
    "queue": False,
    "show_progress": "hidden",
    "api_visibility": "private",
}
"""Of every event that calls us. Without the queue, calls need no stream to answer by."""

Connect = Callable[[str, gr.Request], Api]
"""Gives the API to ask, for a visitor's token ("": none) and request."""

Event = tuple[Callable[..., Any], list[Any], Any]
"""What to call, with which components' values, and the components that the result is for."""

Known = dict[str, Any]
"""What a page shows besides the models themselves; it tells us, so that we need not remember."""


def build(connect: Connect, *, server: str = "") -> gr.Blocks:
    """Return the page. ``connect`` is called in any thread; ``server`` is named in the title."""
    calls = _Calls(connect)
    with gr.Blocks(title=TITLE, analytics_enabled=False) as page:
        where = f", at `{server}`" if server else ""
        gr.Markdown(f"# {TITLE}\nKV cache shared between the replicas of a model{where}.")
        token = gr.Textbox(visible=False)
        with gr.Row(visible=False) as login:
            typed = gr.Textbox(
                label="API key, or token of a login",
                type="password",
                info="This page sends it to its server with each call, and keeps it until it is "
                "closed or reloaded.",
                scale=4,
            )
            enter = gr.Button("Use it", scale=1)
        with gr.Tab("Models"):
            refresh = _models(calls, token, login)
        with gr.Tab("Planner"):
            plan = _planner(calls, token)
        page.load(*refresh, **OPTIONS)
        page.load(*plan, **OPTIONS)
        # Only when it is complete: each wrong token counts against the visitor's address.
        entered = gr.on([typed.submit, enter.click], None, typed, token, js="(typed) => typed")
        entered.then(*refresh, **OPTIONS)
        entered.then(*plan, **OPTIONS)
    blocks: gr.Blocks = page
    return blocks


def _models(calls: _Calls, token: gr.Textbox, login: gr.Row) -> Event:
    """Make the tab with the running models; return what refreshes it."""
    known = gr.JSON(visible=False)
    pending = gr.Textbox(visible=False)
    # Gradio would refuse a choice that it does not remember, after a restart for instance.
    chosen = gr.Dropdown([], label="Model", interactive=True, allow_custom_value=True)
    overview = gr.HTML()
    with gr.Row(visible=False) as actions:
        with gr.Column():
            gr.Markdown("### Limit the tiers")
            with gr.Row():
                gpu = gr.Textbox(label="GPU tier of each replica", placeholder=LIMIT_HINT)
                cpu = gr.Textbox(label="CPU tier of each replica", placeholder=LIMIT_HINT)
            apply = gr.Button("Apply to all replicas")
            limited = gr.HTML()
        with gr.Column():
            gr.Markdown("### Clear the cache")
            start = gr.Button("Clear the cache of all replicas…", variant="stop")
            with gr.Group(visible=False) as confirm:
                question = gr.Markdown(padding=True)
                with gr.Row():
                    yes = gr.Button("Yes, clear it", variant="stop")
                    no = gr.Button("No")
            cleared = gr.HTML()

    refresh: Event = (
        calls.refresh,
        [token, chosen, known],
        [chosen, overview, actions, login, known],
    )
    gr.Timer(REFRESH_S).tick(*refresh, **OPTIONS)
    chosen.input(*refresh, **OPTIONS)
    apply.click(calls.limit, [token, chosen, gpu, cpu], limited, **OPTIONS)
    # What is confirmed is the model that was asked about, whatever is chosen meanwhile.
    start.click(calls.question, [token, chosen], [confirm, question, pending, cleared], **OPTIONS)
    yes.click(calls.clear, [token, pending], [confirm, cleared], **OPTIONS)
    no.click(lambda token: gr.update(visible=False), token, confirm, **OPTIONS)
    return refresh


def _planner(calls: _Calls, token: gr.Textbox) -> Event:
    """Make the tab that tells what budgets hold; return what tells it."""
    defaults = XavierOptions()
    with gr.Row():
        path = gr.Textbox(
            label="Model directory on the server", placeholder="instead of the numbers beside"
        )
        layers = gr.Number(label="Layers", value=24, precision=0)
        kv_heads = gr.Number(label="KV heads", value=2, precision=0)
        head_dim = gr.Number(label="Head dimension", value=64, precision=0)
        dtype = gr.Dropdown(list(DTYPE_BYTES), value="bfloat16", label="KV type")
    with gr.Row():
        block_size = gr.Number(label="Tokens per block", value=16, precision=0)
        step = gr.Number(label="Most tokens of a step", value=2048, precision=0)
        replica = gr.Number(label="Replicas", value=2, precision=0)
        gpu = gr.Textbox(
            label="GPU budget of a replica", value=str(defaults.xavier_gpu_cache_bytes)
        )
        cpu = gr.Textbox(
            label="CPU budget of a replica", value=str(defaults.xavier_cpu_cache_bytes)
        )
    planned = gr.HTML()
    inputs: list[Any] = [
        path,
        layers,
        kv_heads,
        head_dim,
        dtype,
        block_size,
        step,
        replica,
        gpu,
        cpu,
    ]
    plan: Event = (calls.plan, [token, *inputs], planned)
    gr.on([item.change for item in inputs], *plan, trigger_mode="always_last", **OPTIONS)
    return plan


class _Calls:
    """What the page's events call; the token comes first, as ``token.js`` completes it."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._history = History()
        self._refused = Refused()

    def refresh(
        self, token: str, chosen: str | None, known: Known | None, request: gr.Request
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Return the choice of models, what to show, whether to act and to log in, and these."""
        uids, body, ask = self._look(token, chosen, request)
        now: Known = {"uids": uids, "act": bool(uids) and chosen in (None, *uids), "ask": ask}
        if now == known:
            return gr.skip(), body, gr.skip(), gr.skip(), gr.skip()
        value = chosen or (uids[0] if uids else None)
        choice = gr.update(choices=uids, value=value)
        return choice, body, gr.update(visible=now["act"]), gr.update(visible=ask), now

    def limit(
        self, token: str, chosen: str | None, gpu: str | None, cpu: str | None, request: gr.Request
    ) -> str:
        """Limit a model's tiers."""

        def ask(api: Api) -> str:
            budgets = BudgetsRequest(gpu=_text(gpu), cpu=_text(cpu))
            return view.limited(api.set_budgets(chosen or "", budgets))

        return self._told(token, request, ask)

    def question(self, token: str, chosen: str | None) -> tuple[Any, str, str | None, str]:
        """Ask whether to clear a model's caches."""
        return (
            gr.update(visible=True),
            f"All blocks in the GPU and CPU tiers of all replicas of `{chosen}` are dropped. "
            "vLLM's own prefix caches keep what they have. Really clear?",
            chosen,
            "",
        )

    def clear(self, token: str, pending: str, request: gr.Request) -> tuple[Any, str]:
        """Clear a model's caches."""
        text = self._told(token, request, lambda api: view.cleared(api.clear(pending)))
        return gr.update(visible=False), text

    def plan(
        self,
        token: str,
        path: str | None,
        layers: float | None,
        kv_heads: float | None,
        head_dim: float | None,
        dtype: str | None,
        block_size: float | None,
        step: float | None,
        replica: float | None,
        gpu: str | None,
        cpu: str | None,
        request: gr.Request,
    ) -> str:
        """Say what budgets hold."""

        def ask(api: Api) -> str:
            asked: dict[str, Any] = {
                "model_path": _text(path),
                "kv_cache_dtype": dtype,
                "block_size": block_size,
                "max_num_batched_tokens": step,
                "replica": replica,
                "xavier_gpu_cache_bytes": _text(gpu),
                "xavier_cpu_cache_bytes": _text(cpu),
            }
            # They would win over what the directory says.
            if asked["model_path"] is None:
                asked |= {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
            return view.plan(api.plan(PlanRequest.model_validate(asked)))

        return self._told(token, request, ask)

    def _look(
        self, token: str, chosen: str | None, request: gr.Request
    ) -> tuple[list[str], str, bool]:
        """Return the models' uids, what to show, and whether a token is asked for."""
        try:
            models = self._ask(token, request, lambda api: api.models()).models
        except ApiError as error:
            return [], _problem(error), error.status in (401, 403)
        self._history.add(models, time.monotonic())
        by_uid = {model.model_uid: model for model in models}
        if not models:
            return [], view.nothing_runs(), False
        if chosen and chosen not in by_uid:
            return list(by_uid), view.gone(chosen), False
        model = by_uid[chosen] if chosen else models[0]
        return list(by_uid), view.overview(model, self._history), False

    def _told(self, token: str, request: gr.Request, ask: Callable[[Api], str]) -> str:
        """Return what ``ask`` shows, or the refusal."""
        try:
            return self._ask(token, request, ask)
        except ApiError as error:
            return _problem(error)
        except ValidationError as error:
            return view.problem("; ".join(_invalid(item) for item in error.errors()))

    def _ask(self, token: str, request: gr.Request, ask: Callable[[Api], Answer]) -> Answer:
        return self._refused.ask(token, lambda: ask(self._connect(token, request)))


def _text(typed: str | None) -> str | None:
    """Return what was typed, None for nothing; a field that was never touched has None itself."""
    return (typed or "").strip() or None


def _problem(error: ApiError) -> str:
    if error.status == 401:
        return view.unknown_visitor(str(error))
    return view.problem(str(error))


def _invalid(item: Any) -> str:
    """Return what pydantic says of a value, with the value's name."""
    return ": ".join([*map(str, item["loc"]), item["msg"]])
