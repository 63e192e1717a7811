"""Decisions about tiers: lookups, loads, saves and forgetting. Part of the deciding thread's code."""
