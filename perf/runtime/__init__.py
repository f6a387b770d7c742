# SPDX-License-Identifier: Apache-2.0
"""The runtime on a real Triton against the Markov model: `python -m perf.runtime`, or `make bench-runtime`."""
