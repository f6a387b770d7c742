# SPDX-License-Identifier: Apache-2.0
"""The interface between a routing algorithm and the runtime: `route`, `send`, `receive`.

One request visits several models. On each model it has a *session*; on each model an algorithm has a
*router*. A step of model i ends with `route`, for the whole batch, in the process that holds the model.
A request that leaves passes through `send` of the router it leaves and `receive` of the router it comes
to; both run in the `token_router` process (paper, section 3).

Models are numbered from the point of view of the router: 0 is the model it sits beside, j >= 1 is its
j-th peer. With two models each one's peer is 1. With more, the peers of model i are the other models in
the order of the deployment file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:  # a router that only sends and receives, as in token_router, needs no torch
    import torch

__all__ = [
    "Algorithm",
    "BaseRouter",
    "LogitsOutput",
    "OneTokenRouter",
    "PeerReq",
    "RoutedRequest",
    "RouterParams",
    "ServedModel",
    "StepResult",
    "destinations",
    "model_to_peer",
    "peer_request",
    "peer_to_model",
    "send_without_last",
]


class RouterParams(BaseModel):
    """Base of an algorithm's parameters. Subclass it and declare fields with their bounds.

    The deployment file gives the values under `router.params`; a request may override those that
    `per_request` names, through its `router_params` input.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    per_request: ClassVar[frozenset[str]] = frozenset()

    def check_models(self, models: Sequence[str]) -> None:
        """Override to raise ValueError when these values don't fit a deployment of these models."""


P = TypeVar("P", bound=RouterParams)


@dataclass(frozen=True)
class ServedModel:
    """What a router may ask about the model that it sits beside.

    name: the deployment's. weights: the name of its weights, a file's without folder and ending; None for
        an engine without weights (`paced`), or whose weights have no name that is known (`tensorrtllm`).
    vocab_size: columns of the logits. hidden_size: of the hidden states; None = the engine has none.
    embed: INT64 [n] -> FP32 [n, embedding size], rows of the model's input embedding. None = the engine has
        none, or the model isn't loaded (`BaseRouter.check`).
    token_bytes: the text of a token, in UTF-8 bytes; empty of a special token. None as for embed.
    """

    name: str
    weights: str | None
    vocab_size: int
    hidden_size: int | None = None
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None
    token_bytes: Callable[[int], bytes] | None = None


@dataclass(frozen=True)
class LogitsOutput:
    """What the model computed at the last position of each row.

    next_token_logits: FP32 [n, vocabulary], raw: before temperature, penalties and any mask. None when
        the engine has no logits (`paced`).
    hidden_states: FP32 [n, hidden size], after the final norm. None unless the router declares
        `needs_hidden_states`.
    """

    next_token_logits: torch.Tensor | None
    hidden_states: torch.Tensor | None


@dataclass(frozen=True)
class StepResult:
    """One decoding step of one model, as `route` gets it. Row r belongs to request rids[r].

    logits_output: see `LogitsOutput`.
    token_ids: n, the tokens just sampled, not yet committed.
    places: n, the place of each sampled token in its sequence (prompt included, from 0).
    sequences: n, the tokens before each sampled one, prompt included. Read only: they are the runner's own.
    prompt_tokens: n, how many of them are the prompt: row r's token is its answer's first where this equals
        places[r].
    rids: n request numbers, unique while `token_router` lives.
    params: n parameter sets: the deployment's, with what that request overrides.
    draw: one number from [0, 1) for a row. It depends only on the request's seed, the place and the model,
        so a request's draws are the same whatever else is served.
    fields: where `route` puts what `send` needs: fields[r]["name"] = a JSON value. It travels with the
        step's response to `RoutedRequest.fields`.
    """

    logits_output: LogitsOutput
    token_ids: Sequence[int]
    places: Sequence[int]
    sequences: Sequence[Sequence[int]]
    prompt_tokens: Sequence[int]
    rids: Sequence[int]
    params: Sequence[Any]
    draw: Callable[[int], float]
    fields: list[dict[str, Any]]

    @cached_property
    def next_token_ids(self) -> torch.Tensor:
        """`token_ids` as INT64 [n] where the step's tensors are; made when it's first read."""
        import torch

        return torch.tensor(self.token_ids, dtype=torch.int64, device=self._device)

    @property
    def logits(self) -> torch.Tensor:
        """FP32 [n, vocabulary], raw. Raises ValueError on an engine without logits."""
        logits = self.logits_output.next_token_logits
        if logits is None:
            raise ValueError("this engine returns no logits")
        return logits

    @property
    def hidden_states(self) -> torch.Tensor | None:
        """FP32 [n, hidden size] or None; the paper's name for `logits_output.hidden_states`."""
        return self.logits_output.hidden_states

    def param(self, name: str) -> torch.Tensor:
        """The parameter `name` of every row, as FP64 [n] where the step's tensors are."""
        import torch

        values = [getattr(p, name) for p in self.params]
        return torch.tensor(values, dtype=torch.float64, device=self._device)

    @property
    def _device(self) -> torch.device | None:
        """Where the step's tensors are: on an engine's GPU. None = it has none."""
        logits, hidden = self.logits_output.next_token_logits, self.logits_output.hidden_states
        beside = hidden if logits is None else logits
        return None if beside is None else beside.device


