# SPDX-License-Identifier: Apache-2.0
"""One request to a server that runs R-Stitch."""

from __future__ import annotations

from typing import Any

from tools.client import Answer, TokenRouterClient
from tools.supervisor import RunningServer

__all__ = ["ask_rstitch"]


def ask_rstitch(
    server: RunningServer, prompt: list[int], tokens: int, tau: float, **sampling: Any
) -> tuple[list[int], list[str]]:
    """So many tokens after the prompt, and the model that made each."""
    with TokenRouterClient(server.grpc_url) as client:
        answer = Answer.of(
            client.generate(
                input_ids=prompt,
                max_tokens=tokens,
                ignore_eos=True,
                router_params={"tau": tau},
                timeout_s=200,
                **sampling,
            )
        )
    return answer.ids, answer.models
