"""`tools/render.py`: all files that are generated in seconds are up to date, and the command writes and checks."""

from __future__ import annotations

import pytest

from tools import page, render


@pytest.mark.parametrize("name", render.by_default())
def test_generated_files_are_up_to_date(name):
    assert [*render.messages([name])] == []


def test_every_generator_writes_files_whose_pages_name_it():
    for name, generator in render.GENERATORS.items():
        files = [file for pattern in generator.writes for file in page.ROOT.glob(pattern)]
        assert files, name
        for file in (one for one in files if one.suffix == ".md" and one != page.ROOT / "README.md"):
            assert f"enerated by `python tools/render.py {name}`" in file.read_text(encoding="utf-8"), file


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository with a page, a generator of it and of a picture, and a picture that is no longer generated."""
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(render, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("# By hand\n<!-- a: begin -->\nold\n<!-- a: end -->\nBy hand, too.\n")
    (tmp_path / "old.svg").write_text("old")
    generator = render.Generator("tests.test_generated_files:made", ("page.md", "*.svg"), part="TEXT")
    monkeypatch.setattr(render, "GENERATORS", {"made": generator, "long": generator.__class__("x:y", (), "an hour")})
    return tmp_path


def made(part="new"):
    return {**page.filled("page.md", a=part), "new.svg": b"<svg/>"}


def test_a_check_names_what_to_run_and_writes_nothing(root, monkeypatch, capsys):
    before = {file: file.read_bytes() for file in root.iterdir()}
    monkeypatch.setattr("sys.argv", ["render.py", "--check"])
    assert render.main() == 1
    assert sorted(capsys.readouterr().err.splitlines()) == [
        f"{name} is out of date: run `python tools/render.py made`" for name in ("new.svg", "old.svg", "page.md")
    ]
    assert {file: file.read_bytes() for file in root.iterdir()} == before


def test_files_are_written_and_deleted_and_text_outside_of_the_comments_is_kept(root, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["render.py", "made:of a part"])
    assert render.main() == 0
    assert sorted(file.name for file in root.iterdir()) == ["new.svg", "page.md"]
    text = "# By hand\n<!-- a: begin -->\n\nof a part\n\n<!-- a: end -->\nBy hand, too.\n"
    assert (root / "page.md").read_text() == text
    monkeypatch.setattr("sys.argv", ["render.py", "--check", "made:of a part"])
    assert render.main() == 0


def test_a_page_without_the_comments_is_refused(root):
    (root / "page.md").write_text("# By hand\n<!-- a: begin -->\n")
    with pytest.raises(ValueError, match=r"page.md: put the lines <!-- a: begin --> and <!-- a: end -->"):
        made()


def test_an_unknown_name_is_refused(root, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["render.py", "made", "missing", "long:part"])
    with pytest.raises(SystemExit):
        render.main()
    assert "unknown: missing, long:part; --list shows the names" in capsys.readouterr().err
