"""Report: what a round did and what it was worth, as JSONL and as a table. No torch, no Megatron."""

from megatron_dyn.report.changes import ChangeLog
from megatron_dyn.report.flatten import bubble_shares, flatten
from megatron_dyn.report.jsonl import JsonlSink, LossLog, ReportError, check_directory
from megatron_dyn.report.table import TableSink, render_round

__all__ = [
    "ChangeLog",
    "JsonlSink",
    "LossLog",
    "ReportError",
    "TableSink",
    "bubble_shares",
    "check_directory",
    "flatten",
    "render_round",
]
