"""A host pool like SGLang's, without SGLang, in each of its layouts."""

from __future__ import annotations

import math

import torch


class Pool:
    """Keys and values of `layers` layers, in the byte order of SGLang's MHATokenToKVPoolHost."""

    def __init__(self, layout: str = "page_first", pages: int = 16, page_size: int = 4, layers: int = 3) -> None:
        self.layout, self.page_size, self.size, self.layers = layout, page_size, pages * page_size, layers
        self.dtype, self.clears = torch.float32, 0
        row = (2, 8)  # heads and their size
        shape, self.page_axis = {
            "layer_first": ((2, layers, pages, page_size, *row), 2),
            "page_first": ((2, pages, page_size, layers, *row), 1),
            "page_first_direct": ((2, pages, layers, page_size, *row), 1),
        }[layout]
        self.size_per_token = 2 * layers * math.prod(row) * 4
        self.kv = torch.zeros(shape, dtype=self.dtype)

    def page(self, number: int) -> torch.Tensor:
        return self.kv.select(self.page_axis, number)

    def slots(self, *pages: int) -> torch.Tensor:
        return torch.cat([torch.arange(page * self.page_size, (page + 1) * self.page_size) for page in pages])

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        starts: list[int] = []
        for page in (indices[:: self.page_size] // self.page_size).tolist():
            for part in self.page(page).flatten(0, 1) if self.page_axis == 2 else self.page(page):
                starts.append(part.data_ptr())
        parts = 2 * self.layers if self.page_axis == 2 else 2
        return starts, [self.page(0).numel() * 4 // parts] * len(starts)

    def clear(self) -> None:
        self.clears += 1
