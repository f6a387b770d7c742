# SPDX-License-Identifier: Apache-2.0
"""The networks of the trained routers, as torch modules without any input or output of files.

Each gives a logit for every row; the router takes its sigmoid. Inputs are FP32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

__all__ = ["CiterNetwork", "CoLLMHead", "R2RNetwork", "restore"]


class R2RNetwork(nn.Module):
    """R2R's router (arXiv 2505.21600): whether the token just sampled takes the answer elsewhere.

    hidden_size: H, of the small model's hidden states. embedding_size: E, of its input embedding.
    width, blocks, expansion: of the residual network; R2R's are the defaults. top_logits: how many raw logits
    it sees. dropout: while it trains. 56.3 M parameters for H = E = 1536.
    """

    def __init__(
        self,
        hidden_size: int,
        embedding_size: int,
        width: int = 1024,
        blocks: int = 6,
        top_logits: int = 100,
        expansion: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.logits_projection = nn.Linear(top_logits, hidden_size)
        self.combined_projection = nn.Linear(2 * hidden_size + embedding_size, width)
        self.input_projection = nn.Linear(width, width)
        self.blocks = nn.ModuleList(_Block(width, expansion, dropout) for _ in range(blocks))
        self.output_norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 1)

    def forward(self, hidden: torch.Tensor, top_logits: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """The logits [n] that the tokens diverge.

        hidden: [n, H], after the final norm. top_logits: [n, top_logits], the largest raw logits, falling.
        embedding: [n, E], of the sampled tokens.
        """
        features = torch.cat([hidden, embedding, self.logits_projection(top_logits)], dim=-1)
        x = self.input_projection(self.combined_projection(features))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.output(self.output_norm(x)).squeeze(-1)
        return logits


class _Block(nn.Module):
    """x + MLP(norm(x))."""

    def __init__(self, width: int, expansion: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, expansion * width)
        self.down = nn.Linear(expansion * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.dropout(nn.functional.gelu(self.up(self.norm(x))))
        out: torch.Tensor = x + self.dropout(self.down(inner))
        return out


class CiterNetwork(nn.Module):
    """CITER's router (arXiv 2502.01976): whether the small model suffices for the next token.

    hidden_size: H. width: W; its layers are H -> 2W, batch norm, ReLU -> W -> 1, and CITER's W is H, as with
    None. Without a non-linearity before the last layer, as in CITER's code. Serve it in eval mode: batch norm
    would else mix the rows of a batch.
    """

    def __init__(self, hidden_size: int, width: int | None = None, dropout: float = 0.1) -> None:
        super().__init__()
        width = hidden_size if width is None else width
        self.up = nn.Linear(hidden_size, 2 * width)
        self.norm = nn.BatchNorm1d(2 * width)
        self.down = nn.Linear(2 * width, width)
        self.output = nn.Linear(width, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits [n] of the confidence in the small model. hidden: [n, H], after the final norm."""
        inner = self.dropout(nn.functional.relu(self.norm(self.up(hidden))))
        logits: torch.Tensor = self.output(self.dropout(self.down(inner))).squeeze(-1)
        return logits


class CoLLMHead(nn.Module):
    """Co-LLM's deferral (arXiv 2403.03870): theta . h, a linear head beside the language model's own.

    bias: Co-LLM's defer logit is a row of the language model's head, and has none.
    """

    def __init__(self, hidden_size: int, bias: bool = True) -> None:
        super().__init__()
        self.output = nn.Linear(hidden_size, 1, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits [n] that the model defers. hidden: [n, hidden size], after the final norm."""
        logits: torch.Tensor = self.output(hidden).squeeze(-1)
        return logits


N = TypeVar("N", bound=nn.Module)


def restore(network: type[N], arguments: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> N:
    """A network made with these keyword arguments, these numbers in it, in eval mode.

    Raises ValueError when they don't fit each other.
    """
    try:
        with torch.device("meta"):
            module = network(**arguments)
        module.load_state_dict(tensors, assign=True)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"network: {dict(arguments)} doesn't fit its tensors: {reason}") from error
    return module.eval().requires_grad_(False)
