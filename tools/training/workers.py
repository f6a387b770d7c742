# SPDX-License-Identifier: Apache-2.0
"""Jobs done in processes of their own, one for each core: two of them with one thread each do twice one's work."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch

from python_backends.llm.engines import build_engine, parse_engine_config
from tools.errors import UserError
from tools.training import jobs
from tools.training.lockstep import Work, drive

__all__ = ["Item", "Pool", "Processes", "Setup", "run_here"]


@dataclass(frozen=True)
class Item:
    """A job to be done. kind: a function of `jobs`; prompt: its first argument; arguments: the others by name."""

    key: str
    kind: str
    prompt: Sequence[int]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Setup:
    """What a worker needs. engines: the `engine` section of each model that the jobs ask, in their order.
    hidden_states: whether the first of them returns them."""

    engines: Sequence[Mapping[str, Any]]
    hidden_states: bool = False


class Pool(Protocol):
    """Does items, in any order."""

    def __call__(self, setup: Setup, items: Sequence[Item]) -> Iterator[tuple[str, Any]]:
        """The key and the result of each, as they come."""
        ...


@dataclass(frozen=True)
class Processes:
    """A `Pool` of so many processes."""

    count: int

    def __call__(self, setup: Setup, items: Sequence[Item]) -> Iterator[tuple[str, Any]]:
        """Raises UserError when one of the processes fails or ends. They are ended when the iterator is."""
        context = multiprocessing.get_context("spawn")  # llama.cpp's threads wouldn't live through a fork
        shares = [items[n :: self.count] for n in range(self.count)]
        workers, pipes = [], []
        try:
            for share in filter(None, shares):
                ours, theirs = context.Pipe()
                worker = context.Process(target=_work, args=(theirs,), daemon=True)
                worker.start()
                theirs.close()
                workers.append(worker)
                pipes.append(ours)
                # not through args: a process that dies while it starts would leave us waiting for it to read them
                ours.send((setup, share))
            yield from _results(pipes)
        except (EOFError, ConnectionError):
            raise UserError("train: a worker process ended: too little memory?") from None
        finally:
            for worker in workers:
                worker.terminate()
                worker.join()


def _results(pipes: Sequence[Connection]) -> Iterator[tuple[str, Any]]:
    left = list(pipes)
    while left:
        for pipe in [p for p in wait(left) if isinstance(p, Connection)]:
            message = pipe.recv()
            if message is None:
                left.remove(pipe)
            elif isinstance(message, str):
                raise UserError(f"train: {message}")
            else:
                yield message


def _work(pipe: Connection) -> None:
    """A worker's life: gets (setup, items); sends (key, result) for each item, then None; or what went wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    torch.set_num_threads(1)
    setup, items = pipe.recv()
    with suppress(ConnectionError):  # the parent is gone
        try:
            for found in run_here(setup, items):
                pipe.send(found)
            pipe.send(None)
        except ConnectionError:
            raise
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def run_here(setup: Setup, items: Sequence[Item]) -> Iterator[tuple[str, Any]]:
    """The `Pool` that is this process."""
    engines = [
        build_engine(parse_engine_config(engine), f"model {n}", hidden_states=setup.hidden_states and n == 0)
        for n, engine in enumerate(setup.engines)
    ]
    try:
        eos = frozenset(engines[0].capacity().eos_token_ids)
        for key, result in drive(engines, (_work_of(item, eos) for item in items)):
            yield str(key), result
    finally:
        for engine in engines:
            engine.close()


def _work_of(item: Item, eos: frozenset[int]) -> Work:
    """The item as a job; a `jobs.Text` among its arguments is told which tokens end an answer: the model knows."""
    arguments = {k: replace(v, eos=eos) if isinstance(v, jobs.Text) else v for k, v in item.arguments.items()}
    return Work(item.key, len(item.prompt), getattr(jobs, item.kind)(item.prompt, **arguments))
