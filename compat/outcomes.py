"""How the tests of a pytest run ended, read from its junit file, and in what two runs differ. Pure; knows of no Megatron."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

PASSED = "passed"
ABSENT = "absent"
"""The outcome of a test that another run had and this one had not."""

_OUTCOME_OF_TAG = {"skipped": "skipped", "failure": "failed", "error": "error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """The tests of one run."""

    by_test: Mapping[str, str]
    """`passed`, `skipped`, `failed` or `error` (in its set-up or tear-down) by test, `path.py::Class::name`."""

    def counts(self, file: str | None = None) -> Counter[str]:
        """Return how many tests ended in which way: all, or those of one file."""
        return Counter(outcome for test, outcome in self.by_test.items() if file is None or test.startswith(f"{file}::"))


def read_outcomes(path: Path) -> Outcomes:
    """Read the junit file of a pytest run that was started with `-o junit_family=xunit1`, the one that names files.

    Raises OSError where there is no such file and ElementTree.ParseError where it is not complete.
    """
    by_test: dict[str, str] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        file = case.get("file", "")
        # The dotted path of the module, then the classes, if any.
        module = file.removesuffix(".py").replace("/", ".")
        classes = case.get("classname", "").removeprefix(module).strip(".").replace(".", "::")
        test = "::".join(part for part in (file, classes, case.get("name")) if part)
        found = [outcome for tag, outcome in _OUTCOME_OF_TAG.items() if case.find(tag) is not None]
        # A test that fails and whose tear-down fails too is there twice: the worst counts.
        by_test[test] = max([by_test.get(test, PASSED), *found], key=[PASSED, *_OUTCOME_OF_TAG.values()].index)
    return Outcomes(by_test=by_test)


def differences(reference: Outcomes, other: Outcomes) -> list[str]:
    """Return one line for each test that did not end in both runs in the same way, sorted: `test: passed, now failed`."""
    tests = sorted({*reference.by_test, *other.by_test})
    pairs = [(test, reference.by_test.get(test, ABSENT), other.by_test.get(test, ABSENT)) for test in tests]
    return [f"{test}: {before}, now {now}" for test, before, now in pairs if before != now]


def shortfalls(outcomes: Outcomes, passed: Mapping[str, int]) -> list[str]:
    """Return one line for each file of which fewer tests passed than `passed` says."""
    found = {file: outcomes.counts(file)[PASSED] for file in passed}
    return [f"{file}: expected {passed[file]} passed, actual {found[file]}" for file in passed if found[file] < passed[file]]


def describe(counts: Mapping[str, int]) -> str:
    """Return counts as `14 passed, 25 failed`."""
    order: Sequence[str] = (PASSED, *_OUTCOME_OF_TAG.values())
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in order if counts[outcome]) or "none"
