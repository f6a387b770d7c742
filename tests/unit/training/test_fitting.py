# SPDX-License-Identifier: Apache-2.0
"""Fits: scaled inputs, going on after an interruption, and losses against plain formulas."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from routers.networks import R2RNetwork
from tools.training.fitting import FitOptions, Loss, Scaling, fit, predict, weighted_loss
from tools.training.recipes import marginal_loss
from tools.training.work_folder import Checkpoint

ROWS = 300


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 6, generator=generator) * torch.tensor([1, 10, 0.5, 1, 1, 1]) + 5
    return x, (x[:, 1] > 5).float()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.drop(self.first(x).relu())).squeeze(-1)
        return out


@pytest.mark.parametrize("kind", [Scaling.standard, Scaling.margins])
def test_the_first_layer_takes_the_scaling_over(kind: object, data: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, _ = data
    scaling = kind(x)  # type: ignore[operator]
    scaled = scaling(x)
    assert scaled.mean(0).abs().max() < 1e-4
    assert (scaled.std(0) - 1).abs().max() < 1e-3
    network = Net()
    before = predict(network, [scaled])
    scaling.fold(network.first)
    assert torch.allclose(predict(network, [x]), before, atol=1e-4)


def test_a_scaling_of_some_columns_leaves_the_others() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, top, embedding = (torch.randn(50, n, generator=generator) * 3 + 1 for n in (8, 5, 7))
    network = R2RNetwork(hidden_size=8, embedding_size=7, width=16, blocks=1, top_logits=5)
    scalings = [Scaling.standard(hidden), Scaling.margins(top), Scaling.standard(embedding)]
    scaled = [s(x) for s, x in zip(scalings, (hidden, top, embedding), strict=True)]
    before = predict(network, scaled)
    scalings[0].fold(network.combined_projection)
    scalings[2].fold(network.combined_projection, 8)
    scalings[1].fold(network.logits_projection)
    assert torch.allclose(predict(network, [hidden, top, embedding]), before, atol=1e-4)


def _fit(path: Path, data: tuple[torch.Tensor, torch.Tensor], epochs: int, done: list[int]) -> tuple[Net, list[float]]:
    x, labels = data
    torch.manual_seed(3)
    network, loss = Net(), weighted_loss(labels, 1.0)
    train, held_out = torch.arange(200), torch.arange(200, ROWS)
    inputs = [Scaling.standard(x)(x)]
    options = FitOptions(rate=0.01, weight_decay=0.0, batch=32, epochs=epochs, patience=3, seed=4)
    checkpoint = Checkpoint(path, {"about": "this"})

    def progress() -> None:
        done.append(1)

    return network, fit(network, inputs, loss, train, held_out, loss, options, checkpoint, progress)


def test_a_fit_learns_and_an_interrupted_one_ends_like_one_that_was_not(
    tmp_path: Path, data: tuple[torch.Tensor, torch.Tensor]
) -> None:
    whole, history = _fit(tmp_path / "whole.pt", data, 8, [])
    assert history[-1] < history[0]
    _fit(tmp_path / "parts.pt", data, 3, [])
    rest: list[int] = []
    parts, resumed = _fit(tmp_path / "parts.pt", data, 8, rest)
    assert resumed == history
    assert len(rest) == 8  # the three from before count too
    for a, b in zip(whole.state_dict().values(), parts.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_of_other_options_is_not_taken_up(tmp_path: Path) -> None:
    Checkpoint(tmp_path / "fit.pt", {"rate": 1}).save({"history": [1.0]})
    assert Checkpoint(tmp_path / "fit.pt", {"rate": 2}).load() is None
    found = Checkpoint(tmp_path / "fit.pt", {"rate": 1}).load()
    assert found is not None and found["history"] == [1.0]


def test_a_fit_stops_when_it_gets_no_better_and_keeps_the_best(
    tmp_path: Path, data: tuple[torch.Tensor, torch.Tensor]
) -> None:
    x, labels = data
    network = Net()
    losses = iter([4.0, 3.0, 1.0, 2.0, 2.0, 2.0, 2.0, 0.5])
    kept: list[torch.Tensor] = []

    def scripted(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        kept.append(network.first.weight.detach().clone())
        return torch.tensor(next(losses))

    loss: Loss = weighted_loss(labels, 1.0)
    options = FitOptions(rate=0.01, weight_decay=0.0, batch=50, epochs=50, patience=4)
    checkpoint = Checkpoint(tmp_path / "fit.pt", {})
    history = fit(
        network, [x], loss, torch.arange(200), torch.arange(200, 300), scripted, options, checkpoint, lambda: None
    )
    assert history == [4.0, 3.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert torch.equal(network.first.weight, kept[2])


def test_the_losses_are_those_of_the_papers() -> None:
    labels, logits, rows = torch.tensor([1.0, 0.0]), torch.tensor([0.3, -0.7]), torch.arange(2)
    d = [1 / (1 + math.exp(-z)) for z in logits.tolist()]
    weighted = -(8 * math.log(d[0]) + math.log(1 - d[1])) / 2
    assert float(weighted_loss(labels, 8.0)(logits, rows)) == pytest.approx(weighted)
    slm, llm = [0.2, 0.9], [0.6, 0.8]
    marginal = -sum(math.log((1 - d[i]) * slm[i] + d[i] * llm[i]) for i in range(2)) / 2
    loss = marginal_loss(torch.tensor(slm).log(), torch.tensor(llm).log())
    assert float(loss(logits, rows)) == pytest.approx(marginal)
