"""DynamicLife: when a family is asked, and what of it a checkpoint keeps."""

from types import SimpleNamespace

import pytest

from megatron_dyn.host import checkpoint, dynamic_life
from megatron_dyn.host.dynamic_life import LAYERS_APART, STATE, DynamicLife
from megatron_dyn.ports import Change
from megatron_dyn.testing.dynamics import FakeJob, RecordingDynamic

CHANGE = Change(family="recording", iteration=2, what="something")


class Log:
    def __init__(self):
        self.lines, self.open = [], True

    def write(self, change):
        self.lines.append(change)

    def close(self):
        self.open = False


def life_of(*families, args=None, log=None):
    return DynamicLife(
        args or SimpleNamespace(),
        families,
        make_job=lambda model, optimizer: FakeJob({}),
        open_log=None if log is None else lambda: log,
    )


def test_a_life_in_its_order_and_its_state_on_the_arguments():
    family, log, args = RecordingDynamic({2: CHANGE}), Log(), SimpleNamespace()
    life = life_of(family, args=args, log=log)
    life.dress(3, object())
    life.start([], None, 0)
    changed = []
    for step in (1, 2):
        life.before_step(step)
        changed.append(life.at_boundary(step))
    life.close()
    assert [call[0] for call in family.calls] == ["attach", "begin", "start", *["before_step", "at_boundary"] * 2]
    assert family.calls[1] == ("begin", 0, None)
    assert changed == [False, True]
    assert (log.lines, log.open) == ([CHANGE], False)
    assert getattr(args, STATE) == {"recording": len(family.calls)}


def test_a_change_that_costs_nothing_is_logged_and_no_more():
    quiet = Change(family="recording", iteration=1, what="told", changes_costs=False)
    log = Log()
    life = life_of(RecordingDynamic({1: quiet}), log=log)
    life.start([], None, 0)
    assert not life.at_boundary(1)
    assert log.lines == [quiet]


def test_what_a_checkpoint_holds_reaches_the_family_before_it_is_loaded(monkeypatch):
    family, order = RecordingDynamic(), []
    life = life_of(family)
    monkeypatch.setattr(checkpoint, "saved_state", lambda args, load_arg, name: (40, {"recording": "kept"}))
    load = next(row for row in life.rows() if row.target.endswith(":load_checkpoint")).wrap(
        lambda *args, **options: order.append(list(family.calls)) or (40, 0)
    )
    assert load([], object(), None) == (40, 0)
    life.start([], object(), 40)
    assert order == [[("begin", 40, "kept")]]
    assert family.calls == [("begin", 40, "kept"), ("start", 40)]


def test_gradients_are_shown_after_they_are_reduced():
    family, order = RecordingDynamic(), []
    life = life_of(family)
    life.before_step(5)
    finalize = next(row for row in life.rows() if row.target.endswith(":finalize_model_grads")).wrap(
        lambda model, num_tokens=None: order.append(list(family.calls))
    )
    finalize([])
    assert order == [[("before_step", 5)]]
    assert family.calls[-1] == ("after_gradients", 5)


def test_specs_are_edited_by_global_layer_and_the_ones_given_stay(monkeypatch):
    monkeypatch.setattr(dynamic_life, "layer_offset", lambda config, vp_stage: 4)

    class Naming(RecordingDynamic):
        def layer_spec(self, layer, spec):
            return f"{spec} of layer {layer}"

    given = SimpleNamespace(layer_specs=["spec", "spec"], layer_norm="norm")
    row = next(row for row in life_of(Naming()).rows() if row.target.endswith(":_get_block_submodules"))
    edited = row.wrap(lambda *args: given)("config", "spec")
    assert (edited.layer_specs, edited.layer_norm) == (["spec of layer 4", "spec of layer 5"], "norm")
    assert given.layer_specs == ["spec", "spec"]


def test_layers_are_dressed_when_their_block_has_built_them():
    family, block = RecordingDynamic(), SimpleNamespace()
    row = next(row for row in life_of(family).rows() if row.target.endswith("._build_layers"))

    def build(block):
        block.layers = [SimpleNamespace(layer_number=3), SimpleNamespace(layer_number=4)]

    row.wrap(build)(block)
    assert family.calls == [("attach", 2), ("attach", 3)]


@pytest.mark.parametrize("apart", [False, True])
def test_checkpoints_name_each_layer_where_a_family_needs_it(apart):
    life = life_of(RecordingDynamic(), RecordingDynamic(keeps_layers_apart=apart))
    assert (LAYERS_APART in life.rows()) == apart
    assert LAYERS_APART.wrap(lambda args: {"kept": 1})(None) == {"kept": 1, "non_homogeneous_layers": True}


def test_notes_are_by_family():
    assert life_of(RecordingDynamic()).notes(6) == {"recording": {"layer": 6}}
    assert life_of().notes(6) == {}
