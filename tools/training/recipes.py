# SPDX-License-Identifier: Apache-2.0
"""How each algorithm's router is trained: which texts with which labels, which network on which inputs, which loss."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from routers.networks import CiterNetwork, CoLLMHead, R2RNetwork
from tools.training.dataset import Text, Tokens
from tools.training.fitting import FitOptions, Loss, Scaling, predict, ranking_loss, soft_loss, weighted_loss
from tools.training.judges import Judge
from tools.training.labels import Ids, Labels, citer_labels, co_llm_labels, r2r_labels
from tools.training.options import TrainOptions
from tools.training.stages import Stages

__all__ = ["R2R", "Citer", "CoLLM", "Phase", "Prepared", "Recipe", "Trained"]

Embed = Callable[[torch.Tensor], torch.Tensor]
_WARM_UP = FitOptions(rate=1e-3, weight_decay=1e-2, epochs=15, patience=3)
_R2R_FIT = FitOptions(rate=1e-4, weight_decay=5e-4)
_CITER_FIT = FitOptions(rate=1e-4, weight_decay=1e-1)
_CO_LLM_FIT = FitOptions(rate=1e-3, weight_decay=1e-1)
_SURE = 0.03  # normalised entropy: R-Stitch's threshold
_CHECKED_ROWS = 4096
_ROUNDING = 0.05  # of a probability: what FP16 may cost


@dataclass(frozen=True)
class Trained:
    """What a router's file holds: the network on raw inputs, and its keyword arguments."""

    network: nn.Module
    arguments: dict[str, Any]


class Recipe(Protocol):
    """One algorithm. fit: how its network is fitted. rounds: of labels and fit."""

    @property
    def algorithm(self) -> str: ...
    @property
    def fit(self) -> FitOptions: ...
    @property
    def rounds(self) -> int: ...

    def texts(self, stages: Stages, number: int, before: nn.Module | None) -> Iterator[Text]:
        """The texts with their labels, of round `number` (from 1); makes what isn't there. before: the network of the
        round before."""
        ...

    def inputs(self, tokens: Tokens) -> list[torch.Tensor]:
        """What the network reads when it is served, FP32 [n, ...] each."""
        ...

    def prepare(self, tokens: Tokens, train: torch.Tensor) -> Prepared:
        """The network, its inputs and losses; the scaling is that of the rows `train`."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the result depends on besides the data, as JSON."""
        ...

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """From the network's logits to the probability that the large model is needed."""
        ...

    def threshold(self, cut: float) -> float:
        """The threshold at which tokens with a score above `cut` are delegated."""
        ...


@dataclass(frozen=True)
class Phase:
    """loss: is made small on the tokens that are trained on. held_out_loss: of the held-out ones, says when to stop."""

    loss: Loss
    held_out_loss: Loss
    options: FitOptions


@dataclass(frozen=True)
class Prepared:
    """network: on scaled inputs. phases: fitted one after the other. fold: puts the scaling into the network."""

    network: nn.Module
    arguments: dict[str, Any]
    inputs: list[torch.Tensor]
    phases: Sequence[Phase]
    fold: Callable[[], None]
    raw: list[torch.Tensor]

    def finish(self) -> Trained:
        """The network that is served, its numbers those of FP16, in which they are stored.

        Raises RuntimeError when it isn't the one that was trained any more.
        """
        some = slice(0, _CHECKED_ROWS)
        before = predict(self.network, [x[some] for x in self.inputs])
        self.fold()
        with torch.no_grad():
            for values in (*self.network.parameters(), *self.network.buffers()):
                if values.is_floating_point():
                    values.copy_(values.half())
        after = predict(self.network, [x[some] for x in self.raw])
        worst = float((before.sigmoid() - after.sigmoid()).abs().max())
        if not worst < _ROUNDING:
            raise RuntimeError(f"storing the network in FP16 changed a probability by {worst:.3f}")
        return Trained(self.network, self.arguments)


