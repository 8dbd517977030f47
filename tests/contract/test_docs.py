"""The documentation says what the code does: generated blocks are up to date, named files and commands exist."""

import re
import shlex

import pytest

from docs.generate import BLOCKS, outdated, render
from megatron_dyn.host.ledger import ledger
from megatron_dyn.host.seams import apply
from tests.contract.source_tree import ROOT

PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))]


def test_generated_blocks_are_up_to_date():
    assert outdated(write=False) == [], "run: make docs"


def test_a_changed_block_is_noticed():
    text = "<!-- generated: flags -->\nold\n<!-- end: flags -->"
    assert "new" in render("flags", text, "new")
    with pytest.raises(ValueError, match="limits"):
        render("limits", text, "new")


def test_every_documented_flag_is_parsed_and_every_parsed_flag_documented():
    table = BLOCKS["flags"][1]()
    parsed = set(re.findall(r"--(?:no-)?dyn-[a-z-]+", table))
    written = {flag.rstrip("-") for page in PAGES for flag in re.findall(r"--(?:no-)?dyn-[a-z-]+", (ROOT / page).read_text())}
    assert written - {"--dyn"} <= parsed
    assert parsed <= written


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_exist(page):
    text = (ROOT / page).read_text()
    folder = (ROOT / page).parent
    links = [link for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) if "://" not in link]
    missing = [link for link in links if not (folder / link).exists()]
    named = re.findall(r"`((?:megatron_dyn|docs|examples|benchmarks|tests|scripts)/[\w/.-]+\.\w+)`", text)
    missing += [name for name in named if "NNNN" not in name and not (ROOT / name).exists()]
    assert missing == []


def test_make_targets_in_the_readme_exist():
    targets = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    used = {
        words[1]
        for block in blocks
        for line in block.splitlines()
        if (words := shlex.split(line, comments=True))[:1] == ["make"]
    }
    assert {"quickstart", "test"} <= used <= targets


def test_every_ledger_row_is_complete_and_applies_to_the_installed_host():
    for seams in ledger().values():
        for seam in seams:
            assert seam.why, seam.target
            assert seam.remove_when, seam.target
        apply(seams)()


def test_every_field_of_a_round_is_documented():
    keys = set(re.findall(r'^ +"(\w+)": ', (ROOT / "megatron_dyn/report/flatten.py").read_text(), re.MULTILINE))
    assert {"schema_version", "layers", "bubble_share"} <= keys
    page = (ROOT / "docs/reports.md").read_text()
    assert {key for key in keys if f"`{key}`" not in page} == set()
