# SPDX-License-Identifier: Apache-2.0
"""One token of one request, the whole way that a client's goes: the proof that a server serves."""

from __future__ import annotations

from types import TracebackType

from routers import RouterConfig
from tools.client import Answer, GenerationError, TokenRouterClient
from tools.errors import UserError

__all__ = ["FirstToken"]


class FirstToken:
    """A connection for that request. Closing it, from another thread too, ends a `make` under way.

    router: the deployment's; one that needs sampling takes no greedy request.
    """

    def __init__(self, grpc_url: str, router: RouterConfig) -> None:
        self._temperature = 1.0 if router.algorithm().needs_sampling else None
        self._client = TokenRouterClient(grpc_url)

    def __enter__(self) -> FirstToken:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._client.close()

    def make(self, timeout_s: float | None = None) -> None:
        """Raises UserError when no token comes, within timeout_s if it is given."""
        try:
            answer = Answer.of(
                self._client.generate(
                    input_ids=[1],
                    max_tokens=1,
                    stream=False,
                    ignore_eos=True,
                    temperature=self._temperature,
                    timeout_s=timeout_s,
                )
            )
        except GenerationError as error:
            raise UserError(f"the first token was not made: {error}") from error
        if not answer.ids:
            raise UserError("the first request was answered without a token")
