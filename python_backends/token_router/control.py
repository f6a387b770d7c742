# SPDX-License-Identifier: Apache-2.0
"""The supervisor's way in: a Unix socket in the run directory, one JSON object a line.

{"op": "status"}                  -> Runtime.status()
{"op": "traffic"}                 -> Runtime.measured()
{"op": "drain"}                   -> {"ok": true}; new requests are refused from now on
{"op": "abort", "reason": "..."}  -> {"ok": true}; every request ends as UNAVAILABLE

It is no part of the public interface: only the user who runs the server can open it.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from python_backends.token_router.runtime import Runtime

__all__ = ["CONTROL_SOCKET", "serve_control"]

CONTROL_SOCKET = "control.sock"


async def serve_control(runtime: Runtime, run_dir: Path) -> asyncio.Server:
    """Listen in `run_dir`. A socket file left there by a dead process is replaced."""
    path = run_dir / CONTROL_SOCKET
    path.unlink(missing_ok=True)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(json.dumps(_answer(runtime, line)).encode() + b"\n")
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path)
    path.chmod(0o600)
    return server


def _answer(runtime: Runtime, line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
        op = message["op"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"ok": False, "error": 'expected a JSON object with "op": status, traffic, drain or abort'}
    if op == "status":
        return {"ok": True, **runtime.status()}
    if op == "traffic":
        return {"ok": True, **runtime.measured()}
    if op == "drain":
        runtime.drain()
        return {"ok": True}
    if op == "abort":
        runtime.abort(str(message.get("reason", "aborted")))
        return {"ok": True}
    return {"ok": False, "error": f"op: {op!r}; allowed: status, traffic, drain, abort"}
