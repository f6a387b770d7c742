# SPDX-License-Identifier: Apache-2.0
"""The process that solves for B: one JSON object a line in, one a line out, until its standard input ends.

{"live": N, "profile": {...}, "applied": [1, 2]}
    -> {"best": [1, 3], "throughput": {"1,3": 190.1, ...}, "method": "exact"}, or {"error": "..."}

It is of the lowest priority and has one thread: it may take long, but never the models' time. When the process
that started it ends, however that ends, so does this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from typing import Any

from python_backends.token_router.threshold.controller import Answer, Question
from python_backends.token_router.threshold.profile import Profile

__all__ = ["answer", "main"]

_NICE = 19
_ROUGH = 0.002
_PR_SET_PDEATHSIG = 1


def answer(question: Question) -> Answer:
    """Solved here and now. Raises ImportError when there is no scipy."""
    from python_backends.token_router.threshold.solve import evaluate, solve

    profile, live, applied = question.profile, question.live, question.applied
    solution = solve(profile, live)
    throughput = {b: estimate.throughput for b, estimate in solution.throughput.items()}
    known = solution.throughput.get(applied)
    if known is None or known.error > _ROUGH * known.throughput:  # what the best is compared with
        throughput[applied] = evaluate(profile, live, applied).throughput
    return Answer(solution.best, throughput, solution.steady.method)


def main() -> None:
    """Say {"ready": true}, then answer until there is nothing more to read."""
    os.nice(_NICE)
    _end_with_parent()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            try:
                result = _answer_json(json.loads(line))
            except Exception as error:  # whatever it is, the next question may be answered
                result = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(result), file=answers, flush=True)


def _answer_json(question: dict[str, Any]) -> dict[str, Any]:
    profile, applied = Profile.model_validate(question["profile"]), tuple(question["applied"])
    found = answer(Question(question["live"], profile, applied))
    throughput = {",".join(map(str, b)): value for b, value in found.throughput.items()}
    return {"best": list(found.best), "throughput": throughput, "method": found.method}


def _end_with_parent() -> None:
    """The end of standard input is seen only between two answers; the kernel's signal is at once."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
