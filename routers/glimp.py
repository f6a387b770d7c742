# SPDX-License-Identifier: Apache-2.0
"""In the style of GlimpRouter (arXiv 2601.05110): the first token of each line decides who writes that line.

The small model makes the first token of every line. Where its entropy there is above tau the token is dropped, and
the large model writes the line, from its first token to the one that ends it. GlimpRouter's steps are paragraphs of
a reasoning model (`step_end` of two line ends) and its entropy is in nats; here it is R-Stitch's, H / log V.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from routers.base import (
    Algorithm,
    BaseRouter,
    PeerReq,
    RoutedRequest,
    RouterParams,
    ServedModel,
    StepResult,
    send_without_last,
)
from routers.rstitch import normalized_entropy

__all__ = ["GLIMP", "GlimpParams", "GlimpRouter"]


class GlimpParams(RouterParams):
    """tau: normalised entropy of a line's first token above which the large model writes the line.
    step_end: a token whose text ends with this ends a line. An answer's first token begins one."""

    per_request: ClassVar[frozenset[str]] = frozenset({"tau"})

    tau: float = Field(0.2, ge=0.0, le=1.0, allow_inf_nan=False, description="normalised entropy, 0 to 1")
    step_end: str = Field("\n", min_length=1, description="text at the end of a step's last token")


class GlimpRouter(BaseRouter[GlimpParams]):
    """What both sides need: the tokens that end a step."""

    needs_token_bytes = True

    def bind(self, model: ServedModel) -> None:
        if model.token_bytes is None:
            raise ValueError(
                f"router 'glimp': the engine of model '{model.name}' doesn't say what its tokens' texts are"
            )
        end = self.params.step_end.encode()
        self.step_ends = {i for i in range(model.vocab_size) if model.token_bytes(i).endswith(end)}
        if not self.step_ends:
            raise ValueError(
                f"router 'glimp': step_end: {self.params.step_end!r} ends no token of model '{model.name}'"
            )


class GlimpSLM(GlimpRouter):
    """Beside the small model: an uncertain first token -> the large one writes this step."""

    def route(self, result: StepResult) -> list[int]:
        go = [0] * len(result.rids)
        for row, (before, place) in enumerate(zip(result.sequences, result.places, strict=True)):
            if place == result.prompt_tokens[row] or before[-1] in self.step_ends:
                go[row] = int(normalized_entropy(result.logits[row : row + 1])[0] > result.params[row].tau)
        return go

    def send(self, req: RoutedRequest) -> PeerReq:
        return send_without_last(req)


class GlimpLLM(GlimpRouter):
    """Beside the large model: to the end of the step, and back with it."""

    needs_logits = False

    def route(self, result: StepResult) -> list[int]:
        return [int(token in self.step_ends) for token in result.token_ids]


GLIMP = Algorithm(name="glimp", params=GlimpParams, entry=GlimpSLM, peer=GlimpLLM)
