"""Facts of the machine that determine the layout within a block. Used in each vLLM process that names its KV."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["platform_facts"]

_INSTRUCTION_SETS: dict[str, Callable[[], bool]] = {
    "amx": lambda: torch.cpu._is_amx_tile_supported(),
    "avx512": lambda: torch.cpu._is_avx512_supported(),
}


def platform_facts() -> list[str]:
    """vLLM's platform. Its CPU attention packs keys for the CPU's instruction set, with the same backend name and
    shapes for all of them."""
    from vllm.platforms import current_platform

    facts = [current_platform.device_type, str(current_platform.fp8_dtype())]
    if current_platform.is_cpu():
        facts.append(current_platform.get_cpu_architecture().name)
        facts += [f"{name} {supported()}" for name, supported in _INSTRUCTION_SETS.items()]
    return facts
