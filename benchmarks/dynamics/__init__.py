"""The dynamic families at work: real compute saved, and four ways to split their layers. `python -m benchmarks.dynamics`.

`cases` says what runs, `arms` runs it, `costs` makes numbers of it, `page` and `picture` show them. A run leaves what it saw in
`build/dynamics/`, so that page and pictures can be made anew without training.
"""

from benchmarks.dynamics.study import run

__all__ = ["run"]
