# SPDX-License-Identifier: Apache-2.0
"""The command that shows what a server's GPU-first models do."""

from __future__ import annotations

import click

from xinference_xavier.cli.output import (
    api_key_option,
    endpoint_option,
    json_option,
    print_table,
    write_json,
)
from xinference_xavier.rest import Api, ApiError
from xinference_xavier.schemas import (
    AuditedModel,
    Model,
    ModelStatus,
    PromptTokens,
    Replica,
    TierUse,
)
from xinference_xavier.sizes import format_size


@click.command(
    epilog="Exit codes: 0 every replica is ready (or there is none); 1 the server cannot be asked, "
    "refuses, some replica is not ready, or its bookkeeping not consistent; 2 a wrong option."
)
@click.argument("model_uid", required=False)
@endpoint_option
@api_key_option
@click.option(
    "--audit",
    is_flag=True,
    help="Check the bookkeeping of MODEL_UID's replicas, and show what they have in use. Their "
    "engines may wait meanwhile, some microseconds per block.",
)
@json_option
def command(
    model_uid: str | None, endpoint: str, api_key: str | None, audit: bool, json_file: str | None
) -> None:
    """Show the GPU-first models of a server, or one of them with what its replicas share.

    MODEL_UID is the model's name at the server.
    """
    if audit and model_uid is None:
        raise click.UsageError("--audit needs a MODEL_UID")
    try:
        api = Api(endpoint, api_key)
        if audit and model_uid is not None:
            _show_audit(api.audit(model_uid), json_file)
            return
        found = api.models() if model_uid is None else api.model(model_uid)
    except ApiError as error:
        raise click.ClickException(str(error)) from None
    models = [found] if isinstance(found, ModelStatus) else found.models
    if write_json(json_file, found.model_dump()):
        if not models:
            click.echo(
                f"No GPU-first model runs at {endpoint}. Launch one with enable_xavier=true and "
                "xavier_gpu_first=true."
            )
        for model in models:
            _show(model)
            if isinstance(model, ModelStatus):
                _show_links(model)
    replicas = [replica for model in models for replica in model.replicas]
    if bad := [replica.replica for replica in replicas if replica.state != "ready"]:
        raise click.ClickException(f"not ready: {', '.join(bad)}")


def _show_audit(audited: AuditedModel, json_file: str | None) -> None:
    if write_json(json_file, audited.model_dump()):
        rows = [
            {
                "replica": replica.replica,
                "bookkeeping": replica.error or replica.contradiction or "consistent",
                "in_use": ", ".join(f"{count} {name}" for name, count in replica.in_use.items()),
            }
            for replica in audited.replicas
        ]
        print_table(f"{audited.model_uid}: what its replicas have in use", rows)
    if not audited.consistent:
        bad = [one.replica for one in audited.replicas if one.error or one.contradiction]
        raise click.ClickException(f"not consistent, or not checked: {', '.join(bad)}")


def _show(model: Model | ModelStatus) -> None:
    name = f" ({model.model_name})" if model.model_name else ""
    count = f"{model.replica} replica{'' if model.replica == 1 else 's'}"
    title = f"{model.model_uid}{name}: {model.status or 'stopped'}, {count}"
    if not model.replicas:
        click.echo(f"{title}; none of them is in the directory")
        return
    print_table(title, [_row(replica) for replica in model.replicas])


def _row(replica: Replica) -> dict[str, str]:
    return {
        "replica": replica.replica,
        "state": f"{replica.state}: {replica.error}" if replica.error else replica.state,
        "gpu_tier": _use(replica.gpu),
        "cpu_tier": _use(replica.cpu),
        "prompt_tokens": "" if replica.tokens is None else f"{replica.tokens.prompt:,}",
        "not_computed": _sources(replica.tokens),
        "failures": f"{sum(replica.load_failures.values()):,}",
    }


def _use(tier: TierUse | None) -> str:
    if tier is None:
        return ""
    limited = "" if tier.limit_bytes == tier.capacity_bytes else " (limited)"
    return f"{format_size(tier.used_bytes)} of {format_size(tier.limit_bytes)}{limited}"


def _sources(tokens: PromptTokens | None) -> str:
    """Return which part of the prompt tokens came from where."""
    if tokens is None or not tokens.prompt:
        return ""
    parts = {
        "local": tokens.local,
        "own tiers": tokens.own_device + tokens.own_host,
        "peers": tokens.peer_device + tokens.peer_host,
    }
    shown = (f"{100 * part / tokens.prompt:.0f} % {name}" for name, part in parts.items())
    return ", ".join(shown)


def _show_links(model: ModelStatus) -> None:
    rows = [
        {
            "reader": replica.replica,
            "source": link.replica,
            "transport": link.transport or "nothing read yet",
            "loads": f"{link.loads:,}",
            "read": format_size(link.bytes),
            "speed": "" if link.bytes_per_s is None else f"{link.bytes_per_s / 1e6:,.0f} MB/s",
            "failures": f"{link.failures:,}",
            "not_used_because": "" if link.usable else link.reason or "it was not met yet",
        }
        for replica in model.replicas
        for link in replica.links
    ]
    if rows:
        print_table("What the replicas read from each other", rows)
