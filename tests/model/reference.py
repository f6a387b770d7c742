# SPDX-License-Identifier: Apache-2.0
"""Plain sequential loops over engines in this process: what the served answers must equal, token for
token. One request, one model at a time, one token at a time; none of the runtime's code."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from python_backends.llm.contract import SamplingParams, SessionOpen, SessionStep
from python_backends.llm.engines import build_engine, parse_engine_config
from python_backends.llm.engines.base import Engine
from python_backends.llm.sampling import SamplingRow, sample
from routers.rstitch import normalized_entropy
from tools.deployment import Deployment

_GREEDY = SamplingParams()


class Reference:
    """The engines of a deployment, one session at a time."""

    def __init__(self, deployment: Deployment) -> None:
        self.names = deployment.model_names
        self._engines: list[Engine] = [
            build_engine(parse_engine_config(model.engine.model_dump()), model.name, hidden_states=False)
            for model in deployment.models
        ]
        self._session = 0

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def _begin(self, prompt: Sequence[int]) -> list[int]:
        """Open a session everywhere; returns how many tokens each model has."""
        self._session += 1
        for engine in self._engines:
            engine.open(SessionOpen(self._session, len(prompt), 10**6))
        return [0] * len(self._engines)

    def _end(self) -> None:
        for engine in self._engines:
            engine.free([self._session])

    def _logits(self, model: int, had: list[int], tokens: list[int]) -> torch.Tensor:
        """FP32 [vocabulary] after `tokens`, of which the model had the first had[model]."""
        output = self._engines[model].step([SessionStep(self._session, had[model], tokens[had[model] :])])
        assert not output.errors and output.logits is not None
        had[model] = len(tokens)
        return output.logits[0]

    def alone(self, model: int, prompt: list[int], count: int) -> list[int]:
        """One model writes everything, greedily, past its end of sequence."""
        had, tokens = self._begin(prompt), list(prompt)
        for _ in range(count):
            tokens.append(int(self._logits(model, had, tokens).argmax()))
        self._end()
        return tokens[len(prompt) :]

    def rstitch(
        self, prompt: list[int], count: int, tau: float, sampling: SamplingParams = _GREEDY
    ) -> tuple[list[int], list[str]]:
        """R-Stitch: the tokens, and the model that made each. Penalties count all of them."""
        had, tokens, makers = self._begin(prompt), list(prompt), []
        at_llm = False
        while len(makers) < count:
            logits = self._logits(int(at_llm), had, tokens)
            uncertain = float(normalized_entropy(logits[None])[0]) > tau
            if at_llm or not uncertain:
                row = SamplingRow(sampling, tokens, len(prompt))
                tokens.append(int(sample(logits[None], [row]).token_ids[0]))
                makers.append(self.names[int(at_llm)])
            at_llm = uncertain
        self._end()
        return tokens[len(prompt) :], makers
