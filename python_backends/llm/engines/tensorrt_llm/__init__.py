# SPDX-License-Identifier: Apache-2.0
"""The engine `tensorrt_llm`: TensorRT-LLM's Python LLM API (versions 1.0 to 1.2), in the official Triton image."""
