# SPDX-License-Identifier: Apache-2.0
"""Starting an LLM's model anew.

By Triton's HTTP endpoint where that is known: while the stub's own `load_model` runs, this whole process stands still,
because it holds the interpreter's lock (pb_stub.cc of every release up to 26.07), and so do the responses on their way
to clients.
"""

from __future__ import annotations

import http.client
import os
from collections.abc import Callable

import triton_python_backend_utils as pb_utils

__all__ = ["TRITON_HTTP_VARIABLE", "reloader"]

TRITON_HTTP_VARIABLE = "TOKENROUTER_TRITON_HTTP"  # host:port; set by whoever starts tritonserver


def reloader(name: str) -> Callable[[], None]:
    """What unloads and loads model `name`, and returns when it is loaded. It raises RuntimeError with the reason."""
    address = os.environ.get(TRITON_HTTP_VARIABLE)

    def by_http() -> None:
        for action in ("unload", "load"):
            _post(str(address), f"/v2/repository/models/{name}/{action}")

    def by_stub() -> None:
        try:
            pb_utils.unload_model(name)
            pb_utils.load_model(name)
        except pb_utils.TritonModelException as error:
            raise RuntimeError(str(error)) from error

    return by_http if address else by_stub


def _post(address: str, path: str) -> None:
    """No timeout: a large LLM takes minutes to load, and Triton ends this process when it ends itself."""
    connection = http.client.HTTPConnection(address)
    try:
        # an idle kept-alive connection would hold up Triton's exit
        connection.request("POST", path, headers={"Connection": "close"})
        response = connection.getresponse()
        text = " ".join(response.read().decode("utf-8", "replace").split())
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(text)
    except (OSError, http.client.HTTPException) as error:
        raise RuntimeError(f"Triton did not answer at http://{address}{path}: {error}") from error
    finally:
        connection.close()
