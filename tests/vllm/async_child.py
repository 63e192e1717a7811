"""vLLM's asynchronous frontend, as an API server drives it: data-parallel replicas, and input that streams in.

One of the two kinds of engines that child.py runs. Commands: run (a list of requests, one after the other; `replica`
says on which), stream (a request whose `parts` arrive one after the other).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tests.vllm.child import params_of, prompt_of, result_of


class AsyncChild:
    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)

        async def start() -> AsyncLLM:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

        self.llm = self.loop.run_until_complete(start())

    def handle(self, command: dict[str, Any]) -> Any:
        match command["do"]:
            case "run":
                return {each["id"]: self.loop.run_until_complete(self.run(each)) for each in command["requests"]}
            case "stream":
                return self.loop.run_until_complete(self.stream(command["request"]))
        raise ValueError(command)

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        outputs = self.llm.generate(
            prompt_of(request), params_of(request), request["id"], data_parallel_rank=request.get("replica")
        )
        return result_of([output async for output in outputs][-1])

    async def stream(self, request: dict[str, Any]) -> list[int]:
        """The tokens of all answers, one after the other."""
        from vllm.engine.protocol import StreamingInput
        from vllm.sampling_params import RequestOutputKind

        params = params_of(request)
        params.output_kind = RequestOutputKind.DELTA
        answered = asyncio.Queue[None]()

        async def parts() -> AsyncIterator[StreamingInput]:
            for part in request["parts"]:
                yield StreamingInput(prompt={"prompt_token_ids": part})  # type: ignore[typeddict-item]
                for _ in range(params.max_tokens or 0):
                    await answered.get()

        tokens: list[int] = []
        async for output in self.llm.generate(
            parts(), params, request["id"], data_parallel_rank=request.get("replica")
        ):  # type: ignore[arg-type]
            for token in output.outputs[0].token_ids:
                tokens.append(token)
                answered.put_nowait(None)
        return tokens

    def close(self) -> None:
        self.llm.shutdown(timeout=self.llm.vllm_config.shutdown_timeout)  # 0 by default, as the API server does
