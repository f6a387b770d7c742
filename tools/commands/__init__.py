# SPDX-License-Identifier: Apache-2.0
"""What the commands of `tokenrouter` do, one module for each that is more than a call."""
