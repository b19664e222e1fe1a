"""Prompt CSVs: read exactly, refused with file and line; the starter prompts are what their README says."""

import re
from pathlib import Path

import pytest

from hyvideo.data.prompts import Prompt, read_prompts, repeated


@pytest.fixture
def csv_file(tmp_path):
    """Write a CSV file from text or bytes and give its path."""

    def write(content, name="prompts.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_prompts_begin_again_with_noise_of_their_own(csv_file):
    prompts = read_prompts([csv_file("prompt,index,seed\na cat,7,\na dog,2,5\n")])
    assert repeated(prompts, 1) == prompts[:1]
    again = [Prompt("a cat", 8, None, None), Prompt("a dog", 9, None, None), Prompt("a cat", 10, None, None)]
    assert repeated(prompts, 5) == [*prompts, *again]


def test_all_columns_are_read_and_others_left_alone(csv_file, tmp_path):
    (tmp_path / "cat.png").touch()
    prompts = read_prompts([csv_file("seed,note,prompt,ref_image_path,index\n7,x,a cat,cat.png,12\n,,a dog,,\n")])
    assert prompts == [Prompt("a cat", 12, 7, str(tmp_path / "cat.png")), Prompt("a dog", 1, None, None)]


def test_an_image_in_the_home_folder_is_found_from_a_csv_anywhere(csv_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "cat.png").touch()
    path = csv_file("prompt,ref_image_path\na cat,~/cat.png\n")
    assert read_prompts([path])[0].ref_image_path == str(tmp_path / "home" / "cat.png")
    with pytest.raises(ValueError, match="lies outside of image_root"):
        read_prompts([path], tmp_path / "other")


def test_several_files_become_one_list_in_order(csv_file):
    paths = [csv_file("prompt\na\nb\n", "one.csv"), csv_file("prompt,index\nc,9\nd,\n", "two.csv")]
    assert [(prompt.text, prompt.index) for prompt in read_prompts(paths)] == [("a", 0), ("b", 1), ("c", 9), ("d", 3)]


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbfprompt,seed\r\n"a ""red"" cat, running",5\r\n',  # byte order mark and Windows line ends
        b' prompt , seed \n"a ""red"" cat, running" , 5 ',
        b'\n\nprompt,seed\n\n"a ""red"" cat, running",5\n\n\n',
    ],
)
def test_quotes_commas_blanks_and_line_ends_are_read_as_meant(csv_file, content):
    if content.startswith(b" "):
        content = content.replace(b'" ,', b'",')
    assert read_prompts([csv_file(content)]) == [Prompt('a "red" cat, running', 0, 5, None)]


