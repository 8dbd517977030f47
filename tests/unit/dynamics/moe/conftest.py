"""The unit tests of routers stand on what those of the host stand on."""

from tests.unit.host.conftest import cpu_platform, one_rank

__all__ = ["cpu_platform", "one_rank"]
