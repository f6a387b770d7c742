# SPDX-License-Identifier: Apache-2.0
"""`tokenrouter chat`: a conversation in the terminal, each token in the colour of the model that made it."""

from __future__ import annotations

import contextlib
import readline  # noqa: F401  gives input() its line editing and history
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from routers import RouterConfig
from tools.client import Answer, GenerationError, TokenRouterClient
from tools.coloring import Painter
from tools.demo import comparison_table
from tools.errors import UserError
from tools.own_server import own_server

__all__ = ["Conversation", "chat"]

_HELP = "Ctrl-C stops the answer, Ctrl-D ends the chat. /clear forgets the conversation, /stats counts, /help this."
_PROMPT = "> "


class Conversation:
    """The messages so far, and the answers with their times.

    max_tokens: most tokens of one answer; None = the server's default.
    """

    def __init__(self, client: TokenRouterClient, console: Console, max_tokens: int | None = None) -> None:
        runtime = client.runtime()
        if runtime.tokenizer is None:
            raise UserError("the server has no tokenizer and takes token ids only; a chat needs one")
        self._client = client
        self._console = console
        self._models = runtime.model_names
        self._temperature = 1.0 if _samples(runtime.router) else None
        self._max_tokens = max_tokens
        self._painter = Painter(console, runtime.model_names)
        self._messages: list[dict[str, str]] = []
        self._answers: list[Answer] = []

    def run(self) -> None:
        """Reads lines and answers them until the end of input."""
        self._painter.legend()
        self._console.print(_HELP, style="dim")
        while True:
            try:
                line = input(_PROMPT).strip()
            except KeyboardInterrupt:
                self._console.print("\nCtrl-D ends the chat", style="dim")
                continue
            except EOFError:
                self._console.print()
                return
            if line:
                self._take(line)

    def _take(self, line: str) -> None:
        if not line.startswith("/"):
            self._ask(line)
        elif line == "/clear":
            self._messages.clear()
            self._console.print("the conversation is forgotten", style="dim")
        elif line == "/stats":
            self._stats()
        else:
            self._console.print(_HELP if line == "/help" else f"there is no {line}. {_HELP}", style="dim", markup=False)

    def _ask(self, question: str) -> None:
        messages = [*self._messages, {"role": "user", "content": question}]
        generation = self._client.generate(
            messages=messages, max_tokens=self._max_tokens, temperature=self._temperature
        )
        answer = Answer(generation.sent_at)
        try:
            self._painter.show(generation, answer)
        except KeyboardInterrupt:
            self._console.print("stopped", style="dim")
        except GenerationError as error:
            hint = "; /clear begins anew" if error.refused else ""
            self._console.print(f"{error}{hint}", style="red", markup=False)
            return  # the question is not part of the conversation: asking again is harmless
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._answers.append(answer)

    def _stats(self) -> None:
        titled = {f"answer {number}": answer for number, answer in enumerate(self._answers, 1)}
        if titled:
            self._console.print(comparison_table(titled, self._models))
        else:
            self._console.print("no answer yet", style="dim")


def _samples(router: RouterConfig) -> bool:
    """Whether it takes no greedy request; of one that only the server's host has, that isn't known here."""
    try:
        return router.algorithm().needs_sampling
    except ValueError:
        return False


def chat(config: Path | str | None = None, url: str | None = None, max_tokens: int | None = None) -> None:
    """Talk with the server at `url` (host:port of its gRPC endpoint), or with one started from `config`.

    Raises UserError for what the user can put right.
    """
    console = Console(highlight=False)
    try:
        with _server_url(config, url, console) as at, TokenRouterClient(at) as client:
            Conversation(client, console, max_tokens).run()
    except GenerationError as error:
        raise UserError(f"{url or 'the server'}: {error}") from error


@contextlib.contextmanager
def _server_url(config: Path | str | None, url: str | None, console: Console) -> Iterator[str]:
    if url is not None:
        if config is not None:
            raise UserError(f"--url with the deployment {config}: give one of them; a running server has its own")
        yield url
        return
    with own_server(config, console) as server:
        yield server.grpc_url
