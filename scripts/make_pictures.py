# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/, drawn as SVG: they need no script and no network where they are shown.

``make_docs`` writes them. Each picture is a light card that reads on light and dark pages alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

INK: Final = "#1f2937"
QUIET: Final = "#6b7280"
PAPER: Final = "#ffffff"
AREA: Final = "#f3f4f6"
ENGINE: Final = "#dbeafe"
DEVICE: Final = "#bbf7d0"
HOST: Final = "#fde68a"
CONTROL: Final = "#e9d5ff"
COMPUTED: Final = "#fecaca"

LINE_HEIGHT: Final = 17


class Picture:
    """Boxes, arrows and text on a card of ``width`` x ``height`` pixels."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{INK}"/>'
            "</marker></defs>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10" '
            f'fill="{PAPER}" stroke="#d1d5db"/>',
        ]

    def area(self, x: int, y: int, width: int, height: int, title: str) -> None:
        """Draw a frame around other things, with its name at the top."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{AREA}" '
            f'stroke="{QUIET}" stroke-dasharray="4 3"/>'
        )
        self.text(x + width / 2, y + 19, [title], bold=True)

    def box(self, x: int, y: int, width: int, height: int, fill: str, *lines: str) -> None:
        """Draw a box; its first line is its name."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" '
            f'stroke="{INK}"/>'
        )
        top = y + height / 2 - LINE_HEIGHT * (len(lines) - 1) / 2 + 4.5
        self.text(x + width / 2, top, lines[:1], bold=True)
        self.text(x + width / 2, top + LINE_HEIGHT, lines[1:])

    def text(
        self,
        x: float,
        y: float,
        lines: Sequence[str],
        *,
        bold: bool = False,
        anchor: str = "middle",
        colour: str = INK,
    ) -> None:
        """Write lines; ``y`` is the first one's base line."""
        weight = ' font-weight="600"' if bold else ""
        for number, line in enumerate(lines):
            self._parts.append(
                f'<text x="{x:g}" y="{y + LINE_HEIGHT * number:g}" text-anchor="{anchor}" '
                f'fill="{colour}"{weight}>{escape(line)}</text>'
            )

    def arrow(self, *points: tuple[int, int], both: bool = False, dashed: bool = False) -> None:
        """Draw a line through the points, with a tip at its end, or at both ends."""
        path = " ".join(f"{x},{y}" for x, y in points)
        start = ' marker-start="url(#tip)"' if both else ""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5" '
            f'marker-end="url(#tip)"{start}{dashes}/>'
        )

    def line(self, x: int, top: int, bottom: int) -> None:
        """Draw a vertical line: somebody's time."""
        self._parts.append(
            f'<line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}" stroke="{QUIET}" '
            'stroke-dasharray="3 3"/>'
        )

    def svg(self) -> str:
        """Return the picture."""
        return "\n".join([*self._parts, "</svg>", ""])


def overview() -> Picture:
    """Two replicas with their stores, and the directory."""
    picture = Picture("Two replicas, each with a store of two tiers, and one directory", 800, 350)
    picture.box(300, 16, 200, 56, CONTROL, "Directory", "who holds which block")
    for x, name in ((24, "Replica A"), (496, "Replica B")):
        picture.area(x, 104, 280, 236, name)
        picture.box(x + 20, 136, 240, 52, ENGINE, "vLLM", "its KV cache, its prefix cache")
        picture.box(x + 20, 216, 240, 48, DEVICE, "GPU tier", "xavier_gpu_cache_bytes")
        picture.box(x + 20, 280, 240, 48, HOST, "CPU tier", "xavier_cpu_cache_bytes")
        picture.arrow((x + 80, 188), (x + 80, 216))
        picture.text(x + 90, 207, ["save"], anchor="start", colour=QUIET)
        picture.arrow((x + 190, 216), (x + 190, 188))
        picture.text(x + 200, 207, ["load"], anchor="start", colour=QUIET)
        picture.arrow((x + 140, 264), (x + 140, 280), both=True)
    picture.arrow((164, 104), (300, 50), both=True, dashed=True)
    picture.arrow((636, 104), (500, 50), both=True, dashed=True)
    picture.text(400, 96, ["new and gone blocks,", "told in batches"], colour=QUIET)
    picture.arrow((284, 240), (484, 240), (484, 162), (516, 162))
    picture.text(394, 216, ["A's blocks,", "loaded by B"])
    picture.text(400, 260, ["by CUDA IPC,", "shared memory,", "NIXL or xoscar"], colour=QUIET)
    return picture


