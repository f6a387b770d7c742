# SPDX-License-Identifier: Apache-2.0
"""Quality against cost: benchmarks asked of a served deployment, their answers judged, sweeps and their pictures."""
