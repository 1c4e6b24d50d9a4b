"""Configurations after real threads and documents: every malformed file has an error, and no valid file has one."""

import copy
import json
import random
import time
from pathlib import Path

import pytest

from llmtrain_lint import RULES
from llmtrain_lint.rules import ACCELERATE
from llmtrain_lint.schema import schema
from tests.lint.corpus import cases, lint_file, lint_text

ROOT = Path(__file__).parents[2]
MALFORMED, VALID = cases("malformed"), cases("valid")


def test_corpus_is_large_and_has_equal_parts():
    assert len(MALFORMED) == len(VALID)
    assert len(VALID) >= 150
    assert len({case.path.name for case in (*MALFORMED, *VALID)}) == 2 * len(VALID)  # which have a verdict each


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case.path.stem)
def test_malformed_files_are_reported_with_their_field(case):
    errors = case.found("error")
    assert case.wrong
    assert set(case.wrong) <= {f"{one.field} {one.rule}" for one in errors}
    assert all(one.line > 0 for one in errors if one.field.rpartition(".")[2] in case.text)


@pytest.mark.parametrize("case", VALID, ids=lambda case: case.path.stem)
def test_valid_files_have_no_errors(case):
    assert case.found("error") == []
    assert case.lines <= 3


@pytest.mark.parametrize("case", [*MALFORMED, *VALID], ids=lambda case: case.path.stem)
def test_readers_are_guessed(case):
    assert case.result.reader in (case.reader, None)


def test_every_rule_has_a_case():
    found = {one.rule for case in (*MALFORMED, *VALID) for one in case.result.findings}
    assert {rule.id for rule in RULES} - {rule.id for rule in ACCELERATE} - found == set()  # test_lint_accelerate.py


@pytest.mark.slow
def test_verdicts_are_those_of_the_readers():
    """Whatever a reader or DeepSpeed refuses is an error, and they refuse nothing that is valid."""
    from tools import lint_pages, render

    assert [*render.messages(["lint_corpus"])] == []
    refused = [case for case in MALFORMED if lint_pages.verdict(case) != "accepted"]
    assert [case.path.stem for case in refused if not case.refused and case.result.readable] == []
    assert [case.path.stem for case in VALID if lint_pages.verdict(case) != "accepted"] == []


PIECES = [
    '"',
    "'''",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\\",
    "#",
    "//",
    "/*",
    "*/",
    "\n",
    "null",
    "true",
    "auto",
    "-1",
    "1e999",
    "NaN",
]
PIECES += ["é", "\x00", "\ud800", " ", "9" * 30, '"auto"', "{}", "[]", '"stage"', "0"]


def _can_be_printed(finding) -> bool:
    text = f"{finding.field}: {finding.message} {finding.fix}"
    return text.isprintable() and len(text) < 1000 and bool(text.encode("utf-8"))


def test_arbitrary_keys_can_be_printed():
    (finding, *_) = lint_text('{"\\ud800\\u001b[31m": 1, "train_batch_size": 8, "gradient_clipping": 1}')
    assert finding.rule == "lint.unknown_key"
    assert _can_be_printed(finding)
    (finding, *_) = lint_text('{"gradient_clipping": 1, "train_batch_size": 8, "' + "k" * 5000 + '": 1}')
    assert _can_be_printed(finding)


def test_mutated_files_never_crash():
    draw = random.Random(1)
    texts = [case.path.read_text(encoding="utf-8") for case in (*MALFORMED, *VALID)]
    for _ in range(1500):
        damaged = draw.choice(texts)
        for _ in range(draw.randint(1, 5)):
            place = draw.randrange(len(damaged) + 1)
            damaged = damaged[:place] + draw.choice(PIECES) + damaged[place + draw.randint(0, 6) :]
        assert all(_can_be_printed(one) for one in lint_text(damaged, draw.choice([None, 1, 6])))


def test_mutated_values_never_crash():
    """Well-formed files with any value under any known key, at any level."""
    draw = random.Random(2)
    values = [
        None,
        True,
        False,
        0,
        1,
        3,
        -1,
        10**400,
        1e400,
        float("nan"),
        0.5,
        "",
        "auto",
        "cpu",
        "Adam",
        [],
        [[]],
        {},
    ]
    values += [
        {"stage": 3},
        {"enabled": True},
        {"type": "Adam", "params": {"lr": {}}},
        [{"a": 1}],
        "\ud800",
        {"": {"": 0}},
    ]
    paths = [path for homes in schema().paths_by_name.values() for path in homes] + [
        ("",),
        ("optimizer", "params", "betas"),
    ]
    for _ in range(1500):
        made: dict = {"train_batch_size": 8}
        for path in draw.sample(paths, draw.randint(1, 8)):
            block = made
            for key in path[:-1]:
                inner = block.setdefault(key, {})
                block[key] = block = inner if isinstance(inner, dict) else {}
            block[path[-1]] = copy.deepcopy(draw.choice(values))
        assert all(_can_be_printed(one) for one in lint_text(json.dumps(made), draw.choice([None, 1, 6])))


def test_random_bytes_never_crash(tmp_path):
    draw, file = random.Random(3), tmp_path / "random.json"
    for _ in range(300):
        file.write_bytes(draw.randbytes(draw.randint(0, 400)))
        assert lint_file(file, 4)


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        " ",
        "[",
        "{",
        "/*",
        "#",
        "//",
        "'''",
        "'",
        '"',
        "\\",
        '"\\',
        "a:",
        "a:{",
        '{"a":',
        "\n",
        ":",
        "1,",
        "'a'",
        "a ",
    ],
)
def test_time_grows_with_the_length(piece):
    """Half a megabyte of anything is answered at once, which a scanner that goes back would not do."""
    started = time.process_time()
    for head in ("", "{", "{a: ", '{"a": 1} '):
        lint_text(head + piece * ((2**17 - 8) // len(piece)), 4)
    assert time.process_time() - started < 20


def test_endless_files_are_reported():
    if not Path("/dev/zero").exists():
        pytest.skip("needs /dev/zero")
    (finding,) = lint_file(Path("/dev/zero"))
    assert finding.rule == "lint.unreadable"