def prompt() -> Picture:
    """Where the blocks of a prompt come from."""
    picture = Picture("The blocks of a prompt, and where each of them comes from", 760, 250)
    picture.text(24, 30, ["A prompt in blocks of 16 tokens, from its start:"], anchor="start")
    sources = (
        (3, ENGINE, "1  vLLM's own", "prefix cache", "nothing to do"),
        (2, DEVICE, "2  own GPU tier", "", "copied"),
        (2, HOST, "3  own CPU tier", "", "copied"),
        (4, CONTROL, "4  another replica,", "either of its tiers", "leased, copied, compared"),
        (2, COMPUTED, "5  the rest", "", "computed, then saved"),
    )
    x = 24
    for count, fill, name, more, what in sources:
        for block in range(count):
            picture.box(x + 52 * block, 50, 48, 40, fill, "")
        width = 52 * count - 4
        picture.arrow((x + width // 2, 150), (x + width // 2, 96))
        lines = [name, more] if more else [name]
        picture.text(x + width / 2, 172, lines)
        picture.text(x + width / 2, 172 + LINE_HEIGHT * len(lines), [what], colour=QUIET)
        x += 52 * count + 4
    picture.text(
        24,
        236,
        [
            "The first block that nobody holds, or that does not arrive, ends it: "
            "vLLM computes the rest."
        ],
        anchor="start",
        colour=QUIET,
    )
    return picture


def block() -> Picture:
    """The life of a stored block."""
    picture = Picture(
        "The life of a block: saved, demoted, evicted, loaded from either tier", 760, 290
    )
    picture.box(24, 100, 150, 60, ENGINE, "KV block of vLLM", "full, computed")
    picture.box(290, 40, 160, 60, DEVICE, "GPU tier", "a slot, immutable")
    picture.box(290, 190, 160, 60, HOST, "CPU tier", "a slot, immutable")
    picture.box(590, 190, 140, 60, COMPUTED, "gone", "evicted")
    picture.box(590, 40, 140, 60, ENGINE, "KV block", "of any replica")
    picture.arrow((174, 115), (230, 70), (290, 70))
    picture.text(196, 62, ["save, after the", "forward"], anchor="end", colour=QUIET)
    picture.arrow((174, 145), (230, 220), (290, 220), dashed=True)
    picture.text(
        24,
        196,
        ["if every block of the", "GPU tier is leased,", "or that tier is off"],
        anchor="start",
        colour=QUIET,
    )
    picture.arrow((340, 100), (340, 190))
    picture.text(332, 142, ["demotion of the", "least recently used"], anchor="end", colour=QUIET)
    picture.arrow((400, 190), (400, 100), dashed=True)
    picture.text(408, 142, ["promotion on a hit", "(on a GPU)"], anchor="start", colour=QUIET)
    picture.arrow((450, 232), (590, 232))
    picture.text(520, 224, ["room is needed"], colour=QUIET)
    picture.arrow((450, 60), (590, 60))
    picture.text(520, 52, ["load"], colour=QUIET)
    picture.arrow((450, 202), (550, 202), (550, 84), (590, 84))
    picture.text(558, 150, ["load"], anchor="start", colour=QUIET)
    picture.text(
        24,
        276,
        ["A leased block neither moves nor goes until its lease ends."],
        anchor="start",
        colour=QUIET,
    )
    return picture


def load() -> Picture:
    """A load from another replica, over time."""
    picture = Picture("A load from another replica: reserve, copy, compare, release", 760, 410)
    columns = (
        (110, "Reader: engine", ENGINE),
        (300, "Reader: load thread", AREA),
        (480, "Source: its peer", CONTROL),
        (660, "Source: its tiers", DEVICE),
    )
    for x, name, fill in columns:
        picture.box(x - 85, 16, 170, 32, fill, name)
        picture.line(x, 48, 346)

    def message(y: int, start: int, end: int, text: str, *, dashed: bool = False) -> None:
        picture.arrow((start, y), (end, y), dashed=dashed)
        picture.text((start + end) / 2, y - 6, [text])

    message(84, 110, 480, "reserve these blocks (from a control thread)")
    message(116, 480, 110, "leased: tier, slot, generation of each", dashed=True)
    message(156, 110, 300, "vLLM has allocated: load")
    message(188, 300, 660, "read the generations: are they the promised ones?")
    message(220, 660, 300, "copy the slots")
    message(252, 300, 660, "read the generations again: still the same?")
    message(292, 300, 110, "these blocks are good", dashed=True)
    message(324, 110, 480, "release the leases")
    picture.text(
        24,
        374,
        [
            "Whatever fails or is late, exactly the blocks that are not good are computed.",
            "The leases are renewed until the copy ends.",
        ],
        anchor="start",
        colour=QUIET,
    )
    return picture


def processes() -> Picture:
    """Which process has which part."""
    picture = Picture(
        "The processes of two replicas and their directory, and the parts in each", 840, 400
    )
    picture.area(16, 16, 460, 368, "Replica A")
    picture.area(32, 46, 428, 140, "EngineCore: scheduler side")
    picture.box(44, 78, 128, 40, ENGINE, "vLLM", "its scheduler")
    picture.box(200, 78, 120, 40, AREA, "lookup, loads,", "saves")
    picture.box(200, 134, 120, 40, HOST, "index")
    picture.box(348, 78, 100, 96, CONTROL, "control", "thread:", "peer, mirror")
    picture.arrow((172, 98), (200, 98), both=True)
    picture.arrow((260, 118), (260, 134), both=True)
    picture.arrow((320, 98), (348, 98), both=True)
    picture.arrow((320, 154), (348, 154), both=True)
    picture.area(32, 246, 428, 122, "Worker of each rank")
    picture.box(48, 286, 110, 60, ENGINE, "KV cache")
    picture.box(188, 286, 120, 60, AREA, "copy and load", "threads")
    picture.box(338, 286, 110, 60, DEVICE, "arenas", "of both tiers")
    picture.arrow((158, 316), (188, 316), both=True)
    picture.arrow((308, 316), (338, 316), both=True)
    picture.arrow((120, 186), (120, 246))
    picture.text(128, 220, ["jobs, in the step's metadata"], anchor="start", colour=QUIET)
    picture.arrow((400, 246), (400, 186))
    picture.text(392, 236, ["results"], anchor="end", colour=QUIET)
    picture.box(650, 34, 170, 52, CONTROL, "Directory", "beside the supervisor")
    picture.area(650, 150, 170, 234, "Replica B")
    picture.box(666, 190, 138, 56, CONTROL, "EngineCore", "peer")
    picture.box(666, 306, 138, 56, DEVICE, "worker", "load threads")
    picture.arrow((448, 94), (560, 94), (560, 60), (650, 60), both=True)
    picture.text(604, 54, ["deltas"], colour=QUIET)
    picture.arrow((690, 190), (690, 86), both=True)
    picture.arrow((666, 216), (560, 216), (560, 150), (448, 150))
    picture.text(568, 172, ["reserve,", "renew,", "release"], anchor="start", colour=QUIET)
    picture.arrow((448, 330), (666, 330))
    picture.text(564, 322, ["its blocks"], colour=QUIET)
    picture.text(564, 350, ["by CUDA IPC, shared", "memory, NIXL or xoscar"], colour=QUIET)
    return picture


PICTURES: Final = {
    "overview.svg": overview,
    "prompt.svg": prompt,
    "block.svg": block,
    "load.svg": load,
    "processes.svg": processes,
}
"""By file name below docs/images."""


def pictures() -> dict[str, str]:
    """Return the SVG of each picture by its path below docs."""
    return {f"images/{name}": draw().svg() for name, draw in PICTURES.items()}
