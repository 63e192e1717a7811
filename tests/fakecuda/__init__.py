"""A fake NVIDIA driver in C, for tests without a GPU: driver.c says what it is, machine.py builds and controls it."""
