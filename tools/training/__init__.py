# SPDX-License-Identifier: Apache-2.0
"""Training routers: prompts, labels made by the pair of models itself, fitting, calibration, report."""
