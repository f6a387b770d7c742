# SPDX-License-Identifier: Apache-2.0
"""The delayed-batching threshold B, solved: from what a deployment's traffic is to the B that serves it best."""
