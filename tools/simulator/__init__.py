# SPDX-License-Identifier: Apache-2.0
"""A discrete-event simulation of a deployment: the runtime's own queues and policies on a fake clock."""
