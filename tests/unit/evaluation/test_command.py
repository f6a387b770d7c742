# SPDX-License-Identifier: Apache-2.0
"""What `tokenrouter eval` says about wrong input, before any server starts."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import yaml

import tools
from tools.cli import app
from tools.errors import UserError
from tools.evaluation.asking import Asking


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "mmlu"], "--task: got 'mmlu'; allowed: 'humaneval', 'reasoning'"),
        (["--temperature", "1e-6"], "--temperature: got 1e-06; input should be greater than or equal to 0.00001"),
        (["--temperature", "101"], "--temperature: got 101.0; input should be less than or equal to 100"),
        (["--seed", str(2**64 - 1)], "--seed: got 18446744073709551615; input should be less than 1844674406941458432"),
        (
            ["--temperature", "1.0"],
            "--temperature: got 1; only of routers that must sample; the deployment's is rstitch",
        ),
        (["--temperature", "0.7"], "--temperature: got 0.7; only of routers that must sample"),
        (["--router-params", "{"], "--router-params: got '{'; is not JSON"),
        (["--router-params", "[]"], "--router-params: got '[]'; must be a JSON object"),
        (["--router-params", '{"tau": 2}'], "--router-params: router 'rstitch': tau"),
        (["--problems", "x"], "problems: got 'x'; must be N, FROM:TO or FROM:TO:STEP"),
        (["--server", "auto", "--url", "127.0.0.1:1"], "--url: given beside --server; allowed: one of them"),
        (["--url", "127.0.0.1:1"], "the server didn't answer: UNAVAILABLE"),
        (["paced"], "tokenizer: is null; questions in words need one"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    config = [] if arguments[0] == "paced" else ["smollm2"]
    with pytest.raises(UserError) as error:
        app(["eval", "run", *config, *arguments, "--output", str(tmp_path / "out")], standalone_mode=False)
    (line,) = error.value.lines
    assert line.startswith(message)


def test_a_temperature_of_a_router_that_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken where it is given, and 1 where it isn't."""
    text = (Path(tools.__file__).parent / "deployments" / "smollm2.yaml").read_text()
    data = {**yaml.safe_load(text), "router": {"name": "me", "params": {"weights": [0.5, 0.5]}}}
    (tmp_path / "me.yaml").write_text(yaml.safe_dump(data))
    asked = []

    def answer(*arguments: Any) -> NoReturn:
        (asking,) = [a for a in arguments if isinstance(a, Asking)]
        asked.append(asking.temperature)
        raise UserError("that will do")

    monkeypatch.setattr("tools.evaluation.sweep.ask_all", answer)
    monkeypatch.setattr(
        "tools.evaluation.single.own_server_of", lambda *_: nullcontext(SimpleNamespace(grpc_url="", control=None))
    )
    for number, given in enumerate([["--temperature", "0.7"], []]):
        arguments = ["eval", "run", str(tmp_path / "me.yaml"), *given, "--output", str(tmp_path / f"out{number}")]
        with pytest.raises(UserError, match="that will do"):
            app(arguments, standalone_mode=False)
    assert asked == [0.7, 1.0]
