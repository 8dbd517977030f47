"""What holds for all unit tests: examples that hypothesis draws are the same in every run, and no example is timed."""

from hypothesis import settings

# Shared machines make deadlines flaky; a test that fails for one draw must fail for everyone.
settings.register_profile("unit", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("unit")
