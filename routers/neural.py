# SPDX-License-Identifier: Apache-2.0
"""What the trained routers share: a network beside the small model, one token for each visit to the large one.

A router says with `route` how the probability is compared, and with `signal` what its network sees where that is more
than the hidden state. The file of its weights says which models it was trained for; another deployment is refused
(`routers.weights`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import Field

from routers.base import (
    BaseRouter,
    OneTokenRouter,
    PeerReq,
    RoutedRequest,
    RouterParams,
    ServedModel,
    StepResult,
    send_without_last,
)
from routers.weights import RouterHeader, load_router, locate_router, read_header

if TYPE_CHECKING:
    import torch

__all__ = ["NeuralEntry", "NeuralParams", "NeuralPeer", "finite", "hidden_state", "mismatch"]


class NeuralParams(RouterParams):
    """weights: the router's own. other_models: serve beside models that it wasn't trained for; their sizes must
    be those of its own all the same.

    A subclass names its algorithm, and the threshold as the paper does: None = the one of the file.
    """

    algorithm: ClassVar[str]
    threshold_name: ClassVar[str]

    weights: str = Field(description="the path of a .safetensors file, or the name of a shipped router")
    other_models: bool = Field(False, description="serve beside models that the router wasn't trained for")

    @property
    def threshold_given(self) -> float | None:
        value: float | None = getattr(self, self.threshold_name)
        return value

    def header(self) -> RouterHeader:
        """Of the weights. Raises ValueError when they aren't there, or of another algorithm."""
        return read_header(locate_router(self.weights), self.algorithm)


P = TypeVar("P", bound=NeuralParams)


class NeuralEntry(BaseRouter[P]):
    """Beside the small model: its token is dropped where the network says so, and the large one makes it."""

    needs_logits = False
    needs_hidden_states = True

    network: torch.nn.Module  # once bound, in eval mode
    header: RouterHeader  # once bound

    @staticmethod
    def network_class() -> type[torch.nn.Module]:
        """Of `routers.networks`, imported here: `token_router` makes routers too, and needs no torch."""
        raise NotImplementedError

    def signal(self, result: StepResult, row: int) -> torch.Tensor:
        """The network's logit for a row of the step, by default of its hidden state: FP32 [1]. Raises ValueError where
        an input isn't finite."""
        logit: torch.Tensor = self.network(hidden_state(result, row))
        return logit

    def check(self, model: ServedModel) -> None:
        header = self.params.header()
        _check_model(self.params, header, model, self.index)
        if model.hidden_size != header.hidden_size:
            raise mismatch(self.params, "hidden_size", header.hidden_size, model, model.hidden_size)

    def bind(self, model: ServedModel) -> None:
        from routers.networks import restore

        path = locate_router(self.params.weights)
        file = load_router(path, self.params.algorithm)
        try:
            self.network = restore(self.network_class(), file.header.network, file.tensors)
        except ValueError as error:
            raise ValueError(f"weights: {path}: {error}") from error
        self.header = file.header

    def probabilities(self, result: StepResult) -> torch.Tensor:
        """Sigmoid of the network's logits, FP64 [n].

        Row by row: the last bits of a matrix product depend on how many rows it has, and an answer must not
        depend on who else is served. Raises ValueError where the network's input or output isn't finite.
        """
        import torch

        with torch.inference_mode():
            signals = [self.signal(result, r) for r in range(len(result.rids))]
            return finite("the router's logit", torch.cat(signals)).double().sigmoid()

    def thresholds(self, result: StepResult) -> torch.Tensor:
        """Of each row, FP64 [n]: the request's, else the deployment's, else the file's."""
        import torch

        given = (p.threshold_given for p in result.params)
        return torch.tensor([self.header.threshold if t is None else t for t in given], dtype=torch.float64)

    def send(self, req: RoutedRequest) -> PeerReq:
        return send_without_last(req)


class NeuralPeer(OneTokenRouter[P]):
    """Beside the large model: makes one token and hands back."""

    def check(self, model: ServedModel) -> None:
        _check_model(self.params, self.params.header(), model, self.index)


def hidden_state(result: StepResult, row: int) -> torch.Tensor:
    """FP32 [1, H] of a row. Raises ValueError when there is none, or it isn't finite."""
    if result.hidden_states is None:
        raise ValueError("this engine returns no hidden states")
    return finite("hidden state", result.hidden_states[row : row + 1])


def finite(what: str, values: torch.Tensor) -> torch.Tensor:
    """The values. Raises ValueError when one of them is NaN or infinite: a comparison would hide it."""
    if not values.isfinite().all():
        raise ValueError(f"{what}: holds NaN or infinite numbers; allowed: finite ones")
    return values


def _check_model(params: NeuralParams, header: RouterHeader, model: ServedModel, index: int) -> None:
    """Raises ValueError when model number `index` isn't what the router was trained for."""
    if model.vocab_size != header.vocab_size:
        raise mismatch(params, "vocab_size", header.vocab_size, model, model.vocab_size)
    if not params.other_models and (index >= len(header.models) or model.weights != header.models[index]):
        trained = header.models[index] if index < len(header.models) else None
        raise mismatch(params, f"models[{index}]", trained, model, model.weights, "; other_models: true allows it")


def mismatch(
    params: NeuralParams, field: str, trained: Any, model: ServedModel, has: Any, hint: str = ""
) -> ValueError:
    """The error when `field` of the weights isn't what the model served has."""
    return ValueError(
        f"router '{params.algorithm}': weights '{params.weights}': {field}: trained for {trained},"
        f" model '{model.name}' has {has}{hint}"
    )
