# SPDX-License-Identifier: Apache-2.0
"""Which prompts are fitted, held out, and tested."""

from __future__ import annotations

from collections import Counter

import pytest

from tools.training.dataset import Split, split_of
from tools.training.prompts import Prompt

TEN = "one two three four five six seven eight nine ten"
OTHER = "a b c d e f g h i j"


def _code(name: str, text: str) -> Prompt:
    return Prompt(name, "code", text, name)


@pytest.mark.parametrize("seed", range(8))
def test_versions_of_one_function_are_in_one_part(seed: int) -> None:
    alone = [_code(f"f{n}", f"def f{n}(): text of its own {n}") for n in range(60)]
    twins = [_code("v1", f"def reverse(): {TEN}"), _code("v2", f"def turn(x): really {TEN}")]
    bridge = _code("v3", f"def both(): {TEN} and then {OTHER}")
    far = _code("v4", f"def far(): {OTHER}")
    parts = split_of([far, *alone, *twins, bridge], seed)
    assert len(parts) == 64
    assert len({parts[name] for name in ("v1", "v2", "v3", "v4")}) == 1
    sizes = Counter(parts.values())
    assert abs(sizes[Split.TRAIN] - 42) <= 4 and abs(sizes[Split.HELD_OUT] - 10) <= 4 and sizes[Split.TEST] >= 8


def test_the_parts_are_the_seeds() -> None:
    prompts = [_code(f"f{n}", f"def f{n}(): text of its own {n}") for n in range(60)]
    assert split_of(prompts, 1) == split_of(prompts[::-1], 1) != split_of(prompts, 2)


def test_tasks_of_one_wording_are_not_alike() -> None:
    tasks = [
        Prompt(f"sum:{n}", "reasoning", f"State the answer to the following arithmetic problem please: {n}", "sum")
        for n in range(40)
    ]
    assert len(set(split_of(tasks, 0).values())) == 3
