# SPDX-License-Identifier: Apache-2.0
"""The stationary distribution of a sparse chain, or of many that don't touch, at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array, csr_array, eye_array, tril, triu
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import splu

__all__ = ["stationary_distribution"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_SWEEPS = 400
_CHANGE = 1e-11  # of a distribution in one sweep, summed over its states


def stationary_distribution(matrix: csr_array, begins: Ints) -> Floats:
    """pi with pi T = pi, with sum 1 over what each of the states of `begins` can reach.

    matrix: T, its states in an order that most transitions follow, for speed. The chains that begin there don't
    touch each other. A state that its chain leaves for ever has 0. Where a chain can end in one of several closed
    sets, each counts with the probability of ending there.
    """
    matrix.sum_duplicates()
    count, component = connected_components(matrix, connection="strong")
    row, col = matrix.nonzero()
    leaves = component[row] != component[col]
    closed = np.ones(count, dtype=bool)
    closed[component[row[leaves]]] = False
    size = np.bincount(component)
    pi = closed[component].astype(float)  # right where a state is a closed set by itself
    members = np.flatnonzero((closed & (size > 1))[component])
    if len(members):
        _, local = np.unique(component[members], return_inverse=True)
        pi[members] = _irreducible(matrix[members][:, members], local)
    return np.asarray(pi * _endings(matrix, begins, component, closed)[component])


def _endings(matrix: csr_array, begins: Ints, component: Ints, closed: NDArray[np.bool_]) -> Floats:
    """The probability of ending in each component, when beginning in `begins` (one chain each)."""
    # Almost always each chain has one closed set.
    _, chain = connected_components(matrix, directed=False)
    sets = np.zeros(chain.max() + 1)
    np.add.at(sets, chain[np.unique(component, return_index=True)[1]], closed)
    share = closed.astype(float)
    for begin in begins[sets[chain[begins]] > 1]:
        mine = chain == chain[begin]
        share[component[mine]] = 0
        transient = np.flatnonzero(mine & ~closed[component])
        begin_at = (transient == begin).astype(float)
        visits = splu(csc_array(eye_array(len(transient)) - matrix[transient][:, transient].T)).solve(begin_at)
        ends = np.flatnonzero(mine & closed[component])
        np.add.at(share, component[ends], visits @ matrix[transient][:, ends])
    return share


def _irreducible(matrix: csr_array, of: Ints) -> Floats:
    """The distribution of each of several irreducible chains; of: which one a state belongs to."""
    n = matrix.shape[0]
    sizes = np.bincount(of)
    equations = eye_array(n) - matrix.T
    # Gauss-Seidel. In the order of time a sweep follows the chain from one step of the slowest model to its next.
    lower = splu(csc_array(tril(equations)), permc_spec="NATURAL", diag_pivot_thresh=0.0)
    upper = csr_array(triu(equations, 1))
    pi: Floats = 1 / sizes[of]
    change = np.ones(len(sizes))
    for _ in range(_SWEEPS):
        after = lower.solve(-(upper @ pi))
        after /= np.bincount(of, after)[of]
        change = np.asarray(np.bincount(of, np.abs(after - pi)), dtype=float)
        pi = after
        if change.max() < _CHANGE:
            break
    for which in np.flatnonzero(change >= _CHANGE):
        # Nearly periodic: no sweep mixes it.
        mine = np.flatnonzero(of == which)
        pi[mine] = _direct(matrix[mine][:, mine])
    return pi


def _direct(matrix: csr_array) -> Floats:
    # One state's weight is set to 1 and its equation left out, which keeps the system sparse.
    equations = csc_array(eye_array(matrix.shape[0] - 1) - matrix[1:, 1:].T)
    # An M-matrix: its diagonal is a stable pivot.
    factors = splu(equations, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
    pi = np.concatenate([[1.0], factors.solve(matrix[[0], 1:].toarray()[0])])
    return np.asarray(pi / pi.sum())
