# SPDX-License-Identifier: Apache-2.0
"""Plain sequential loops over engines in this process: what the served answers must equal, token for
token. One request, one model at a time, one token at a time; none of the runtime's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from python_backends.llm.contract import SamplingParams, SessionOpen, SessionStep
from python_backends.llm.engines import build_engine, parse_engine_config
from python_backends.llm.engines.base import Engine, EngineOutput
from python_backends.llm.sampling import SamplingRow, routing_stream, sample, uniform
from routers.rstitch import normalized_entropy
from tools.deployment import Deployment

_GREEDY = SamplingParams()

# of the small model after the sequence so far: its hidden state, its logits, its token's embedding
Delegates = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]


class Reference:
    """The engines of a deployment, one session at a time. hidden_states: whether the first one gives them."""

    def __init__(self, deployment: Deployment, hidden_states: bool = False) -> None:
        self.names = deployment.model_names
        self._engines: list[Engine] = [
            build_engine(parse_engine_config(model.engine.model_dump()), model.name, hidden_states and number == 0)
            for number, model in enumerate(deployment.models)
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
        logits = self._step(model, had, tokens).logits
        assert logits is not None
        return logits[0]

    def _step(self, model: int, had: list[int], tokens: list[int]) -> EngineOutput:
        output = self._engines[model].step([SessionStep(self._session, had[model], tokens[had[model] :])])
        assert not output.errors
        had[model] = len(tokens)
        return output

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

    def one_token(self, prompt: list[int], count: int, delegates: Delegates) -> tuple[list[int], list[str]]:
        """R2R, CITER and Co-LLM, greedily: where `delegates` says so the small model's token is dropped, and the
        large one makes one in its place."""
        had, tokens, makers = self._begin(prompt), list(prompt), []
        while len(makers) < count:
            output = self._step(0, had, tokens)
            assert output.logits is not None and output.hidden_states is not None
            token, maker = output.logits[0].argmax(), 0
            if delegates(output.hidden_states[0], output.logits[0], self._engines[0].embed(token[None])[0]):
                token, maker = self._logits(1, had, tokens).argmax(), 1
            tokens.append(int(token))
            makers.append(self.names[maker])
        self._end()
        return tokens[len(prompt) :], makers

    def me(
        self, prompt: list[int], count: int, weights: Sequence[float], sampling: SamplingParams
    ) -> tuple[list[int], list[str]]:
        """ME: the tokens, and the model that made each. One number of the first model's stream draws the first
        token's model and, if that is the first model, the second's too."""
        had, tokens, makers = self._begin(prompt), list(prompt), []

        def drawn(u: float) -> int:
            return next(m for m in range(len(weights)) if u < sum(weights[: m + 1]))

        u = uniform(sampling.seed, len(prompt), routing_stream(0))
        model = drawn(u)
        while len(makers) < count:
            row = SamplingRow(sampling, tokens, len(prompt))
            token = int(sample(self._logits(model, had, tokens)[None], [row]).token_ids[0])
            makers.append(model)
            if len(makers) == 1 and model == 0:
                model = drawn(u / weights[0])
            else:
                model = drawn(uniform(sampling.seed, len(tokens), routing_stream(model)))
            tokens.append(token)
        self._end()
        return tokens[len(prompt) :], [self.names[m] for m in makers]

    def glimp(self, prompt: list[int], count: int, tau: float, line_ends: set[int]) -> tuple[list[int], list[str]]:
        """Glimp: the tokens, and the model that made each."""
        had, tokens, makers = self._begin(prompt), list(prompt), []
        writer = 0
        while len(makers) < count:
            if not makers or tokens[-1] in line_ends:
                first = self._logits(0, had, tokens)
                writer = int(normalized_entropy(first[None])[0] > tau)
                logits = first if writer == 0 else self._logits(1, had, tokens)
            else:
                logits = self._logits(writer, had, tokens)
            tokens.append(int(logits.argmax()))
            makers.append(self.names[writer])
        self._end()
        return tokens[len(prompt) :], makers
