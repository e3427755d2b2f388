"""Which modules are commands: `python -m` with any other says so, and exits 2."""

import sys
from pathlib import Path

from smelt_interp.errors import EXIT_USER


def is_command(module: str, root: Path) -> bool:
    """Whether `python -m module` does something: a package with a `__main__`, or a file that runs its `main`."""
    path = root.joinpath(*module.split("."))
    if path.is_dir():
        return (path / "__main__.py").is_file()
    return '\nif __name__ == "__main__":\n' in path.with_suffix(".py").read_text(encoding="utf-8")


def refuse_no_command(root: Path) -> None:
    """End `python -m module` when that module of ours is no command. Each package calls this when it is imported.

    While Python looks for the module, and imports its packages for that, `sys.argv[0]` is "-m".
    """
    if sys.argv[:1] != ["-m"] or "-m" not in sys.orig_argv:
        return
    module = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    path = root.joinpath(*module.split("."))
    if (path.is_dir() or path.with_suffix(".py").is_file()) and not is_command(module, root):
        print(
            f"error: python -m must name a command; got {module}, which is only imported: see README.md",
            file=sys.stderr,
        )
        raise SystemExit(EXIT_USER)
