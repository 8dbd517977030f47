"""Balanced assignment of tokens to experts by auction, exact in the balance and nearly so in the score.

Bertsekas, "Auction algorithms for network flow problems: A tutorial introduction" (1992); with similar objects, Bertsekas and
Castanon, "The auction algorithm for the transportation problem" (1989): the places of an expert have one price, that of the
lowest bid it holds. BASE layers (Lewis et al. 2021, arXiv 2103.16716) pose the problem: the greatest sum of scores in which all
experts get equally many tokens.
"""

import torch

from megatron_dyn.ports import JobError

EPSILON_OF_SPREAD = 1e-3
"""The sum of scores is at most this times the spread of the scores per token below the best possible."""
_FIRST_EPSILON_OF_SPREAD, _SHRINK = 0.25, 4.0


def balanced_assignment(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Which experts each token goes to: bool [tokens, experts], `topk` in a row, tokens x topk / experts in a column, exactly.

    `scores` is [tokens, experts]. For `topk` 1 the assignment is the best within EPSILON_OF_SPREAD; for more, tokens get
    their experts one after another: each round is the best one given those before. Deterministic; waits for the device.
    Raises JobError when tokens cannot be shared out evenly.
    """
    num_tokens, num_experts = scores.shape
    if num_tokens % num_experts:
        raise JobError(
            f"--dyn-moe-assignment auction: expected tokens in multiples of the {num_experts} experts, got {num_tokens}"
        )
    # What is not finite is for Megatron's check of the loss; an auction of it would never end. As fp32 first: the greatest
    # number of fp64 would leave no room for prices.
    values = torch.nan_to_num(scores.detach().float()).double()
    assigned = torch.zeros_like(scores, dtype=torch.bool)
    for _ in range(topk):
        chosen = _auction(values.masked_fill(assigned, -torch.inf), num_tokens // num_experts)
        assigned[torch.arange(num_tokens, device=scores.device), chosen] = True
    return assigned


def _auction(values: torch.Tensor, places: int) -> torch.Tensor:
    """The expert of each token [tokens]; -inf forbids a pair. Epsilon shrinks, prices stay: far fewer bids than at once."""
    num_tokens, num_experts = values.shape
    if num_experts == 1:
        return torch.zeros(num_tokens, dtype=torch.int64, device=values.device)
    finite = values[values.isfinite()]
    spread = float(finite.max() - finite.min())
    prices = values.new_zeros(num_experts)
    # All scores alike: any balanced assignment is best, but bids have to rise.
    spread = spread if spread > 0 else 1.0
    share = _FIRST_EPSILON_OF_SPREAD
    while True:
        share = max(share, EPSILON_OF_SPREAD)
        owner = _sell(values, prices, places, spread * share, spread)
        if share == EPSILON_OF_SPREAD:
            return owner
        share /= _SHRINK


def _sell(values: torch.Tensor, prices: torch.Tensor, places: int, epsilon: float, spread: float) -> torch.Tensor:
    """Let tokens bid until each has a place; `prices` rise in place. Returns the expert of each token."""
    num_tokens = values.shape[0]
    owner = torch.full((num_tokens,), -1, dtype=torch.int64, device=values.device)
    bids = values.new_zeros(num_tokens)
    while (homeless := (owner < 0).nonzero().squeeze(1)).numel():
        worth = values[homeless] - prices
        leading = torch.topk(worth, 2, dim=1)
        (best, second), wanted = leading.values.unbind(1), leading.indices[:, 0]
        # A token with one expert left would bid without limit; bidding less, but above the price, is always allowed.
        raised = torch.minimum(best - second, torch.full_like(best, spread)) + epsilon
        owner[homeless], bids[homeless] = wanted, prices[wanted] + raised
        _settle(owner, bids, prices, places)
    return owner


def _settle(owner: torch.Tensor, bids: torch.Tensor, prices: torch.Tensor, places: int) -> None:
    """Every expert keeps its highest bids, as many as it has places; the others are without a place again."""
    num_experts = prices.shape[0]
    bidders = (owner >= 0).nonzero().squeeze(1)
    # By expert, then by bid, then by token: stable sorts, so that equal bids do not depend on the kernel.
    bidders = bidders[torch.sort(bids[bidders], descending=True, stable=True).indices]
    bidders = bidders[torch.sort(owner[bidders], stable=True).indices]
    experts = owner[bidders]
    held = torch.bincount(experts, minlength=num_experts)
    rank = torch.arange(bidders.numel(), device=owner.device) - (held.cumsum(0) - held)[experts]
    lowest = rank == places - 1
    prices[experts[lowest]] = torch.maximum(prices[experts[lowest]], bids[bidders[lowest]])
    owner[bidders[rank >= places]] = -1
