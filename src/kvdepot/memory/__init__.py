"""Shared memory, the arena, its records and allocator, and the copy threads. It makes no decisions about chunks."""
