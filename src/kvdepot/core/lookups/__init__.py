"""Lookups: what each waits for, until its answer."""
