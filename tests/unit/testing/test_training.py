"""Command lines of tiny runs."""

from megatron_dyn.host.steps import Step
from megatron_dyn.testing.training import losses, tiny_gpt_arguments


def test_overrides_become_flags():
    argv = tiny_gpt_arguments(bf16=True, mock_data=False, num_layers=4, cp_comm_type=["p2p", "a2a"], vocab_size=None)
    assert argv[argv.index("--num-layers") + 1] == "4"
    assert argv[argv.index("--cp-comm-type") + 1 :][:2] == ["p2p", "a2a"]
    assert "--bf16" in argv
    assert not {"--mock-data", "--vocab-size", "True", "None"} & set(argv)


def test_losses_are_those_of_the_last_rank():
    first = Step(iteration=1, loss=None, grad_norm="0x1p+0")
    last = Step(iteration=1, loss="0x1.8p+1", grad_norm="0x1p+0")
    assert losses([[first], [last]]) == ["0x1.8p+1"]
