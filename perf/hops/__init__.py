# SPDX-License-Identifier: Apache-2.0
"""Where the time goes between the end of one model's step and the begin of the next: `python -m perf.hops`."""
