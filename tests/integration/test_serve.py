"""`pretrain serve`: the real server of transformers on the export of a run, asked by OpenAI's client."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from pretrain.artifact.open import open_artifact
from pretrain.artifact.transfer import write_served
from pretrain.errors import ConfigError, LaunchError
from pretrain.generation.chat import ChatCodec
from pretrain.generation.generation_options import Options
from pretrain.generation.text import generate_text
from pretrain.utils.net import refuse_used_port, reserved_port
from tests.helpers.chat_templates import CHATML
from tests.helpers.cli import SOURCE_PATH, run_warm
from tests.helpers.waiting import LIMIT_S, wait_until
from tests.unit.artifact.runs import write_run, write_text_run
from tests.unit.artifact.test_chat_templates import write_base
from tests.unit.preparation.test_templates import prepared

RECORD = {"prompt": "Who climbs into it?", "response": "A little girl."}


def test_a_package_that_is_missing_is_named(tmp_path):
    pytest.importorskip("transformers")
    try:
        import fastapi  # noqa: F401
    except ImportError:
        refused = run_warm("serve", str(tmp_path), cwd=tmp_path)
        assert "serving is done by `transformers serve`, which needs fastapi" in refused.errors[0]
        assert ".[serve]" in refused.errors[0]


def test_a_used_port_is_refused_before_the_export():
    refused = pytest.raises(LaunchError, match=r"port \d+ of 127.0.0.1 cannot be used: Address already in use")
    with socket.create_server(("127.0.0.1", 0)) as server, refused:
        refuse_used_port("127.0.0.1", server.getsockname()[1])
    refuse_used_port("127.0.0.1", 0)


def test_a_translator_is_refused_and_a_folder_of_hugging_face_linked(tmp_path):
    with pytest.raises(ConfigError, match=r"continues texts, unlike this model: encoder\+decoder"):
        write_served(write_run(tmp_path / "mt", steps=[1]), tmp_path, "fp32")
    release = tmp_path / "a@b"
    release.mkdir()
    (release / "config.json").write_text("{}")
    (release / "generation_config.json").write_text('{"eos_token_id": 3}')
    folder, chats = write_served(release, tmp_path, "fp32")
    assert (folder, chats) == (tmp_path / "a-b", False)
    assert (folder / "config.json").resolve() == release / "config.json"
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": 3, "do_sample": True}
    assert (release / "generation_config.json").read_text() == '{"eos_token_id": 3}'


@pytest.mark.long
def test_a_run_answers_a_client_of_openai_as_generate_does_and_ends_at_a_signal(tmp_path):
    openai = pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    base = write_base(tmp_path / "base", CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_end|>")
    prepared(tmp_path, RECORD, base, template="tokenizer")
    run = write_text_run(tmp_path / "run", tmp_path / "out", "llama-tiny", "supervised")
    artifact = open_artifact(run)
    options = Options(max_tokens=5, temperature=0.0)
    method = options.method(artifact.model, artifact.generation)
    codec = ChatCodec(artifact.codec)
    constraints = options.constraints(artifact.model, codec, artifact.generation)
    ((expected,),) = generate_text(artifact.model, codec, ["Who?"], constraints, method)
    with reserved_port(None) as port:
        pass
    command = [sys.executable, "-m", "pretrain", "serve", str(run), "--port", str(port), "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": SOURCE_PATH, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(command, env=environment, stderr=log, stdout=log, start_new_session=True)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)

    def answers():
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status == 200
        except OSError:
            return False

    try:
        wait_until(answers, "the server answers", process, say=(tmp_path / "log").read_text)
        messages = [{"role": "user", "content": "Who?"}]

        def said(temperature, seed):
            asked = {"temperature": temperature, "max_tokens": 5, "seed": seed}
            found = client.chat.completions.create(model="run", messages=messages, **asked)
            return found.choices[0].message.content

        assert said(0.0, seed=0) == said(0.0, seed=1) == expected.text
        drawn = [said(50.0, seed=seed) for seed in (1, 2, 1)]
        assert drawn[0] == drawn[2] and drawn[0] != drawn[1]
        stop = expected.text[1:3]
        asked = {"model": "run", "messages": messages, "temperature": 0.0, "max_tokens": 5, "stop": [stop, "\n"]}
        (choice,) = client.chat.completions.create(**asked).choices
        assert (choice.message.content, choice.finish_reason) == (expected.text.partition(stop)[0], "stop")
        streamed = [one.choices[0].delta.content or "" for one in client.chat.completions.create(**asked, stream=True)]
        assert "".join(streamed) == choice.message.content
        with pytest.raises(openai.BadRequestError, match="stop must be a text, or a list of up to 4 texts"):
            client.completions.create(model="run", prompt="Who", stop=list("abcde"))
        assert [model.id for model in client.models.list()] == ["run"]
        with pytest.raises(openai.NotFoundError, match=r'"gpt-4" is not served here; the model is "run"'):
            client.completions.create(model="gpt-4", prompt="Who?", max_tokens=1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=LIMIT_S) == 0
        assert not list(tmp_path.glob("pretrain-serve-*"))
    finally:
        process.kill()
        log.close()
