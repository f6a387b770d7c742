# SPDX-License-Identifier: Apache-2.0
"""Deployments for the tests on a real server, and what every test wants of one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from python_backends.llm.engines.paced import next_token
from tools.client import Answer, GenerationError, TokenRouterClient
from tools.deployment import Deployment
from tools.supervisor import RunningServer

ALGORITHMS = str(Path(__file__).parent / "algorithms")
VOCABULARY = 1000


def paced_deployment(
    steps_ms: Sequence[float] = (2.0, 8.0),
    router: dict[str, Any] | None = None,
    batching: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
    **engine: Any,
) -> Deployment:
    """Paced models named slm, llm, xl, ..., one for each step time, on free ports."""
    names = ("slm", "llm", "xl")
    return Deployment.model_validate(
        {
            "models": [
                {"name": name, "engine": {"type": "paced", "step_ms": ms, "vocab_size": VOCABULARY, **engine}}
                for name, ms in zip(names, steps_ms, strict=False)
            ],
            "router": router or {"name": "random", "params": {"p": 0.3}},
            "batching": batching or {},
            "limits": limits or {},
            "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "drain_timeout_s": 10},
        }
    )


def paced_tokens(model: str, prompt: Sequence[int], count: int) -> list[int]:
    """What one paced model alone writes."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(model, tokens, VOCABULARY, 0))
    return tokens[len(prompt) :]


def wait_until(what: str, condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """The first true value of `condition`; fails after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
    return value


def ask(server: RunningServer, **request: Any) -> Answer:
    """One whole answer."""
    with TokenRouterClient(server.grpc_url) as client:
        return Answer.of(client.generate(**({"timeout_s": 60} | request)))


def assert_clean_and_serving(server: RunningServer, **request: Any) -> None:
    """Nothing is left of any request on any model, and the next request is served."""

    def clean() -> bool:
        status = server.control.status()
        return status.live == status.queued == 0 and not any(m["sessions"] for m in status.models.values())

    wait_until("nothing left on any model", clean)
    request = request or {"input_ids": [3, 4], "max_tokens": 2}
    assert ask(server, timeout_s=20, **request).ids


class Background(threading.Thread):
    """One request read in a thread: `answer` or `error` when done."""

    def __init__(self, url: str, **request: Any) -> None:
        super().__init__(daemon=True)
        self.client = TokenRouterClient(url)
        self.generation = self.client.generate(timeout_s=60, **request)
        self.answer = Answer(self.generation.sent_at)
        self.error: GenerationError | None = None
        self.start()

    def run(self) -> None:
        try:
            for chunk in self.generation:
                self.answer.add(chunk)
        except GenerationError as error:
            self.error = error
        finally:
            self.client.close()
