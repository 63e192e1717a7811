"""One of the two engines of apart.py, with processes of its own: runs the requests that it reads.

    python role.py ROLE MODEL_DIR DEPOT_URL

ROLE is the connector's `kv_role`. One line of JSON on standard input is one request: its name, its prompt's tokens, how
many tokens to generate, and whether to empty the engine's own prefix cache before. One line on standard output is its
result; the first line says that the engine has started.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from engine import new_engine, reset, run


def main() -> None:
    role, model, url = sys.argv[1:]
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's messages

    def say(answer: Any) -> None:
        print(json.dumps(answer), file=said, flush=True)

    llm = new_engine(model, url, role)
    say("started")
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["reset"]:
            reset(llm)
        say(run(llm, asked["name"], asked["tokens"], asked["new"]))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
