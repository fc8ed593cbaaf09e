"""Prioritized replay's sum tree (Schaul et al. 2016, appendix B.2.1): float64, a level a NumPy call, no loop per item.

The tree is one array: node i has the children 2i and 2i + 1, leaf p is node `size + p`, node 1 holds the sum. 16 B a
leaf.
"""

import numpy as np


class SumTree:
    """Non-negative weights of `num_leaves` leaves, drawn in proportion."""

    def __init__(self, num_leaves: int):
        self._depth = max(1, (num_leaves - 1).bit_length())
        self._size = 1 << self._depth
        self.nodes = np.zeros(2 * self._size)

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self.nodes[1])

    def get(self, leaves: np.ndarray) -> np.ndarray:
        """Weights of leaves i64[K]."""
        return self.nodes[self._size + leaves]

    def set(self, leaves: np.ndarray, weights: np.ndarray | float) -> None:
        """Sets weights; of a leaf that is named twice, the last one counts."""
        if len(leaves) == 0:
            return
        nodes = self._size + leaves
        self.nodes[nodes] = weights
        for _ in range(self._depth):
            nodes = nodes >> 1
            self.nodes[nodes] = self.nodes[2 * nodes] + self.nodes[2 * nodes + 1]

    def find(self, points: np.ndarray) -> np.ndarray:
        """The leaves that points f64[K] in [0, total) fall on, the weights laid side by side."""
        nodes = np.ones(len(points), np.int64)
        points = points.copy()
        for _ in range(self._depth):
            nodes = 2 * nodes
            left = self.nodes[nodes]
            right = (points >= left) & (self.nodes[nodes + 1] > 0)  # rounding never leads to a weight of 0
            points -= np.where(right, left, 0)
            nodes += right
        return nodes - self._size
