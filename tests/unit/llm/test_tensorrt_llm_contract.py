# SPDX-License-Identifier: Apache-2.0
"""The contract check: a package that has what was recorded passes, one that differs is told by name."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import create_model

from python_backends.llm.engines import EngineError, build_engine, parse_engine_config
from python_backends.llm.engines.tensorrt_llm.contract import Contract, Record, load_contract, mismatches, require
from python_backends.llm.engines.tensorrt_llm.package import SUPPORTED, import_package, minor_version, package_problem
from tests.unit.llm import fake_tensorrt_llm

CONTRACTS = "python_backends.llm.engines.tensorrt_llm.contracts"
CALLABLE = Record("tensorrt_llm", "LLM.generate_async", "callable", ("inputs", "sampling_params"))


def generate(monkeypatch: pytest.MonkeyPatch, contract: Contract, *leave_out: Record) -> None:
    """A package made of nothing but the recorded names, each as it was recorded."""
    made: dict[str, Any] = {}
    records = [r for r in (*contract.public, *contract.kept) if r not in leave_out]
    for record in sorted(records, key=lambda r: r.name.count(".")):
        module = made.setdefault(record.module, ModuleType(record.module))
        owner: Any = module
        *path, last = record.name.split(".")
        for part in path:
            if not hasattr(owner, part):
                setattr(owner, part, type(part, (), {}))
            owner = getattr(owner, part)
        value = _value(record)
        if not hasattr(owner, last):
            setattr(owner, last, value)
    for name in {n for module in made for n in _parents(module)}:
        made.setdefault(name, ModuleType(name))
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _value(record: Record) -> Any:
    fields: dict[str, Any] = dict.fromkeys(record.parameters, (Any, None))
    if record.kind == "fields":
        return create_model(record.name, **fields)
    if record.kind == "instance":
        return type(record.name, (), {"__init__": lambda self: self.__dict__.update(fields)})
    is_class = record.name.rpartition(".")[2][0].isupper()
    return _class(record.parameters) if is_class else _function("self", *record.parameters)


def _class(parameters: tuple[str, ...]) -> type:
    return type("Made", (), {"__init__": _function("self", *parameters)})


def _function(*parameters: str, **defaults: Any) -> Callable[..., Any]:
    """One with exactly these parameters."""

    def function(*args: Any, **kwargs: Any) -> None: ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [inspect.Parameter(p, kind, default=defaults.get(p, inspect.Parameter.empty)) for p in parameters]
    function.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    return function


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_package_that_has_the_recorded_names_passes(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    contract = load_contract(f"{version}.1")
    assert contract.version == version and contract.public and contract.kept
    generate(monkeypatch, contract)
    assert mismatches([*contract.public, *contract.kept]) == []


@pytest.mark.parametrize("version", SUPPORTED)
def test_every_record_says_where_it_is_from(version: str) -> None:
    lists = json.loads(resources.files(CONTRACTS).joinpath(f"{version}.json").read_text("utf-8"))
    for group in (*lists["public"], *lists["kept"]):
        assert set(group) in ({"read", "version", "records"}, {"inferred", "records"})
        if "read" in group:  # at a commit, or as the index of stored copies numbers it
            assert re.search(r"^[\w.-]+/[\w.-]+@[0-9a-f]{40}$|^a stored \w+\.py .* \(\d+\)$", group["read"])
            assert group["version"]


@pytest.mark.parametrize("version", SUPPORTED)
def test_what_several_ranks_send_and_what_retention_is_made_of_are_recorded(version: str) -> None:
    """`_sent_logits` and `make_retention` read and make these."""
    names = {f"{r.module}.{r.name}" for r in load_contract(f"{version}.0").public}
    retention = "tensorrt_llm.llmapi.KvCacheRetentionConfig.TokenRangeRetentionConfig"
    assert names >= {
        "tensorrt_llm.llmapi.RequestOutput.outputs",
        "tensorrt_llm.executor.result.CompletionOutput.generation_logits",
        *(f"{retention}.{field}" for field in ("token_start", "token_end", "priority", "duration_ms")),
    }


@pytest.mark.parametrize("version", SUPPORTED)
def test_the_fake_package_meets_the_list_of_each_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    fake_tensorrt_llm.install(monkeypatch, f"{version}.0")
    contract = load_contract(f"{version}.0")
    assert mismatches([*contract.public, *contract.kept]) == []


def test_an_installed_package_has_the_lists() -> None:
    files = {file.name for file in resources.files(CONTRACTS).iterdir() if file.name.endswith(".json")}
    assert files == {f"{version}.json" for version in SUPPORTED}
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8")
    package_data = project.partition("[tool.setuptools.package-data]")[2].partition("\n[")[0]
    assert f'"{CONTRACTS}" = ["*.json"]' in package_data.splitlines()


def test_a_difference_from_an_inferred_record_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensorrt_llm.install(monkeypatch)
    (line,) = mismatches([Record("tensorrt_llm", "NoSuchName", "attribute", inferred="1.1")])
    assert line.endswith("expected attribute [inferred from 1.1]")


@pytest.mark.parametrize("version", SUPPORTED)
def test_each_name_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    contract = load_contract(f"{version}.0")
    records = [*contract.public, *contract.kept]
    for missing in [r for r in records if not any(o.name.startswith(r.name + ".") for o in records)]:
        with monkeypatch.context() as patch:
            generate(patch, contract, missing)
            (line,) = mismatches(records)
        assert line.startswith(f"{missing.module}.{missing.name}: found nothing (")
        assert f"expected {missing.kind}" in line and all(p in line for p in missing.parameters)


@pytest.mark.parametrize(
    ("parameters", "defaults", "found"),
    [
        (("self", "inputs"), {}, "callable (inputs)"),
        (("self", "inputs", "params"), {}, "callable (inputs, params)"),
        (("self", "inputs", "sampling_params", "lora"), {}, "callable (inputs, sampling_params, lora)"),
        (("self", "inputs", "sampling_params", "lora"), {"lora": None}, None),
        (("self", "sampling_params", "inputs"), {}, None),
    ],
)
def test_another_signature_is_named(
    monkeypatch: pytest.MonkeyPatch, parameters: tuple[str, ...], defaults: dict[str, Any], found: str | None
) -> None:
    fake_tensorrt_llm.install(monkeypatch)
    monkeypatch.setattr("tensorrt_llm.LLM.generate_async", _function(*parameters, **defaults))
    lines = mismatches([CALLABLE])
    expected = f"tensorrt_llm.LLM.generate_async: found {found}, expected callable (inputs, sampling_params)"
    assert lines == ([] if found is None else [expected])


def test_what_cannot_be_compared_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensorrt_llm.install(monkeypatch)
    monkeypatch.setattr("tensorrt_llm.LLM.generate_async", lambda self, *args, **kwargs: None)
    assert mismatches([CALLABLE]) == []
    monkeypatch.setattr("tensorrt_llm.LLM.generate_async", dict.update)  # a C function without a signature
    assert mismatches([CALLABLE]) == []
    monkeypatch.setattr("tensorrt_llm.LLM.generate_async", lambda self, *args: None)
    assert "found callable (args)" in mismatches([CALLABLE])[0]
    monkeypatch.setattr("tensorrt_llm.LLM.generate_async", 3)
    assert mismatches([CALLABLE]) == [
        "tensorrt_llm.LLM.generate_async: found a int, expected callable (inputs, sampling_params)"
    ]


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        ("fields", create_model("M", a=(int, 0)), "no fields b"),
        ("fields", SimpleNamespace(), "a SimpleNamespace without fields"),
        ("instance", SimpleNamespace, "no attributes a, b"),
        ("instance", _class(("x",)), None),
        ("instance", lambda x: x, "it can't be made without arguments: "),
    ],
)
def test_other_kinds_that_differ(monkeypatch: pytest.MonkeyPatch, kind: Any, value: Any, found: str | None) -> None:
    fake_tensorrt_llm.install(monkeypatch)
    monkeypatch.setattr("tensorrt_llm.LLM", value)
    (line,) = mismatches([Record("tensorrt_llm", "LLM", kind, ("a", "b"))])
    assert (found or "no attributes a, b") in line and f"expected {kind} (a, b)" in line


@pytest.mark.parametrize("version", ["1.0.0", "1.0.3.2510", "1.1.0", "1.2.0", "1.2.1", "1.2.1+cu131", "1.2.0.post1"])
def test_supported_versions(version: str) -> None:
    assert minor_version(version) == version[:3]


@pytest.mark.parametrize("version", ["0.21.0", "1.3.0", "1.3.0rc29", "1.2.0rc6", "2.0", "1.20.0"])
def test_other_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, version: str, tmp_path: Any) -> None:
    with pytest.raises(EngineError, match=rf"version {version} is installed; allowed: 1\.0\.x, 1\.1\.x, 1\.2\.x"):
        load_contract(version)
    (tmp_path / "config.json").write_text('{"vocab_size": 50, "eos_token_id": 2}')
    fake_tensorrt_llm.install(monkeypatch, version)
    for name in ("TLLM_WORKER_USE_SINGLE_PROCESS",):
        monkeypatch.setenv(name, "0")
    with pytest.raises(EngineError, match=f"version {version} is installed"):
        build_engine(parse_engine_config({"type": "tensorrt_llm", "weights": str(tmp_path)}), "slm", False)


def test_a_public_name_that_is_missing_refuses_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 50, "eos_token_id": 2}')
    fake = fake_tensorrt_llm.install(monkeypatch)
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "0")
    monkeypatch.delattr("tensorrt_llm.llmapi.KvCacheRetentionConfig")
    with pytest.raises(EngineError) as caught:
        build_engine(parse_engine_config({"type": "tensorrt_llm", "weights": str(tmp_path)}), "slm", False)
    assert str(caught.value).startswith("tensorrt_llm 1.2.1 isn't what this engine was written for: ")
    assert "tensorrt_llm.llmapi.KvCacheRetentionConfig: found nothing" in str(caught.value)
    assert fake.llm_arguments == {}  # refused before anything is loaded


def test_nothing_is_required_of_what_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensorrt_llm.install(monkeypatch)
    require([CALLABLE], "1.2.1")
    with pytest.raises(EngineError, match=r"LLM\.generat: found nothing"):
        require([replace(CALLABLE, name="LLM.generat")], "1.2.1")


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "0")
    with pytest.raises(EngineError) as caught:
        import_package(1)
    assert str(caught.value) == (
        "tensorrt_llm isn't installed in this process's Python; the image tritonserver:26.07-trtllm-python-py3"
        " has 1.2.1"
    )
    assert str(package_problem()).startswith("tensorrt_llm isn't installed here; the image ")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_dependency", "can't be imported: No module named 'no_such_dependency'"),
        ("raise ImportError('libcuda.so.1:\\n cannot open')", "can't be imported: libcuda.so.1: cannot open"),
    ],
)
def test_a_package_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, source: str, words: str
) -> None:
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "__init__.py").write_text(source)
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineError, match="tensorrt_llm ") as caught:
        import_package(1)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("version", "problem"), [("1.2.1", None), (None, None), ("1.3.0", "version 1.3.0 is installed")]
)
def test_the_installed_version_is_looked_at_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, version: str | None, problem: str | None
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("importlib.metadata.version", installed)
    found = package_problem()
    assert found is None if problem is None else problem in str(found)
    assert "tensorrt_llm" not in sys.modules


def test_other_engines_need_none_of_it() -> None:
    code = (
        "import sys; from python_backends.llm.engines import *; build_engine(parse_engine_config({'type': 'paced'}),"
        " 'slm', False); sys.exit(any('tensorrt_llm' in m for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
