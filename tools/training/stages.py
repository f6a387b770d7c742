# SPDX-License-Identifier: Apache-2.0
"""The stages that make labels. Each keeps its results in the work folder, item by item, and makes only what isn't
there yet; the algorithms share those that they have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from python_backends.token_router.tokenizer import Tokenizer
from tools.training.jobs import Answer, Branch, Followed, Policy, Text, first_statement
from tools.training.judges import Case, Judge
from tools.training.labels import mismatches
from tools.training.options import DataOptions
from tools.training.prompts import Prompt, choose_prompts, fingerprint, passes
from tools.training.work_folder import Records, WorkFolder
from tools.training.workers import Item, Pool, Setup

__all__ = ["PROMPT_TOKENS", "Pair", "Stages", "kept_prompts"]

_SANDBOXES = 2
PROMPT_TOKENS = 400  # of a prompt, at most


@dataclass(frozen=True)
class Pair:
    """The models: names of their weights, and their `engine` sections as the workers run them."""

    weights: tuple[str, str]
    engines: tuple[Mapping[str, Any], Mapping[str, Any]]
    tokenizer: Tokenizer

    @property
    def slm(self) -> Setup:
        return Setup(self.engines[:1], hidden_states=True)

    @property
    def llm(self) -> Setup:
        return Setup(self.engines[1:])

    @property
    def both(self) -> Setup:
        return Setup(self.engines, hidden_states=True)


@dataclass(frozen=True)
class Stages:
    """See the module. pool: does the models' work. Every method returns what the whole stage gave."""

    folder: WorkFolder
    pair: Pair
    options: DataOptions
    pool: Pool
    console: Console

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The prompts of this run."""
        kept = self.folder.records("prompts")
        wanted = self.options.prompts + self.options.reasoning
        if len(kept) < wanted:
            with self._progress("choosing prompts", wanted) as done:
                chosen, left_out = choose_prompts(
                    self.options.prompts, self.options.reasoning, self.options.seed, self._fits, done
                )
            self.folder.write_json("left_out", left_out)
            for prompt in chosen:
                if prompt.id not in kept:
                    kept.add(prompt.id, asdict(prompt))
        return kept_prompts(kept)

    @property
    def fingerprint(self) -> str:
        """Of the prompts."""
        return fingerprint(self.prompts)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """The prompt as the models get it."""
        return self.pair.tokenizer.encode_chat(prompt.messages, prompt.answer_prefix)

    def text(self, prompt: Prompt) -> Text:
        return Text(self.pair.tokenizer.pieces, frozenset(), prompt.stop, self.options.max_tokens)

    @cached_property
    def answers(self) -> Records:
        """The large model's answers: token_ids, logprobs."""

        def item(prompt: Prompt) -> Item:
            return Item(prompt.id, "answer", self.token_ids(prompt), {"text": self.text(prompt)})

        def keep(kept: Records, key: str, found: Answer) -> None:
            kept.add(key, {"token_ids": found.token_ids, "logprobs": [round(x, 5) for x in found.logprobs]})

        return self._records("answers", self.pair.llm, map(item, self.prompts), keep)

    @cached_property
    def outcomes(self) -> dict[str, bool]:
        """Whether each answer is right."""
        kept = self.folder.records("outcomes")

        def judge(prompt: Prompt) -> tuple[str, bool]:
            return prompt.id, passes(prompt, self.read(self.answers[prompt.id]["token_ids"]))

        left = [p for p in self.prompts if p.id not in kept]
        for key, passed in self._in_threads("testing the answers", left, judge):
            kept.add(key, {"passed": passed})
        return {key: bool(kept[key]["passed"]) for key in kept}

    def read(self, token_ids: Sequence[int]) -> str:
        return self.pair.tokenizer.decode(token_ids)

    @cached_property
    def gold(self) -> dict[str, list[int]]:
        """For each prompt with one, an answer that is right: the large model's, else the function's own source."""
        found = {}
        for prompt in self.prompts:
            reference = prompt.reference_answer
            if self.outcomes[prompt.id]:
                found[prompt.id] = self.answers[prompt.id]["token_ids"]
            elif reference is not None:
                found[prompt.id] = self.pair.tokenizer.encode(reference)
        return found

    def follow_answers(self) -> None:
        """The small model along the large one's answers (`arrays`, "slm-answers")."""
        self._follow("slm-answers", self.pair.slm, {p.id: self.answers[p.id]["token_ids"] for p in self.prompts})

    def follow_references(self) -> None:
        """Both models along the gold texts that the large one didn't write ("slm-references", "llm-references")."""
        texts = {key: tokens for key, tokens in self.gold.items() if not self.outcomes[key]}
        self._follow("slm-references", self.pair.slm, texts)
        self._follow("llm-references", self.pair.llm, texts)

    def _follow(self, stage: str, setup: Setup, texts: Mapping[str, Sequence[int]]) -> None:
        prompts = {p.id: p for p in self.prompts}
        left = [key for key in texts if not self.folder.has_arrays(stage, key)]
        items = [Item(k, "follow", self.token_ids(prompts[k]), {"given": texts[k]}) for k in left]
        for key, found in self._through(stage, setup, items, len(texts)):
            self.folder.save_arrays(stage, key, _arrays(found))

    def branches(self, judge: Judge) -> Records:
        """The large model after each token at which the small one would have left its answer."""
        self.follow_answers()

        def item(prompt: Prompt) -> Item:
            given = self.answers[prompt.id]["token_ids"]
            slm = self.folder.load_arrays("slm-answers", prompt.id)["argmax"]
            whole = judge.whole and self.outcomes[prompt.id]  # where the answer is wrong, tests say nothing
            arguments = {
                "given": given,
                "marks": mismatches(np.array(given), slm),
                "code": prompt.kind == "code",
                "whole": whole,
                "text": self.text(prompt),
            }
            return Item(prompt.id, "branches", self.token_ids(prompt), arguments)

        stage = f"branches-{'whole' if judge.whole else 'statement'}"
        return self._records(stage, self.pair.llm, map(item, self.prompts), _keep_branches)

    def verdicts(self, judge: Judge) -> dict[str, dict[int, int]]:
        """Of each prompt, by position: what the judge says of the branch there."""
        branches = self.branches(judge)
        kept = self.folder.records(f"verdicts-{judge.name}")

        def decide(prompt: Prompt) -> tuple[str, dict[str, int]]:
            given, passed = self.answers[prompt.id]["token_ids"], self.outcomes[prompt.id]
            whole, text = judge.whole and passed, self.text(prompt)
            found = {}
            for branch in branches[prompt.id]["branches"]:
                at = branch["position"]
                if branch["equal"]:
                    found[str(at)] = 0
                    continue
                original = given[at:] if whole else first_statement(given, at, prompt.kind == "code", text)
                before, one, two = map(self.read, (given[:at], original, branch["token_ids"]))
                cut_off = branch["equal"] is None or (whole and not branch["whole"])
                found[str(at)] = judge(Case(prompt, before, one, two, passed, cut_off))
            return prompt.id, found

        left = [p for p in self.prompts if p.id not in kept]
        for key, found in self._in_threads(f"judging ({judge.name})", left, decide):
            kept.add(key, {"verdicts": found})
        return {key: {int(at): v for at, v in kept[key]["verdicts"].items()} for key in kept}

    def rollouts(self, name: str, most: int, policy: Policy | None) -> dict[str, dict[int, bool]]:
        """A round of CITER's, kept under `name`: of each reference, by position, whether the answer that follows from
        the small model's token is right, where neither model says the gold one. At most `most` positions of a text.
        An answer that is cut off counts as it stands: CITER's own roll-outs have a limit too."""
        self.follow_references()
        prompts = {p.id: p for p in self.prompts}
        keys = [key for key in self.gold if not self.outcomes[key]]

        def item(key: str) -> Item:
            gold = np.array(self.gold[key])
            slm = self.folder.load_arrays("slm-references", key)["argmax"]
            llm = self.folder.load_arrays("llm-references", key)["argmax"]
            marks = [(t, token) for t, token in mismatches(gold, slm) if llm[t] != gold[t]]
            rng = np.random.default_rng([self.options.seed, len(gold), len(marks)])
            drawn = rng.permutation(len(marks))[:most]
            arguments = {
                "given": self.gold[key],
                "marks": [marks[i] for i in sorted(drawn)],
                "text": self.text(prompts[key]),
                "policy": policy,
            }
            return Item(key, "rollouts", self.token_ids(prompts[key]), arguments)

        setup = self.pair.slm if policy is None else self.pair.both
        written = self._records(f"rollouts-{name}", setup, map(item, keys), _keep_branches)
        kept = self.folder.records(f"rollout-outcomes-{name}")

        def judge(key: str) -> tuple[str, dict[str, bool]]:
            return key, {
                str(b["position"]): passes(prompts[key], self.read([*self.gold[key][: b["position"]], *b["token_ids"]]))
                for b in written[key]["branches"]
            }

        left = [key for key in keys if key not in kept]
        for key, found in self._in_threads("testing the roll-outs", left, judge):
            kept.add(key, {"right": found})
        return {key: {int(at): right for at, right in kept[key]["right"].items()} for key in kept}

    def arrays(self, stage: str, key: str) -> dict[str, NDArray[Any]]:
        """What a model said along a text (`jobs.Followed`)."""
        return self.folder.load_arrays(stage, key)

    def _fits(self, prompt: Prompt) -> bool:
        reference = prompt.reference_answer
        answer_tokens = 0 if reference is None else len(self.pair.tokenizer.encode(reference))
        return len(self.token_ids(prompt)) <= PROMPT_TOKENS and answer_tokens <= self.options.max_tokens

    def _records(
        self, stage: str, setup: Setup, items: Iterable[Item], keep: Callable[[Records, str, Any], None]
    ) -> Records:
        kept = self.folder.records(stage)
        every = list(items)
        left = [item for item in every if item.key not in kept]
        for key, found in self._through(stage, setup, left, len(every)):
            keep(kept, key, found)
        return kept

    def _through(self, stage: str, setup: Setup, items: Sequence[Item], of: int) -> Iterator[tuple[str, Any]]:
        """The results of the items that are left of a stage."""
        if items:
            with self._progress(stage, of, of - len(items)) as done:
                for found in self.pool(setup, items):
                    yield found
                    done()

    def _in_threads(self, what: str, items: Sequence[Any], do: Callable[[Any], Any]) -> Iterator[Any]:
        if items:
            with self._progress(what, len(items)) as done, ThreadPoolExecutor(_SANDBOXES) as threads:
                for found in threads.map(do, items):
                    yield found
                    done()

    @contextmanager
    def _progress(self, what: str, total: int, before: int = 0) -> Iterator[Callable[[], None]]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console) as progress:
            task = progress.add_task(what, total=total, completed=before)
            yield lambda: progress.advance(task)


def kept_prompts(records: Records) -> list[Prompt]:
    """Those of a work folder's file, in their order."""
    return [Prompt(**{name: value for name, value in records[key].items() if name != "key"}) for key in records]


def _keep_branches(kept: Records, key: str, found: Sequence[Branch]) -> None:
    kept.add(key, {"branches": [asdict(branch) for branch in found]})


def _arrays(found: Followed) -> dict[str, NDArray[Any]]:
    return {name: value for name, value in vars(found).items() if value is not None}
