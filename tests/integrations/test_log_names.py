"""Lines of kvdepot in vLLM's log begin with its name, once: vLLM shows a line's file, not its logger."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import HANG_S

_SCRIPT = """
import logging
from kvdepot.integrations.vllm.start import log_with_vllm
log_with_vllm()
log_with_vllm()
vllm = logging.getLogger("vllm")
vllm.setLevel("INFO")
vllm.propagate = False
vllm.addHandler(logging.StreamHandler())
log = logging.getLogger("kvdepot.client.connection")
log.info("reconnected to %s", "a server")
log.info("kvdepot: started %d", 1)
log.debug("unseen")
"""


def test_lines_in_vllms_log_begin_with_the_products_name_once() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stderr.splitlines() == ["kvdepot: reconnected to a server", "kvdepot: started 1"]
