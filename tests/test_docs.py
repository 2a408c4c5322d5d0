"""What the README shows has to run as it stands."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_readmes_python_runs(block):
    """A newcomer pastes it first."""
    exec(compile(block, "README.md", "exec"), {})


def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    return generate


def test_the_table_of_arguments_is_what_the_code_does():
    """A table that says another thing than the code is worse than none: run docs/generate.py."""
    assert (ROOT / "docs" / "arguments.md").read_text() == generator().page()


def test_the_tables_of_results_are_those_of_the_benchmarks():
    """Figures that no script has measured, or another one than said: run docs/generate.py."""
    text = (ROOT / "docs" / "precision.md").read_text()
    assert text == generator().with_results(text)
    assert text.count(".csv -->\n| ") == 6


def test_the_bill_is_what_the_code_says():
    """Somebody rents a cluster by it: run docs/generate.py."""
    text = (ROOT / "docs" / "distributed.md").read_text()
    assert text == generator().with_bill(text)
    assert text.count("| llama") == 18


def test_there_is_python_in_the_readme():
    assert BLOCKS


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page):
    """A table of deviations that cannot be found is none."""
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target
