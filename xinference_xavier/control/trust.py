# SPDX-License-Identifier: Apache-2.0
"""What the members of a group prove to each other, and whoever asks them: keyed digests.

All are made from the group's secret, which itself never travels between replicas. Without a secret
they are made from what is no secret, and prove only that the caller means this very namespace,
fingerprint, member and epoch.

A digest is a bearer token: whoever reads the network can use it, for as long as the member that it
is meant for lives. xoscar's connections are neither encrypted nor safe from whoever can reach them
(docs/security.md), so a challenge would add a round trip and no safety.
"""

from __future__ import annotations

import hmac
import struct

from xinference_xavier.control.messages import Credential


class GroupKey:
    """The key of one namespace, made from the group's secret (None: there is none).

    The secret cannot be had back from it, and neither is shown by ``repr``.
    """

    __slots__ = ("_key", "namespace")

    def __init__(self, namespace: str, secret: str | None) -> None:
        self.namespace = namespace
        self._key = (secret or "").encode()
        self._key = self._digest(b"xinference-xavier group 1", namespace.encode())

    def __repr__(self) -> str:
        return f"GroupKey({self.namespace!r})"

    def admission(self) -> bytes:
        """Return what a directory is shown: members see only those that show the same.

        It is worth nothing to a peer, so that a directory that serves several groups, or is not
        theirs, cannot read their stores.
        """
        return self._digest(b"directory")

    def credential(self, fingerprint: bytes, name: str, epoch: int) -> Credential:
        """Return what that member, in that life, wants to see of whoever asks it for anything."""
        proof = self._digest(b"peer", fingerprint, name.encode(), struct.pack(">Q", epoch))
        return Credential(fingerprint, epoch, proof)

    def _digest(self, *parts: bytes) -> bytes:
        # With lengths, so that no two lists of parts are one text.
        text = b"".join(struct.pack(">Q", len(part)) + part for part in parts)
        return hmac.digest(self._key, text, "sha256")
