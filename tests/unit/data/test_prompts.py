"""Prompt CSVs and their images are read exactly, or refused with file and line; what the starter prompts are."""

import logging
import re
import struct
import zlib
from pathlib import Path

import pytest
from PIL import ExifTags, Image

from hyvideo.data.prompts import Prompt, read_prompts, repeated
from hyvideo.data.videos import check_images, read_image
from tests.support.training import noisy_image


@pytest.fixture
def csv_file(tmp_path):
    def write(content, name="prompts.csv"):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path / name

    return write


def test_all_columns_are_read_files_become_one_list_and_prompts_begin_again_with_other_noise(csv_file, tmp_path):
    paths = [csv_file("prompt\na\nb\n", "one.csv"), csv_file("prompt,index\nc,9\nd,\n", "two.csv")]
    assert [(prompt.text, prompt.index) for prompt in read_prompts(paths)] == [("a", 0), ("b", 1), ("c", 9), ("d", 3)]
    (tmp_path / "cat.png").touch()
    prompts = read_prompts([csv_file("seed,note,prompt,ref_image_path,index\n7,x,a cat,cat.png,12\n,,a dog,,\n")])
    assert prompts == [Prompt("a cat", 12, 7, str(tmp_path / "cat.png")), Prompt("a dog", 1, None, None)]
    prompts = read_prompts([csv_file("prompt,index,seed\na cat,7,\na dog,2,5\n")])
    assert repeated(prompts, 1) == prompts[:1]
    again = [Prompt("a cat", 8, None, None), Prompt("a dog", 9, None, None), Prompt("a cat", 10, None, None)]
    assert repeated(prompts, 5) == [*prompts, *again]


def test_an_image_in_the_home_folder_is_found_from_a_csv_anywhere(csv_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "cat.png").touch()
    path = csv_file("prompt,ref_image_path\na cat,~/cat.png\n")
    assert read_prompts([path])[0].ref_image_path == str(tmp_path / "home" / "cat.png")
    with pytest.raises(ValueError, match="lies outside of image_root"):
        read_prompts([path], tmp_path / "other")


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbfprompt,seed\r\n"a ""red"" cat, running",5\r\n',  # byte order mark and Windows line ends
        b' prompt , seed \n"a ""red"" cat, running", 5 ',
        b'\n\nprompt,seed\n\n"a ""red"" cat, running",5\n\n\n',
    ],
)
def test_quotes_commas_blanks_line_ends_and_languages_are_read_as_meant(csv_file, content):
    assert read_prompts([csv_file(content)]) == [Prompt('a "red" cat, running', 0, 5, None)]
    assert read_prompts([csv_file('prompt\n"一只猫\nمرحبا 🐈"\n')])[0].text == "一只猫\nمرحبا 🐈"


def test_a_text_files_lines_and_json_objects_are_prompts_too(csv_file, tmp_path):
    (tmp_path / "cat.png").touch()
    lines = csv_file(b'\xef\xbb\xbf\r\na "red" cat, running\r\n\r\n  a dog; barking \r\n', "list.TXT")
    objects = '{"prompt": " a bird ", "seed": 7, "note": [1]}\n\n'
    objects += '{"prompt": "b", "ref_image_path": "cat.png", "seed": null}'
    assert read_prompts([lines, csv_file(objects, "more.jsonl")]) == [
        Prompt('a "red" cat, running', 0, None, None),
        Prompt("a dog; barking", 1, None, None),
        Prompt("a bird", 2, 7, None),
        Prompt("b", 3, None, str(tmp_path / "cat.png")),
    ]
    for wrong in ('{"prompt": "a"', "[]", '{"Prompt": "a"}', "a cat", "[" * 10**5):
        with pytest.raises(ValueError, match=r"wrong.jsonl, line 2: expected a JSON object such as {\"prompt\""):
            read_prompts([csv_file("\n" + wrong, "wrong.jsonl")])
    for blank in (' {"prompt": null}', '{"prompt": "\\n"}'):
        with pytest.raises(ValueError, match="line 1: the prompt is blank"):
            read_prompts([csv_file(blank, "wrong.jsonl")])
    with pytest.raises(ValueError, match="empty.txt: no prompts"):
        read_prompts([csv_file("\n \n", "empty.txt")])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, "prompts.csv: no prompts") for content in ("", "prompt\n")),
        ("seed,Prompt\n1,a cat\n", "prompts.csv, line 1: expected a header with a column `prompt` and no column twice"),
        ("Prompt\na cat\n", "received Prompt. Names of columns are in lower case: write `prompt`."),
        ("prompt;seed\na cat;1\n", "received prompt;seed. Excel separates columns by semicolons"),
        ("a cat\n", "received a cat. Prompts alone, one in each line, are read from a .txt file."),
        ("prompt,seed,seed\na,1,2\n", "line 1: expected a header with a column `prompt`"),
        ("prompt,seed\na cat,1\n  ,2\n", "line 3: the prompt is blank"),
        ('prompt,seed\n"a\nb",1\n,2\n', "line 4: the prompt is blank"),
        ("index,prompt\n7\n", "line 2: the prompt is blank"),
        ("prompt\na red cat, running\n", "line 2: 2 values for 1 columns (prompt)"),
        ("prompt,seed\na cat,one\n", "line 2: seed must be a whole number in [0, 2^63) or empty; received 'one'"),
        *((f"prompt,seed\na cat,{n}\n", "line 2: seed must be a whole number") for n in ("-1", "٣", 2**63, "first")),
        ("prompt,index\na,3\nb,4\nc,3\n", "line 4: index 3 is already that of"),
        ("prompt,index\na,1\nb,\n", "line 3: index 1 is already that of"),
        *((f"prompt,ref_image_path\na,{n}\n", "line 2: ref_image_path: there is no file") for n in ("no.png", "\0")),
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


