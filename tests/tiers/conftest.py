"""Their suite says what it compared."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("kvdepot.testing.tiers")
