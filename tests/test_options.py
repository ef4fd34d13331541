# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from xinference_xavier.options import (
    STOCK_OPTIONS,
    Deployment,
    OptionError,
    XavierOptions,
    listen_host,
    option_table,
    split_options,
)
from xinference_xavier.sizes import Size


def test_defaults_are_the_documented_ones() -> None:
    assert XavierOptions.from_mapping({}).to_mapping() == {
        "xavier_gpu_first": False,
        "xavier_gpu_cache_bytes": 268435456,
        "xavier_cpu_cache_bytes": "10%",
        "xavier_transport": "auto",
        "xavier_load_timeout": 10.0,
        "xavier_lookup_timeout": 0.02,
        "xavier_verify": "off",
    }


def test_none_means_the_default() -> None:
    given = dict.fromkeys(XavierOptions.model_fields)
    assert XavierOptions.from_mapping(given) == XavierOptions()


@pytest.mark.parametrize(
    ("name", "value", "parsed"),
    [
        ("xavier_gpu_first", True, True),
        ("xavier_gpu_first", "true", True),
        ("xavier_gpu_first", "False", False),
        ("xavier_gpu_first", "1", True),
        ("xavier_gpu_first", 0, False),
        ("xavier_gpu_cache_bytes", "8MiB", Size(bytes=8 * 2**20)),
        ("xavier_gpu_cache_bytes", 0, Size(bytes=0)),
        ("xavier_cpu_cache_bytes", "25%", Size(percent=25.0)),
        ("xavier_transport", "SHM", "shm"),
        ("xavier_load_timeout", "2.5", 2.5),
        ("xavier_load_timeout", 600, 600.0),
        ("xavier_lookup_timeout", 0, 0.0),
        ("xavier_min_load_tokens", "512", 512),
        ("xavier_min_load_tokens", 512.0, 512),
        ("xavier_identity", "my weights v2", "my weights v2"),
        ("xavier_verify", "checksum", "checksum"),
        ("xavier_verify", False, "off"),
    ],
)
def test_values_become_their_type(name: str, value: object, parsed: object) -> None:
    found = getattr(XavierOptions.from_mapping({name: value}), name)
    assert found == parsed
    assert type(found) is type(parsed)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("xavier_gpu_first", "yes", "true or false"),
        ("xavier_gpu_first", 2, "true or false"),
        ("xavier_gpu_first", 1.0, "true or false"),
        ("xavier_gpu_cache_bytes", True, "whole bytes"),
        ("xavier_gpu_cache_bytes", -1, "0 or more"),
        ("xavier_gpu_cache_bytes", float("nan"), "whole bytes"),
        ("xavier_cpu_cache_bytes", "1.5", "whole bytes"),
        ("xavier_cpu_cache_bytes", "3 parsecs", "MiB"),
        ("xavier_transport", "rdma", "auto | cuda_ipc | shm | nixl | xoscar"),
        ("xavier_transport", 1, "auto | cuda_ipc | shm | nixl | xoscar"),
        ("xavier_load_timeout", True, "0.1 to 600 s"),
        ("xavier_load_timeout", 0, "0.1 to 600 s"),
        ("xavier_load_timeout", float("nan"), "0.1 to 600 s"),
        ("xavier_load_timeout", "nan", "0.1 to 600 s"),
        ("xavier_load_timeout", "soon", "0.1 to 600 s"),
        ("xavier_load_timeout", 10**400, "0.1 to 600 s"),
        ("xavier_lookup_timeout", -0.1, "0 to 10 s"),
        ("xavier_lookup_timeout", [1], "0 to 10 s"),
        ("xavier_min_load_tokens", 1.5, "0 to 10,000,000 tokens"),
        ("xavier_min_load_tokens", -1, "0 to 10,000,000 tokens"),
        ("xavier_min_load_tokens", False, "0 to 10,000,000 tokens"),
        ("xavier_identity", "", "1 to 256 printable characters"),
        ("xavier_identity", "a\nb", "1 to 256 printable characters"),
        ("xavier_identity", "x" * 257, "1 to 256 printable characters"),
        ("xavier_identity", 7, "1 to 256 printable characters"),
        ("xavier_verify", True, "off | checksum"),
    ],
)
def test_bad_values_are_refused_with_value_limit_and_option(
    name: str, value: object, limit: str
) -> None:
    with pytest.raises(OptionError) as caught:
        XavierOptions.from_mapping({name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}={value!r}")
    assert limit in message


def test_the_words_of_a_choice_say_all() -> None:
    with pytest.raises(OptionError) as caught:
        XavierOptions.from_mapping({"xavier_transport": "rdma"})
    assert str(caught.value).endswith("; allowed: auto | cuda_ipc | shm | nixl | xoscar")


def test_all_bad_values_are_told_at_once() -> None:
    with pytest.raises(OptionError) as caught:
        XavierOptions.from_mapping({"xavier_load_timeout": 0, "xavier_transport": "rdma"})
    assert "xavier_load_timeout=0" in str(caught.value)
    assert "xavier_transport='rdma'" in str(caught.value)


@pytest.mark.parametrize("zero", [0, "0 MiB", "0%"])
def test_a_store_without_any_tier_is_refused(zero: object) -> None:
    budgets = {"xavier_gpu_cache_bytes": zero, "xavier_cpu_cache_bytes": zero}
    with pytest.raises(OptionError, match="leave no room for any block"):
        XavierOptions.from_mapping(budgets)


@pytest.mark.parametrize("name", ["xavier_gpu_cache_bytes", "xavier_cpu_cache_bytes"])
def test_either_tier_alone_may_be_zero(name: str) -> None:
    assert getattr(XavierOptions.from_mapping({name: 0}), name) == Size(bytes=0)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("xavier_gpu_cache_byte", "xavier_gpu_cache_bytes"),
        ("xavier_cpu_cach_bytes", "xavier_cpu_cache_bytes"),
        ("xavier_gpufirst", "xavier_gpu_first"),
        ("XAVIER_VERIFY", "xavier_verify"),
        ("xavier_timeout", "xavier_load_timeout"),
        ("gpu_first", "xavier_gpu_first"),
    ],
)
def test_an_unknown_option_names_the_nearest_one(name: str, nearest: str) -> None:
    with pytest.raises(OptionError) as caught:
        XavierOptions.from_mapping({name: None})
    assert str(caught.value) == f"unknown option {name}: did you mean {nearest}?"


