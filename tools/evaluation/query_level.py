# SPDX-License-Identifier: Apache-2.0
"""Routing once per request, the line that token-level routing has to beat: each question goes as a whole to the SLM or
to the LLM, by the mean entropy of the SLM's first answer tokens.

With greedy decoding nothing has to be generated for it: both models' answers to every question are there, and each
threshold picks among them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from python_backends.llm.contract import SessionOpen, SessionStep
from python_backends.llm.engines import build_engine, parse_engine_config
from python_backends.llm.engines.base import Engine, EngineError
from python_backends.token_router.tokenizer import Tokenizer
from tools.deployment import ModelConfig
from tools.errors import UserError
from tools.evaluation.answers import Answered
from tools.evaluation.tasks import Question

__all__ = ["QueryPoint", "entropies", "frontier", "random_line"]

_SESSION = 1


class QueryPoint(BaseModel):
    """to_llm: how many questions, those with the highest entropy. llm_share: of the answers' tokens; that the SLM began
    the others too isn't counted."""

    to_llm: int
    accuracy: float
    llm_share: float


class _Score(BaseModel):
    """entropy: mean normalised entropy of the SLM over `answer`, the ids of the answer's first tokens."""

    model_config = ConfigDict(extra="forbid")

    id: str
    entropy: float
    answer: list[int]


def frontier(slm: Sequence[Answered], llm: Sequence[Answered], entropy: dict[str, float]) -> list[QueryPoint]:
    """From all by the SLM to all by the LLM, one question more each time, over the questions that both answered."""
    by_id = {a.id: a for a in llm}
    pairs = [(entropy[a.id], a, by_id[a.id]) for a in slm if a.id in by_id and a.id in entropy]
    pairs.sort(key=lambda pair: -pair[0])
    points = []
    for to_llm in range(len(pairs) + 1):
        large = [pair[2] for pair in pairs[:to_llm]]
        chosen = large + [pair[1] for pair in pairs[to_llm:]]
        tokens = sum(len(a.ids) for a in chosen)
        points.append(
            QueryPoint(
                to_llm=to_llm,
                accuracy=sum(a.passed for a in chosen) / len(chosen) if chosen else 0.0,
                llm_share=sum(len(a.ids) for a in large) / tokens if tokens else 0.0,
            )
        )
    return points


def random_line(slm: Sequence[Answered], llm: Sequence[Answered]) -> list[QueryPoint]:
    """The same with questions drawn at random, in expectation."""
    by_id = {a.id: a for a in llm}
    pairs = [(a, by_id[a.id]) for a in slm if a.id in by_id]
    n = len(pairs)
    small, large = sum(len(a.ids) for a, _ in pairs), sum(len(a.ids) for _, a in pairs)
    points = []
    for to_llm in range(n + 1):
        part = to_llm / n if n else 0.0
        solved = sum((1 - part) * a.passed + part * b.passed for a, b in pairs)
        tokens = (1 - part) * small + part * large
        points.append(
            QueryPoint(
                to_llm=to_llm, accuracy=solved / n if n else 0.0, llm_share=part * large / tokens if tokens else 0.0
            )
        )
    return points


def entropies(
    model: ModelConfig,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    slm: Sequence[Answered],
    first_tokens: int,
    path: Path,
    told: Callable[[], None],
) -> dict[str, float]:
    """Question -> the mean normalised entropy of the SLM over the first tokens of its own recorded answer.

    The served model tells nobody its distributions, so the same weights are loaded into this process, with the same
    engine, and go over the answer again. Results are kept in the file `path`, a line each. Raises UserError.
    """
    known = _read(path)
    done = {a.id: known[a.id].entropy for a in slm if a.id in known and known[a.id].answer == a.ids[:first_tokens]}
    by_id = {q.id: q for q in questions}
    left = [a for a in slm if a.id not in done and a.ids]
    if not left:
        return done
    try:
        engine = build_engine(parse_engine_config(model.engine.model_dump()), model.name, hidden_states=False)
    except EngineError as error:
        raise UserError(f"query_level: {model.name}: {error}") from error
    try:
        with path.open("a", encoding="utf-8") as file:
            for answer in left:
                question = by_id[answer.id]
                prompt = tokenizer.encode_chat(list(question.messages), question.begun)
                value = _entropy(engine, prompt, answer.ids[:first_tokens])
                done[answer.id] = value
                score = _Score(id=answer.id, entropy=value, answer=answer.ids[:first_tokens])
                file.write(score.model_dump_json() + "\n")
                file.flush()
                told()
    except OSError as error:
        raise UserError(f"{path}: can't be written: {error.strerror}") from error
    except EngineError as error:
        raise UserError(f"query_level: {model.name}: {error}") from error
    finally:
        engine.close()
    return done


def _entropy(engine: Engine, prompt: list[int], answer: list[int]) -> float:
    """Mean over the positions of `answer` of the entropy of what the model expected there."""
    from routers.rstitch import normalized_entropy

    engine.open(SessionOpen(_SESSION, len(prompt), len(prompt) + len(answer) + 1))
    try:
        values, had = [], 0
        for new in (prompt, *([token] for token in answer[:-1])):
            output = engine.step([SessionStep(_SESSION, had, list(new))])
            if output.logits is None:
                raise UserError("query_level: this engine has no logits; set query_level: false")
            if output.errors:
                raise EngineError(output.errors[_SESSION])
            had += len(new)
            values.append(float(normalized_entropy(output.logits)[0]))
        return sum(values) / len(values)
    finally:
        engine.free([_SESSION])


def _read(path: Path) -> dict[str, _Score]:
    """What an earlier run has left; a line that a crash cut off counts as not there."""
    scores = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                score = _Score(**json.loads(line))
            except (ValueError, TypeError, ValidationError):
                continue
            scores[score.id] = score
    return scores
