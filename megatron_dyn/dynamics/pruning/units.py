"""A weight as units that stay or go together: their scores, and the mask that follows from which of them stay.

A score is the bit pattern of a non-negative fp32 magnitude, which orders as the magnitude does: integers, so that counting
finds a threshold exactly. Source of magnitude as the score: Zhu and Gupta, arXiv 1710.01878, section 3.
"""

from dataclasses import dataclass

import torch

from megatron_dyn.dynamics.pruning.pattern import Kind, Pattern

GONE = -1
"""The score of a unit that was pruned before: below all others, and never a candidate again."""


@dataclass(frozen=True, slots=True)
class Units:
    """The units of one weight (outputs by inputs), or of one rank's slice of it."""

    scores: torch.Tensor
    """int32, one per unit, in the order of the weight's elements; GONE where the unit was pruned."""
    size: int
    """Weights that go when a unit goes."""

    @property
    def num_weights(self) -> int:
        """Weights that the pattern could prune, those that are gone included."""
        return self.scores.numel() * self.size


def units_of(weight: torch.Tensor, mask: torch.Tensor, pattern: Pattern) -> Units:
    """Score the units of a weight under the mask (bool, same shape) that is in force. Nothing is changed."""
    weight = weight.detach()
    match pattern.kind:
        case Kind.UNSTRUCTURED:
            magnitudes, whole, size = weight.float().abs().reshape(-1), mask.reshape(-1), 1
        case Kind.N_OF_M:
            smallest = _groups(weight.abs(), pattern).sort(dim=-1).values[:, : pattern.second - pattern.first]
            magnitudes, whole = _norms(smallest), _groups(mask, pattern).all(-1)
            size = pattern.second - pattern.first
        case Kind.BLOCK | Kind.ROWS:
            blocks = _blocks(weight, pattern)
            magnitudes, whole, size = _norms(blocks), _blocks(mask, pattern).any(-1), blocks.shape[1]
    scores = magnitudes.contiguous().view(torch.int32)
    return Units(torch.where(whole, scores, GONE), size)


def mask_of(kept: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """The mask (bool, of the weight's shape) when the units `kept` (bool, one per unit) stay and the others go.

    It lets through nothing that `mask`, the one in force, does not.
    """
    rows, columns = weight.shape
    match pattern.kind:
        case Kind.UNSTRUCTURED:
            wanted = kept.view_as(weight)
        case Kind.N_OF_M:
            groups = _groups(weight.detach().float().abs(), pattern)
            # Stable: of equal magnitudes the first stay, on every rank alike.
            largest = groups.argsort(dim=-1, descending=True, stable=True)[:, : pattern.first]
            wanted = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, largest, value=True)
            wanted = (wanted | kept[:, None]).view(rows, columns)
        case Kind.BLOCK | Kind.ROWS:
            height, width = _block_shape(weight, pattern)
            grid = kept.view(rows // height, columns // width)
            wanted = grid.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return wanted & mask


def _groups(matrix: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """[groups, M]: neighbours along the input dimension."""
    return matrix.reshape(-1, pattern.second)


def _blocks(matrix: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """[blocks, elements of a block], block by block along a row of blocks."""
    height, width = _block_shape(matrix, pattern)
    rows, columns = matrix.shape
    cut = matrix.reshape(rows // height, height, columns // width, width).transpose(1, 2)
    return cut.reshape(-1, height * width)


def _block_shape(matrix: torch.Tensor, pattern: Pattern) -> tuple[int, int]:
    return (1, matrix.shape[1]) if pattern.kind is Kind.ROWS else (pattern.first, pattern.second)


def _norms(units: torch.Tensor) -> torch.Tensor:
    """The root mean square of each row, fp32: per weight, so that rows of unequal lengths can be compared.

    Added in fp64: what another order of adding could change is then rounded away, but for rare halves.
    """
    return units.double().square().mean(-1).sqrt().float()
