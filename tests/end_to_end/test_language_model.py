"""Prompts and checks that a language model behind a real chat server writes: resumed, validated, kept apart."""

import json
from pathlib import Path

import pytest

from generate import main as generate
from hyvideo.data.checks import Check, read_checks
from hyvideo.data.prompts import prompt_rows, read_prompts
from scripts.make_checks import main as make_checks
from scripts.rewrite_prompts import main as rewrite
from tests.support.reward_server import serving
from tests.support.training import noisy_image
from tests.support.vision_language import chat_app, write_vision_language_model

LONG = "A grey cat with a white chin walks along a low wall, stops, and looks into the camera."
SIGN = 'A shop window at dusk; a lamp goes on and the word "OPEN" lights up red behind the glass.'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_language_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def test_prompts_are_rewritten_once_and_keep_their_originals_and_their_words_on_screen(model, tmp_path, capsys):
    prompts, output = tmp_path / "prompts.csv", tmp_path / "long.csv"
    prompts.write_text('prompt,seed\n"a cat, grey",3\n"a shop window says ""OPEN""",\n')
    lost = "A shop window at dusk without a word."
    thinking = "<think>Okay, the user wants a cat"
    app = chat_app(model, replies=[f"<think>a wall?</think>{LONG}\n", lost, thinking, "word " * 400, SIGN])
    with serving(app) as url:
        command = ["--prompts_csv", str(prompts), "--output", str(output), "--server", f"{url}/v1", "--model", "tiny"]
        command += ["--in_flight", "1"]
        assert rewrite(command) == 1
        assert "did not rewrite it in 3 attempts: it wrote 400 words" in capsys.readouterr().err
        assert [prompt.text for prompt in read_prompts([output])] == [LONG, 'a shop window says "OPEN"']
        assert rewrite(command) == 0
        assert rewrite(command) == 0 and len(app.state.asked) == 5
    rows = [row for _, row in prompt_rows(output)]
    assert rows[0] == {"prompt": LONG, "seed": "3", "original_prompt": "a cat, grey"}
    assert rows[1] == {"prompt": SIGN, "seed": "", "original_prompt": 'a shop window says "OPEN"'}
    output.unlink()
    with serving(chat_app(model, replies=[413, SIGN, 403])) as url:  # refuses one prompt, then all that are left
        command[command.index("--server") + 1] = f"{url}/v1"
        assert rewrite(command) == 1 and [prompt.text for prompt in read_prompts([output])] == ["a cat, grey", SIGN]
        assert "a cat, grey': server http" in (told := capsys.readouterr().err) and "refused with status 413" in told
        assert rewrite(command) == 2 and "refused with status 403" in capsys.readouterr().err
    mine = tmp_path / "mine.csv"
    mine.write_text("prompt\nmy own prompt\n")
    assert rewrite([*command[:3], str(mine), *command[4:]]) == 2 and mine.read_text() == "prompt\nmy own prompt\n"
    assert "has 1 rows that are not of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        rewrite(["--prompts_csv", str(prompts)])
    assert "needed: --output, --server, --model" in capsys.readouterr().err