class RoutedRequest(Protocol):
    """A request as one model's router sees it in `send` and `receive`. Read only.

    rid: the request's number.
    origin_input_ids: the prompt's token ids.
    output_ids: the tokens after the prompt that this model knows, the one just sampled included.
    peer_locs: by peer index: how many tokens of the sequence (prompt included) that peer is known to
        have; 0 when it was never sent any. Index 0 is unused.
    destination: the peer that `route` sends the request to.
    fields: what `route` left in `StepResult.fields` for this request's last token.
    """

    @property
    def rid(self) -> int: ...
    @property
    def origin_input_ids(self) -> list[int]: ...
    @property
    def output_ids(self) -> list[int]: ...
    @property
    def peer_locs(self) -> list[int]: ...
    @property
    def destination(self) -> int: ...
    @property
    def fields(self) -> Mapping[str, Any]: ...

    def finished(self) -> bool:
        """Whether the last token of `output_ids` ends the request (end of sequence, or its limit)."""
        ...


@dataclass(frozen=True)
class PeerReq:
    """What travels from one model's router to another's (paper, section 3).

    rid: the request's number.
    token_ids: the tokens that the peer hasn't seen: the sequence's positions loc - len(token_ids) to loc.
    loc: the sender's position: the length of the sequence (prompt included) once token_ids are in it.
        What the sender sampled beyond it is dropped, and the peer makes that position anew.
    finished: whether the sequence is complete: its last token ends it, or it has reached its limit. The
        runtime sets this from the tokens that were kept, before `receive`, whatever `send` put here.
    fields: the algorithm's own, a JSON object; `receive` of the peer sees it.
    """

    rid: int
    token_ids: Sequence[int]
    loc: int
    finished: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)


class BaseRouter(Generic[P]):
    """One algorithm beside one model. Subclass it and fill in `route`; override `send` and `receive`.

    params: the deployment's parameters. What a request overrides is in `StepResult.params`.
    models: the names of all models, in the deployment's order.
    index: which of them this router sits beside.
    """

    needs_logits: ClassVar[bool] = True
    needs_hidden_states: ClassVar[bool] = False
    needs_embeddings: ClassVar[bool] = False  # `ServedModel.embed`
    needs_token_bytes: ClassVar[bool] = False  # `ServedModel.token_bytes`
    needs_sampling: ClassVar[bool] = False  # true: greedy requests are refused

    def __init__(self, params: P, models: Sequence[str], index: int) -> None:
        self.params = params
        self.models = tuple(models)
        self.index = index

    @classmethod
    def needs(cls) -> list[str]:
        """What the engine must provide, by the names of `Capacity.provides`."""
        known = ("logits", "hidden_states", "embeddings", "token_bytes", "sampling")
        return [what for what in known if getattr(cls, f"needs_{what}")]

    def check(self, model: ServedModel) -> None:
        """Override to raise ValueError when this router can't sit beside that model, weights unread: it is
        also what `tokenrouter validate` asks, with what the files say of the model."""

    def bind(self, model: ServedModel) -> None:
        """Override to load what `route` needs. Called once at start, in the model's process: the engine is
        loaded, `check` has passed, no step has been made.

        Raises ValueError when the router can't serve beside this model: it is refused with that message.
        """

    def route(self, result: StepResult) -> torch.Tensor | list[int]:
        """Where each request of the batch goes: 0 = stay here, j = to peer j.

        INT64 [n] from a router that computes with tensors, on their device; a list of n ints from one that has
        them at hand: on an engine without logits, making a tensor would be most of what routing costs.

        Called once per step in the model's process, before the sampled tokens are committed. It must not
        change `result` other than its `fields`. If it raises, it is called again row by row, and only
        the rows for which it raises again fail.
        """
        raise NotImplementedError

    def send(self, req: RoutedRequest) -> PeerReq:
        """What goes to peer `req.destination`: by default every token it hasn't seen, the newest too.

        Called in `token_router`, once for each request that `route` sends away.
        """
        return peer_request(req)

    def receive(self, peer_req: PeerReq) -> Sequence[int]:
        """The tokens of `peer_req.token_ids` to commit, from its first on: by default all.

        Called in `token_router` when the request arrives here. Tokens that this model already has are
        skipped by the runtime, so an overlap is harmless.
        """
        return peer_req.token_ids


