# SPDX-License-Identifier: Apache-2.0
"""The recorded names of each version of tensorrt_llm: see `contract.py`."""
