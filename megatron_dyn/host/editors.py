"""Which editor fits the optimizer of this job."""

from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_dyn.host.optimizer import ListEditor
from megatron_dyn.host.sharded import ShardEditor
from megatron_dyn.ports import JobError

Editor = ListEditor | ShardEditor


def editor_of(optimizer: Any) -> Editor:
    """The editor for what `setup_model_and_optimizer` returned. Raises JobError for a mixture of kinds."""
    chain = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    sharded = {isinstance(wrapper, DistributedOptimizer) for wrapper in chain}
    if len(sharded) > 1:
        raise JobError(f"optimizer: expected all parts distributed or none, got {[type(part).__name__ for part in chain]}")
    return ShardEditor(chain) if sharded == {True} else ListEditor(chain)
