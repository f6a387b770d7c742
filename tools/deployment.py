# SPDX-License-Identifier: Apache-2.0
"""A deployment: the one YAML file that says which models, which router, which limits, which ports."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from python_backends.llm.catalog import CATALOG, FAMILIES
from python_backends.llm.engines.config import EngineConfig, LlamaCppConfig, TensorRTLLMBackendConfig, TensorRTLLMConfig
from python_backends.token_router.config import BatchingConfig, LimitsConfig, LLMConfig, RuntimeConfig, Transport
from routers import RouterConfig
from tools.building.config import BuildConfig
from tools.config_errors import did_you_mean, explain
from tools.errors import UserError
from tools.sizing.config import MemoryConfig

__all__ = [
    "ENSEMBLE",
    "ROUTER",
    "Deployment",
    "ModelConfig",
    "ServerConfig",
    "load_deployment",
    "load_node",
    "shipped_deployments",
]

ROUTER = "token_router"  # the public model
ENSEMBLE = "ensemble"  # the same for clients of the TensorRT-LLM templates
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_URL = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
_SHIPPED = Path(__file__).parent / "deployments"


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Config):
    """One LLM. name: of its Triton model, and in each answer the model that made a token. url: host:port of the gRPC
    endpoint of another host that serves it (`serve --only` there, with the same deployment); null = this host does.
    devices: names of `memory.devices`, one for each rank; empty = the only one there is."""

    name: str
    engine: EngineConfig
    url: str | None = None
    devices: list[str] = []
    build: BuildConfig = BuildConfig()

    @field_validator("name")
    @classmethod
    def _valid(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("must be letters, digits, '_', '-' and '.', beginning with a letter or digit")
        if name in (ROUTER, ENSEMBLE):
            raise ValueError(f"'{ROUTER}' and '{ENSEMBLE}' are the names of the public models")
        return name

    @field_validator("url")
    @classmethod
    def _host_and_port(cls, url: str | None) -> str | None:
        found = None if url is None else _URL.fullmatch(url)
        if url is not None and (found is None or not 0 < int(found[1]) < 1 << 16):
            raise ValueError("must be host:port of a gRPC endpoint, such as gpu2:8001")
        return url

    @model_validator(mode="after")
    def _can_be_elsewhere(self) -> ModelConfig:
        if self.url is not None and isinstance(self.engine, TensorRTLLMBackendConfig):
            raise ValueError(f"url: a model of engine {self.engine.type} has to be on the host of {ROUTER}")
        return self

    @model_validator(mode="after")
    def _is_built(self) -> ModelConfig:
        if self.build != BuildConfig() and not isinstance(self.engine, TensorRTLLMBackendConfig):
            raise ValueError(f"build: nothing is built for engine {self.engine.type}; allowed for: tensorrtllm")
        return self

    def placed_on(self, memory: MemoryConfig) -> tuple[str, ...]:
        """The devices that it takes memory of."""
        return tuple(self.devices or (memory.devices if len(memory.devices) == 1 else ()))

    def as_llm(self) -> LLMConfig:
        """What `token_router` is told of it."""
        engine = self.engine if isinstance(self.engine, TensorRTLLMBackendConfig) else None
        return LLMConfig(name=self.name, url=self.url, engine=engine)


class ServerConfig(_Config):
    """Where Triton listens, and how patient the supervisor is. A port of 0 = a free one."""

    host: str = Field("127.0.0.1", description="the address that all three ports listen on")
    http_port: int = Field(8000, ge=0, le=65535, description="of HTTP: generate, generate_stream, and the rest")
    grpc_port: int = Field(8001, ge=0, le=65535, description="of gRPC, which every client here uses")
    metrics_port: int = Field(8002, ge=0, le=65535, description="of Triton's own metrics, for Prometheus")
    startup_timeout_s: PositiveFloat = Field(300.0, description="until a first token has been made")
    drain_timeout_s: float = Field(30.0, ge=0, description="how long running requests may go on after SIGTERM")
    log_verbose: int = Field(0, ge=0, le=4, description="Triton's --log-verbose")
    mps: bool = Field(False, description="run NVIDIA's MPS for the models, if two of this host share a GPU")

    @model_validator(mode="after")
    def _distinct_ports(self) -> ServerConfig:
        ports = [p for p in (self.http_port, self.grpc_port, self.metrics_port) if p]
        if len(set(ports)) != len(ports):
            raise ValueError("http_port, grpc_port and metrics_port must differ")
        return self


class Deployment(_Config):
    """The whole file. models: at least one; the first is where every request starts.

    tokenizer: a family of `tokenrouter models list` or a folder that transformers can load; null = token
    ids only. transport: of the steps of the models on this host, see RuntimeConfig.
    """

    models: list[ModelConfig] = Field(min_length=1)
    tokenizer: str | None = None
    router: RouterConfig = RouterConfig()
    batching: BatchingConfig = BatchingConfig()
    limits: LimitsConfig = LimitsConfig()
    server: ServerConfig = ServerConfig()
    memory: MemoryConfig | None = None
    transport: Transport = "socket"
    _only: tuple[str, ...] | None = PrivateAttr(None)

    @field_validator("models")
    @classmethod
    def _unique(cls, models: list[ModelConfig]) -> list[ModelConfig]:
        names = [m.name for m in models]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"each model needs a name of its own; given twice: {', '.join(twice)}")
        return models

    @model_validator(mode="after")
    def _transport_is_used(self) -> Deployment:
        ours = any(m.url is None and not isinstance(m.engine, TensorRTLLMBackendConfig) for m in self.models)
        if self.transport != "socket" and not ours:
            raise ValueError("transport: is of models on this host, of other engines than tensorrtllm; there is none")
        return self

    @property
    def model_names(self) -> list[str]:
        """The Triton models of the LLMs, the entry first."""
        return [m.name for m in self.models]

    @property
    def routes(self) -> bool:
        """Whether this host has `token_router`."""
        return self._only is None

    @property
    def here(self) -> list[int]:
        """The numbers of the LLMs on this host."""
        only = self._only
        return [i for i, m in enumerate(self.models) if (m.url is None if only is None else m.name in only)]

    def on_llm_node(self, only: Sequence[str]) -> Deployment:
        """The same as another host of it sees it, which serves these LLMs and no `token_router`. Raises UserError."""
        urls = {model.name: model.url for model in self.models}
        far = [name for name, url in urls.items() if url is not None]
        allowed = ", ".join(far) or "none, since no model has a url"
        problems = [] if only else [f"--only: names no model; allowed: {allowed}"]
        for name in only:
            if name not in urls:
                problems.append(f"--only: no model '{name}'{did_you_mean(name, far)}; allowed: {allowed}")
            elif urls[name] is None:
                problems.append(f"--only: '{name}' has no url: the host of {ROUTER} serves it; allowed: {allowed}")
        if problems:
            raise UserError(problems)
        node = self.model_copy()
        node._only = tuple(only)
        return node

    def runtime(self) -> RuntimeConfig:
        """What `token_router` is told."""
        return RuntimeConfig(
            models=[model.as_llm() for model in self.models],
            tokenizer=self.tokenizer,
            router=self.router,
            batching=self.batching,
            limits=self.limits,
            transport=self.transport,
        )


def shipped_deployments() -> list[str]:
    """The names of the deployments that come with the package."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def load_deployment(config: Path | str | None = None) -> Deployment:
    """A deployment from a YAML file, or a shipped one by its name; None = the shipped default.

    Relative paths in the file are taken from its folder. Raises UserError with a line for each error.
    """
    path = _find(str(config) if config is not None else "default")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: is not valid YAML: {_one_line(error)}") from error
    except (TypeError, ValueError, RecursionError) as error:  # PyYAML's, of a date that isn't one and the like
        raise UserError(f"{path}: has a value that can't be read: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: must be a mapping with the keys {', '.join(Deployment.model_fields)}")
    try:
        deployment = Deployment.model_validate(data)
    except ValidationError as error:
        raise UserError([f"{path}: {line}" for line in explain(error, Deployment, data)]) from error
    return _with_absolute_paths(deployment, path.resolve().parent)


