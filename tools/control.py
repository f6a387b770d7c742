# SPDX-License-Identifier: Apache-2.0
"""The supervisor's end of the control socket that `token_router` opens in the run directory.

One JSON object a line, both ways: {"op": "status" | "traffic" | "drain" | "abort", ...} -> {"ok": true, ...}.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

__all__ = ["ControlClient", "ControlError", "RouterStatus"]

# token_router's own `CONTROL_SOCKET` would bring its whole runtime with it; a test compares them
_SOCKET = "control.sock"


class ControlError(Exception):
    """token_router did not answer, or refused. The message is one line."""


@dataclass(frozen=True)
class RouterStatus:
    """state: starting, serving or draining. live: requests generating. queued: waiting for admission.

    models: by name what token_router knows of each, its "state" among it.
    controller: what `batching: auto` believes and has chosen; None where it isn't on.
    full: even the shortest request would have to wait for others to end.
    """

    state: str
    live: int
    queued: int
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    controller: dict[str, Any] | None = None
    full: bool = False

    @property
    def unfinished(self) -> int:
        """Requests that have not been answered yet."""
        return self.live + self.queued

    def not_up(self) -> dict[str, str]:
        """The states of the models that don't serve: starting, reloading (token_router is at it), or down; with the
        reason where it is known."""
        missing = {name: m for name, m in self.models.items() if m.get("state") != "up"}
        return {name: ": ".join(filter(None, (str(m.get("state")), m.get("problem")))) for name, m in missing.items()}


class ControlClient:
    """One connection for each call: a call is rare, and so no state outlives a restart of token_router."""

    def __init__(self, path: Path, timeout_s: float = 5.0) -> None:
        self._path = path
        self._timeout_s = timeout_s

    @classmethod
    def of(cls, run: Path) -> ControlClient:
        """That of the token_router whose run directory this is."""
        return cls(run / _SOCKET)

    def status(self) -> RouterStatus:
        """Raises ControlError when there is no answer."""
        answer = self._ask({"op": "status"})
        try:
            return RouterStatus(**{f.name: answer[f.name] for f in fields(RouterStatus)})
        except KeyError as error:
            raise ControlError(f"token_router's status lacks {error}") from error

    def traffic(self) -> dict[str, Any]:
        """What token_router has measured of the traffic: its `Runtime.measured`. Raises ControlError."""
        return self._ask({"op": "traffic"})

    def drain(self) -> None:
        """Refuse new requests from now on. Raises ControlError."""
        self._ask({"op": "drain"})

    def abort(self, reason: str) -> None:
        """End every request with an error that says `reason`. Raises ControlError."""
        self._ask({"op": "abort", "reason": reason})

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self._timeout_s)
                connection.connect(str(self._path))
                connection.sendall(json.dumps(question).encode() + b"\n")
                with connection.makefile("rb") as lines:
                    answer = json.loads(lines.readline())
        except (OSError, ValueError) as error:
            raise ControlError(f"token_router did not answer '{question['op']}': {error}") from error
        if not isinstance(answer, dict) or not answer.get("ok"):
            raise ControlError(f"token_router refused '{question['op']}': {answer}")
        return answer
