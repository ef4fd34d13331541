# SPDX-License-Identifier: Apache-2.0
"""Puts our model classes before the stock ones of Xinference's vLLM engine.

Xinference's own registration hook must be set before its model package is imported, and that has
always happened when an extension is loaded. So the list behind the engine is extended in place,
as Xinference's repeated installations do, and the table made from it is made again.
"""

from __future__ import annotations

from typing import Any

from xinference.model.llm import generate_engine_config_by_model_family
from xinference.model.llm.custom import get_user_defined_llm_families
from xinference.model.llm.llm_family import BUILTIN_LLM_FAMILIES, LLM_ENGINES, VLLM_CLASSES

from xinference_xavier.extension.vllm.models import MODEL_CLASSES


def register_model_classes() -> None:
    """Let the vLLM engine use our classes in this process. Idempotent."""
    VLLM_CLASSES[:0] = [cls for cls in MODEL_CLASSES if cls not in VLLM_CLASSES]
    if not LLM_ENGINES:
        # Xinference has not made its table yet and will make it with our classes.
        return
    engines: dict[str, Any] = {}
    for family in [*BUILTIN_LLM_FAMILIES, *get_user_defined_llm_families()]:
        generate_engine_config_by_model_family(family, engines)
    LLM_ENGINES.clear()
    LLM_ENGINES.update(engines)