def load_node(config: Path | str | None, only: str | None) -> Deployment:
    """The same as one host of it sees it. only: names of LLMs, with commas between them, if it is one that serves
    just these; None = that of token_router. Raises UserError."""
    deployment = load_deployment(config)
    if only is None:
        return deployment
    return deployment.on_llm_node([name.strip() for name in only.split(",") if name.strip()])


def _find(config: str) -> Path:
    path = Path(os.path.expanduser(config))
    try:
        if path.is_file():
            return path
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error
    shipped = shipped_deployments()
    if config in shipped:
        return _SHIPPED / f"{config}.yaml"
    raise UserError(
        f"{config}: no such file{did_you_mean(config, shipped)}; the shipped deployments are {', '.join(shipped)}"
    )


def _with_absolute_paths(deployment: Deployment, folder: Path) -> Deployment:
    """Paths made absolute: the processes that read them run in other folders."""

    def absolute(text: str) -> str:
        return str(folder / os.path.expanduser(text))

    models = [_model_with(absolute, m) for m in deployment.models]
    tokenizer = deployment.tokenizer
    if tokenizer is not None and tokenizer not in FAMILIES and tokenizer not in CATALOG:
        tokenizer = absolute(tokenizer) if "/" in tokenizer or Path(absolute(tokenizer)).is_dir() else tokenizer
    router = deployment.router
    if router.path is not None:
        router = router.model_copy(update={"path": absolute(router.path)})
    own = router.params.get("weights")
    if isinstance(own, str) and own.endswith(".safetensors"):
        router = router.model_copy(update={"params": {**router.params, "weights": absolute(own)}})
    return deployment.model_copy(update={"models": models, "tokenizer": tokenizer, "router": router})


def _model_with(absolute: Callable[[str], str], model: ModelConfig) -> ModelConfig:
    build = model.build.model_copy(update={"examples": absolute(model.build.examples)})
    return model.model_copy(update={"engine": _engine_with(absolute, model.engine), "build": build})


def _engine_with(absolute: Callable[[str], str], engine: EngineConfig) -> EngineConfig:
    if isinstance(engine, LlamaCppConfig) and engine.weights.endswith(".gguf"):
        return engine.model_copy(update={"weights": absolute(engine.weights)})
    if isinstance(engine, TensorRTLLMBackendConfig):
        paths = {"engine_dir": engine.engine_dir, "checkpoint": engine.checkpoint}
        return engine.model_copy(update={k: absolute(v) for k, v in paths.items() if v is not None})
    if isinstance(engine, TensorRTLLMConfig):
        path = absolute(engine.weights)
        if engine.weights.startswith((".", "~")) or Path(path).is_dir():  # else a name of the Hugging Face hub
            return engine.model_copy(update={"weights": path})
    return engine


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


class _UniqueKeyLoader(yaml.SafeLoader):
    """A SafeLoader that refuses a key given twice, which YAML forbids and PyYAML quietly takes the last of."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            key = key_node.value
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key}' is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
