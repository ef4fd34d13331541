# SPDX-License-Identifier: Apache-2.0
"""The one definition of every option: name, type, default, unit, limits and help text.

The launch validation, the model class, the connector, the command line, the web UI and the
documentation's tables all read the two models of this module. :class:`XavierOptions` is what a
user chooses; :class:`Deployment` is what places one replica in its group, which Xinference's
integration fills in itself and a user of plain vLLM writes.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import CoreSchema, core_schema

from xinference_xavier.sizes import Size, parse_size

if TYPE_CHECKING:
    from typing import Self

    from pydantic import GetCoreSchemaHandler

STOCK_OPTIONS: Final[Mapping[str, str]] = {
    "xavier_cache_bytes": "use xavier_cpu_cache_bytes",
    "xavier_cache_backend": "GPU-first Xavier has a store of its own: leave it out",
    "xavier_cache_backend_config": "GPU-first Xavier has a store of its own: leave it out",
    "vllm_transfer_backend_type": "use xavier_transport",
}
"""Options of Xinference's built-in Xavier that GPU-first Xavier does not take, and what to do.

``xavier_gpu_cache_bytes`` exists in both and ``enable_xavier`` is Xinference's own switch.
"""


LONGEST_HOST: Final = 253
"""Characters of the longest name of the DNS."""

HOST_NAME: Final = re.compile(r"(?![0-9.]+$)[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""A name, which is more than numbers: systems read "0" and "10.1" as addresses."""

PREFIX: Final = "xavier_"

Transport = Literal["auto", "cuda_ipc", "shm", "nixl", "xoscar"]
TRANSPORTS: Final[tuple[str, ...]] = get_args(Transport)
"""Values of ``xavier_transport``."""

Verify = Literal["off", "checksum"]

NEARLY: Final = 0.65
"""How alike two names must be, without what all begin with, for "did you mean" (0 to 1)."""


class OptionError(ValueError):
    """A bad option. The message names the value, the limit and the option to change.

    Several bad options of one mapping are reported together, separated by ``"; "``.
    """


class _Refused(ValueError):
    """A reader's way to say: not one of mine. :meth:`Kind.parse` makes the message."""


@dataclass(frozen=True)
class Kind:
    """How values of an option are read, and how that is told to people.

    ``read(value, option)`` returns the value in its Python type; every text is for people.
    ``limits`` that say all by themselves are ``complete``, and errors leave the type's name out.
    """

    type: str
    read: Callable[[object, str], object]
    unit: str = ""
    limits: str = ""
    complete: bool = False

    def parse(self, value: object, option: str) -> object:
        """Return the value in its Python type. Raises ValueError naming value, limit, option."""
        try:
            return self.read(value, option)
        except _Refused:
            limits = f"{self.limits} {self.unit}".strip()
            parts = [limits] if self.complete else [self.type, limits]
            allowed = ", ".join(part for part in parts if part)
            raise OptionError(f"{option}={value!r} is not allowed; allowed: {allowed}") from None

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Let pydantic read fields that carry this kind with :meth:`parse` alone."""
        return core_schema.with_info_plain_validator_function(
            lambda value, info: self.parse(value, info.field_name or "")
        )


def _flag() -> Kind:
    words = {"true": True, "1": True, "false": False, "0": False}

    def read(value: object, option: str) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, int | str) and (word := str(value).strip().lower()) in words:
            return words[word]
        raise _Refused

    return Kind("true or false", read)


def _size(of: str, least: str) -> Kind:
    """Return the kind of budgets of ``least`` and more; percentages are shares of ``of``."""

    def read(value: object, option: str) -> Size:
        return value if isinstance(value, Size) else parse_size(value, option=option)

    limits = (
        f"0, or not below {least} (checked when the model is loaded); a percentage is a share "
        f"of {of}"
    )
    return Kind("size", read, unit="bytes", limits=limits)


def _number(low: float, high: float, unit: str) -> Kind:
    """Return the kind of finite numbers from ``low`` to ``high``."""

    def read(value: object, option: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise _Refused
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise _Refused from None
        # NaN compares false with everything, so it fails here too.
        if not low <= number <= high:
            raise _Refused
        return number

    return Kind("number", read, unit=unit, limits=f"{low:g} to {high:g}")


def _whole_number(low: int, high: int, unit: str) -> Kind:
    """Return the kind of whole numbers from ``low`` to ``high``."""
    number = _number(low, high, unit)

    def read(value: object, option: str) -> int:
        found = number.read(value, option)
        if not isinstance(found, float) or not found.is_integer():
            raise _Refused
        return int(found)

    return Kind("whole number", read, unit=unit, limits=f"{low:,} to {high:,}")


def _choice(*words: str) -> Kind:
    """Return the kind of a few words, in any case."""

    def read(value: object, option: str) -> str:
        # YAML reads the bare word off as false.
        word = "off" if value is False else value
        if isinstance(word, str) and word.strip().lower() in words:
            return word.strip().lower()
        raise _Refused

    return Kind("choice", read, limits=" | ".join(words), complete=True)


def _text(longest: int) -> Kind:
    def read(value: object, option: str) -> str:
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise _Refused
        if len(value) > longest:
            raise _Refused
        return value

    return Kind("text", read, limits=f"1 to {longest} printable characters")


def _host() -> Kind:
    """Return the kind of hosts that others can connect to (R11)."""
    limits = (
        "a host name or address that the other replicas reach, without scheme and port, never a "
        "wildcard"
    )

    def read(value: object, option: str) -> str:
        if _is_wildcard(host := _bare_host(value)):
            raise _Refused
        return host

    return Kind("host", read, limits=limits, complete=True)


def _address() -> Kind:
    """Return the kind of addresses that others can connect to: a host, a colon and a port."""
    limits = "a host without scheme, never a wildcard; port 1 to 65535; IPv6 as [::1]:9990"

    def read(value: object, option: str) -> str:
        text = value if isinstance(value, str) else ""
        host, _, port = text.rpartition(":")
        if _is_wildcard(_bare_host(host)) or not (port.isascii() and port.isdecimal()):
            raise _Refused
        if len(port) > 5 or not 1 <= int(port) <= 65535:
            raise _Refused
        return text

    return Kind("host:port", read, limits=limits)


def listen_host(value: object, *, option: str) -> str:
    """Return a host to listen on, IPv6 without brackets; other than for peers, "0.0.0.0" is one.

    Raises :class:`OptionError` naming ``option``.
    """
    limits = "a host name or address of this machine, without scheme and port"
    kind = Kind("host", lambda value, _: _bare_host(value), limits=limits, complete=True)
    return str(kind.parse(value, option))


def _bare_host(value: object) -> str:
    """Return a host's name or address, IPv6 without brackets; the one reader of all hosts."""
    if not isinstance(value, str) or len(value) > LONGEST_HOST or " " in value:
        raise _Refused
    if value.startswith("[") and value.endswith("]"):
        if isinstance(_ip_address(value[1:-1]), IPv6Address):
            return value[1:-1]
        raise _Refused
    # A scheme or a port has a colon, which an IPv6 address has, but no name.
    if _ip_address(value) is None and not HOST_NAME.fullmatch(value):
        raise _Refused
    return value