def test_a_quoted_prompt_may_span_lines_and_languages(csv_file):
    assert read_prompts([csv_file('prompt\n"一只猫\nمرحبا 🐈"\n')])[0].text == "一只猫\nمرحبا 🐈"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "prompts.csv: no prompts"),
        ("prompt\n", "prompts.csv: no prompts"),
        ("seed,Prompt\n1,a cat\n", "prompts.csv, line 1: expected a header with a column `prompt`, in lower case"),
        ("prompt;seed\na cat;1\n", "set apart by commas, and no column twice; received prompt;seed"),
        ("prompt,seed,seed\na,1,2\n", "line 1: expected a header with a column `prompt`"),
        ("prompt,seed\na cat,1\n  ,2\n", "line 3: the prompt is blank"),
        ('prompt,seed\n"a\nb",1\n,2\n', "line 4: the prompt is blank"),
        ("index,prompt\n7\n", "line 2: the prompt is blank"),
        ("prompt\na red cat, running\n", "line 2: 2 values for 1 columns (prompt)"),
        ("prompt,seed\na cat,one\n", "line 2: seed must be a whole number in [0, 2^63) or empty; received 'one'"),
        ("prompt,seed\na cat,-1\n", "line 2: seed must be a whole number"),
        ("prompt,seed\na cat,٣\n", "line 2: seed must be a whole number"),
        ("prompt,seed\na cat,9223372036854775808\n", "line 2: seed must be a whole number"),
        ("prompt,seed\na cat,first\n", "line 2: seed must be a whole number"),
        ("prompt,index\na,3\nb,4\nc,3\n", "line 4: index 3 is already that of"),
        ("prompt,index\na,1\nb,\n", "line 3: index 1 is already that of"),
        ("prompt,ref_image_path\na,no.png\n", "line 2: ref_image_path: there is no file"),
        ("prompt,ref_image_path\na,\0\n", "line 2: ref_image_path: there is no file"),
        ('prompt\na cat\n"a dog\na bird\n', "line 3: not proper CSV"),
        ('prompt\n"a" cat\n', "line 2: not proper CSV"),
        (b"prompt\na cat\ncaf\xe9\n", "line 3: byte 0xe9 is not UTF-8"),
        ("prompt\na cat\n".encode("utf-16"), "line 1: byte 0xff is not UTF-8"),
        ("prompt\n" + "a" * 200_000, "line 2: not proper CSV: field larger than field limit"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(csv_file, content, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_prompts([csv_file(content)])


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([], "at least one file"),
        (["prompt\na\n", "prompt\n"], "1.csv: no prompts"),
        (["prompt,index\na,5\n", "prompt,index\nb,5\n"], "1.csv, line 2: index 5 is already that of .*0.csv, line 2"),
    ],
)
def test_no_files_an_empty_one_and_an_index_of_two_are_refused(csv_file, contents, message):
    with pytest.raises(ValueError, match=message):
        read_prompts([csv_file(content, f"{number}.csv") for number, content in enumerate(contents)])


@pytest.mark.parametrize(("name", "reason"), [("no.csv", "No such file"), ("", "Is a directory"), ("a\0b", "null")])
def test_what_cannot_be_opened_is_named_with_the_reason(tmp_path, name, reason):
    with pytest.raises(ValueError, match=f"cannot be read: .*{reason}"):
        read_prompts([tmp_path / name])


@pytest.mark.parametrize("name", ["../secret.png", "link.png", "folder/a.png", "{outside}"])
def test_images_outside_of_the_root_are_refused_wherever_the_path_goes(tmp_path, name):
    outside, root = tmp_path / "secret.png", tmp_path / "root"
    (tmp_path / "elsewhere").mkdir()
    root.mkdir()
    for file in (outside, tmp_path / "elsewhere" / "a.png", root / "inside.png"):
        file.touch()
    (root / "link.png").symlink_to(outside)
    (root / "folder").symlink_to(tmp_path / "elsewhere")
    csv = root / "prompts.csv"
    csv.write_text(f"prompt,ref_image_path\na,{name.format(outside=outside)}\n")
    assert len(read_prompts([csv])) == 1
    with pytest.raises(ValueError, match=r"line 2: ref_image_path .* lies outside of image_root '.*root'"):
        read_prompts([csv], image_root=root)
    csv.write_text("prompt,ref_image_path\na,inside.png\nb,../root/inside.png\nc,\n")
    assert len(read_prompts([csv], image_root=root)) == 3


def test_the_starter_prompts_are_what_their_readme_says():
    folder = Path(__file__).parents[3] / "assets" / "prompts"
    train, valid = (read_prompts([folder / f"{name}.csv"]) for name in ("train", "valid"))
    assert (len(train), len(valid)) == (410, 32)
    assert len({prompt.text for prompt in [*train, *valid]}) == 442
    lengths = sorted(len(prompt.text.split()) for prompt in train)
    assert lengths[205] <= 15 and lengths[-1] == 48
    for rows in (train, valid):
        assert sum('"' in prompt.text for prompt in rows) >= len(rows) // 16
    assert len({prompt.seed for prompt in valid}) == 32
    assert all(prompt.seed is None for prompt in train)
