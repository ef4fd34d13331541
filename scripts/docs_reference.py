# SPDX-License-Identifier: Apache-2.0
"""The two reference pages of docs/ that are made from code: the commands and the HTTP API."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import click
from pydantic import BaseModel

from xinference_xavier import cli, schemas

PROGRAM: Final = "xinference-xavier"

COMMANDS: Final = """
# Commands

`{program} COMMAND --help` prints the same. With `--json` a command writes what it found as JSON.

{commands}
"""

API: Final = """
# API

In Xinference, under its own address and authentication. Give the token of a login or an API key
as `Authorization: Bearer TOKEN`, where the server asks for one. All routes are part of the
server's OpenAPI page as well (`/docs`).

| Route | Scope | Takes | Gives | Refusals |
| --- | --- | --- | --- | --- |
| `GET /v1/xavier/models` | `models:read` |  | [ModelList](#modellist) | 503 |
| `GET /v1/xavier/models/{{model_uid}}` | `models:read` |  | [ModelStatus](#modelstatus) | \
404, 503 |
| `POST /v1/xavier/models/{{model_uid}}/clear` | `models:write` |  | \
[ClearedModel](#clearedmodel) | 404, 503 |
| `POST /v1/xavier/models/{{model_uid}}/audit` | `models:write` |  | \
[AuditedModel](#auditedmodel) | 404, 503 |
| `POST /v1/xavier/models/{{model_uid}}/budgets` | `models:write` | \
[BudgetsRequest](#budgetsrequest) | [BudgetsResult](#budgetsresult) | 400, 404, 503 |
| `POST /v1/xavier/plan` | `models:read`; with `model_path` also `models:write` | \
[PlanRequest](#planrequest) | [Plan](#plan) | 404, 503 |
| `GET /v1/xavier/cluster` | `models:read` |  | [Cluster](#cluster) |  |

Refusals are `{{"detail": "..."}}`, a text for people: 400 for a value that is not allowed, 404 for
a model that has no GPU-first replica, 503 when the directory does not answer. 401 (no valid token)
and 403 (without the scope) are Xinference's own, 422 (a body of another form) is FastAPI's.
Xinference's API keys have no `models:write`: clearing, limiting and checking
need a login.

Launching stays where it is, `POST /v1/models`: the [options](options.md) are launch arguments
there. Where a replica's prompt tokens came from is in each answer's
[usage](metrics.md#in-each-answer).

## Examples

Which replicas there are, what they hold, and what they read from each other:

```console
curl http://127.0.0.1:9997/v1/xavier/models
```

What a launch would hold. The request is the body of a launch; what it has beside is ignored:

```console
curl http://127.0.0.1:9997/v1/xavier/plan -H 'Content-Type: application/json' -d '{{
  "layers": 24, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "replica": 2,
  "xavier_gpu_cache_bytes": "256MiB", "xavier_cpu_cache_bytes": "4GiB"
}}'
```

Values that a launch would refuse are `errors` of an answer with status 200, and `valid` is then
false. `code` is one of `invalid` (not readable), `below_block`, `no_tier` (both budgets 0),
`does_not_fit`, `unsupported`; those of `warnings` are `offload_only` (one replica),
`unknown_block` (bytes only), `host_memory` (the GPU tier is host memory), `other_hosts`,
`no_gpu_tier` and `no_cpu_tier`.

Empty the stores of all replicas; vLLM's own prefix caches keep what they have:

```console
curl -X POST http://127.0.0.1:9997/v1/xavier/models/qwen2.5-instruct/clear
```

Let the tiers of a running model hold less, until the next launch:

```console
curl -X POST http://127.0.0.1:9997/v1/xavier/models/qwen2.5-instruct/budgets \\
    -H 'Content-Type: application/json' -d '{{"gpu": "64MiB", "cpu": "50%"}}'
```

From Python, `xinference_xavier.rest.Api(endpoint, token)` has a method for each route; the models
below are classes of `xinference_xavier.schemas`.

## What is taken and given

Tiers are called `gpu` and `cpu`, as in the names of the options; on a CPU-only host the first is
host memory, and `device` says so. Sizes are bytes of one replica.

{models}
"""

ROUTED: Final = (
    schemas.ModelList,
    schemas.ModelStatus,
    schemas.ClearedModel,
    schemas.BudgetsRequest,
    schemas.BudgetsResult,
    schemas.PlanRequest,
    schemas.Plan,
    schemas.Cluster,
)
"""What the routes take and give; the models inside of them follow each."""


def table(rows: Sequence[Mapping[str, str]], code: str = "") -> str:
    """Return rows of equal keys as a Markdown table, the column ``code`` in code style."""
    headings = list(rows[0])
    lines = [[heading.capitalize() for heading in headings], ["---"] * len(headings)]
    for row in rows:
        cells = {heading: text.replace("|", r"\|") for heading, text in row.items()}
        lines.append([f"`{cells[name]}`" if name == code else cells[name] for name in headings])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def commands_page() -> str:
    """Return the page of all commands, from what their ``--help`` says."""
    root = click.Context(cli.main, info_name=PROGRAM)
    return COMMANDS.format(program=PROGRAM, commands="\n\n".join(_commands(cli.main, root)))


def _commands(group: click.Group, parent: click.Context) -> Iterator[str]:
    for name in group.list_commands(parent):
        command = group.get_command(parent, name)
        if command is None:
            continue
        context = click.Context(command, info_name=name, parent=parent)
        if isinstance(command, click.Group):
            yield f"## {context.command_path}\n\n{_prose(command.help)}"
            yield from _commands(command, context)
        else:
            yield _command(command, context)


def _command(command: click.Command, context: click.Context) -> str:
    depth = "##" if context.parent is not None and context.parent.parent is None else "###"
    usage = context.get_usage().removeprefix("Usage: ")
    parts = [f"{depth} {context.command_path}", f"```text\n{usage}\n```", _prose(command.help)]
    records = (param.get_help_record(context) for param in command.params)
    rows = [{"option": record[0], "meaning": record[1]} for record in records if record]
    if rows:
        parts.append(table(rows, code="option"))
    if command.epilog:
        parts.append(_prose(command.epilog))
    return "\n\n".join(parts)


def _prose(text: str | None) -> str:
    return inspect.cleandoc(text or "")


def api_page() -> str:
    """Return the page of the HTTP API, its models from their classes."""
    seen: dict[str, type[BaseModel]] = {}
    for model in ROUTED:
        _collect(model, seen)
    return API.format(models="\n\n".join(_model(model) for model in seen.values()))


def _collect(model: type[BaseModel], seen: dict[str, type[BaseModel]]) -> None:
    """Add a model, and then those that its fields name, each once."""
    if model.__name__ in seen:
        return
    seen[model.__name__] = model
    for name in model.model_json_schema().get("$defs", {}):
        _collect(getattr(schemas, name), seen)


def _model(model: type[BaseModel]) -> str:
    found = model.model_json_schema()
    base = model.__base__
    inherited = base.model_fields if base is not None and issubclass(base, BaseModel) else {}
    rows = [
        {"field": name, "type": _type(field), "meaning": field.get("description", "")}
        for name, field in found["properties"].items()
        if name not in inherited
    ]
    parts = [f"### {model.__name__}", _prose(model.__doc__)]
    if base is not None and inherited:
        parts.append(f"All of [{base.__name__}](#{base.__name__.lower()}), and:")
    return "\n\n".join([*parts, table(rows, code="field")])


def _type(field: Mapping[str, Any]) -> str:
    """Return a field's JSON schema in words."""
    if "$ref" in field:
        name = str(field["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(each) for each in field["anyOf"]))
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{str(field['const']).lower()}`"
    kind = str(field.get("type", "anything"))
    if kind == "array":
        return f"list of {_type(field['items'])}"
    if kind == "object" and isinstance(field.get("additionalProperties"), Mapping):
        return f"object of {_type(field['additionalProperties'])} by name"
    return kind
