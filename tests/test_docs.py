# SPDX-License-Identifier: Apache-2.0
"""What README and docs/ say is so: generated pages, options, commands, routes, messages, links."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import click
import pytest

from tests.extension.stock_api import Stock, client_of
from xinference_xavier import cli
from xinference_xavier.metrics.table import METRICS
from xinference_xavier.options import STOCK_OPTIONS, Deployment, XavierOptions, split_options

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "xinference_xavier"
PAGES = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md"))

BUILTIN_ONLY = {"xavier_transfer_block_num"}
"""Options of the built-in Xavier that the page on migration names."""

HOLE = "\0"
"""Stands for what differs in a message."""

NAME = r"\b(?:xavier_[a-z_]+|enable_xavier)\b"
"""Names of options differ, too: in places the code fills them in."""


def page(name: str | Path) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def each_page() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)


# -- generated pages -------------------------------------------------------------------------------


def test_generated_pages_are_current() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_docs.py"), "--check"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr


# -- the site --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a single warning: every link and anchor leads somewhere."""
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stdout + result.stderr) == (0, "")
    return folder


def test_the_site_has_every_page(site: Path) -> None:
    pages = {path.stem for path in ROOT.glob("docs/*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}


def test_the_site_asks_no_other_host_for_anything(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe|source)\b[^>]*?\bsrc=[\"']?([^\"' >]+)"
            r"|<link\b(?![^>]*\brel=[\"']?(?:canonical|next|prev))[^>]*?\bhref=[\"']?([^\"' >]+)",
            path.read_text(encoding="utf-8"),
        )
        outside = [url for pair in loaded for url in pair if re.match(r"(https?:)?//", url)]
        assert outside == [], path.name
        assert 'class="mermaid"' not in path.read_text(encoding="utf-8")
    for path in site.rglob("*.css"):
        assert re.findall(r"url\([\"']?https?://", path.read_text(encoding="utf-8")) == []


# -- links -----------------------------------------------------------------------------------------


def test_links_of_the_readme_lead_to_files() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page("README.md")) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(docs/([^)#]+\.md)\)", page("README.md")))
    assert linked == {path.name for path in ROOT.glob("docs/*.md")}


def test_every_picture_is_on_a_page() -> None:
    shown = {name for path in PAGES for name in re.findall(r"images/([\w.-]+)", page(path))}
    assert shown == {path.name for path in ROOT.glob("docs/images/*")}


def test_the_design_names_every_package() -> None:
    named = set(re.findall(r"`(\w+)`", page("docs/design.md")))
    parts = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert parts - named <= {"__init__", "__pycache__", "data"}


# -- options and commands --------------------------------------------------------------------------


def test_the_quick_start_shows_an_extra_config_that_is_accepted() -> None:
    quick = page("docs/index.md")
    config = json.loads(re.search(r"--kv-transfer-config '(\{.*?\})'", quick, re.DOTALL)[1])
    options, deployment = split_options(config["kv_connector_extra_config"])
    assert options.xavier_gpu_first
    assert deployment.xavier_directory == "127.0.0.1:9990"
    assert config["kv_role"] == "kv_both"


@each_page()
def test_pages_name_only_options_that_exist(path: Path) -> None:
    valid = {*XavierOptions.model_fields, *Deployment.model_fields, *STOCK_OPTIONS}
    valid |= {metric.name for metric in METRICS}
    if path.name == "migration.md":
        valid |= BUILTIN_ONLY
    named = set(re.findall(r"\bxavier_[a-z_]+(?=[`=\" ])", path.read_text(encoding="utf-8")))
    assert named <= valid


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the words after ``xinference-xavier`` of each command in a page."""
    fences = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line for fence in fences for line in fence.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`((?:\.venv/bin/)?xinference-xavier [^`]+)`", text)
    for line in lines:
        if found := re.match(r"(?:\.venv/bin/)?xinference-xavier (.*)", line):
            yield shlex.split(found[1])


def parsed(words: list[str]) -> str:
    """Return the path of the command that ``words`` call; click's errors where they are wrong.

    The words in capitals that stand for values are left as they are.
    """
    command: click.Command = cli.main
    context = click.Context(command, info_name="xinference-xavier")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, f"no command {name}"
        command, context = found, click.Context(found, info_name=name, parent=context)
    values, _, _ = command.make_parser(context).parse_args(words)
    for param in command.params:
        value = values.get(param.name or "")
        placeholder = isinstance(value, str) and value.isupper()
        if value is not None and not placeholder and not isinstance(param.type, click.Path):
            param.type_cast_value(context, value)
    return context.command_path


@each_page()
def test_commands_of_pages_exist_and_take_their_options(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    text = text.replace("`xinference-xavier COMMAND --help`", "")
    for words in command_lines(text):
        assert parsed(words)


def test_the_check_of_commands_finds_wrong_ones() -> None:
    text = "```console\nxinference-xavier plan --layers 24 \\\n    --gpus 1MiB\n```\n"
    (words,) = command_lines(text)
    with pytest.raises(click.NoSuchOption):
        parsed(words)
    with pytest.raises(AssertionError):
        parsed(["plans"])


# -- the API ---------------------------------------------------------------------------------------


def test_the_page_of_the_api_has_exactly_the_routes_that_exist() -> None:
    paths = client_of(Stock()).app.openapi()["paths"]
    routes = {
        f"{method.upper()} {path}"
        for path, methods in paths.items()
        if path.startswith("/v1/xavier/")
        for method in methods
    }
    told = set(re.findall(r"^\| `([A-Z]+ /v1/xavier/[^`]+)`", page("docs/api.md"), re.MULTILINE))
    assert told == routes


def test_pages_name_only_routes_that_exist() -> None:
    known = client_of(Stock()).app.openapi()["paths"]
    patterns = [re.sub(r"\{\w+\}", "[^/]+", route) + "$" for route in known]
    for path in PAGES:
        for route in re.findall(r"/v1/xavier/[\w./{}-]+", path.read_text(encoding="utf-8")):
            assert any(re.match(pattern, route) for pattern in patterns), (path.name, route)


# -- messages --------------------------------------------------------------------------------------


@functools.cache
def texts_of_the_code() -> list[str]:
    """Every text in the package and the web page's script, with holes where values go."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    str(part.value) if isinstance(part, ast.Constant) else HOLE
                    for part in node.values
                )
                found.add("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"%[-.\d]*[a-z]", HOLE, node.value))
    script = (ROOT / "frontend" / "src" / "texts.ts").read_text(encoding="utf-8")
    found.update(re.findall(r'"([^"\n]+)"', script))
    return sorted(re.sub(NAME, HOLE, text).replace("\n", " ") for text in found)


def told(message: str) -> bool:
    """Whether the code has a text with all parts of ``message``, in order, between its holes."""
    parts = [part.strip() for part in re.split(rf"\.\.\.|{NAME}", message)]
    pattern = re.compile(".*".join(re.escape(part) for part in parts if part.strip(":;,.()=")))
    return any(pattern.search(text) for text in texts_of_the_code())


def messages() -> list[str]:
    """The messages that the page on troubleshooting quotes: fences, and first cells of tables."""
    text = page("docs/troubleshooting.md")
    fences = re.findall(r"```text\n(.*?)\n```", text, re.DOTALL)
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return fences + [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]


def test_the_page_on_troubleshooting_quotes_messages() -> None:
    assert len(messages()) > 50


@pytest.mark.parametrize("message", messages())
def test_messages_on_the_page_on_troubleshooting_are_those_of_the_code(message: str) -> None:
    assert told(message)


def test_the_check_of_messages_finds_wrong_ones() -> None:
    assert not told("the peer is on some other host")
    assert not told("no directory at ... (...): no sharing until it is back")


# -- documents of the demo -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lighthouses.txt", "canals.txt"])
def test_demo_documents_are_long_prose(name: str) -> None:
    text = resources.files("xinference_xavier").joinpath("data", name).read_text(encoding="utf-8")
    words = text.split()
    assert 1700 <= len(words) <= 2200
    # Prose repeats small words, but hardly any run of eight words.
    runs = {tuple(words[i : i + 8]) for i in range(len(words) - 7)}
    assert len(runs) == len(words) - 7