@pytest.mark.parametrize("name", ["zzz", "xavier_foo", "xavier_enabled", "xavier_port"])
def test_an_option_like_no_other_names_all(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        XavierOptions.from_mapping({name: 1})
    message = str(caught.value)
    assert message.startswith(f"unknown option {name}: valid: ")
    assert all(valid in message for valid in XavierOptions.model_fields)


@pytest.mark.parametrize("name", Deployment.model_fields)
def test_places_given_as_options_are_told_to_be_for_plain_vllm_only(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name}: it is for plain vLLM only"):
        XavierOptions.from_mapping({name: "x"})


@pytest.mark.parametrize("name", STOCK_OPTIONS)
def test_options_of_the_built_in_xavier_are_told_apart(name: str) -> None:
    with pytest.raises(OptionError, match="built-in Xavier"):
        XavierOptions.from_mapping({name: 1})


def test_advice_for_stock_options_names_only_existing_ones() -> None:
    words = " ".join(STOCK_OPTIONS.values()).replace(":", " ").split()
    named = {word for word in words if word.startswith("xavier_")}
    assert named
    assert named <= set(XavierOptions.model_fields)


FULL: dict[str, Any] = {
    "xavier_gpu_first": "true",
    "xavier_gpu_cache_bytes": "1.5 GB",
    "xavier_cpu_cache_bytes": "2.5%",
    "xavier_transport": "nixl",
    "xavier_load_timeout": 3,
    "xavier_lookup_timeout": "0.5",
    "xavier_min_load_tokens": 64,
    "xavier_identity": "weights-7",
    "xavier_verify": "checksum",
}


def test_a_mapping_survives_json_and_reads_back_equal() -> None:
    options = XavierOptions.from_mapping(FULL)
    assert set(options.to_mapping()) == set(XavierOptions.model_fields)
    assert XavierOptions.from_mapping(json.loads(json.dumps(options.to_mapping()))) == options


def test_options_are_hashable_picklable_and_frozen() -> None:
    options = XavierOptions.from_mapping(FULL)
    assert pickle.loads(pickle.dumps(options)) == options
    assert len({options, XavierOptions.from_mapping(FULL)}) == 1
    with pytest.raises(ValidationError):
        options.xavier_gpu_first = False  # type: ignore[misc]  # that is what is tested


def test_extra_config_is_split_into_choice_and_place() -> None:
    place = {
        "xavier_directory": "[::1]:9990",
        "xavier_namespace": "qwen",
        "xavier_member": "qwen-rep0",
        "xavier_host": "10.0.0.7",
    }
    options, deployment = split_options({**FULL, **place})
    assert options == XavierOptions.from_mapping(FULL)
    assert deployment.to_mapping() == place


def test_a_replica_has_a_name_even_when_nobody_gave_one() -> None:
    first, second = split_options({})[1], split_options({})[1]
    assert first.xavier_directory is None
    assert first.xavier_namespace == "default"
    assert first.xavier_member == second.xavier_member != ""


def test_an_unknown_key_of_the_extra_config_is_refused() -> None:
    with pytest.raises(OptionError, match="did you mean xavier_directory"):
        split_options({"xavier_directori": "127.0.0.1:1"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("xavier_directory", "localhost"),
        ("xavier_directory", ":9990"),
        ("xavier_directory", "host:0"),
        ("xavier_directory", "host:65536"),
        ("xavier_directory", "host:٣٣"),
        ("xavier_directory", 9990),
        ("xavier_directory", "http://h:9990"),
        ("xavier_directory", "tcp://h:9990"),
        ("xavier_directory", "two words:9990"),
        ("xavier_directory", " h:9990"),
        ("xavier_directory", "h :9990"),
        ("xavier_directory", "0.0.0.0:9990"),
        ("xavier_directory", "[::]:9990"),
        ("xavier_directory", "*:9990"),
        ("xavier_directory", "0:9990"),
        ("xavier_directory", "h" * 254 + ":9990"),
        ("xavier_host", ""),
        ("xavier_host", "http://h"),
        ("xavier_host", "h:9990"),
        ("xavier_host", "10.0.0.7:9990"),
        ("xavier_host", "[::1]:9990"),
        ("xavier_host", "[h]"),
        ("xavier_host", "fe80::1%a b"),
        ("xavier_host", "10.0.7"),
        ("xavier_host", "h\n"),
        ("xavier_host", "0.0.0.0"),
        ("xavier_host", "::"),
        ("xavier_host", "[::]"),
        ("xavier_host", "*"),
        ("xavier_host", "two words"),
        ("xavier_namespace", " "),
        ("xavier_member", "x" * 129),
    ],
)
def test_bad_places_are_refused(name: str, value: object) -> None:
    with pytest.raises(OptionError) as caught:
        Deployment.from_mapping({name: value})
    assert str(caught.value).startswith(f"{name}={value!r} is not allowed; allowed: ")


@pytest.mark.parametrize(
    ("host", "read"),
    [
        ("node-7.example.org", "node-7.example.org"),
        ("compose_service", "compose_service"),
        ("10.0.0.7", "10.0.0.7"),
        ("fd00::7", "fd00::7"),
        ("[fd00::7]", "fd00::7"),
        ("fe80::1%eth0", "fe80::1%eth0"),
    ],
)
def test_hosts_are_names_and_addresses_without_brackets(host: str, read: str) -> None:
    assert Deployment.from_mapping({"xavier_host": host}).xavier_host == read
    address = f"{host}:9990"
    assert Deployment.from_mapping({"xavier_directory": address}).xavier_directory == address


def test_a_listening_host_may_be_a_wildcard_and_errors_name_its_option() -> None:
    assert listen_host("0.0.0.0", option="--host") == "0.0.0.0"
    assert listen_host("[::]", option="--host") == "::"
    with pytest.raises(OptionError, match=r"^--host='h:1' is not allowed; allowed: a host name"):
        listen_host("h:1", option="--host")


@pytest.mark.parametrize("model", [XavierOptions, Deployment])
def test_the_table_tells_everything_about_every_option(
    model: type[XavierOptions] | type[Deployment],
) -> None:
    rows = option_table(model)
    assert [row["name"] for row in rows] == list(model.model_fields)
    for row in rows:
        assert list(row) == ["name", "type", "default", "unit", "limits", "help"]
        assert all(row[key] for key in ("type", "default", "help"))


def test_defaults_of_the_table_are_accepted_values() -> None:
    told = {"xavier_min_load_tokens", "xavier_identity"}
    rows = {row["name"]: row["default"] for row in option_table() if row["name"] not in told}
    assert XavierOptions.from_mapping(rows) == XavierOptions()
