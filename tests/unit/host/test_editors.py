"""Which editor fits an optimizer: by the kind of its parts, all of one kind."""

from types import SimpleNamespace

import pytest
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

from megatron_dyn.host.editors import editor_of
from megatron_dyn.host.optimizer import ListEditor
from megatron_dyn.host.sharded import ShardEditor
from megatron_dyn.ports import JobError


def part(kind):
    """An optimizer of that class, without Megatron's constructors."""
    return kind.__new__(kind)


@pytest.mark.parametrize(("kind", "editor"), [(FP32Optimizer, ListEditor), (DistributedOptimizer, ShardEditor)])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_the_editor_works_on_all_parts_of_one_kind(kind, editor, num_parts):
    parts = [part(kind) for _ in range(num_parts)]
    found = editor_of(parts[0] if num_parts == 1 else SimpleNamespace(chained_optimizers=parts))
    assert type(found) is editor
    assert all(mine is given for mine, given in zip(found._chain, parts, strict=True))


def test_parts_of_both_kinds_are_refused_by_their_names():
    mixture = SimpleNamespace(chained_optimizers=[part(DistributedOptimizer), part(FP32Optimizer)])
    with pytest.raises(JobError) as raised:
        editor_of(mixture)
    assert str(raised.value) == (
        "optimizer: expected all parts distributed or none, got ['DistributedOptimizer', 'FP32Optimizer']"
    )