class OneTokenRouter(BaseRouter[P]):
    """Beside a large model that makes one token for each visit and hands back."""

    needs_logits = False

    def route(self, result: StepResult) -> torch.Tensor | list[int]:
        return [1] * len(result.rids)


def destinations(routed: Any, rows: int) -> list[int]:
    """What `route` returned for that many rows, as ints. Raises ValueError when it isn't what the interface says."""
    if isinstance(routed, list):
        if len(routed) == rows and all(type(to) is int for to in routed):
            return routed
        wrong = sorted({type(to).__name__ for to in routed if type(to) is not int})
        what = f"a list with {' and '.join(wrong)}" if wrong else f"a list of {len(routed)}"
    else:
        import torch

        if not isinstance(routed, torch.Tensor):
            what = type(routed).__name__
        elif routed.dtype == torch.int64 and routed.shape == (rows,):
            ints: list[int] = routed.tolist()
            return ints
        else:
            what = f"{routed.dtype} {list(routed.shape)}"
    raise ValueError(f"it must return INT64 [{rows}] or a list of as many ints, it returned {what}")


def peer_request(req: RoutedRequest, dropped: int = 0) -> PeerReq:
    """The PeerReq that brings the destination of `req` up to its sequence, but for the last `dropped` of output_ids.
    Of a long sequence only what the destination hasn't seen is copied."""
    prompt, kept = len(req.origin_input_ids), len(req.output_ids) - dropped
    if not 0 <= dropped <= len(req.output_ids):
        raise ValueError(f"dropped: got {dropped}; allowed: 0 to {len(req.output_ids)}, the tokens of output_ids")
    seen = req.peer_locs[req.destination]
    unseen = req.origin_input_ids[seen:] + req.output_ids[max(0, seen - prompt) : kept]
    return PeerReq(rid=req.rid, token_ids=unseen, loc=prompt + kept)


def send_without_last(req: RoutedRequest) -> PeerReq:
    """A `send` that drops the token just sampled, so that the peer makes that position itself."""
    return peer_request(req, dropped=1)


@dataclass(frozen=True)
class Algorithm:
    """A routing algorithm: what the registry holds and what a dotted path must lead to.

    name: as in the deployment file's `router.name`.
    params: the class of its parameters.
    entry: the router beside model 0, where every request starts.
    peer: the router beside each of the other models.
    min_models, max_models: how many models it can route between; max_models None = any number.
    """

    name: str
    params: type[RouterParams]
    entry: type[BaseRouter[Any]]
    peer: type[BaseRouter[Any]]
    min_models: int = 2
    max_models: int | None = 2

    @property
    def needs_sampling(self) -> bool:
        """Whether one of its routers takes no greedy request."""
        return self.entry.needs_sampling or self.peer.needs_sampling

    def router(self, index: int, params: RouterParams, models: Sequence[str]) -> BaseRouter[Any]:
        """The router beside model number `index` of the deployment's `models` (in its order).

        Raises ValueError when the algorithm can't route between that many models.
        """
        self.check_models(models)
        params.check_models(models)
        cls = self.entry if index == 0 else self.peer
        return cls(params, models, index)

    def check_models(self, models: Sequence[str]) -> None:
        """Raises ValueError when the algorithm can't route between these models."""
        allowed = (
            f"{self.min_models} or more"
            if self.max_models is None
            else (
                str(self.min_models)
                if self.min_models == self.max_models
                else f"{self.min_models} to {self.max_models}"
            )
        )
        if len(models) < self.min_models or (self.max_models is not None and len(models) > self.max_models):
            raise ValueError(
                f"router '{self.name}' routes between {allowed} models; the deployment has {len(models)}"
                f" ({', '.join(models)})"
            )


def peer_to_model(index: int, peer: int) -> int:
    """The deployment's number of the model that is peer number `peer` of model number `index`."""
    if peer == 0:
        return index
    return peer - 1 if peer <= index else peer


def model_to_peer(index: int, model: int) -> int:
    """The inverse of `peer_to_model`: how model number `index` numbers model number `model`."""
    if model == index:
        return 0
    return model + 1 if model < index else model
