# SPDX-License-Identifier: Apache-2.0
"""R2R: the large model makes each token that would take the answer elsewhere (arXiv 2505.21600).

The signal is the probability that the token just sampled diverges, from the small model's hidden state, its 100
largest raw logits and the token's embedding. Delegated where it is the threshold or more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from routers.base import Algorithm, ServedModel, StepResult
from routers.neural import NeuralEntry, NeuralParams, NeuralPeer, finite, hidden_state, mismatch

if TYPE_CHECKING:
    import torch

    from routers.networks import R2RNetwork

__all__ = ["R2R", "R2RSLM", "R2RParams"]


class R2RParams(NeuralParams):
    """threshold: the probability of divergence from which on a token is delegated."""

    algorithm: ClassVar[str] = "r2r"
    threshold_name: ClassVar[str] = "threshold"
    per_request: ClassVar[frozenset[str]] = frozenset({"threshold"})

    threshold: float | None = Field(None, ge=0, le=1, allow_inf_nan=False, description="probability; null = the file's")


class R2RSLM(NeuralEntry[R2RParams]):
    """Beside the small model: divergent -> the large one makes that position."""

    needs_logits = True
    needs_embeddings = True

    network: R2RNetwork

    @staticmethod
    def network_class() -> type[R2RNetwork]:
        from routers.networks import R2RNetwork

        return R2RNetwork

    def bind(self, model: ServedModel) -> None:
        import torch

        super().bind(model)
        if model.embed is None:
            raise ValueError("router 'r2r' needs the rows of the input embedding, which this engine doesn't give")
        self._embed = model.embed
        self._top_logits = self.network.logits_projection.in_features
        trained, has = self.header.network["embedding_size"], self._embed(torch.zeros(1, dtype=torch.int64)).shape[-1]
        if has != trained:
            raise mismatch(self.params, "network.embedding_size", trained, model, has)
        if self._top_logits > model.vocab_size:
            raise mismatch(self.params, "network.top_logits", self._top_logits, model, f"{model.vocab_size} logits")

    def signal(self, result: StepResult, row: int) -> torch.Tensor:
        top = result.logits[row : row + 1].topk(self._top_logits).values
        logit: torch.Tensor = self.network(
            hidden_state(result, row),
            finite(f"the {self._top_logits} largest logits", top),
            self._embed(result.next_token_ids[row : row + 1]),
        )
        return logit

    def route(self, result: StepResult) -> torch.Tensor:
        return (self.probabilities(result) >= self.thresholds(result)).long()


R2R = Algorithm(name="r2r", params=R2RParams, entry=R2RSLM, peer=NeuralPeer)
