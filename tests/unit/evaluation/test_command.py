# SPDX-License-Identifier: Apache-2.0
"""What `tokenrouter eval` says about wrong input, before any server starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.cli import app
from tools.errors import UserError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "mmlu"], "--task: got 'mmlu'; allowed: 'humaneval', 'reasoning'"),
        (["--temperature", "0"], "--temperature: got 0.0; input should be greater than 0"),
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