def test_an_empty_file_and_an_index_of_two_are_refused_and_what_cannot_be_opened_is_named(csv_file, tmp_path):
    good, empty = csv_file("prompt,index\na,5\n", "0.csv"), csv_file("prompt\n", "1.csv")
    same = csv_file("prompt,index\nb,5\n", "2.csv")
    wrong = [([good, empty], "1.csv: no prompts")]
    wrong.append(([good, same], "2.csv, line 2: index 5 is already that of .*0.csv, line 2"))
    for name, reason in (("no.csv", "No such file"), ("", "Is a directory"), ("a\0b", "null")):
        wrong.append(([tmp_path / name], f"cannot be read: .*{reason}"))
    for paths, message in wrong:
        with pytest.raises(ValueError, match=message):
            read_prompts(paths)


@pytest.mark.parametrize("name", ["../secret.png", "link.png", "folder/secret.png", "{outside}"])
def test_images_outside_of_the_root_are_refused_wherever_the_path_goes(tmp_path, name):
    outside, root = tmp_path / "secret.png", tmp_path / "root"
    root.mkdir()
    for file in (outside, root / "inside.png"):
        file.touch()
    (root / "link.png").symlink_to(outside)
    (root / "folder").symlink_to(tmp_path)
    csv = root / "prompts.csv"
    csv.write_text(f"prompt,ref_image_path\na,{name.format(outside=outside)}\n")
    assert len(read_prompts([csv])) == 1
    with pytest.raises(ValueError, match=r"line 2: ref_image_path .* lies outside of image_root '.*root'"):
        read_prompts([csv], image_root=root)
    csv.write_text("prompt,ref_image_path\na,inside.png\nb,../root/inside.png\nc,\n")
    assert len(read_prompts([csv], image_root=root)) == 3


# As SAGE-GRPO's release reads them: names as `index`, and images seen from the working directory.
def test_an_index_may_be_a_name_which_stands_for_one_number_wherever_it_stands(tmp_path):
    (tmp_path / "one.csv").write_text("prompt,index\na cat,cat_01\na dog,3\n")
    (tmp_path / "two.csv").write_text("index,prompt\ncat_02,a cat\ncat_01,a cat\n")
    one, two = (read_prompts([tmp_path / f"{name}.csv"]) for name in ("one", "two"))
    assert one[0].index == two[1].index != two[0].index
    assert one[1].index == 3 and 2**62 <= one[0].index < 2**63
    with pytest.raises(ValueError, match="is already that of"):
        read_prompts([tmp_path / "one.csv", tmp_path / "two.csv"])


def test_an_image_is_taken_from_beside_the_csv_or_told_to_be_in_the_working_directory(tmp_path, monkeypatch, caplog):
    (tmp_path / "csvs").mkdir()
    for place in (tmp_path / "both.png", tmp_path / "csvs" / "both.png", tmp_path / "here.png"):
        noisy_image(0).save(place)
    path = tmp_path / "csvs" / "prompts.csv"
    path.write_text("prompt,ref_image_path\na cat,both.png\na dog,here.png\n")
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING):
        beside, elsewhere = read_prompts([path])
    assert Path(beside.ref_image_path) == tmp_path / "csvs" / "both.png"
    assert Path(elsewhere.ref_image_path).resolve() == tmp_path / "here.png"
    (told,) = caplog.messages
    assert "line 3" in told and "here.png" in told and "working directory" in told
    with pytest.raises(ValueError, match="lies outside of image_root"):
        read_prompts([path], image_root=tmp_path / "csvs")
    monkeypatch.chdir(tmp_path / "csvs")
    with pytest.raises(ValueError, match="nor 'here.png' in the working directory"):
        read_prompts([path])


def test_the_starter_prompts_are_what_their_readme_says():
    folder = Path(__file__).parents[3] / "assets" / "prompts"
    train, valid = (read_prompts([folder / f"{name}.csv"]) for name in ("train", "valid"))
    assert (len(train), len(valid), len({prompt.text for prompt in [*train, *valid]})) == (410, 32, 442)
    lengths = sorted(len(prompt.text.split()) for prompt in train)
    assert lengths[205] <= 15 and lengths[-1] == 48
    for rows in (train, valid):
        assert sum('"' in prompt.text for prompt in rows) >= len(rows) // 16
    assert len({prompt.seed for prompt in valid}) == 32 and {prompt.seed for prompt in train} == {None}


