# SPDX-License-Identifier: Apache-2.0
"""Tasks of the package `reasoning-gym`, made from a seed and judged by the package's own verifiers.

The package makes the n-th task of a seed from seed + n, so that two seeds near each other share most of their tasks.
One of ours chooses a block of the package's seeds for each kind: other seeds, other blocks. Training's tasks are from
seeds below all blocks (`training.prompts`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tools.config_errors import did_you_mean
from tools.errors import UserError

__all__ = ["KINDS", "MOST", "Made", "chat_prompt", "final_answer", "make"]

# Within reach of models of 1B, not certain for them, with answers that one line can state. Others are refused: some of
# the package's verifiers run the answer as Python, in this process.
KINDS = (
    "basic_arithmetic",
    "calendar_arithmetic",
    "chain_sum",
    "gcd",
    "gsm_symbolic",
    "leg_counting",
    "letter_counting",
    "number_sequence",
    "simple_equations",
    "spell_backward",
)
MOST = 2**20  # tasks of one kind and seed
_BLOCKS = 2**40
_REQUEST = "Think step by step, briefly. End with a line that says only 'Answer:' and the final answer."
_FINAL = re.compile(r"^[\s*#]*(?:final\s+)?answer[*\s]*:[*\s]*(\S.*?)[\s*]*$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Made:
    """verify: whether an answer is exactly right."""

    id: str
    question: str
    verify: Callable[[str], bool]


def make(kinds: Sequence[str], per_kind: int, seed: int) -> Iterator[Made]:
    """`per_kind` tasks of each kind, `MOST` or fewer. Raises UserError when the package isn't installed, or for a kind
    not of KINDS."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UserError(
            f"kinds: got {', '.join(unknown)}{did_you_mean(unknown[0], KINDS)}; allowed: {', '.join(KINDS)}"
        )
    try:
        import reasoning_gym
    except ImportError:
        raise UserError("reasoning: needs the package reasoning-gym (pip install -e '.[eval]')") from None
    for kind in kinds:
        dataset = reasoning_gym.create_dataset(kind, size=per_kind, seed=_first_seed(kind, seed))
        for number, entry in enumerate(dataset):
            yield Made(f"{kind}/{number}", entry["question"], _verifier(dataset, entry))


def _first_seed(kind: str, seed: int) -> int:
    """Of a block of the package's seeds, from `MOST` on."""
    digest = hashlib.sha256(f"{kind}/{seed}".encode()).digest()
    return MOST * (1 + int.from_bytes(digest, "big") % _BLOCKS)


def _verifier(dataset: object, entry: object) -> Callable[[str], bool]:
    def verify(answer: str) -> bool:
        return bool(dataset.score_answer(answer=answer, entry=entry) == 1.0)  # type: ignore[attr-defined]

    return verify


def chat_prompt(question: str) -> list[dict[str, str]]:
    """The conversation that asks for it."""
    return [{"role": "user", "content": f"{question}\n\n{_REQUEST}"}]


def final_answer(text: str) -> str | None:
    """What the last line that says "Answer:" says; None without one."""
    found = _FINAL.findall(text)
    return found[-1].strip(" `$\\()[]") if found else None
