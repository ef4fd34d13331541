# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from xinference import extensions
from xinference.model.llm.llm_family import (
    BUILTIN_LLM_FAMILIES,
    LLM_ENGINES,
    SUPPORTED_ENGINES,
    VLLM_CLASSES,
)

from xinference_xavier import installed
from xinference_xavier.extension import create, plugin, registration
from xinference_xavier.extension.names import FINAL_REPORTS, NAME, RECORD_FINAL
from xinference_xavier.extension.vllm import cpu
from xinference_xavier.extension.vllm.models import MODEL_CLASSES

STOCK = [cls.stock_class for cls in MODEL_CLASSES]


@pytest.fixture
def stock_tables(monkeypatch: pytest.MonkeyPatch):
    """Xinference's tables with stock classes only, put back afterwards."""
    classes, engines = list(VLLM_CLASSES), dict(LLM_ENGINES)
    VLLM_CLASSES[:] = STOCK
    LLM_ENGINES.clear()
    LLM_ENGINES.update(
        {
            "with-gpu": {"vLLM": [{"llm_class": cls, "kept": True} for cls in STOCK]},
            "other": {"Transformers": [{"llm_class": object}]},
        }
    )
    yield
    VLLM_CLASSES[:] = classes
    LLM_ENGINES.clear()
    LLM_ENGINES.update(engines)


@pytest.fixture
def no_cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "cpu_build_installed", lambda: False)


@pytest.fixture
def extension(stock_tables: None, no_cpu_build: None) -> plugin.XavierExtension:
    return create()


def test_xinference_accepts_the_extension(
    stock_tables: None, no_cpu_build: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XINFERENCE_EXTENSIONS", "xinference_xavier.extension:create")
    monkeypatch.setattr(extensions, "_loaded", None)
    [loaded] = extensions.get_extensions()
    assert loaded.name == NAME
    metadata = extensions.worker_extension_metadata()
    worker = {"address": "a:1", "gpu_devices": [3, 1], "extensions": metadata}
    assert extensions.filter_worker_resources(worker, [worker]) == [3, 1]


def test_our_classes_come_first_and_stock_ones_stay(extension: Any) -> None:
    assert [*MODEL_CLASSES, *STOCK] == VLLM_CLASSES
    assert SUPPORTED_ENGINES["vLLM"] is VLLM_CLASSES


def test_models_that_stock_offers_are_offered_alike_by_our_classes(extension: Any) -> None:
    assert {
        "with-gpu": {"vLLM": [{"llm_class": cls, "kept": True} for cls in MODEL_CLASSES]},
        "other": {"Transformers": [{"llm_class": object}]},
    } == LLM_ENGINES


def test_registering_again_changes_nothing(extension: Any) -> None:
    before = list(VLLM_CLASSES)
    registration.register_model_classes()
    assert before == VLLM_CLASSES


def test_an_empty_table_is_left_for_xinference_to_fill(
    stock_tables: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "cpu_build_installed", lambda: True)
    LLM_ENGINES.clear()
    registration.register_model_classes()
    assert LLM_ENGINES == {}


def test_the_cpu_build_makes_models_available_that_stock_reserves_for_gpus(
    stock_tables: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "cpu_build_installed", lambda: True)
    monkeypatch.setattr(cpu, "cpu_build_installed", lambda: True)
    [family] = [f for f in BUILTIN_LLM_FAMILIES if f.model_name == "qwen2.5-instruct"]
    spec = next(s for s in family.model_specs if s.model_format == "pytorch")
    registration.register_model_classes()
    offers = LLM_ENGINES["qwen2.5-instruct"]["vLLM"]
    [offer] = [
        offer
        for offer in offers
        if offer["model_format"] == "pytorch"
        and offer["model_size_in_billions"] == spec.model_size_in_billions
    ]
    assert offer["llm_class"].__name__ == "GpuFirstVLLMChatModel"
    assert offer["quantizations"] == ["none"]
    formats = {(offer["model_format"], offer["model_size_in_billions"]) for offer in offers}
    assert len(formats) == len(offers)


@pytest.mark.parametrize("distribution", ["xinference", "xoscar"])
def test_an_old_host_package_stops_the_start_with_what_is_needed(
    stock_tables: None, monkeypatch: pytest.MonkeyPatch, distribution: str
) -> None:
    real = installed.version
    monkeypatch.setattr(
        installed, "version", lambda name: "0.9.0" if name == distribution else real(name)
    )
    with pytest.raises(installed.UnsupportedVersion) as refused:
        create()
    assert f"{distribution} 0.9.0 is not supported" in str(refused.value)
    assert ">= " in str(refused.value)
    assert VLLM_CLASSES == STOCK


def test_final_counters_are_kept_by_model_and_bounded(extension: Any) -> None:
    for number in range(plugin.MOST_REPORTS + 5):
        report = {"model_uid": "m" if number % 2 else "n", "replica": number}
        assert extension.control_operation(RECORD_FINAL, report) is None
    reports = [
        report
        for uid in ("m", "n")
        for report in extension.control_operation(FINAL_REPORTS, {"model_uid": uid})
    ]
    assert len(reports) == plugin.MOST_REPORTS
    assert min(report["replica"] for report in reports) == 5
    assert extension.control_operation(FINAL_REPORTS, {"model_uid": "other"}) == []


def test_an_unknown_operation_is_refused(extension: Any) -> None:
    with pytest.raises(ValueError, match="reboot"):
        extension.control_operation("reboot", {})


def test_routes_are_added_to_the_api(extension: Any) -> None:
    from fastapi import FastAPI

    app = FastAPI()
    context = SimpleNamespace(
        app=app, auth_service=None, auth_enabled=False, get_supervisor_ref=None
    )
    extension.configure_api(context)
    paths = {route.path for route in app.routes}
    assert {"/v1/models", "/v1/autostart/models", "/v1/xavier/models/{model_uid}"} <= paths
