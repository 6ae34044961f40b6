"""The site is built with every warning an error: broken links, pages in no menu, docstrings."""

import io
import re
from contextlib import redirect_stderr
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytest.importorskip("sphinx", reason="pip install -e '.[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, whose calculator has one model: test_calculator.py tests the page."""
    from sphinx.cmd.build import main

    folder = tmp_path_factory.mktemp("site")
    paths = ["-d", str(folder / "doctrees"), str(ROOT / "docs"), str(folder / "html")]
    with pytest.MonkeyPatch.context() as patched, redirect_stderr(io.StringIO()) as said:
        patched.setattr("tuner.app.calculator.all_models", lambda: ("qwen3-0.6b",))
        status = main(["-W", "--keep-going", "-q", "-b", "html", *paths])
    assert status == 0, said.getvalue()
    assert (folder / "html/calculator.html").exists()  # pages link to it
    return folder / "html"


@pytest.mark.slow
def test_every_page_is_in_the_site_and_loads_nothing_from_elsewhere(site):
    pages = {p.relative_to(ROOT / "docs").with_suffix("") for p in (ROOT / "docs").rglob("*.md")}
    for page in pages:
        html = (site / page).with_suffix(".html").read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"([^\"]+)\"", html)
        assert loaded
        assert not [address for address in loaded if re.match(r"(?:https?:)?//", address)], page


@pytest.mark.slow
def test_references_have_every_command_and_the_python_names(site):
    import click

    from tuner.app.cli.main import cli

    commands = (site / "reference" / "cli.html").read_text("utf-8")
    context = click.Context(cli)
    found = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    for name in [name for name, command in found.items() if command and not command.hidden]:
        assert f'id="tuner-{name}"' in commands, name
    names = (site / "reference" / "python.html").read_text("utf-8")
    for name in ("search", "estimate", "SearchResult", "InputError", "report_step"):
        assert f'<span class="pre">{name}</span>' in names, name


@pytest.mark.slow
def test_the_menu_of_every_page_has_the_pages_of_the_navigation(site):
    for page in ("index.html", "notebook/accuracy.html"):
        menu = (site / page).read_text("utf-8").partition('class="sidebar-tree"')[2]
        menu = menu.partition("</aside>")[0]
        entries = re.findall(r'class="toctree-l1[^>]*><a [^>]*href="([^"]*)"', menu)
        named = {(site / page).parent.joinpath(e).resolve().stem for e in entries if e != "#"}
        # Sphinx has pages of its own, such as search.html, which would take a page's place.
        assert named >= {p.stem for p in (ROOT / "docs").glob("*.md")} - {"index"}, page
        # The reference has one entry, as the home page would have; the notebook none.
        assert len(entries) == len([*(ROOT / "docs").glob("*.md")]), page
