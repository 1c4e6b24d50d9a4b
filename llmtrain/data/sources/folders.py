"""Finds the data files of a split in a local folder, by the layout and the names that `datasets.load_dataset` reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import BaseModel, Field

from llmtrain.data.sources.formats import kind_of
from llmtrain.errors import DataError, Problem, abbreviate, did_you_mean
from llmtrain.system.untrusted import UNREADABLE, read_json, read_text

WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split → words that name it in the name of a file or a folder."""
_SEPARATOR = "[-._ 0-9]"
_NAMES = {
    split: re.compile(f"(.*{_SEPARATOR})?({'|'.join(words)})({_SEPARATOR}.*)?", re.DOTALL)
    for split, words in WORDS.items()
}
_SHARD = re.compile(r"(.+)-[0-9]{5}-of-[0-9]{5}.*\..*", re.DOTALL)
NOT_DATA = frozenset(
    ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "dummy_data.zip", "state.json")
)
"""Files that describe data sets."""
DICT, STATE = "dataset_dict.json", "state.json"
MAX_SHOWN = 3
"""Number of files that an error message names."""


class _Dict(BaseModel):
    """The file that `DatasetDict.save_to_disk` writes."""

    expected: ClassVar[str] = '{"splits": [NAME, ...]}'
    splits: list[str]


class _File(BaseModel):
    filename: str


class _State(BaseModel):
    """The file that `Dataset.save_to_disk` writes."""

    expected: ClassVar[str] = '{"_data_files": [{"filename": NAME}, ...]}'
    files: list[_File] = Field(alias="_data_files")


Description = TypeVar("Description", _Dict, _State)


def files_of_split(folder: Path, split: str, field: str) -> list[Path]:
    """Returns the data files below a folder that belong to a split, without hidden files and folders.

    A folder that `DatasetDict.save_to_disk` wrote has a folder for each split. Otherwise a split is named by the shards
    in `data/` (`data/train-00000-of-00002.parquet`), else by folders, else by files; if nothing names one, all files
    are the split `train`. Empty if the folder has no data files.

    Raises DataError for an unknown split, if some files belong to no split, or to several, and for several subsets.
    """
    if (folder / DICT).exists():
        _require_split(folder, split, _read(folder / DICT, _Dict).splits, field)
        return _data_files(folder / split)
    _require_one_subset(folder, field)
    files = _data_files(folder)
    splits_of = _splits_of(folder, files)
    if not any(splits_of.values()):
        splits_of = dict.fromkeys(files, ("train",))
    if files:
        _require_split(folder, split, [name for names in splits_of.values() for name in names], field)
        _require_one_split(folder, splits_of, field)
    return [path for path, names in splits_of.items() if names == (split,)]


def _require_one_subset(folder: Path, field: str) -> None:
    """Raises DataError for a copy of a dataset of the hub whose README.md declares several subsets."""
    from yaml import SafeLoader

    from llmtrain_lint.yaml_text import YamlError, parse_yaml

    try:
        head = read_text(folder / "README.md").partition("---\n")[2].partition("\n---")[0]
        names = [str(subset["config_name"]) for subset in parse_yaml(head, SafeLoader, dict)[0]["configs"]]
    except (*UNREADABLE, YamlError, TypeError, KeyError):  # it declares none
        return
    if len(names) > 1:
        message = f"'{folder}' has several subsets, as its README.md says: {', '.join(names)}"
        fix = "name the files of one of them with a glob: FOLDER/SUBSET/train-*.parquet"
        raise DataError(Problem("data.subset", f"{field}.name", message, fix))


def _splits_of(folder: Path, files: Sequence[Path]) -> dict[Path, tuple[str, ...]]:
    """Returns the splits that the names of each file, or of its folders, name."""
    relative_paths = {path: path.relative_to(folder) for path in files}
    shards = {
        path: _SHARD.fullmatch(relative.name)
        for path, relative in relative_paths.items()
        if relative.parent == Path("data")
    }
    if any(shards.values()):
        return {path: (match[1],) if (match := shards.get(path)) else () for path in files}
    by_folder = {path: _named(relative.parts[:-1]) for path, relative in relative_paths.items()}
    return by_folder if any(by_folder.values()) else {path: _named((path.name,)) for path in files}


def _named(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(split for split, pattern in _NAMES.items() if any(map(pattern.fullmatch, names)))


def _data_files(folder: Path) -> list[Path]:
    """Returns the data files below a folder, without the cache files in a folder that `save_to_disk` wrote."""
    files = []
    saved: dict[Path, set[str] | None] = {}
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.name in NOT_DATA or not kind_of(path) or any(part.startswith((".", "__")) for part in parts):
            continue
        if path.suffix == ".arrow" and path.parent not in saved:
            saved[path.parent] = _saved(path.parent)
        listed = saved.get(path.parent) if path.suffix == ".arrow" else None
        if path.is_file() and (listed is None or path.name in listed):
            files.append(path)
    return files


def _saved(folder: Path) -> set[str] | None:
    """Returns the names of the files of a data set in its folder; None if `save_to_disk` did not write the folder."""
    if not (folder / STATE).exists():
        return None
    names = {file.filename for file in _read(folder / STATE, _State).files}
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        fix = "copy the whole folder, or save the data set again"
        raise DataError(Problem("data.read", str(folder / missing[0]), f"does not exist, but {STATE} names it", fix))
    return names


def _read(path: Path, kind: type[Description]) -> Description:
    try:
        return read_json(path, kind)
    except UNREADABLE:
        message = f"does not contain {kind.expected}"
        fix = "save the data set again (save_to_disk), or name its files with a glob"
        raise DataError(Problem("data.format", str(path), message, fix)) from None


def _require_split(folder: Path, split: str, names: Iterable[str], field: str) -> None:
    splits = list(dict.fromkeys(names))
    if split not in splits:
        message = f"'{folder}' has no split '{split}'{did_you_mean(split, splits)} (splits: {', '.join(splits)})"
        raise DataError(Problem("data.split", f"{field}.split", message, "name one of them, or name files with a glob"))


def _require_one_split(folder: Path, splits_of: Mapping[Path, Sequence[str]], field: str) -> None:
    """Raises DataError for files that would be left out, or belong to two splits."""
    named = min(splits_of, key=lambda path: abs(len(splits_of[path]) - 1))
    for count, what in ((0, "no split"), (2, "several splits")):
        if paths := [path for path, splits in splits_of.items() if min(len(splits), 2) == count]:
            shown = abbreviate([str(path.relative_to(folder)) for path in paths], MAX_SHOWN)
            message = (
                f"'{folder}' has files whose names name {what}, while {named.relative_to(folder)} "
                f"names '{splits_of[named][0]}': {shown}"
            )
            fix = "name the files to read with a glob: FOLDER/**/*.jsonl"
            raise DataError(Problem("data.split", f"{field}.name", message, fix))
