"""What the source of the dashboard may hold."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.app_pages import APP


def test_the_first_page_imports_neither_torch_nor_what_brings_it(folder: Path) -> None:
    script = (
        "import sys; from streamlit.testing.v1 import AppTest; "
        f"sys.argv = ['app/main.py', '--captures', {str(folder)!r}]; "
        f"test = AppTest.from_file({str(APP / 'main.py')!r}, default_timeout=60); "
        "test.query_params['capture'] = 'looped'; test.run(); assert not test.exception; "
        "assert any('**Digest**' in each.value for each in test.markdown); "
        "print(sorted({'torch', 'transformer_lens', 'nnsight', 'transformers'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("path", sorted(APP.rglob("*.py")), ids=lambda path: str(path.relative_to(APP)))
def test_a_page_does_no_arithmetic(path: Path) -> None:
    arithmetic = (ast.Add, ast.Sub, ast.Mult, ast.Mod, ast.Pow, ast.FloorDiv, ast.MatMult)
    tree = ast.parse(path.read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, arithmetic)]
    # A page counts from 1; texts are joined; a constant may be written as a power of two.
    allowed = ("2 ** 53", "2 ** 20")
    texts = {ast.unparse(node) for node in found if ast.unparse(node.right) != "1"}
    assert not {text for text in texts if text not in allowed and "join" not in text}
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not imported & {"numpy", "math", "statistics"}


def test_no_file_of_the_app_hides_a_module() -> None:
    # `streamlit run app/main.py` puts app/ before everything else on the path.
    names = {path.stem for path in APP.glob("*")} - {"__init__"}
    packages = {path.parent.name for path in APP.parent.glob("*/__init__.py")}
    assert not names & (set(sys.stdlib_module_names) | packages | {"streamlit", "plotly", "pandas", "numpy"})
