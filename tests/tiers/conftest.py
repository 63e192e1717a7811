"""Failures of the suite for tiers tell what was compared."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("kvdepot.testing.tiers")
