"""A stand-in for NVIDIA's driver bindings (`cuda.bindings.driver`), for machines without a GPU.

It stands for a foreign library, never for code of ours: this folder goes on PYTHONPATH before the real thing. Device
memory is files in /dev/shm, asynchronous copies run late and in an order that no missing synchronisation survives, and
what the real driver punishes fails here too. It proves logic. It says nothing about speed, nor what a GPU really does.
"""
