"""Records of others' files, whole, by their line or entry, and refused in one line where they are damaged."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from posttrain.data.records import read_jsonl
from posttrain.errors import UserError


def read(path: Path, content: bytes, lists: bool = False) -> list[tuple[str, dict[str, object]]]:
    path.write_bytes(content)
    return [(where.removeprefix(str(path)), record) for where, record in read_jsonl(path, lists)]


def test_lines_are_numbered_and_blank_ones_passed_over(tmp_path: Path) -> None:
    text = '\ufeff{"a": 1}\r\n\n{"a": "é\u2028"}'.encode()
    expected = [(" line 1", {"a": 1}), (" line 3", {"a": "é\u2028"})]
    assert read(tmp_path / "x.jsonl", text) == expected
    assert read(tmp_path / "x.jsonl.gz", gzip.compress(text)) == expected


def test_a_list_is_read_where_it_is_asked_for(tmp_path: Path) -> None:
    text = b'[{"a": 1},\n {"a": 2}]'
    expected = [(" entry 1", {"a": 1}), (" entry 2", {"a": 2})]
    assert read(tmp_path / "x.json", text, lists=True) == expected
    assert read(tmp_path / "x.json.gz", gzip.compress(text), lists=True) == expected
    assert read(tmp_path / "y.json", b'{"a": 1}\n{"a": 2}') == [(" line 1", {"a": 1}), (" line 2", {"a": 2})]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.jsonl", b"", "is empty"),
        ("x.json", b"[]", "is empty"),
        ("x.json", b"{}", "expected a list of JSON objects"),
        ("x.json", b'[{"a": 1}, "\\ud83d"]', "entry 2: expected a JSON object, not str"),
        ("x.json", b'[{"a": 1}, {"a": "\\ud83d"}]', "entry 2: half a character"),
        ("x.jsonl", b'{"a": 1}\n{', "line 2: not JSON"),
        ("x.jsonl", b'{"a": 1}\n{"a": "\xff"}', "line 2: not UTF-8"),
        ("x.csv", "prompt\nGrüße\n".encode("cp1252"), "line 2: not UTF-8 text; save it as UTF-8"),
        ("x.xlsx", b"PK", "cannot read .*x.xlsx, a spreadsheet; save it as CSV, in UTF-8"),
        ("x.jsonl", b'{"a": null}', "is empty"),
        ("x.jsonl.gz", b"{}", "cannot read .*gz"),
        ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-9], "cannot read .*gz"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        read(tmp_path / name, content, lists=True)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read .*nowhere.jsonl: No such file"):
        list(read_jsonl(tmp_path / "nowhere.jsonl"))


def test_a_file_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.data.records.MAX_UNPACKED", 2**20)
    bomb = gzip.compress(b'{"a": "' + b" " * 2**21 + b'"}')
    assert len(bomb) < 4096
    with pytest.raises(UserError, match=r"is larger than 0\.000976562 GiB unpacked"):
        read(tmp_path / "x.jsonl.gz", bomb)


@pytest.mark.parametrize(
    ("row", "key"), [('{"prompt": "a", "b": 1, "prompt": "c"}', "prompt"), ('{"m": [{"role": "user", "role": 1}]}', "role")]
)
def test_a_key_that_is_there_twice_is_refused(row: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"x.jsonl line 2: the key '{key}' is there twice; remove or rename one"):
        read(tmp_path / "x.jsonl", b'{"prompt": "a"}\n' + row.encode() + b"\n")
    with pytest.raises(UserError, match=f"x.json: the key '{key}' is there twice"):
        read(tmp_path / "x.json", f"[{row}]".encode())


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_json_does_not_have_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(f'{{"prompt": "a", "answer": 1}}\n{{"prompt": "b", "answer": {name}}}\n')
    with pytest.raises(UserError, match=f"x.jsonl line 2: {name} is not JSON; write null for a missing value"):
        list(read_jsonl(file))


def test_tables_are_read_with_the_line_of_each_row(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text('prompt,answer\n"a\nb",1\nc,"x,y"\n')
    assert list(read_jsonl(table)) == [
        (f"{table} line 3", {"prompt": "a\nb", "answer": "1"}), (f"{table} line 4", {"prompt": "c", "answer": "x,y"})
    ]  # fmt: skip
    table.write_text(f"prompt,answer\n{'a' * 200_000},1\n")
    assert [len(row["prompt"]) for _, row in read_jsonl(table)] == [200_000]
    table.write_text("prompt,answer\na\n")
    with pytest.raises(UserError, match=r"a.csv line 2: expected 2 cells, as in the first line"):
        list(read_jsonl(table))
    table.write_text("prompt,answer,prompt\na,1,b\n")
    with pytest.raises(UserError, match=r"a.csv line 1: the column 'prompt' is there twice; rename one"):
        list(read_jsonl(table))
    table.write_text("prompt\tanswer\na, b;c\t1\n")
    assert list(read_jsonl(table)) == [(f"{table} line 2", {"prompt": "a, b;c", "answer": "1"})]
    table.write_text("prompt;answer\na, b;1\n")
    assert list(read_jsonl(table)) == [(f"{table} line 2", {"prompt": "a, b", "answer": "1"})]
    table.write_text('prompt;answer, short;"x;,,"\na;1,5;b\n')
    assert [row for _, row in read_jsonl(table)] == [{"prompt": "a", "answer, short": "1,5", "x;,,": "b"}]
    table.write_text('"a;b;c",d\n1,2\n')
    assert [row for _, row in read_jsonl(table)] == [{"a;b;c": "1", "d": "2"}]
    table.write_text("prompt,answer\na,1\n,\n,,\n\nb,2\n,\n")
    with pytest.raises(UserError, match=r"a.csv line 4: expected 2 cells, as in the first line"):
        list(read_jsonl(table))
    table.write_text("prompt,answer\na,1\n,\n\nb,2\n,\n")
    assert [where.rpartition(" ")[2] for where, _ in read_jsonl(table)] == ["2", "5"]
    table.write_text("prompt,answer,,\na,1,,\n")
    assert [row["answer"] for _, row in read_jsonl(table)] == ["1"]
    tabs = tmp_path / "a.tsv"
    tabs.write_text("prompt\tanswer\na\t1\n")
    assert [row for _, row in read_jsonl(tabs)] == [{"prompt": "a", "answer": "1"}]
    listed = tmp_path / "a.json"
    listed.write_text('[{"a": 1},\n {"a": 2}]')
    assert [row for _, row in read_jsonl(listed)] == [{"a": 1}, {"a": 2}]
    broken = tmp_path / "a.parquet"
    broken.write_text("no")
    with pytest.raises(UserError, match=r"cannot read .*a\.parquet: |a\.parquet: to read parquet, pip install"):
        list(read_jsonl(broken))
