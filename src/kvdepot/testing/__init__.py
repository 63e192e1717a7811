"""The suite for authors of tiers; nothing here runs in production."""
