# SPDX-License-Identifier: Apache-2.0
"""How many tokens of KV fit beside the weights: of every model, and of all of them together."""
