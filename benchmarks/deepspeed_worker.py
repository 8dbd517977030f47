"""Runs DeepSpeed's own `partition_balanced` in an interpreter that has a release of DeepSpeed installed.

`benchmarks.planner` starts it as a script by that interpreter, which need not have megatron_dyn: on stdin comes JSON, a list of
[weights, number of parts], and goes out on stdout. The functions alone are taken out of the installed file: importing all of
a DeepSpeed of 2023, which has the old function, fails with the torch of today.
"""

import ast
import bisect
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

PARTS = ("prefix_sum_inc", "partition_uniform", "partition_balanced", "_lprobe", "_rb_partition_balanced")
"""Functions of deepspeed/runtime/utils.py that the balancing consists of, in any release."""


def partition_balanced() -> tuple[Callable[..., list[int]], bool]:
    """The installed function, and whether it is the old one; raises ImportError without DeepSpeed."""
    package = importlib.util.find_spec("deepspeed")
    if package is None or package.origin is None:
        raise ImportError("deepspeed: expected to be installed in this interpreter")
    path = Path(package.origin).parent / "runtime" / "utils.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kept = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in PARTS]
    names: dict[str, Any] = {"bisect_left": bisect.bisect_left}
    exec(compile(ast.Module(body=kept, type_ignores=[]), str(path), "exec"), names)
    return names["partition_balanced"], "_lprobe" in names


def main() -> int:
    """Answer every case: its boundaries, or the name of the exception, and the seconds of CPU time that it took."""
    function, is_old = partition_balanced()
    answers = []
    for weights, num_parts in json.load(sys.stdin):
        start = process_time()
        try:
            found: list[int] | str = [int(boundary) for boundary in function(weights, num_parts)]
        except AssertionError as error:
            found = type(error).__name__
        answers.append([found, process_time() - start])
    json.dump({"version": importlib.metadata.version("deepspeed"), "is_old": is_old, "answers": answers}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
