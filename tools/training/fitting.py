# SPDX-License-Identifier: Apache-2.0
"""Fitting a router's network to labels, in torch on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tools.training.calibration import auroc
from tools.training.options import TrainOptions
from tools.training.work_folder import Checkpoint

__all__ = ["FitOptions", "Loss", "Scaling", "fit", "predict", "ranking_loss", "soft_loss", "weighted_loss"]

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From the network's logits and the numbers of their rows to a mean."""
_PREDICT_BATCH = 4096


@dataclass(frozen=True)
class FitOptions:
    """epochs: at most. patience: epochs without a better held-out loss after which it stops."""

    rate: float
    weight_decay: float
    batch: int = 256
    epochs: int = TrainOptions.epochs
    patience: int = 10
    seed: int = 0


@dataclass(frozen=True)
class Scaling:
    """x -> (x - mean) @ matrix. A network trains on scaled inputs, and its first layer then takes the scaling over:
    what is served has the paper's shape and reads raw numbers."""

    mean: torch.Tensor
    matrix: torch.Tensor

    @classmethod
    def standard(cls, x: torch.Tensor, deviation: float = 1.0) -> Scaling:
        """To mean 0 and that deviation in each column of FP32 [n, d]."""
        return cls(x.mean(0), torch.diag(deviation / x.std(0).clamp(min=1e-6)))

    @classmethod
    def margins(cls, x: torch.Tensor, deviation: float = 1.0) -> Scaling:
        """The same of what sorted logits FP32 [n, d] lie below the largest one. The logits themselves are nearly the
        same number d times; the margins say how sure the model is."""
        matrix = -torch.eye(x.shape[1])
        matrix[0] = 1.0
        return cls(x.mean(0), matrix * deviation / (x @ matrix).std(0).clamp(min=1e-6))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) @ self.matrix

    def fold(self, linear: nn.Linear, first_column: int = 0) -> None:
        """Make the columns of `linear` from `first_column` on read what they read scaled so far."""
        columns = slice(first_column, first_column + len(self.mean))
        with torch.no_grad():
            weight = linear.weight[:, columns].double() @ self.matrix.T.double()
            linear.weight[:, columns] = weight.float()
            linear.bias.sub_((weight @ self.mean.double()).float())


def soft_loss(targets: torch.Tensor) -> Loss:
    """Binary cross-entropy against FP32 probabilities."""

    def loss(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(logits, targets[rows])

    return loss


def ranking_loss(labels: torch.Tensor) -> Loss:
    """1 - AUROC: says when to stop. Cross-entropy would stop too early: it minds a network that is too sure of itself,
    where all that counts is the order, the threshold being chosen afterwards."""

    def loss(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.tensor(1 - auroc(labels[rows].long().numpy(), logits.numpy()))

    return loss


def weighted_loss(labels: torch.Tensor, positive_weight: float) -> Loss:
    """Binary cross-entropy against FP32 labels, those of 1 weighted."""
    weight = torch.tensor(positive_weight)

    def loss(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(logits, labels[rows], pos_weight=weight)

    return loss


def predict(network: nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The network's logits, FP32 [n], in eval mode."""
    network.eval()
    with torch.inference_mode():
        parts = [network(*part) for part in zip(*(_batches(x, _PREDICT_BATCH) for x in inputs), strict=True)]
    return torch.cat(parts).clone()


def fit(
    network: nn.Module,
    inputs: Sequence[torch.Tensor],
    loss: Loss,
    train: torch.Tensor,
    held_out: torch.Tensor,
    held_out_loss: Loss,
    options: FitOptions,
    checkpoint: Checkpoint,
    progress: Callable[[], None],
) -> list[float]:
    """Train `network` on the rows `train` of its inputs until the loss of the rows `held_out` gets no better, and leave
    it with the best numbers, which may be those that it came with. Returns the held-out loss before the first epoch and
    after each. An interrupted fit goes on from its last epoch, as it would have without."""

    def held_out_now() -> float:
        return float(held_out_loss(predict(network, [x[held_out] for x in inputs]), held_out))

    optimizer = torch.optim.AdamW(network.parameters(), lr=options.rate, weight_decay=options.weight_decay)
    generator = torch.Generator().manual_seed(options.seed)
    history: list[float] = []
    best: dict[str, Any] = copy.deepcopy(network.state_dict())
    if (saved := checkpoint.load()) is not None:
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        generator.set_state(saved["generator"])
        torch.set_rng_state(saved["dropout"])
        history, best = saved["history"], saved["best"]
        for _ in history[1:]:
            progress()
    else:
        history.append(held_out_now())
    while len(history) <= options.epochs and not _stalled(history, options.patience):
        network.train()
        order = train[torch.randperm(len(train), generator=generator)]
        for rows in _batches(order, options.batch):
            if len(rows) > 1:  # batch norm has no variance of one row
                optimizer.zero_grad()
                loss(network(*(x[rows] for x in inputs)), rows).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        history.append(held_out_now())
        if history[-1] == min(history):
            best = copy.deepcopy(network.state_dict())
        checkpoint.save(
            {
                "network": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "generator": generator.get_state(),
                "dropout": torch.get_rng_state(),
                "history": history,
                "best": best,
            }
        )
        progress()
    network.load_state_dict(best)
    return history


def _stalled(history: Sequence[float], patience: int) -> bool:
    return len(history) > patience and min(history[:-patience]) <= min(history[-patience:])


def _batches(x: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [x[at : at + size] for at in range(0, len(x), size)]
