"""Times below which no split can be, whatever the order of the layers: where the searches start, and what gaps are to.

Used by `partition` and `interleaved` on the tables of a problem. It must not know how splits are searched for.
"""

from bisect import bisect_right
from fractions import Fraction
from itertools import accumulate
from math import ceil, gcd

from megatron_dyn.plan.exact.tables import Tables


def time_floor(tables: Tables) -> int:
    """A time that the slowest stage of any split takes at least.

    The largest of: what each stage takes whatever the split; all load spread evenly by speed; the heaviest item on the
    stage where it takes the least.
    """
    stages = range(min(tables.num_stages, tables.num_chunks))
    speeds = sum(Fraction(tables.rates[stage].denominator, tables.rates[stage].numerator) for stage in stages)
    even = ceil(Fraction(tables.prefix[-1] + sum(tables.fixed[stage] for stage in stages)) / speeds)
    # Two stages may differ in speed and in what they hold, so the heaviest item has its own best place.
    heaviest = max(tables.items, default=0)
    alone = min(tables.rates[stage].time(tables.fixed[stage] + heaviest) for stage in stages)
    return max(even, alone, *(rate.time(load) for rate, load in zip(tables.rates, tables.fixed, strict=True)))


def packing_floor(tables: Tables) -> int:
    """As `time_floor`, and no less than what the items need as a set: they are whole, and so many.

    Within a bound a stage holds at most as many items as the lightest ones that fit it; and where all items are
    multiples of one load (equal layers, or dense and sparse ones in turn) it can hold only multiples of that.
    """
    lightest, step = list(accumulate(sorted(tables.items), initial=0)), gcd(*tables.items)
    stages = range(min(tables.num_stages, tables.num_chunks))

    def is_enough(bound: int) -> bool:
        rooms = [tables.rates[stage].load_within(bound) - tables.fixed[stage] for stage in stages]
        if min(rooms) < 0:
            return False
        num_items = sum(bisect_right(lightest, room) - 1 for room in rooms)
        load = sum(room // step * step for room in rooms) if step else tables.prefix[-1]
        return num_items >= tables.num_items and load >= tables.prefix[-1]

    low, high = time_floor(tables), max(time_floor(tables), tables.longest())
    while low < high:
        bound = (low + high) // 2
        low, high = (low, bound) if is_enough(bound) else (bound + 1, high)
    return low
