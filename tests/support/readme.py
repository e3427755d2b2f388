"""The README's tree: every file of the product once, with the first sentence of its docstring.

python -m tests.support.readme      writes it into README.md
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
LINES = [
    line.partition("#")[0].split()
    for line in README.read_text(encoding="utf-8").splitlines()
    if line.startswith("    ")
]
"""The words of its commands, and of its tree."""
COMMANDS = [words[2:] for words in LINES if words[:2] == ["python", "-m"]]
"""Those of Python, from the name of the module on."""
CODE = ("smelt_interp", "model", "cache", "probes", "app", "benchmarks")
BLOCK = re.compile(r"(?<=## Where things are\n\n)(?:    .*\n|\n(?=    ))+")
OTHERS = {
    "smelt_interp/costs/gpus.json": "Peak rates and memory of GPUs, each with its source",
    "smelt_interp/data/texts/": "Excerpts of prose and mathematics, with their licences",
    "smelt_interp/paper/paper_numbers.json": "Every figure that the paper prints, once",
    "app/.streamlit/": "The dashboard's settings: a theme, no telemetry",
    "checkpoints/": "The demo pair: a small SMELT and its matched Baseline, trained on the same tokens",
    "docs/": "adding_a_family, experiments, kernels, numbers, recipes, tests, training, visits",
    "tests/": "The same tree again, and `support/` for what tests share",
}
"""What is no module."""
LAST = ("checkpoints/", "docs/", "tests/")
COLUMN = 29
ROOM = 120 - COLUMN
FEW = 20


def sentence(path: Path) -> str:
    """What a module is for: the first sentence of its docstring, cut after a clause where a line has no room."""
    text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
    first = re.split(r"[.?](?:\s|$)", text.replace("\n", " "), maxsplit=1)[0]
    parts = [
        first,
        *(first[: mark.start()] for sign in ("[:;] ", ", ") for mark in reversed([*re.finditer(sign, first)])),
    ]
    return next(said for said in parts if FEW <= len(said) <= ROOM)


def tree() -> str:
    """The block of lines, as the README holds it."""
    lines = []
    for package in CODE:
        top = ROOT / package
        folders = [top, *sorted(path.parent for path in top.rglob("*/__init__.py") if path.parent != top)]
        lines.append("")
        for folder in folders:
            name = folder.relative_to(ROOT).as_posix()
            if (folder / "__init__.py").exists():
                lines.append(
                    line(f"{name}/" if folder == top else f"  {folder.name}/", sentence(folder / "__init__.py"))
                )
            else:
                lines.append(line(f"{name}/", "Speed, as ratios measured side by side in one run"))
            entries = {path.name: sentence(path) for path in folder.glob("*.py") if path.name != "__init__.py"}
            held = {other for other in OTHERS if Path(other).parent.as_posix() == name}
            entries |= {other.removeprefix(f"{name}/"): OTHERS[other] for other in held}
            indent = "  " if folder == top else "    "
            lines += [line(indent + entry, said) for entry, said in sorted(entries.items())]
    lines += ["", *(line(name, OTHERS[name]) for name in LAST)]
    return "\n".join(lines[1:]) + "\n"


def line(name: str, said: str) -> str:
    return f"    {name:<{COLUMN - 5}} {said}"


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    README.write_text(BLOCK.sub(lambda _: tree(), text, count=1), encoding="utf-8")
