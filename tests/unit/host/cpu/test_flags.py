"""The flags a CPU run lacks are added, those it has are kept."""

import pytest

from megatron_dyn.host.cpu.flags import CPU_FLAGS, cpu_arguments, has_flag

ALWAYS = [word for row in CPU_FLAGS if row.only_with is None for word in row.words]


def test_missing_flags_are_added_at_the_end_and_told_in_one_line():
    argv, notice = cpu_arguments(["--num-layers", "8"])
    assert argv == ["--num-layers", "8", *ALWAYS]
    assert notice is not None
    assert "\n" not in notice
    assert notice.endswith(" ".join(ALWAYS))


def test_nothing_is_added_twice_and_then_nothing_is_told():
    once, _ = cpu_arguments([])
    assert cpu_arguments(once) == (once, None)


@pytest.mark.parametrize("given", [["--transformer-impl", "transformer_engine"], ["--transformer-impl=local"]])
def test_the_users_value_stays(given):
    argv, _ = cpu_arguments(given)
    assert [word for word in argv if word.startswith("--transformer-impl")] == given[:1]
    assert argv[: len(given)] == given


def test_experts_lose_their_bias_and_only_they():
    assert has_flag(cpu_arguments(["--num-experts", "4"])[0], "--disable-bias-linear")
    assert not has_flag(cpu_arguments([])[0], "--disable-bias-linear")


def test_asynchronous_saves_get_the_writer_that_needs_no_gpu_and_only_they():
    assert cpu_arguments(["--async-save"])[0][-2:] == ["--async-strategy", "mcore"]
    assert not has_flag(cpu_arguments([])[0], "--async-strategy")


def test_the_callers_list_is_not_changed():
    argv = ["--num-layers", "8"]
    cpu_arguments(argv)
    assert argv == ["--num-layers", "8"]


@pytest.mark.parametrize(
    ("argv", "expected"), [(["--a"], True), (["--a=1"], True), (["--ab"], False), (["a"], False), ([], False)]
)
def test_a_flag_is_recognised_in_each_spelling(argv, expected):
    assert has_flag(argv, "--a") is expected
