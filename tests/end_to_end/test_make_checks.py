"""Checks written by a language model behind a real chat server, resumed, and validated."""

import json

import pytest

from hyvideo.data.checks import Check, read_checks
from hyvideo.models.reward_models.remote import exchange
from scripts.make_checks import main
from tests.support.reward_server import serving
from tests.support.vision_language import chat_app, write_vision_language_model


def reply(question: str) -> str:
    return f"Here they are:\n```json\n{json.dumps([{'question': question, 'answer': 'yes'}])}\n```"


def test_checks_are_written_once_and_only_missing_ones_when_started_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exchange, "_FIRST_WAIT_SECONDS", 0.01)
    prompts, output = tmp_path / "prompts.csv", tmp_path / "checks.csv"
    prompts.write_text('prompt,seed\n"a cat, grey",3\na dog,\n')
    model = write_vision_language_model(tmp_path / "model", "qwen2_5_vl")
    app = chat_app(model, replies=[reply("A cat?"), "I would rather not.", "[]", "[", reply("A dog?")])
    with serving(app) as url:
        command = ["--prompts_csv", str(prompts), "--output", str(output), "--server", f"{url}/v1", "--model", "tiny"]
        command += ["--in_flight", "1", "--num_checks", "1"]
        assert main(command) == 1
        assert "'a dog': the model wrote no checks in 3 attempts" in capsys.readouterr().err
        of_cat = {"a cat, grey": (Check(question="A cat?", answer="yes"),)}
        assert read_checks([output]) == of_cat and main(command) == 0
        asked = len(app.state.asked)
        assert main(command) == 0 and len(app.state.asked) == asked == 5
    assert read_checks([output]) == of_cat | {"a dog": (Check(question="A dog?", answer="yes"),)}
    assert output.read_text().splitlines()[0] == "prompt,seed,checks" and '"a cat, grey",3,' in output.read_text()
    assert main(["--validate", str(output)]) == 0 and "2 prompts have 2 checks" in capsys.readouterr().out


def test_bad_rows_are_all_named_and_wrong_calls_refused(tmp_path, capsys):
    bad = tmp_path / "bad.csv"
    bad.write_text('prompt,checks\na,nothing\nb,\nc,"[{""question"": ""x?"", ""answer"": ""maybe""}]"\n')
    assert main(["--validate", str(bad)]) == 2
    told = capsys.readouterr().err
    assert "line 2: checks: expected [{" in told and "'nothing':  Invalid JSON" in told
    assert "line 4: checks: expected [{" in told and "[0]['answer'] Input should be 'yes' or 'no'" in told
    writes = ["--prompts_csv", str(bad), "--output", str(tmp_path / "new.csv")]
    assert main([*writes, "--server", "http://x/v1", "--model", "x"]) == 2
    assert "bad.csv, line 2: checks: expected [{" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--prompts_csv", str(bad)])
    assert "needed, or --validate: --output, --server, --model" in capsys.readouterr().err
