# SPDX-License-Identifier: Apache-2.0
"""Where a replica's secret comes from, and what is made of it."""

from __future__ import annotations

import itertools
import os
import pickle
from pathlib import Path

import pytest

from xinference_xavier.control.client import Contact
from xinference_xavier.control.trust import GroupKey
from xinference_xavier.launch_note import ENVIRONMENT, LaunchNote
from xinference_xavier.options import OptionError
from xinference_xavier.secret import (
    FILE_VARIABLE,
    LONGEST,
    VARIABLE,
    environment_secret,
    group_secret,
)

SECRET = "correct horse battery"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text(f"{SECRET}\n")
    return path


def test_nobody_needs_to_give_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert group_secret({}) is None


def test_a_secret_comes_from_the_environment_or_from_a_private_file(file: Path) -> None:
    assert environment_secret({VARIABLE: SECRET}) == SECRET
    assert environment_secret({FILE_VARIABLE: str(file)}) == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601])
def test_a_file_that_others_may_use_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(OptionError, match=f"{FILE_VARIABLE}={file} has mode {mode:04o}.*chmod 600"):
        environment_secret({FILE_VARIABLE: str(file)})


def test_what_a_link_leads_to_is_looked_at(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    assert environment_secret({FILE_VARIABLE: str(link)}) == SECRET
    file.chmod(0o644)
    with pytest.raises(OptionError, match="0644"):
        environment_secret({FILE_VARIABLE: str(link)})


def test_a_path_that_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path, reason in [
        (tmp_path / "nothing", "No such file"),
        (tmp_path, "Is a directory"),
        (pipe, "no regular file"),
    ]:
        with pytest.raises(OptionError, match=f"{FILE_VARIABLE}={path}.*{reason}"):
            environment_secret({FILE_VARIABLE: str(path)})


@pytest.mark.parametrize("secret", ["", "short", "x" * (LONGEST + 1), "with a \0 character", "äöü"])
def test_a_bad_secret_is_named_by_where_it_is_and_not_shown(file: Path, secret: str) -> None:
    with pytest.raises(OptionError, match=f"{VARIABLE} holds.*16 to 1024") as refused:
        environment_secret({VARIABLE: secret})
    assert not secret or secret not in str(refused.value)
    file.write_text(secret)
    with pytest.raises(OptionError, match=f"{FILE_VARIABLE}.*holds"):
        environment_secret({FILE_VARIABLE: str(file)})


def test_a_file_that_is_no_text_is_refused(file: Path) -> None:
    file.write_bytes(b"\xff\xfe" * 20)
    with pytest.raises(OptionError, match="it is no text"):
        environment_secret({FILE_VARIABLE: str(file)})


def test_two_sources_at_once_are_refused(file: Path) -> None:
    with pytest.raises(OptionError, match="both set"):
        environment_secret({VARIABLE: SECRET, FILE_VARIABLE: str(file)})


# -- from the launcher -----------------------------------------------------------------------------


def test_what_the_launcher_gives_goes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note = LaunchNote("given by the launcher")
    monkeypatch.setenv(ENVIRONMENT, note.path)
    assert group_secret({VARIABLE: SECRET}) == "given by the launcher"
    assert (note.reason(), note.peer()) == (None, None)
    note.close()


def test_a_launcher_that_is_gone_fails_the_launch_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    note = LaunchNote("given by the launcher")
    monkeypatch.setenv(ENVIRONMENT, note.path)
    note.close()
    with pytest.raises(OptionError, match="launcher's note"):
        group_secret({VARIABLE: SECRET})


# -- what is made of it ----------------------------------------------------------------------------

FACTS = {
    "namespace": ("a", "b"),
    "secret": (SECRET, SECRET + ".", None),
    "fingerprint": (b"f" * 32, b"g" * 32),
    "name": ("rep0", "rep1"),
    "epoch": (7, 8),
}


def test_a_proof_is_for_one_member_in_one_life_and_one_secret() -> None:
    proofs = {}
    for namespace, secret, fingerprint, name, epoch in itertools.product(*FACTS.values()):
        shown = GroupKey(namespace, secret).credential(fingerprint, name, epoch)
        assert (shown.fingerprint, shown.epoch, len(shown.proof)) == (fingerprint, epoch, 32)
        proofs[shown.proof] = (namespace, secret, fingerprint, name, epoch)
    assert len(proofs) == 2 * 3 * 2 * 2 * 2


def test_what_the_directory_is_shown_opens_no_store() -> None:
    key = GroupKey("a", SECRET)
    assert key.admission() == GroupKey("a", SECRET).admission()
    assert len({GroupKey(*of).admission() for of in itertools.product("ab", [SECRET, None])}) == 4
    for fingerprint in (b"f" * 32, b""):
        assert key.credential(fingerprint, "", 0).proof != key.admission()


def test_names_cannot_be_shifted_into_one_another() -> None:
    key = GroupKey("a", SECRET)
    assert key.credential(b"fg", "h", 7).proof != key.credential(b"f", "gh", 7).proof
    assert GroupKey("ab", "c" * 16).admission() != GroupKey("a", "b" + "c" * 16).admission()


def test_nothing_shows_a_secret_or_a_proof() -> None:
    key = GroupKey("a", SECRET)
    shown = key.credential(b"f" * 32, "rep0", 7)
    for text in map(repr, (key, shown, Contact("host:1", shown), {"key": key})):
        assert SECRET not in text
        assert "proof" not in text
        assert repr(shown.proof)[2:-1] not in text
        assert shown.proof.hex() not in text
    assert SECRET.encode() not in pickle.dumps(key)


def test_a_contact_travels_as_text() -> None:
    contact = Contact("[fd00::1]:99", GroupKey("a", SECRET).credential(b"f" * 32, "rep 0", 7))
    assert Contact.from_text(contact.to_text()) == contact
    with pytest.raises(ValueError, match="unpack"):
        Contact.from_text("host:1")
