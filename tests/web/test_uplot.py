"""The package contains uPlot unchanged."""

from __future__ import annotations

import hashlib

from tests.web.site import VENDOR


def test_every_file_of_uplot_is_the_one_that_was_committed_with_its_hash() -> None:
    hashes = dict(reversed(line.split()) for line in (VENDOR / "SHA256SUMS").read_text().splitlines())
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in VENDOR.iterdir()}
    del found["SHA256SUMS"]
    assert found == hashes
    assert {"LICENSE", "uPlot.esm.js", "uPlot.min.css"} == set(hashes)
    assert "Leon Sorokin" in (VENDOR / "LICENSE").read_text()
