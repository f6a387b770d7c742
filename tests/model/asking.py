# SPDX-License-Identifier: Apache-2.0
"""One request to a server, as the tests that compare with a reference ask it."""

from __future__ import annotations

from typing import Any

from tools.client import Answer, TokenRouterClient
from tools.supervisor import RunningServer

__all__ = ["ask", "ask_rstitch"]


def ask(
    server: RunningServer, prompt: list[int], tokens: int, timeout_s: float, **asked: Any
) -> tuple[list[int], list[str]]:
    """So many tokens after the prompt, and the model that made each."""
    with TokenRouterClient(server.grpc_url) as client:
        answer = Answer.of(
            client.generate(input_ids=prompt, max_tokens=tokens, ignore_eos=True, timeout_s=timeout_s, **asked)
        )
    return answer.ids, answer.models


def ask_rstitch(
    server: RunningServer, prompt: list[int], tokens: int, tau: float, **sampling: Any
) -> tuple[list[int], list[str]]:
    """The same of a server that runs R-Stitch."""
    return ask(server, prompt, tokens, 200, router_params={"tau": tau}, **sampling)
