"""Which layout of its KV an engine is asked for by `kvdepot.layout`, and whether it has it.

connector.py calls it in the engine core. Every release that is served (versions.py) settles the layout there, once, for
all workers and KV cache groups: a layout in VLLM_KV_CACHE_LAYOUT has precedence, what a connector asks for comes next,
and if an attention backend does not declare it, vLLM logs a warning and takes another. The layout that results is part
of the namespace (identity.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["LAYOUTS", "check_layout", "required_layout"]

log = init_logger(__name__)

LAYOUTS = ("engine", "blocks")
"""Whatever the engine chooses; or all layers of a block side by side, so that a block is one piece of a copy."""


def required_layout(setting: str, vllm_config: VllmConfig) -> str | None:
    """vLLM's name for the layout of `kvdepot.layout`; None: the engine chooses.

    Tokens come before heads within a layer's block, as in vLLM's default, except where kernels read heads first: on
    CPUs, FlashInfer on GPUs with compute capability 10, b12x on 12. MLA on CPUs declares no layouts, and fails at its
    first step if a layer's blocks are apart.
    """
    if setting != "blocks":
        return None
    if current_platform.is_cpu():
        return None if vllm_config.model_config.use_mla else "BLHNC"
    capability = current_platform.get_device_capability()
    return "BLHNC" if capability is not None and capability.major in (10, 12) else "BLNHC"


def check_layout(setting: str, vllm_config: VllmConfig) -> None:
    """Warn if the layers of a block do not lie side by side although `kvdepot.layout` asks for it."""
    if setting != "blocks":
        return
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    if not layout.is_block_outermost:
        log.warning(
            "kvdepot: kvdepot.layout is blocks, but this engine's KV has the layout %s: VLLM_KV_CACHE_LAYOUT is set, "
            "or its attention backend supports none with all layers of a block side by side. Blocks are copied in "
            "several pieces, as without the setting",
            layout.name,
        )
