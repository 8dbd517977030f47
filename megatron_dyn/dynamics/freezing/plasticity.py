"""Egeria's decisions: freeze the front-most layer once its plasticity has settled. Pure: readings in, a state out.

Wang et al., "Egeria: Efficient DNN Training with Knowledge-Guided Layer Freezing", EuroSys 2023, section 4: readings are
smoothed over a window and fitted by a line; a layer freezes when the slope stays below a fraction of the steepest of its first
three; all layers train again when the learning rate has dropped by a factor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_dyn.dynamics.freezing.settings import EgeriaSettings

_FIRST_SLOPES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PlasticityState:
    """All that a decision rests on; it goes into checkpoints."""

    num_frozen: int = 0
    """Layers frozen from the front; the next one is watched."""
    readings: tuple[float, ...] = ()
    """Plasticity of the watched layer, oldest first, as many as two windows need."""
    slopes: tuple[float, ...] = ()
    """The first slopes of the watched layer, at most three."""
    num_settled: int = 0
    """Settled readings in a row."""
    rate_at_freezing: float | None = None
    """The learning rate when a layer last froze; None while none is frozen."""

    def observe(self, reading: float, *, learning_rate: float, num_layers: int, settings: EgeriaSettings) -> "PlasticityState":
        """Add a reading of the watched layer and decide. The last layer never freezes: something has to train."""
        if self.num_frozen >= num_layers - 1:
            return self
        readings = (*self.readings, reading)[-2 * settings.window :]
        if len(readings) < 2 * settings.window:
            return replace(self, readings=readings)
        steepness = abs(slope(smoothed(readings, settings.window)))
        slopes = self.slopes if len(self.slopes) == _FIRST_SLOPES else (*self.slopes, steepness)
        settled = len(slopes) == _FIRST_SLOPES and steepness <= settings.tolerance * max(slopes)
        count = self.num_settled + 1 if settled else 0
        if count < settings.patience:
            return replace(self, readings=readings, slopes=slopes, num_settled=count)
        return PlasticityState(num_frozen=self.num_frozen + 1, rate_at_freezing=learning_rate)

    def follow_rate(self, learning_rate: float, settings: EgeriaSettings) -> "PlasticityState":
        """Let everything train again where the learning rate has dropped far enough since the last freezing."""
        if self.rate_at_freezing is None or learning_rate * settings.lr_drop > self.rate_at_freezing:
            return self
        return PlasticityState()


def smoothed(readings: Sequence[float], window: int) -> list[float]:
    """The moving average over `window` readings."""
    return [sum(readings[end - window : end]) / window for end in range(window, len(readings) + 1)]


def slope(values: Sequence[float]) -> float:
    """The slope of the least-squares line through equally spaced values."""
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    spread = sum((place - middle) ** 2 for place in range(len(values)))
    return sum((place - middle) * (value - mean) for place, value in enumerate(values)) / spread if spread else 0.0