def hidden(mode: str) -> Image.Image:
    """Return an image whose left half is green under a layer that lets nothing of it through, its right half red."""
    image = Image.new("RGBA", (8, 4), (255, 0, 0, 255))
    image.paste((0, 255, 0, 0), (0, 0, 4, 4))
    return image if mode == "RGBA" else image.convert("LA") if mode == "LA" else image.quantize(4)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("kind", ["png", "webp"])
def test_what_an_image_hides_is_white_and_no_colour_that_nobody_has_seen(tmp_path, mode, kind):
    hidden(mode).save(tmp_path / f"a.{kind}", lossless=True)
    image = read_image(str(tmp_path / f"a.{kind}"))
    right = (76, 76, 76) if mode == "LA" else (255, 0, 0)
    assert (image.mode, image.getpixel((0, 0)), image.getpixel((7, 3))) == ("RGB", (255, 255, 255), right)
    Image.new("RGBA", (2, 2), (0, 0, 0, 51)).save(tmp_path / f"pale.{kind}", lossless=True)
    assert read_image(str(tmp_path / f"pale.{kind}")).getpixel((0, 0)) == (204, 204, 204)
    Image.new("RGB", (2, 2), (0, 255, 0)).save(tmp_path / "named.png", transparency=(0, 255, 0))
    assert read_image(str(tmp_path / "named.png")).getpixel((0, 0)) == (255, 255, 255)


def mistyped(path: Path, place: int, kind: int) -> str:
    """Write a turned photo whose EXIF has one byte changed."""
    exif = Image.Exif()
    exif[ExifTags.Base.BitsPerSample], exif[ExifTags.Base.Make] = (8, 8, 8), "Camera"
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.XResolution] = 6, 72.0
    noisy_image(0).save(path, exif=exif)
    content = bytearray(path.read_bytes())
    content[content.index(b"Exif\0\0") + 6 + place] = kind
    path.write_bytes(content)
    return str(path)


def test_images_are_read_as_rgb_and_upright_if_orientation_is_a_number_and_a_wrong_exif_tag_is_named(tmp_path):
    for kind in (1, 2):
        assert read_image(mistyped(tmp_path / "a.jpg", 37, kind)).size == (48, 40)
    for place, kind in ((11, 6), (23, 1), (47, 13), (49, 1)):
        path = mistyped(tmp_path / "a.jpg", place, kind)
        with pytest.raises(ValueError, match=f"image '{path}' cannot be read"):
            read_image(path)
    noisy_image(0).convert("L").save(tmp_path / "grey.png")
    image = read_image(str(tmp_path / "grey.png"))
    assert (image.mode, image.size) == ("RGB", (48, 40))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # held upright: rows are columns
    noisy_image(0).save(tmp_path / "upright.jpg", exif=exif)
    assert read_image(str(tmp_path / "upright.jpg")).size == (40, 48)


CHUNKS = [(b"IHDR", struct.pack(">IIBBBBB", 40_000, 30_000, 8, 2, 0, 0, 0)), (b"IDAT", b""), (b"IEND", b"")]
BOMB = b"\x89PNG\r\n\x1a\n" + b"".join(
    struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in CHUNKS
)


@pytest.mark.parametrize("content", ["half", b"no image", b"", None, BOMB], ids="cut text empty absent bomb".split())
def test_a_damaged_image_or_one_that_would_fill_the_memory_is_named(tmp_path, content):
    path = tmp_path / "image.png"
    noisy_image(0).save(path)
    path.write_bytes(path.read_bytes()[:2000] if content == "half" else content or b"")
    if content is None:
        path.unlink()
    for read in (read_image, lambda path: check_images([Prompt("a cat", 0, None, path)])):
        with pytest.raises(ValueError, match=f"image '{path}' cannot be read"):
            read(str(path))


@pytest.mark.parametrize("kind", ["gif", "bmp", "tiff", "ppm", "eps"])
def test_other_formats_16_bits_and_more_pixels_than_pillow_allows_are_refused(tmp_path, monkeypatch, kind):
    noisy_image(0).save(tmp_path / f"a.{kind}")
    with pytest.raises(ValueError, match="Expected a whole PNG, JPEG or WebP file"):
        read_image(str(tmp_path / f"a.{kind}"))
    noisy_image(0).save(tmp_path / "a.png")
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="a.png' cannot be read: Image size"):
        patch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 48 * 40 // 2 - 1)
        read_image(str(tmp_path / "a.png"))
    Image.new("I;16", (8, 8), 40000).save(tmp_path / "deep.png")
    with pytest.raises(ValueError, match="deep.png' cannot be read: it has 16 bits per value"):
        read_image(str(tmp_path / "deep.png"))
