# SPDX-License-Identifier: Apache-2.0
"""Bringing the official weights to this machine, and making from them what the engines load."""

from __future__ import annotations

from tools.models.fetching import Source, fetch
from tools.models.listing import ModelRow, list_models

__all__ = ["ModelRow", "Source", "fetch", "list_models"]
