"""What `--dyn-freeze` and its companions say, validated. Pure."""

import json
import re
from dataclasses import dataclass, field
from enum import StrEnum

from megatron_dyn.config import ConfigError
from megatron_dyn.dynamics.freezing.schedule import FreezeSchedule

FLAG = "--dyn-freeze"


class Method(StrEnum):
    """Who decides what freezes."""

    SCHEDULE = "schedule"
    AUTOFREEZE = "autofreeze"
    EGERIA = "egeria"


class EmbeddingRule(StrEnum):
    """When the embedding freezes, where a schedule does not name it."""

    WITH_FIRST_LAYER = "with-first-layer"
    NEVER = "never"


class FrozenState(StrEnum):
    """What becomes of the optimizer state of a layer that freezes."""

    DROP = "drop"
    PARK = "park"


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoFreezeSettings:
    """`autofreeze:KEY=VALUE,...`."""

    percentile: float = 50.0
    """Layers whose change lies below this percentile of all that still train may freeze; 0 to 100."""
    evaluations: int = 20
    """How often it is decided over the run, evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EgeriaSettings:
    """`egeria:KEY=VALUE,...`."""

    interval: int = 10
    """Steps between two readings of plasticity."""
    window: int = 5
    """Readings over which plasticity is averaged, and then fitted by a line."""
    tolerance: float = 0.2
    """A slope counts as settled below this fraction of the steepest of the layer's first three."""
    patience: int = 3
    """Settled readings in a row after which the layer freezes."""
    update: int = 50
    """Steps between two copies of the model into the reference."""
    lr_drop: float = 10.0
    """Everything trains again once the learning rate is below that at the last freezing by this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeSettings:
    """Everything that can be set."""

    method: Method
    schedule: FreezeSchedule | None = None
    """For the method `schedule` only."""
    autofreeze: AutoFreezeSettings = field(default_factory=AutoFreezeSettings)
    egeria: EgeriaSettings = field(default_factory=EgeriaSettings)
    embedding: EmbeddingRule = EmbeddingRule.WITH_FIRST_LAYER
    """`--dyn-freeze-embedding`."""
    state: FrozenState = FrozenState.DROP
    """`--dyn-freeze-state`."""
    cache_gib: float = 0.0
    """`--dyn-freeze-cache-gib`: host memory of a rank for what frozen prefixes gave; 0: none."""

    def __post_init__(self) -> None:
        """Refuse values out of range; raises ConfigError naming the flag and the key."""
        auto, egeria = self.autofreeze, self.egeria
        for key, value, holds, expected in (
            ("autofreeze:percentile", auto.percentile, 0 <= auto.percentile <= 100, "0 to 100"),
            ("autofreeze:evaluations", auto.evaluations, auto.evaluations >= 2, "at least 2"),
            ("egeria:interval", egeria.interval, egeria.interval >= 1, "at least 1"),
            ("egeria:window", egeria.window, egeria.window >= 2, "at least 2"),
            ("egeria:tolerance", egeria.tolerance, 0 < egeria.tolerance < 1, "above 0 and below 1"),
            ("egeria:patience", egeria.patience, egeria.patience >= 1, "at least 1"),
            ("egeria:update", egeria.update, egeria.update >= 1, "at least 1"),
            ("egeria:lr_drop", egeria.lr_drop, egeria.lr_drop > 1, "above 1"),
        ):
            if not holds:
                raise ConfigError(f"{FLAG} {key}: expected {expected}, got {value}")
        if not 0 <= self.cache_gib < 2**20:
            raise ConfigError(f"--dyn-freeze-cache-gib: expected a finite number of at least 0, got {self.cache_gib}")

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        num_layers: int,
        embedding: str = EmbeddingRule.WITH_FIRST_LAYER,
        state: str = FrozenState.DROP,
        cache_gib: float = 0.0,
    ) -> "FreezeSettings":
        """Read the value of `--dyn-freeze`: the JSON text of a schedule, `autofreeze[:...]` or `egeria[:...]`.

        Raises ConfigError naming the flag, what was expected and what was found.
        """
        rest = {"embedding": EmbeddingRule(embedding), "state": FrozenState(state), "cache_gib": cache_gib}
        name, _, options = text.strip().partition(":")
        if name == Method.AUTOFREEZE:
            auto = AutoFreezeSettings(**_options(name, options, {"percentile": float, "evaluations": int}))
            return cls(method=Method.AUTOFREEZE, autofreeze=auto, **rest)
        if name == Method.EGERIA:
            kinds = {"interval": int, "window": int, "tolerance": float, "patience": int, "update": int, "lr_drop": float}
            return cls(method=Method.EGERIA, egeria=EgeriaSettings(**_options(name, options, kinds)), **rest)
        schedule = FreezeSchedule.of_table(_json(text), flag=FLAG, num_layers=num_layers, shown=text, with_embedding=True)
        return cls(method=Method.SCHEDULE, schedule=schedule, **rest)


def _json(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f'{FLAG}: expected a schedule such as {{"0-7": [0, 200]}}, autofreeze or egeria, got {text.strip()[:60]!r}: '
            f"not JSON: {error.msg}, at column {error.colno}"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{FLAG}: not JSON that can be read: {error}") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{FLAG}: expected each range once, got {twice[:60]!r} twice")
    return table


def _options(method: str, text: str, kinds: dict[str, type]) -> dict[str, float]:
    """`key=value,...` by key; raises ConfigError."""
    values: dict[str, float] = {}
    for item in text.split(",") if text else []:
        key, _, value = item.partition("=")
        kind = kinds.get(key.strip())
        pattern = r"\d{1,9}" if kind is int else r"\d{1,9}(\.\d*)?(e-?\d{1,2})?"
        if kind is None or key.strip() in values or not re.fullmatch(pattern, value.strip()):
            known = ", ".join(f"{name}=<{kind.__name__}>" for name, kind in kinds.items())
            raise ConfigError(f"{FLAG} {method}: expected {known}, each once, got {item[:60]!r}")
        values[key.strip()] = kind(value)
    return values