def _ip_address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _is_wildcard(host: str) -> bool:
    address = _ip_address(host)
    return address is not None and address.is_unspecified


class _Options(BaseModel):
    """What both models share: reading from and writing to plain mappings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Self:
        """Read options from plain values; None means the default. Raises :class:`OptionError`."""
        given = {name: value for name, value in values.items() if value is not None}
        _refuse_unknown(values, cls.model_fields)
        try:
            return cls(**cast("dict[str, Any]", given))
        except ValidationError as error:
            raise OptionError("; ".join(_messages(error))) from None

    def to_mapping(self) -> dict[str, Any]:
        """Return plain JSON values that :meth:`from_mapping` reads back to an equal object."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {
            name: value.to_plain() if isinstance(value, Size) else value
            for name, value in values.items()
            if value is not None
        }


class XavierOptions(_Options):
    """What a user can set: launch options in Xinference, extra config keys in plain vLLM."""

    xavier_gpu_first: Annotated[bool, _flag()] = Field(
        default=False,
        description="Share KV cache between the replicas through a GPU-first store. "
        "Experimental; without it nothing of stock Xinference changes.",
    )
    xavier_gpu_cache_bytes: Annotated[Size, _size("the device's memory", "one KV block")] = Field(
        default=Size(bytes=256 * 2**20),
        description="Budget of the device tier of each replica, rounded down to whole KV blocks. "
        "0 keeps blocks in the CPU tier only. Xinference takes it out of vLLM's share of the GPU; "
        "on a CPU-only host this tier is host memory.",
    )
    xavier_cpu_cache_bytes: Annotated[Size, _size("the host's memory limit", "three KV blocks")] = (
        Field(
            default=Size(percent=10.0),
            description="Budget of the CPU tier of each replica, to which the device tier's least "
            "recently used blocks move. 0 turns the tier off.",
        )
    )
    xavier_transport: Annotated[Transport, _choice(*TRANSPORTS)] = Field(
        default="auto",
        description="How blocks come from another replica: cuda_ipc maps its GPU memory on one "
        "host, shm its host memory, nixl reads memory directly where that works (RDMA, or one "
        "host), xoscar copies over sockets elsewhere; auto takes the first of them that works.",
    )
    xavier_load_timeout: Annotated[float, _number(0.1, 600, "s")] = Field(
        default=10.0,
        description="Longest time for loading a request's blocks; what is missing then is "
        "computed by the engine.",
    )
    xavier_lookup_timeout: Annotated[float, _number(0, 10, "s")] = Field(
        default=0.02,
        description="Longest time that a request waits for another replica to reserve its "
        "blocks; after it, the lookup is a miss. 0 never waits.",
    )
    xavier_min_load_tokens: Annotated[int | None, _whole_number(0, 10_000_000, "tokens")] = Field(
        default=None,
        description="Shorter hits are computed instead of loaded. By default decided per request, "
        "from the measured speed of loads and of prefill.",
    )
    xavier_identity: Annotated[str | None, _text(256)] = Field(
        default=None,
        description="Identity of the model's weights; replicas share only when it is equal. By "
        "default derived from the model's files.",
    )
    xavier_verify: Annotated[Verify, _choice(*get_args(Verify))] = Field(
        default="off",
        description="checksum: sum each block when it is published and compare after each load; "
        "a block that differs is computed again.",
    )

    @model_validator(mode="after")
    def _some_tier(self) -> XavierOptions:
        tiers = (self.xavier_gpu_cache_bytes, self.xavier_cpu_cache_bytes)
        if not any(size.bytes or size.percent for size in tiers):
            raise OptionError(
                "xavier_gpu_cache_bytes=0 and xavier_cpu_cache_bytes=0 leave no room for any "
                "block; give at least one of them a size"
            )
        return self


