# SPDX-License-Identifier: Apache-2.0
"""The load under which `tokenrouter profile` measures: clients that each ask again once they are answered."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from routers import RouterConfig
from tools.client import Answer, Generation, GenerationError, TokenRouterClient

__all__ = ["PROMPTS", "ClosedLoop", "Requests"]

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in a few sentences why the sky is blue.",
    "A train goes 60 km in 45 minutes. How fast is it? Show the steps.",
    "List five things to check before deploying a web service.",
    "Write a short poem about a lighthouse.",
    "What is the difference between a process and a thread?",
    "Write an SQL query that finds the three customers with the most orders.",
    "Summarise the plot of Romeo and Juliet.",
)
_VOCABULARY = 100  # ids below it exist on every model
_PROMPT_TOKENS = (8, 64)


@dataclass(frozen=True)
class Requests:
    """What is asked. prompts: texts; None = random token ids, whose answers go on to max_tokens.

    samples: whether the router takes no greedy request.
    """

    prompts: Sequence[str] | None
    max_tokens: int
    samples: bool
    seed: int

    @classmethod
    def of(cls, router: RouterConfig, prompts: Sequence[str] | None, max_tokens: int, seed: int) -> Requests:
        """Those that a deployment with this router takes."""
        return cls(prompts, max_tokens, router.algorithm().needs_sampling, seed)

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """The next one's inputs."""
        inputs: dict[str, Any] = {"max_tokens": self.max_tokens, "seed": rng.getrandbits(32)}
        if self.prompts is None:
            length = rng.randint(*_PROMPT_TOKENS)
            inputs |= {"input_ids": [rng.randrange(1, _VOCABULARY) for _ in range(length)], "ignore_eos": True}
        else:
            inputs["messages"] = [{"role": "user", "content": rng.choice(self.prompts)}]
        if self.samples:
            inputs["temperature"] = 1.0
        return inputs


class ClosedLoop:
    """`clients` threads that ask while the block runs; at its end what is under way is cancelled."""

    def __init__(self, grpc_url: str, clients: int, requests: Requests) -> None:
        self._url = grpc_url
        self._requests = requests
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._under_way: set[Generation] = set()
        self._error: GenerationError | None = None
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(clients)]

    def __enter__(self) -> ClosedLoop:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            self._stop.set()
            for generation in self._under_way:
                generation.cancel()
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        """Raises the GenerationError that ended a client, if one has."""
        if self._error is not None:
            raise self._error

    def _ask(self, number: int) -> None:
        rng = random.Random(f"{self._requests.seed}/{number}")
        with TokenRouterClient(self._url) as client:
            while (generation := self._next(client, rng)) is not None:
                try:
                    Answer.of(generation)
                except GenerationError as error:
                    if not self._stop.is_set():
                        self._error = error
                    return
                finally:
                    with self._lock:
                        self._under_way.discard(generation)

    def _next(self, client: TokenRouterClient, rng: random.Random) -> Generation | None:
        with self._lock:
            if self._stop.is_set():
                return None
            generation = client.generate(**self._requests.draw(rng))
            self._under_way.add(generation)
            return generation
