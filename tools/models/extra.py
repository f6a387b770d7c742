# SPDX-License-Identifier: Apache-2.0
"""Packages that only an extra of tokenrouter brings."""

from __future__ import annotations

import importlib
from typing import Any

from python_backends.llm.catalog import WeightsError

__all__ = ["from_extra"]


def from_extra(package: str) -> Any:
    """The module of that name. Raises WeightsError where the package isn't installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise WeightsError(f"the package {package} is not installed: install tokenrouter[cpu]") from error
