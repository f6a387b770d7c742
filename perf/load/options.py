# SPDX-License-Identifier: Apache-2.0
"""The options of a load run beside Locust's own, each checked before the run begins."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from perf.load.prompts import BUILT_IN, IntRange, PromptSet, prompt_set

__all__ = ["LoadOptions", "add_options"]

# A name, an IPv4 address, or an IPv6 one in brackets; the port.
_HOST_PORT = re.compile(r"([^\s/:]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")
_LAST_PORT = 65535


def _host_port(text: str) -> str:
    match = _HOST_PORT.fullmatch(text)
    if match is None or not 1 <= int(match[2]) <= _LAST_PORT:
        raise ValueError(f"must be host:port, as in 127.0.0.1:8001; got {text!r}")
    return text


def _from_text(parse: Callable[[str], Any]) -> BeforeValidator:
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


class LoadOptions(BaseModel):
    """See the descriptions; each field is an option of the same name."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", frozen=True)

    grpc_url: Annotated[str, AfterValidator(_host_port)] = Field(
        "127.0.0.1:8001", description="host:port that gRPC users send to"
    )
    http_url: Annotated[str, AfterValidator(_host_port)] = Field(
        "127.0.0.1:8000", description="host:port that HTTP users send to"
    )
    model: str = Field("token_router", min_length=1, description="the public model's name")
    rate: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="open loop: Poisson arrivals, so many requests a second of each user, whether or not earlier ones"
        " have ended; without it closed loop: a user's next request follows the end of the one before",
    )
    prompts: Annotated[PromptSet, _from_text(prompt_set)] = Field(
        default=BUILT_IN["ids"],
        description=f"what is asked: {', '.join(BUILT_IN)}, ids:N:M (random ids, N to M of them; ids alone: 16 to 64),"
        " or a file with a JSON object of inputs on each line",
    )
    max_tokens: Annotated[IntRange, _from_text(IntRange.parse)] = Field(
        default=IntRange(64, 64), description="most tokens of an answer: N, or N:M drawn for each request"
    )
    ignore_eos: bool = Field(False, description="answers have max_tokens tokens, whatever the model would end with")
    cancel_share: float = Field(
        0.0, ge=0, le=1, description="share of the requests whose user cancels midway (0 to 1), after 1 to max_tokens-1"
        " tokens",
    )  # fmt: skip
    timeout_s: float = Field(120.0, gt=0, allow_inf_nan=False, description="a request that takes longer has failed")
    seed: int = Field(0, ge=0, description="the same seed: the same requests in the same order of each user")

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> LoadOptions:
        """From Locust's parsed options, whose values `add_options` has had checked."""
        return cls.model_validate({name: getattr(parsed, name) for name in cls.model_fields})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give Locust's parser the options of `LoadOptions`. A bad value ends the program with a line that names the
    option, the value and what is allowed."""
    group = parser.add_argument_group("TokenRouter", "What is sent, and where to.")
    defaults = LoadOptions()
    shown = {"prompts": "ids", "max_tokens": "64"}
    for name, field in LoadOptions.model_fields.items():
        default = shown.get(name, getattr(defaults, name))
        how: dict[str, Any] = {"type": _checked(name)} if field.annotation is not bool else {"action": "store_true"}
        note = "" if default in (None, False) else f" (default: {default})"
        group.add_argument(
            f"--{name.replace('_', '-')}", default=default, help=f"{field.description}{note}".replace("%", "%%"), **how
        )


def _checked(name: str) -> Callable[[str], Any]:
    """The option's value from its text; as an error what argparse shows behind the option's name."""

    def value(text: str) -> Any:
        try:
            return getattr(LoadOptions.model_validate({name: text}), name)
        except ValidationError as error:
            first = error.errors()[0]
            reason = str(first["ctx"]["error"]) if first["type"] == "value_error" else f"{first['msg']}, got {text!r}"
            raise argparse.ArgumentTypeError(reason) from None

    return value
