# SPDX-License-Identifier: Apache-2.0
"""What xoscar does not ship: its decorator's type, and a short form of the messages of a lease.

xoscar pickles what it does not know, in a pickle of its own that costs more than all else of such
a message. Every caller and every actor of ours imports this module, so both sides know the form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import xoscar as xo
from xoscar.serialization.core import Serializer

from xinference_xavier.control.messages import Credential, LeaseGrant

Method = TypeVar("Method", bound=Callable[..., Any])


def no_lock(method: Method) -> Method:
    """Let an actor's method run beside the others instead of one after the other."""
    marked: Method = xo.no_lock(method)
    return marked


class _Plain(Serializer):  # type: ignore[misc]  # xoscar ships no types
    """Sends the fields of a message, plain values, in their order."""

    message: ClassVar[type]
    fields: ClassVar[tuple[str, ...]]

    def serial(self, obj: Any, context: Any) -> tuple[tuple[Any, ...], list[Any], bool]:
        """Return the header; there is nothing besides, and that is final."""
        return tuple([getattr(obj, name) for name in self.fields]), [], True

    def deserial(self, serialized: tuple[Any, ...], context: Any, subs: Any) -> Any:
        """Make the message. Raises TypeError for another number of fields."""
        return self.message(*serialized)


class _Credential(_Plain):
    message = Credential
    fields = ("fingerprint", "epoch", "proof")


class _LeaseGrant(_Plain):
    message = LeaseGrant
    fields = ("lease_id", "rows", "further", "missing")


_Credential.register(Credential)
_LeaseGrant.register(LeaseGrant)
