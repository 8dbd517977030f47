"""The ledger puts rows in force, checks them, and takes every one back; targets are attributes of a made-up module."""

import functools
import sys
from types import ModuleType

import pytest

from megatron_dyn.host.seams import Seam, SeamError, apply, is_applied


class Base:
    def inherited(self):
        return "inherited"


class Child(Base):
    def method(self, value):
        return value

    @staticmethod
    def static(value):
        return value

    @classmethod
    def named(cls):
        return cls.__name__


@pytest.fixture
def host(monkeypatch):
    """A module `made_up_host` with a function, a class and a number."""
    module = ModuleType("made_up_host")
    module.add = lambda left, right: left + right
    module.Child = type("Child", (Child,), dict(vars(Child)))
    module.NUMBER = 3
    monkeypatch.setitem(sys.modules, "made_up_host", module)
    return module


def seam(path="add", wrap=None, parameters=()):
    return Seam(
        target=f"made_up_host:{path}",
        why="a test",
        remove_when="never",
        parameters=parameters,
        wrap=wrap or plus(10),
    )


def plus(number):
    def wrap(original):
        @functools.wraps(original)
        def replacement(*args, **options):
            return original(*args, **options) + number

        return replacement

    return wrap


def test_apply_wraps_and_undo_restores_the_very_object(host):
    original = host.add
    undo = apply([seam()])
    assert host.add(1, 2) == 13
    undo()
    assert host.add is original


def test_undo_twice_is_harmless(host):
    original = host.add
    undo = apply([seam()])
    undo()
    host.add = replaced_later = lambda left, right: 0
    undo()
    assert host.add is replaced_later is not original


def test_handle_is_a_context_manager_also_when_the_block_fails(host):
    original = host.add
    with pytest.raises(ZeroDivisionError), apply([seam()]):
        assert host.add(1, 2) == 13
        raise ZeroDivisionError
    assert host.add is original


def test_the_same_seam_again_is_left_alone_and_not_undone_by_the_second_handle(host):
    row = seam()
    first = apply([row])
    second = apply([row])
    assert host.add(1, 2) == 13
    second()
    assert host.add(1, 2) == 13
    assert is_applied(row)
    first()
    assert not is_applied(row)


def test_two_seams_stack_on_one_target_and_come_off_in_reverse(host):
    original = host.add
    lower, upper = seam(wrap=plus(10)), seam(wrap=plus(100))
    undo = apply([lower, upper])
    assert host.add(1, 2) == 113
    assert is_applied(lower)
    apply([lower])()
    assert host.add(1, 2) == 113
    undo()
    assert host.add is original


def test_undo_of_a_covered_seam_is_refused_and_leaves_it(host):
    lower = apply([seam(wrap=plus(10))])
    apply([seam(wrap=plus(100))])
    with pytest.raises(SeamError, match="'made_up_host:add' cannot be undone"):
        lower()
    assert host.add(1, 2) == 113


def test_a_class_can_be_replaced(host):
    original = host.Child
    with apply([seam("Child", wrap=lambda original: type("Stand-in", (), {"method": lambda self, value: -value}))]):
        assert host.Child().method(1) == -1
    assert host.Child is original


@pytest.mark.parametrize(("path", "args", "expected"), [("method", (1,), 11), ("static", (1,), 11)])
def test_methods_and_static_methods_stay_what_they_are(host, path, args, expected):
    stored = vars(host.Child)[path]
    with apply([seam(f"Child.{path}")]):
        assert getattr(host.Child(), path)(*args) == expected
    assert vars(host.Child)[path] is stored


def test_a_class_method_is_wrapped_with_its_class_bound(host):
    def wrap(original):
        return lambda: original() + "!"

    with apply([seam("Child.named", wrap=wrap)]):
        assert host.Child.named() == "Child!"
    assert host.Child.named() == "Child"


def test_undo_takes_an_attribute_away_that_was_only_inherited(host):
    with apply([seam("Child.inherited", wrap=lambda original: lambda self: "replaced")]):
        assert host.Child().inherited() == "replaced"
        assert Base().inherited() == "inherited"
    assert "inherited" not in vars(host.Child)


@pytest.mark.parametrize("target", ["no_such_module:add", "made_up_host:nothing", "made_up_host:Child.nothing"])
def test_a_missing_target_is_named_with_the_host(host, target):
    row = Seam(target=target, why="a test", remove_when="never", wrap=plus(1))
    with pytest.raises(SeamError, match=rf"{target}.*megatron-core .*supported 0\.17 <= megatron-core < 0\.20"):
        apply([row])


@pytest.mark.parametrize("target", ["made_up_host", "made_up_host:", ":add"])
def test_a_malformed_target_is_refused(host, target):
    with pytest.raises(SeamError, match="expected 'package.module:attribute.path'"):
        apply([Seam(target=target, why="a test", remove_when="never", wrap=plus(1))])


def test_the_signature_is_guarded(host):
    with apply([seam(parameters=("left", "right"))]):
        assert host.add(1, 2) == 13
    with pytest.raises(SeamError, match="expected parameters left, group, missing group, actual left, right"):
        apply([seam(parameters=("left", "group"))])
    assert host.add(1, 2) == 3


def test_the_signature_of_the_original_counts_below_other_seams(host):
    with apply([seam(wrap=plus(10)), seam(wrap=plus(100), parameters=("left", "right"))]):
        assert host.add(1, 2) == 113


def test_every_target_that_does_not_fit_is_named_at_once(host):
    rows = [seam(), seam("nothing"), seam("Child"), seam("gone"), seam(parameters=("left", "group"))]
    with pytest.raises(SeamError, match=r"nothing.*; missing as well: made_up_host:gone, made_up_host:add\(group\)$"):
        apply(rows)
    assert host.add(1, 2) == 3


def test_what_has_no_signature_cannot_be_guarded(host):
    with pytest.raises(SeamError, match="'made_up_host:NUMBER' has no signature"):
        apply([seam("NUMBER", parameters=("left",))])


def test_nothing_is_left_where_a_later_seam_fails(host):
    original = host.add
    with pytest.raises(SeamError):
        apply([seam(), seam("nothing")])
    assert host.add is original


def test_nothing_is_left_where_a_wrap_fails(host):
    original = host.add

    def broken(_original):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        apply([seam(), seam("Child", wrap=broken)])
    assert host.add is original
