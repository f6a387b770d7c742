# SPDX-License-Identifier: Apache-2.0
"""From Hugging Face checkpoints to what the engines of a deployment load."""
