# SPDX-License-Identifier: Apache-2.0
"""What R2R, CITER and Co-LLM decide, one token at a time: for the sequential loop, without any of the routers' code."""

from __future__ import annotations

import torch

from tests.model.reference import Delegates

__all__ = ["delegates", "probability"]


def probability(
    algorithm: str, network: torch.nn.Module, hidden: torch.Tensor, logits: torch.Tensor, embedding: torch.Tensor
) -> float:
    """What the network says of one token: of its divergence (r2r), of the confidence in it (citer), of deferring
    (co_llm). Of the small model: its hidden state, its logits and its token's embedding."""
    with torch.inference_mode():
        inputs = [hidden[None]]
        if algorithm == "r2r":
            inputs += [logits.sort(descending=True).values[None, :100], embedding[None]]
        return float(network(*inputs).double().sigmoid())


def delegates(algorithm: str, network: torch.nn.Module, threshold: float) -> Delegates:
    """The algorithm's comparison of that probability with its threshold."""

    def decide(*step: torch.Tensor) -> bool:
        said = probability(algorithm, network, *step)
        return {"r2r": said >= threshold, "citer": said < threshold, "co_llm": said > threshold}[algorithm]

    return decide
