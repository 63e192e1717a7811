"""Shared memory, the arena, its records and allocator. It makes no decisions about chunks."""
