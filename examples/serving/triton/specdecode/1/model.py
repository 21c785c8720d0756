"""Triton's Python backend over AsyncLLM, streaming. Not run: see ../../README.md."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import numpy as np
import triton_python_backend_utils as triton  # part of the backend
from specdecode import AsyncLLM, RequestOutputKind, SamplingParams
from specdecode.contract import SpecdecodeError


def speculation(parameters: dict[str, str]) -> dict[str, Any] | None:
    """``speculative_config`` from the parameters of ``config.pbtxt``; empty ones say nothing."""
    config: dict[str, Any] = {}
    if parameters.get("draft_model"):
        config["model"] = parameters["draft_model"]
    if parameters.get("method"):
        config["method"] = parameters["method"]
    if config and parameters.get("num_speculative_tokens"):
        config["num_speculative_tokens"] = int(parameters["num_speculative_tokens"])
    return config or None


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        given = json.loads(args["model_config"])["parameters"]
        parameters = {name: value["string_value"] for name, value in given.items()}
        self._llm = AsyncLLM(parameters["model"], speculative_config=speculation(parameters))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Decoupled: answers go through each request's sender, as they come."""
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._answer(request), self._loop)

    async def _answer(self, request: Any) -> None:
        sender = request.get_response_sender()
        try:
            params = SamplingParams(
                max_tokens=int(_value(request, "MAX_TOKENS", 128)),
                temperature=float(_value(request, "TEMPERATURE", 0.0)),
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = _value(request, "PROMPT", b"").decode()
            async for output in self._llm.generate(prompt, params, f"triton-{id(request)}"):
                if request.is_cancelled():
                    break  # which aborts it
                sender.send(_response(output.outputs[0].text, output.metrics.accepted))
        except SpecdecodeError as error:
            sender.send(triton.InferenceResponse(error=triton.TritonError(str(error))))
        finally:
            sender.send(flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self) -> None:
        self._llm.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _value(request: Any, name: str, default: Any) -> Any:
    tensor = triton.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().flat[0]


def _response(text: str, accepted: int) -> Any:
    return triton.InferenceResponse(
        [
            triton.Tensor("TEXT", np.array([text.encode()], dtype=object)),
            triton.Tensor("ACCEPTED_TOKENS", np.array([accepted], dtype=np.int32)),
        ]
    )
