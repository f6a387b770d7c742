# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on real weights: a session's bits depend on its own tokens and on nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch

from python_backends.llm.catalog import WeightsError
from python_backends.llm.contract import SessionOpen, SessionStep
from python_backends.llm.engines.base import EngineError
from python_backends.llm.engines.config import LlamaCppConfig
from python_backends.llm.engines.llama_cpp import LlamaCppEngine

pytestmark = pytest.mark.model

VOCAB = 49152
CONTEXT = 640
CHUNK = 64
# short, around a chunk's and an attention kernel's boundaries, and beyond 512 positions
LENGTHS = (1, 2, 40, 64, 65, 90, 130, 530)
SUFFIX_LENGTHS = (1, 3, 66, 1, 9, 1)


def config(**settings: object) -> LlamaCppConfig:
    values = {
        "type": "llama_cpp",
        "weights": "smollm2-135m-q4_0",
        "context_tokens": CONTEXT,
        "max_sessions": 8,
        "prefill_chunk": CHUNK,
    }
    return LlamaCppConfig.model_validate({**values, **settings})


@pytest.fixture(scope="module", params=["smollm2-135m-q4_0", "smollm2-135m-q8_0", "smollm2-135m-q4_0 2 threads"])
def loaded(request: pytest.FixtureRequest) -> Iterator[LlamaCppEngine]:
    weights, *threads = request.param.split()
    made = LlamaCppEngine(config(weights=weights, threads=int(threads[0]) if threads else 1))
    yield made
    made.close()


@pytest.fixture
def engine(loaded: LlamaCppEngine) -> Iterator[LlamaCppEngine]:
    """The engine, and without sessions afterwards, so that one test's failure isn't the next one's."""
    yield loaded
    loaded.free(range(1000))


class Writer:
    """One session with a fixed text to be told, prompt first; it keeps the logits after every part."""

    def __init__(self, engine: LlamaCppEngine, session: int, prompt_tokens: int) -> None:
        rng = random.Random(prompt_tokens)
        self.text = [rng.randrange(VOCAB) for _ in range(prompt_tokens + sum(SUFFIX_LENGTHS))]
        self.prompt_tokens = prompt_tokens
        self.session = session
        self.told = 0
        self.logits: list[torch.Tensor] = []
        engine.open(SessionOpen(session, prompt_tokens, CONTEXT))

    def part(self, length: int, sample: bool = True) -> SessionStep:
        start, self.told = self.told, self.told + length
        return SessionStep(self.session, start, self.text[start : self.told], sample)

    def prompt(self) -> SessionStep:
        return self.part(self.prompt_tokens)


def step(engine: LlamaCppEngine, writers: Sequence[Writer], parts: Sequence[SessionStep]) -> None:
    output = engine.step(parts)
    assert not output.errors and output.logits is not None
    for row, session in enumerate(output.sessions):
        next(w for w in writers if w.session == session).logits.append(output.logits[row])


def alone(engine: LlamaCppEngine, prompt_tokens: int) -> list[torch.Tensor]:
    """The logits after the prompt and after each suffix, with nobody else there."""
    writer = Writer(engine, 999, prompt_tokens)
    step(engine, [writer], [writer.prompt()])
    for length in SUFFIX_LENGTHS:
        step(engine, [writer], [writer.part(length)])
    engine.free([999])
    return writer.logits


@pytest.fixture(scope="module")
def expected(loaded: LlamaCppEngine) -> dict[int, list[torch.Tensor]]:
    return {n: alone(loaded, n) for n in LENGTHS}


def check(writers: Sequence[Writer], expected: dict[int, list[torch.Tensor]]) -> None:
    for writer in writers:
        wanted = expected[writer.prompt_tokens]
        assert len(writer.logits) == len(wanted)
        assert [torch.equal(a, b) for a, b in zip(writer.logits, wanted, strict=True)] == [True] * len(wanted)


@pytest.mark.parametrize("count", [4, 8])
def test_many_at_once_equal_alone(engine: LlamaCppEngine, expected: dict[int, list[torch.Tensor]], count: int) -> None:
    """Ragged suffixes, any subset in a step, the others pending."""
    rng = random.Random(count)
    writers = [Writer(engine, i, n) for i, n in enumerate(LENGTHS[-count:])]
    step(engine, writers, [w.prompt() for w in writers])
    while live := [w for w in writers if len(w.logits) <= len(SUFFIX_LENGTHS)]:
        some = rng.sample(live, rng.randint(1, len(live)))
        step(engine, writers, [w.part(SUFFIX_LENGTHS[len(w.logits) - 1]) for w in some])
    check(writers, expected)


