"""Prompts rewritten by a language model behind a real chat server, resumed, and kept apart from the originals."""

import pytest

from hyvideo.data.prompts import read_prompts, rows_of_csv
from hyvideo.models.reward_models.remote import exchange
from scripts.rewrite_prompts import main
from tests.support.reward_server import serving
from tests.support.vision_language import chat_app, write_vision_language_model

LONG = "A grey cat with a white chin walks along a low wall, stops, and looks into the camera."
SIGN = 'A shop window at dusk; a lamp goes on and the word "OPEN" lights up red behind the glass.'


def test_prompts_are_rewritten_once_and_keep_their_originals_and_their_words_on_screen(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exchange, "_FIRST_WAIT_SECONDS", 0.01)
    prompts, output = tmp_path / "prompts.csv", tmp_path / "long.csv"
    prompts.write_text('prompt,seed\n"a cat, grey",3\n"a shop window says ""OPEN""",\n')
    model = write_vision_language_model(tmp_path / "model", "qwen2_5_vl")
    lost = "A shop window at dusk without a word."
    thinking = "<think>Okay, the user wants a cat"
    app = chat_app(model, replies=[f"<think>a wall?</think>{LONG}\n", lost, thinking, "word " * 400, SIGN])
    with serving(app) as url:
        command = ["--prompts_csv", str(prompts), "--output", str(output), "--server", f"{url}/v1", "--model", "tiny"]
        command += ["--in_flight", "1"]
        assert main(command) == 1
        assert "did not rewrite it in 3 attempts: it wrote 400 words" in capsys.readouterr().err
        assert [prompt.text for prompt in read_prompts([output])] == [LONG, 'a shop window says "OPEN"']
        assert main(command) == 0
        assert main(command) == 0 and len(app.state.asked) == 5
    rows = [row for _, row in rows_of_csv(output)]
    assert rows[0] == {"prompt": LONG, "seed": "3", "original_prompt": "a cat, grey"}
    assert rows[1] == {"prompt": SIGN, "seed": "", "original_prompt": 'a shop window says "OPEN"'}
    mine = tmp_path / "mine.csv"
    mine.write_text("prompt\nmy own prompt\n")
    assert main([*command[:3], str(mine), *command[4:]]) == 2 and mine.read_text() == "prompt\nmy own prompt\n"
    assert "has 1 rows that are not of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--prompts_csv", str(prompts)])
    assert "needed: --output, --server, --model" in capsys.readouterr().err