@dataclass(frozen=True)
class R2R:
    """R2R (arXiv 2505.21600). width: of the network, 1024 in the paper; with so few labels as an hour makes, a narrow
    one does as well and is some MB. The paper's learning rate, 5e-5, is for 7.6 million labels."""

    embed: Embed
    judge: Judge
    width: int = 128
    fit: FitOptions = _R2R_FIT
    rounds: int = 1
    algorithm: ClassVar[str] = "r2r"

    def texts(self, stages: Stages, number: int, before: nn.Module | None) -> Iterator[Text]:
        verdicts = stages.verdicts(self.judge)
        for prompt in stages.prompts:
            answer = stages.answers[prompt.id]
            tokens, arrays = np.array(answer["token_ids"]), stages.arrays("slm-answers", prompt.id)
            labels = r2r_labels(tokens, arrays["argmax"], verdicts[prompt.id])
            yield Text(prompt.id, arrays, _logprobs(answer), tokens, labels)

    def inputs(self, tokens: Tokens) -> list[torch.Tensor]:
        return [tokens.hidden, tokens.top_logits, self.embed(tokens.choice)]

    def prepare(self, tokens: Tokens, train: torch.Tensor) -> Prepared:
        raw = self.inputs(tokens)
        # hidden state and embedding have ten times as many columns as the logits, and say less each
        scalings = [
            Scaling.standard(raw[0][train], 0.03),
            Scaling.margins(raw[1][train], 0.3),
            Scaling.standard(raw[2][train], 0.03),
        ]
        hidden_size, embedding_size = raw[0].shape[1], raw[2].shape[1]
        arguments = {
            "hidden_size": hidden_size,
            "embedding_size": embedding_size,
            "width": self.width,
            "top_logits": raw[1].shape[1],
        }
        network = R2RNetwork(**arguments)

        def fold() -> None:
            scalings[0].fold(network.combined_projection)
            scalings[2].fold(network.combined_projection, hidden_size)
            scalings[1].fold(network.logits_projection)

        labels = torch.from_numpy(tokens.labels).float()
        phases = [
            _warm_up(_unsure(tokens), self.fit),
            Phase(weighted_loss(labels, _imbalance(labels[train])), ranking_loss(labels), self.fit),
        ]
        return Prepared(network, arguments, _scaled(scalings, raw), phases, fold, raw)

    def facts(self) -> dict[str, Any]:
        return {"judge": self.judge.name, "width": self.width, **asdict(self.fit)}

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.double().sigmoid()

    def threshold(self, cut: float) -> float:
        return cut


@dataclass(frozen=True)
class Citer:
    """CITER (arXiv 2502.01976). width: of the network; None = the hidden size, as in the paper. rollouts: at most, of a
    text. The paper's learning rate, 1e-7, and its 1000 epochs are hours of a GPU."""

    width: int | None = None
    rollouts: int = TrainOptions.rollouts
    rounds: int = TrainOptions.rounds
    fit: FitOptions = _CITER_FIT
    algorithm: ClassVar[str] = "citer"

    def texts(self, stages: Stages, number: int, before: nn.Module | None) -> Iterator[Text]:
        policy = None if before is None else Confident(before)
        # a later round's answers depend on the network of the round before, and that on everything
        depends_on = json.dumps([self.rollouts, {} if before is None else self.facts()], sort_keys=True)
        name = f"{number}-{hashlib.sha256(depends_on.encode()).hexdigest()[:8]}"
        right = stages.rollouts(name, self.rollouts, policy)

        def labels(key: str, gold: Ids, slm: Ids, llm: Ids) -> Labels:
            return citer_labels(gold, slm, llm, right.get(key, {}))

        yield from _gold_texts(stages, labels)

    def inputs(self, tokens: Tokens) -> list[torch.Tensor]:
        return [tokens.hidden]

    def prepare(self, tokens: Tokens, train: torch.Tensor) -> Prepared:
        scaling = Scaling.standard(tokens.hidden[train])
        arguments: dict[str, Any] = {"hidden_size": tokens.hidden.shape[1]}
        arguments |= {} if self.width is None else {"width": self.width}
        network = CiterNetwork(**arguments)
        suffices = 1 - torch.from_numpy(tokens.labels).float()
        phases = [
            _warm_up(1 - _unsure(tokens), self.fit),
            Phase(weighted_loss(suffices, 1.0), ranking_loss(suffices), self.fit),
        ]
        raw = self.inputs(tokens)
        inputs = _scaled([scaling], raw)
        return Prepared(network, arguments, inputs, phases, lambda: scaling.fold(network.up), raw)

    def facts(self) -> dict[str, Any]:
        return {"rollouts": self.rollouts, "width": self.width, **asdict(self.fit)}

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        return (-logits.double()).sigmoid()

    def threshold(self, cut: float) -> float:
        return 1 - cut