def test_generate_samples_a_rewritten_prompt_and_notes_the_original(model, tiny_root, tmp_path, monkeypatch, capsys):
    refused = "I am sorry, but I cannot help with that."
    thoughts = f'The user wants a cat.\n</think>\n"{LONG}"'
    drawn = f'{LONG} A sign says "no cats" in red letters on the wall.'
    replies = [refused, drawn, thoughts, SIGN]
    app = chat_app(model, replies=replies)
    command = f"--model_path {tiny_root} --num_inference_steps 1 --fixed_size 32x48 --video_length 1 --guidance_scale 1"
    command = [*command.split(), "--output_path", str(tmp_path / "cat.mp4"), "--seed", "1", "2", "--prompt", "a cat"]
    with serving(app) as url:
        command += ["--rewrite_prompt", f"{url}/v1", "tiny"]
        assert generate(command) == 0 and f"rewritten: {LONG}" in capsys.readouterr().out
        note = json.loads((tmp_path / "cat_seed2.json").read_text())
        assert (note["prompt"], note["original_prompt"]) == (LONG, "a cat")
        (tmp_path / "cat_seed1.mp4").unlink()
        assert "rewrite_prompt" in note and "127.0.0.1" not in (tmp_path / "cat_seed2.json").read_text()
        command[command.index(f"{url}/v1")] = f"{url.replace('127.0.0.1', 'localhost')}/v1"
        assert generate(command) == 0 and len(app.state.asked) == 3  # the answer is taken from the note
        assert "cat_seed2.mp4 is finished already" in capsys.readouterr().err
        assert generate([*command, "--prompt", 'a shop window says "OPEN"']) == 0
        assert json.loads((tmp_path / "cat_seed2.json").read_text())["prompt"] == SIGN
    assert generate([*command, "--prompt", "a dog"]) == 2
    assert "--rewrite_prompt: server http://localhost" in capsys.readouterr().err
    monkeypatch.setenv("OPENAI_API_KEY", "se\ncret")
    assert generate([*command, "--prompt", "a dog"]) == 2 and "cret" not in (told := capsys.readouterr().err)
    assert "OPENAI_API_KEY: expected printable ASCII" in told
    monkeypatch.delenv("OPENAI_API_KEY")
    noisy_image(0).save(tmp_path / "cat.png")
    assert generate([*command, "--image_path", str(tmp_path / "cat.png")]) == 2
    assert "another image than --image_path, which it does not see" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert generate(command) == 2 and "goes with --prompt and one process" in capsys.readouterr().err


def reply(question: str) -> str:
    return f"Here they are:\n```json\n{json.dumps([{'question': question, 'answer': 'yes'}])}\n```"


def test_checks_are_written_once_and_only_missing_ones_when_started_again(model, tmp_path, capsys):
    prompts, output = tmp_path / "prompts.csv", tmp_path / "checks.csv"
    prompts.write_text('prompt,seed\n"a cat, grey",3\na dog,\n')
    app = chat_app(model, replies=[reply("A cat?"), "I would rather not.", "[]", "[", reply("A dog?")])
    with serving(app) as url:
        command = ["--prompts_csv", str(prompts), "--output", str(output), "--server", f"{url}/v1", "--model", "tiny"]
        command += ["--in_flight", "1", "--num_checks", "1"]
        assert make_checks(command) == 1
        assert "'a dog': the model wrote no checks in 3 attempts" in capsys.readouterr().err
        of_cat = {"a cat, grey": (Check(question="A cat?", answer="yes"),)}
        assert read_checks([output]) == of_cat and make_checks(command) == 0
        asked = len(app.state.asked)
        assert make_checks(command) == 0 and len(app.state.asked) == asked == 5
    assert read_checks([output]) == of_cat | {"a dog": (Check(question="A dog?", answer="yes"),)}
    assert output.read_text().splitlines()[0] == "prompt,seed,checks" and '"a cat, grey",3,' in output.read_text()
    assert make_checks(["--validate", str(output)]) == 0 and "2 prompts have 2 checks" in capsys.readouterr().out


def test_bad_rows_are_all_named_and_wrong_calls_refused(tmp_path, capsys):
    bad = tmp_path / "bad.csv"
    bad.write_text('prompt,checks\na,nothing\nb,\nc,"[{""question"": ""x?"", ""answer"": ""maybe""}]"\n')
    assert make_checks(["--validate", str(bad)]) == 2
    told = capsys.readouterr().err
    assert "line 2: checks: expected [{" in told and "'nothing': Invalid JSON" in told
    assert "line 4: checks: expected [{" in told and "0.answer: Input should be 'yes' or 'no'" in told
    writes = ["--prompts_csv", str(bad), "--output", str(tmp_path / "new.csv")]
    assert make_checks([*writes, "--server", "http://x/v1", "--model", "x"]) == 2
    assert "bad.csv, line 2: checks: expected [{" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        make_checks(["--prompts_csv", str(bad)])
    assert "needed, or --validate: --output, --server, --model" in capsys.readouterr().err
