"""Random arithmetic expressions as trees, and batches of them as forests.

The expressions are those of ListOps (Nangia and Bowman, arXiv 1804.06028), with operators that do not depend on the
order of their arguments: minimum, maximum, and sum modulo 10. A few tensors contain all trees; a tree is a slice of
them.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

OPERATORS = (min, max, lambda values: sum(values) % 10)
WORDS = 10 + len(OPERATORS)  # the digits, then the operators


def grow(made: random.Random, depth: int, nodes: list[list[int]], start: int) -> tuple[int, int]:
    """Append the nodes of a random expression to ``nodes``, children first. A node is a word, the index of its parent
    (relative to ``start``; a root is its own parent), and its height. Return the index of the root in ``nodes``, and
    the value of the expression."""
    if depth == 0 or made.random() < 0.25:
        word = value = made.randrange(10)
        children: list[tuple[int, int]] = []
    else:
        word = made.randrange(10, WORDS)
        children = [grow(made, depth - 1, nodes, start) for _ in range(made.randrange(2, 5))]
        value = OPERATORS[word - 10]([value for _, value in children])
    place = len(nodes)
    for child, _ in children:
        nodes[child][1] = place - start
    nodes.append([word, place - start, 1 + max((nodes[child][2] for child, _ in children), default=-1)])
    return place, value


class Tree(NamedTuple):
    """An expression. ``nodes``: int64 of shape (nodes, 3), the nodes made by :func:`grow`."""

    nodes: Tensor
    value: Tensor


class Expressions(Dataset[Tree]):
    """Random expressions in which at most ``depth`` operators are nested."""

    def __init__(self, count: int, depth: int, seed: int) -> None:
        made, nodes, values, self.ends = random.Random(seed), list[list[int]](), [], [0]
        for _ in range(count):
            values.append(grow(made, depth, nodes, self.ends[-1])[1])
            self.ends.append(len(nodes))
        self.nodes, self.values = torch.tensor(nodes), torch.tensor(values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tree:
        return Tree(self.nodes[self.ends[index] : self.ends[index + 1]], self.values[index])


class Forest(NamedTuple):
    """A batch of trees, with the nodes sorted by height. A level is the nodes of one height.

    Attributes:
        words: the words of the nodes.
        sizes: the number of nodes on each level.
        edges: for each level but the first, the indices of the children of its nodes, and their parents as indices
            within the level.
        roots: the index of each tree's root.
        values: the value of each tree.
    """

    words: Tensor
    sizes: list[int]
    edges: list[tuple[Tensor, Tensor]]
    roots: Tensor
    values: Tensor


def forest(trees: list[Tree]) -> Forest:
    """Return trees as one batch."""
    counts = torch.tensor([len(tree.nodes) for tree in trees])
    starts = counts.cumsum(0) - counts
    words, parents, heights = torch.cat([tree.nodes for tree in trees]).T
    parents = parents + starts.repeat_interleave(counts)
    order = heights.argsort(stable=True)
    place = order.argsort()  # the index of each node in that order
    sizes: list[int] = heights.bincount().tolist()
    parents = place[parents[order]]
    children = (parents != torch.arange(len(parents))).nonzero().squeeze(1)
    of_level = children[heights[order][parents[children]].argsort(stable=True)]
    edges, level, begin = [], parents[of_level], 0
    for below, size in pairwise(sizes):
        begin += below
        here = (begin <= level) & (level < begin + size)
        edges.append((of_level[here], level[here] - begin))
    return Forest(words[order], sizes, edges, place[starts + counts - 1], torch.stack([tree.value for tree in trees]))
