"""The device follows the flag, and what cannot be had ends the process in one line."""

import argparse

import pytest

from megatron_dyn.host.cpu import device


@pytest.mark.parametrize(
    ("requested", "available", "expected"),
    [
        ("auto", True, "cuda"),
        ("auto", False, "cpu"),
        ("cpu", True, "cpu"),
        ("cpu", False, "cpu"),
        ("cuda", True, "cuda"),
    ],
)
def test_choice(requested, available, expected):
    assert device.choose_device(requested, lambda: available) == expected


def test_cuda_without_a_device_is_refused():
    with pytest.raises(device.DeviceError, match="--dyn-device: expected a CUDA device"):
        device.choose_device("cuda", lambda: False)


@pytest.mark.parametrize("argv", [["--dyn-device", "cpu"], ["--num-layers", "8", "--dyn-device=cpu", "--unknown"]])
def test_the_flag_is_found_among_all_others(argv):
    assert device.device_from_arguments(argv) == "cpu"


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--dyn-device", "cuda"], "expected a CUDA device for 'cuda', actual: torch.cuda.is_available() is False"),
        (["--dyn-device", "tpu"], "invalid choice: 'tpu'"),
        (["--dyn-device"], "expected one argument"),
    ],
)
def test_a_bad_wish_ends_the_process_with_one_line(argv, reason, capsys, monkeypatch):
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        device.device_from_arguments(argv)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--dyn-device" in line
    assert reason in line


def test_the_flag_is_registered_in_a_group_of_the_callers_choice():
    parser = argparse.ArgumentParser()
    device.add_device_argument(parser.add_argument_group("dynamic balancing"))
    assert parser.parse_args([]).dyn_device == "auto"
