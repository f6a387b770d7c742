# SPDX-License-Identifier: Apache-2.0
"""The public model: the three loops that move every request between the LLMs."""
