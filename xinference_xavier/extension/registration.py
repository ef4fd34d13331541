# SPDX-License-Identifier: Apache-2.0
"""Puts our model classes before the stock ones of Xinference's vLLM engine.

Xinference's own registration hook must be set before its model package is imported, and that has
always happened when an extension is loaded. So the list behind the engine is extended in place,
as Xinference's repeated installations do, and the table that was made from it is mended: making
it again would ask every engine about every model, which takes many seconds.
"""

from __future__ import annotations

from typing import Any, Final

from xinference.model.llm import check_format_with_engine
from xinference.model.llm.custom import get_user_defined_llm_families
from xinference.model.llm.llm_family import BUILTIN_LLM_FAMILIES, LLM_ENGINES, VLLM_CLASSES

from xinference_xavier.extension.vllm.cpu import cpu_build_installed
from xinference_xavier.extension.vllm.models import MODEL_CLASSES

ENGINE: Final = "vLLM"


def register_model_classes() -> None:
    """Let the vLLM engine use our classes in this process. Idempotent."""
    missing = [cls for cls in MODEL_CLASSES if cls not in VLLM_CLASSES]
    if not missing:
        return
    VLLM_CLASSES[:0] = missing
    # An empty table is still to be made by Xinference, and then with our classes.
    if LLM_ENGINES and cpu_build_installed():
        _offer_on_cpu()
    _replace_stock_classes()


def _replace_stock_classes() -> None:
    """Give every model that the vLLM engine offers our class instead of the stock one."""
    ours = {cls.stock_class: cls for cls in MODEL_CLASSES}
    for engines in LLM_ENGINES.values():
        for offer in engines.get(ENGINE, ()):
            offer["llm_class"] = ours.get(offer["llm_class"], offer["llm_class"])


def _offer_on_cpu() -> None:
    """Let the vLLM engine offer what its CPU build can run; stock classes ask for a GPU."""
    for family in [*BUILTIN_LLM_FAMILIES, *get_user_defined_llm_families()]:
        if offers := _offers(family):
            LLM_ENGINES.setdefault(family.model_name, {})[ENGINE] = offers


def _offers(family: Any) -> list[dict[str, Any]]:
    """Return what the engine can run of ``family``: one entry per format and size."""
    offers: dict[tuple[str, Any], dict[str, Any]] = {}
    for spec in family.model_specs:
        if not check_format_with_engine(spec.model_format, ENGINE):
            continue
        matching = (cls for cls in MODEL_CLASSES if cls.match(family, spec, spec.quantization))
        cls = next(matching, None)
        if cls is None:
            continue
        offer = offers.setdefault(
            (spec.model_format, spec.model_size_in_billions),
            {
                "model_name": family.model_name,
                "model_format": spec.model_format,
                "model_size_in_billions": spec.model_size_in_billions,
                "quantizations": [],
                "llm_class": cls,
            },
        )
        if spec.quantization not in offer["quantizations"]:
            offer["quantizations"].append(spec.quantization)
        if hasattr(spec, "multimodal_projectors"):
            offer.setdefault("multimodal_projectors", spec.multimodal_projectors)
    return list(offers.values())