def test_eager_lazy_and_chunked_prefill_agree(engine: LlamaCppEngine, expected: dict[int, list[torch.Tensor]]) -> None:
    """Chunk by chunk without sampling, others in between; the last chunk with the output's first tokens."""
    other = Writer(engine, 50, 40)
    step(engine, [other], [other.prompt()])
    for i, prompt_tokens in enumerate((130, 530)):
        writer = Writer(engine, i, prompt_tokens)
        while writer.prompt_tokens - writer.told > CHUNK:
            step(engine, [writer, other], [writer.part(CHUNK, sample=False), other.part(1)])
        late = sum(SUFFIX_LENGTHS[:3])
        step(engine, [writer], [writer.part(writer.prompt_tokens - writer.told + late)])
        assert torch.equal(writer.logits[0], expected[prompt_tokens][3])


def test_a_rejected_tail_leaves_no_trace(engine: LlamaCppEngine, expected: dict[int, list[torch.Tensor]]) -> None:
    writers = [Writer(engine, i, n) for i, n in enumerate(LENGTHS[-3:])]
    step(engine, writers, [w.prompt() for w in writers])
    for length in SUFFIX_LENGTHS:
        engine.step([SessionStep(w.session, w.told, [7] * (1 + w.session)) for w in writers])
        step(engine, writers, [w.part(length) for w in writers])
    check(writers, expected)


def test_used_slots_are_as_new_ones(engine: LlamaCppEngine, expected: dict[int, list[torch.Tensor]]) -> None:
    rng = random.Random(5)
    for round_ in range(3):
        first = 100 * round_
        fillers = [Writer(engine, first + i, rng.randint(1, 80)) for i in range(7)]
        step(engine, fillers, [w.prompt() for w in fillers])
        engine.free([w.session for w in rng.sample(fillers, 3)])
        writer = Writer(engine, first + 50, LENGTHS[4 + round_])
        step(engine, [writer], [writer.prompt()])
        for length in SUFFIX_LENGTHS:
            step(engine, [writer], [writer.part(length)])
        check([writer], expected)
        engine.free(range(first, first + 60))


def test_the_engine_goes_on_when_one_session_fails(engine: LlamaCppEngine) -> None:
    good, bad = Writer(engine, 1, 40), Writer(engine, 2, 40)
    step(engine, [good, bad], [good.prompt(), bad.prompt()])
    for start, token, message in ((41, 1, "start: 41"), (0, VOCAB, f"token_ids: {VOCAB}")):
        output = engine.step([good.part(1), SessionStep(2, start, [token])])
        assert list(output.sessions) == [1] and message in output.errors[2]
    output = engine.step([SessionStep(2, 40, [1] * (CONTEXT - 39)), SessionStep(3, 0, [1])])
    assert f"at most {CONTEXT}" in output.errors[2] and "not open" in output.errors[3]
    with pytest.raises(ValueError, match="open already"):
        engine.open(SessionOpen(2, 1, 1))
    for session in range(10, 16):
        engine.open(SessionOpen(session, 1, 1))
    with pytest.raises(EngineError, match="max_sessions = 8"):
        engine.open(SessionOpen(16, 1, 1))


def test_what_the_engine_says_of_itself(engine: LlamaCppEngine) -> None:
    capacity = engine.capacity()
    assert (capacity.vocab_size, capacity.context_tokens, capacity.max_sessions) == (VOCAB, CONTEXT, 8)
    assert 2 in capacity.eos_token_ids  # <|im_end|>
    assert capacity.provides == {"logits", "embeddings", "token_bytes", "sampling"}
    assert capacity.hidden_size is None


@pytest.mark.parametrize("weights", ["smollm2-135m-q4_0", "smollm2-135m-q8_0"])
def test_a_hidden_state_times_the_embedding_gives_the_logits(weights: str) -> None:
    """SmolLM2's head is its embedding: so the state is the one after the final norm, and the rows are the right
    ones. llama.cpp rounds the state to 8 bits before it multiplies."""
    engine = LlamaCppEngine(config(weights=weights), hidden_states=True)
    writer = Writer(engine, 1, 40)
    output = engine.step([writer.prompt()])
    assert output.logits is not None and output.hidden_states is not None
    assert engine.capacity().hidden_size == output.hidden_states.shape[1]
    by_hand = engine.embed(torch.arange(VOCAB)) @ output.hidden_states[0]
    assert torch.corrcoef(torch.stack([by_hand, output.logits[0]]))[0, 1] > 0.999
    assert by_hand.argmax() == output.logits[0].argmax()
    engine.close()


