# SPDX-License-Identifier: Apache-2.0
"""Whether a running server is of the deployment that is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from python_backends.token_router.config import RuntimeConfig
from tools.client import TokenRouterClient
from tools.deployment import Deployment
from tools.errors import UserError
from tools.evaluation.single import _serving


def deployment(**engine: Any) -> Deployment:
    """With a `memory`, whose sizing sets the engines' max_tokens where it is served."""
    stock = {"type": "tensorrtllm", "engine_dir": "/engines", **engine}
    return Deployment.model_validate(
        {
            "models": [{"name": name, "engine": stock} for name in ("slm", "llm")],
            "router": {"name": "random"},
            "memory": {"devices": {"gpu0": "80GiB"}},
        }
    )


@pytest.fixture
def serves(monkeypatch: pytest.MonkeyPatch) -> Callable[[RuntimeConfig], None]:
    return lambda runtime: monkeypatch.setattr(TokenRouterClient, "runtime", lambda self: runtime)


def test_a_server_of_the_same_file_with_its_memory_sized(serves: Callable[[RuntimeConfig], None]) -> None:
    serves(deployment(max_tokens=4096).runtime())
    with _serving(deployment(), None, "there:8001", Console()) as (url, control):
        assert (url, control) == ("there:8001", None)


@pytest.mark.parametrize("key", ["models", "tokenizer", "router"])
def test_a_server_of_another_is_refused(serves: Callable[[RuntimeConfig], None], key: str) -> None:
    other = {"models": [{"name": "slm"}], "tokenizer": "smollm2", "router": {"name": "single"}}
    serves(RuntimeConfig.model_validate({**deployment().runtime().model_dump(), key: other[key]}))
    with (
        pytest.raises(UserError, match=rf"^the server has {key} .*give the deployment that it was started with$"),
        _serving(deployment(), None, "there:8001", Console()),
    ):
        pass
