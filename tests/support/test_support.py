"""Files go where the path points: links are followed, pipes and devices are written to."""

import os
import stat
from pathlib import Path

import pytest

from klgrad.errors import OutputError
from klgrad.support import partials_of, write_whole


def names_in(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_new_file_and_its_folders_are_made(tmp_path):
    write_whole(tmp_path / "new" / "a" / "b.txt", "π")
    assert (tmp_path / "new" / "a" / "b.txt").read_bytes() == "π".encode()
    assert names_in(tmp_path / "new" / "a") == ["b.txt"]


@pytest.mark.parametrize("old", ["old", None])
def test_a_link_stays_and_its_target_is_replaced_or_made(tmp_path, old):
    target, middle, link = tmp_path / "deep" / "target", tmp_path / "middle", tmp_path / "link"
    if old:
        target.parent.mkdir()
        target.write_text(old)
    middle.symlink_to(Path("deep") / "target")
    link.symlink_to("middle")
    write_whole(link, "new")
    assert link.is_symlink()
    assert middle.is_symlink()
    assert target.read_text() == "new"
    assert names_in(tmp_path / "deep") == ["target"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_permissions_are_kept(tmp_path, mode):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(mode)
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "file", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_a_file_that_must_not_be_written_is_left(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o444)
    with pytest.raises(OutputError, match="Permission denied"):
        write_whole(path, "new")
    assert path.read_text() == "old"


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(OutputError, match="Is a directory"):
        write_whole(tmp_path, "x")
    assert tmp_path.is_dir()
    assert not tmp_path.with_name(f".{tmp_path.name}.partial").exists()


def test_interrupted_it_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", "x")
    assert names_in(tmp_path) == []


def test_a_name_that_is_not_utf_8_does_not_stop_it(tmp_path):
    write_whole(tmp_path / "file", '{"file": "a\udcff"}')
    assert (tmp_path / "file").read_text(encoding="utf-8") == '{"file": "a\\udcff"}'


def test_another_process_keeps_its_half_written_file(tmp_path):
    other = tmp_path / ".out.json.1.0123.partial"
    other.write_text("half")
    write_whole(tmp_path / "out.json", "whole")
    assert (tmp_path / "out.json").read_text() == "whole"
    assert other.read_text() == "half"
    assert partials_of(tmp_path / "out.json", [1, 2]) == [other]
    assert partials_of(tmp_path / "out.json", [2]) == []


def test_a_link_in_place_of_the_temporary_file_is_not_followed(tmp_path, monkeypatch):
    """In a folder that others may write to, a link at a name that can be foreseen would lead to a file of the user."""
    victim, foreseen = tmp_path / "victim", tmp_path / f".out.json.{os.getpid()}.00.partial"
    victim.write_text("data")
    foreseen.symlink_to("victim")
    monkeypatch.setattr("secrets.token_hex", lambda _: "00")
    with pytest.raises(OutputError, match="File exists"):
        write_whole(tmp_path / "out.json", "new")
    assert victim.read_text() == "data"
    assert not (tmp_path / "out.json").exists()