def test_hidden_states_are_the_same_bits_whoever_else_is_there() -> None:
    engine = LlamaCppEngine(config(), hidden_states=True)
    found: dict[int, list[list[torch.Tensor]]] = {n: [] for n in (40, 130, 65)}
    for group in ([40], [130], [65], [40, 130, 65]):
        writers = {i: Writer(engine, i, n) for i, n in enumerate(group)}
        for w in writers.values():
            found[w.prompt_tokens].append([])
        for part in (None, *SUFFIX_LENGTHS):
            output = engine.step([w.prompt() if part is None else w.part(part) for w in writers.values()])
            assert output.hidden_states is not None
            for row, session in enumerate(output.sessions):
                found[writers[session].prompt_tokens][-1].append(output.hidden_states[row])
        engine.free(list(writers))
    for alone_, together in found.values():
        assert len(alone_) == 1 + len(SUFFIX_LENGTHS)
        assert all(torch.equal(a, b) for a, b in zip(alone_, together, strict=True))
    engine.close()


def test_hidden_states_come_without_changing_the_logits() -> None:
    plain, telling = LlamaCppEngine(config()), LlamaCppEngine(config(), hidden_states=True)
    assert "hidden_states" in telling.capacity().provides
    outputs = []
    for engine in (plain, telling):
        writers = [Writer(engine, i, n) for i, n in enumerate((40, 130))]
        for parts in ([w.prompt() for w in writers], [writers[0].part(70), writers[1].part(1, sample=False)]):
            outputs.append(engine.step(parts))
        engine.close()
    for without, with_ in zip(outputs[:2], outputs[2:], strict=True):
        assert without.hidden_states is None and with_.hidden_states is not None
        assert with_.hidden_states.shape == (len(with_.sessions), 576)
        assert with_.hidden_states.isfinite().all() and with_.hidden_states.abs().sum(-1).min() > 0
        order = [list(with_.sessions).index(s) for s in without.sessions]
        assert without.logits is not None and with_.logits is not None
        assert torch.equal(without.logits, with_.logits[order])


def test_mixed_batches_are_right_but_for_rounding() -> None:
    """deterministic=False: the tokens of one sequence still only see their own."""
    exact, mixed = LlamaCppEngine(config()), LlamaCppEngine(config(deterministic=False))
    wanted = alone(exact, 130)
    writers = [Writer(mixed, i, n) for i, n in enumerate((130, 90, 40))]
    step(mixed, writers, [w.prompt() for w in writers])
    for length in SUFFIX_LENGTHS:
        step(mixed, writers, [w.part(length) for w in writers])
    agreement = [torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(writers[0].logits, wanted, strict=True)]
    assert min(agreement) > 0.99
    exact.close()
    mixed.close()


def test_what_cannot_be_loaded_is_said_in_one_line(tmp_path: Path) -> None:
    text, damaged = tmp_path / "text.gguf", tmp_path / "damaged.gguf"
    text.write_text("hello")
    damaged.write_bytes(b"GGUF" + bytes(100))
    cases: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"weights": str(tmp_path / "none.gguf")}, WeightsError, "none.gguf"),
        ({"weights": "no-such-model"}, WeightsError, "no-such-model"),
        ({"weights": str(text)}, EngineError, "not a GGUF file"),
        ({"weights": str(damaged)}, EngineError, "can't load"),
        ({"context_tokens": 8193}, EngineError, "context_tokens: 8193 .* at most 8192"),
    ]
    for settings, kind, message in cases:
        with pytest.raises(kind, match=message) as caught:
            LlamaCppEngine(config(**settings))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("free_bytes", "what"), [(10**7, "the weights smollm2"), (10**8, "the KV of max_sessions = 8")]
)
def test_too_little_memory_is_said_before_it_is_used(
    free_bytes: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Memory:
        available = free_bytes

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    with pytest.raises(EngineError, match=f"too little memory: {what}.* GB are free"):
        LlamaCppEngine(config())