def _default_member() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


class Deployment(_Options):
    """Where one replica belongs. In Xinference nobody writes these; with plain vLLM the user."""

    xavier_directory: Annotated[str | None, _address()] = Field(
        default=None,
        description="Address of the directory through which replicas find each other. Without "
        "one a replica has its own tiers only.",
    )
    xavier_namespace: Annotated[str, _text(128)] = Field(
        default="default",
        description="Name of the group of replicas inside the directory; one per launched model.",
    )
    xavier_member: Annotated[str, _text(128)] = Field(
        default_factory=_default_member,
        description="Name of this replica, unique in its group. By default the host's name and "
        "the process id.",
    )
    xavier_host: Annotated[str | None, _host()] = Field(
        default=None,
        description="Host name or address under which the other replicas reach this one. By "
        "default the local address of the route to the directory.",
    )


DEFAULT_TEXT: Final[Mapping[str, str]] = {
    "xavier_min_load_tokens": "measured",
    "xavier_identity": "from the model's files",
    "xavier_directory": "none",
    "xavier_member": "host name and process id",
    "xavier_host": "address of the route to the directory",
}
"""How a default is told where it is no plain value."""


def split_options(extra: Mapping[str, object]) -> tuple[XavierOptions, Deployment]:
    """Read a connector's extra config, which holds both models' keys. Raises OptionError."""
    _refuse_unknown(extra, [*XavierOptions.model_fields, *Deployment.model_fields])
    placing = {name: value for name, value in extra.items() if name in Deployment.model_fields}
    chosen = {name: value for name, value in extra.items() if name not in placing}
    return XavierOptions.from_mapping(chosen), Deployment.from_mapping(placing)


def option_table(model: type[_Options] = XavierOptions) -> list[dict[str, str]]:
    """Return one row per option of ``model``, for docs and UI, in order of definition.

    Keys: ``name, type, default, unit, limits, help``; all values are text.
    """
    rows = []
    for name, field in model.model_fields.items():
        kind = next(item for item in field.metadata if isinstance(item, Kind))
        rows.append(
            {
                "name": name,
                "type": kind.type,
                "default": DEFAULT_TEXT.get(name) or _shown(field.default),
                "unit": kind.unit,
                "limits": kind.limits,
                "help": field.description or "",
            }
        )
    return rows


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _refuse_unknown(names: Iterable[str], valid: Iterable[str]) -> None:
    valid = list(valid)
    problems = []
    for name in names:
        if name in valid:
            continue
        problems.append(f"unknown option {name}: {_advice(str(name), valid)}")
    if problems:
        raise OptionError("; ".join(problems))


def _advice(name: str, valid: list[str]) -> str:
    """Return what to do about a name that is not ``valid``."""
    if name in STOCK_OPTIONS:
        return f"it belongs to Xinference's built-in Xavier; {STOCK_OPTIONS[name]}"
    if name in Deployment.model_fields:
        return (
            "it is for plain vLLM only, where it is a key of kv_connector_extra_config; "
            "Xinference fills it in: leave it out"
        )
    # What all names begin with would make any two of them alike.
    ends = {known.removeprefix(PREFIX): known for known in valid}
    end = name.lower().removeprefix(PREFIX)
    if nearest := difflib.get_close_matches(end, ends, n=1, cutoff=NEARLY):
        return f"did you mean {ends[nearest[0]]}?"
    return f"valid: {', '.join(valid)}"


def _messages(error: ValidationError) -> Iterable[str]:
    for item in error.errors(include_url=False):
        cause = item.get("ctx", {}).get("error")
        yield str(cause) if cause is not None else item["msg"]