@dataclass(frozen=True)
class CoLLM:
    """Co-LLM (arXiv 2403.03870), the small model frozen: the deferral head from weak labels, 8 to 1 for the positive
    ones; with `marginal` then from the marginal likelihood of the gold tokens."""

    marginal: bool = False
    rounds: int = 1
    fit: FitOptions = _CO_LLM_FIT
    algorithm: ClassVar[str] = "co_llm"

    def texts(self, stages: Stages, number: int, before: nn.Module | None) -> Iterator[Text]:
        yield from _gold_texts(stages, lambda _, gold, slm, llm: co_llm_labels(gold, slm, llm))

    def inputs(self, tokens: Tokens) -> list[torch.Tensor]:
        return [tokens.hidden]

    def prepare(self, tokens: Tokens, train: torch.Tensor) -> Prepared:
        scaling = Scaling.standard(tokens.hidden[train], 0.1)
        arguments: dict[str, Any] = {"hidden_size": tokens.hidden.shape[1]}
        network = CoLLMHead(**arguments)
        labels = torch.from_numpy(tokens.labels).float()
        phases = [
            _warm_up(_unsure(tokens), self.fit),
            Phase(weighted_loss(labels, 8.0), ranking_loss(labels), self.fit),
        ]
        if self.marginal:
            marginal = marginal_loss(tokens.slm_logprobs, tokens.llm_logprobs)
            phases.append(Phase(marginal, marginal, self.fit))
        raw = self.inputs(tokens)
        inputs = _scaled([scaling], raw)
        return Prepared(network, arguments, inputs, phases, lambda: scaling.fold(network.output), raw)

    def facts(self) -> dict[str, Any]:
        return {"marginal": self.marginal, **asdict(self.fit)}

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.double().sigmoid()

    def threshold(self, cut: float) -> float:
        return cut


@dataclass(frozen=True)
class Confident:
    """CITER's policy while it learns: the large model makes the token where the small one's confidence is below 1/2."""

    network: nn.Module

    def __call__(self, hidden: torch.Tensor) -> bool:
        return bool(predict(self.network, [hidden[None]])[0] < 0)


def marginal_loss(slm_logprobs: torch.Tensor, llm_logprobs: torch.Tensor) -> Loss:
    """-log((1 - d) p_slm(y) + d p_llm(y)), d = sigmoid(logit), mean over the rows: Co-LLM's equation 2."""

    def loss(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        stay = nn.functional.logsigmoid(-logits) + slm_logprobs[rows]
        defer = nn.functional.logsigmoid(logits) + llm_logprobs[rows]
        return -torch.logaddexp(stay, defer).mean()

    return loss


def _gold_texts(stages: Stages, labels: Callable[[str, Ids, Ids, Ids], Labels]) -> Iterator[Text]:
    """Right answers, with `labels`(prompt, gold, small model's choices, large one's). Routers are judged on the large
    model's own answers only, right or not: the functions' own sources are texts that nobody will be served."""
    stages.follow_answers()
    stages.follow_references()
    for prompt in stages.prompts:
        key, answer, right = prompt.id, stages.answers[prompt.id], stages.outcomes[prompt.id]
        arrays, tokens = stages.arrays("slm-answers", key), np.array(answer["token_ids"])
        slm = arrays["argmax"]
        own = labels(key, tokens, slm, tokens) if right else co_llm_labels(tokens, slm, tokens)
        yield Text(key, arrays, _logprobs(answer), tokens, own, trained=right)
        if not right and key in stages.gold:
            arrays, llm, gold = (
                stages.arrays("slm-references", key),
                stages.arrays("llm-references", key),
                np.array(stages.gold[key]),
            )
            own = labels(key, gold, arrays["argmax"], llm["argmax"])
            yield Text(key, arrays, llm["logprobs"], gold, own, judged=False)


def _unsure(tokens: Tokens) -> torch.Tensor:
    """How far the small model's entropy says that it isn't sure: FP32 [n] in (0, 1)."""
    ratio = torch.from_numpy(tokens.entropy).clamp(min=1e-9) / _SURE
    return (2 * ratio.log()).sigmoid()


def _warm_up(targets: torch.Tensor, fit: FitOptions) -> Phase:
    """First the network learns what the bare entropy says: that costs no label, and labels are few. Then they only
    have to teach it where the entropy is wrong."""
    loss = soft_loss(targets)
    return Phase(loss, loss, replace(_WARM_UP, seed=fit.seed, epochs=min(fit.epochs, _WARM_UP.epochs)))


def _scaled(scalings: Sequence[Scaling], raw: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [scaling(x) for scaling, x in zip(scalings, raw, strict=True)]


def _imbalance(labels: torch.Tensor) -> float:
    """R2R's weight of positive labels: n0 / n1."""
    positive = int(labels.sum())
    return (len(labels) - positive) / max(1, positive)


def _logprobs(answer: Mapping[str, Any]) -> NDArray[np.float32]:
    return np.array(answer["logprobs"], np.float32)
