"""`pretrain generate` as a process: pipes, signals, and the settings that a released model brings."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import transformers

from pretrain.config.texts.templates import to_jinja
from tests.helpers.cli import SOURCE_PATH, run_warm
from tests.helpers.lent import quiet_transformers
from tests.helpers.waiting import LIMIT_S, wait_until
from tests.helpers.warm_jobs import start_warm
from tests.unit.generation.codecs import END, MASK, PAD, byte_codec

NOTE = "note: standard input is read to its end, a line each; --prompt gives a text instead\n"
COMMAND = [sys.executable, "-m", "pretrain", "generate"]
SIZES = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}


def save(model, codec, folder):
    """Writes a released model with a tokenizer."""
    with quiet_transformers():
        model.save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=codec._tokenizer, eos_token=END, mask_token=MASK, pad_token=PAD
        ).save_pretrained(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with tiny random released models: `gpt`, `marian`, `bert`."""
    folder, codec = tmp_path_factory.mktemp("models"), byte_codec()
    pad, end = 0, codec.eos_ids[0]
    torch.manual_seed(0)
    gpt = transformers.GPT2Config(
        vocab_size=codec.vocab_size, n_embd=48, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2,
        bos_token_id=end, eos_token_id=end,
    )  # fmt: skip
    save(transformers.GPT2LMHeadModel(gpt), codec, folder / "gpt")
    config = transformers.MarianConfig(
        **SIZES, vocab_size=codec.vocab_size, d_model=48, encoder_ffn_dim=64, decoder_ffn_dim=64, init_std=0.2,
        max_position_embeddings=64, pad_token_id=pad, decoder_start_token_id=pad, eos_token_id=end,
        forced_eos_token_id=end,
    )  # fmt: skip
    marian = transformers.MarianMTModel(config)
    marian.generation_config = transformers.GenerationConfig(
        num_beams=4, length_penalty=0.7, max_length=20, bad_words_ids=[[pad]], eos_token_id=end, pad_token_id=pad,
        forced_eos_token_id=end, decoder_start_token_id=pad, renormalize_logits=True,
    )  # fmt: skip
    save(marian, byte_codec(appends_end=True), folder / "marian")
    bert = transformers.BertConfig(
        vocab_size=codec.vocab_size, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    save(transformers.BertForMaskedLM(bert), codec, folder / "bert")
    return folder


def start(*arguments, cwd, **streams):
    """Starts the command with the given streams."""
    environment = {**os.environ, "PYTHONPATH": SOURCE_PATH, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*COMMAND, *arguments], cwd=cwd, env=environment, text=True, **streams)


@pytest.mark.long
def test_a_translator_translates_by_its_own_settings_what_is_piped_in(models):
    theirs = transformers.MarianMTModel.from_pretrained(models / "marian")
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / "marian")
    sentences = ["the cat sat on the mat", "the dog", "Na\u00efve caf\u00e9s"]
    inputs = tokenizer(sentences, return_tensors="pt", padding=True, return_token_type_ids=False)
    output = theirs.generate(**inputs, return_dict_in_generate=True, output_scores=True)
    done = start("marian", "--json", "--batch-size", "2", cwd=models, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    found = [json.loads(line) for line in done.communicate("\n".join(sentences))[0].splitlines()]
    assert done.returncode == 0
    assert [one["prompt"] for one in found] == sentences
    assert [one["text"] for one in found] == tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
    assert [one["score"] for one in found] == pytest.approx(output.sequences_scores.tolist(), abs=1e-5)


def test_prompts_come_from_a_file_and_each_gets_its_text(models, warm, tmp_path):
    (tmp_path / "prompts").write_text("the cat\n\nsat on\n")
    options = ["--max-tokens", "6", "--temperature", "0", "--json"]
    result = warm("generate", "gpt", "--file", str(tmp_path / "prompts"), *options, cwd=models)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["the cat", "", "sat on"]
    again = warm("generate", "gpt", "--prompt", "the cat", "--prompt", "", "--prompt", "sat on", *options, cwd=models)
    assert again.stdout == result.stdout
    (alone,) = warm("generate", "gpt", "--prompt", "sat on", *options, cwd=models).stdout.splitlines()
    assert json.loads(alone)["text"] == lines[2]["text"]


def test_more_tokens_than_the_model_has_positions_are_noted(models, warm):
    options = ["--prompt", "the cat", "--temperature", "0"]
    most = warm("generate", "gpt", *options, "--max-tokens", "64", cwd=models)
    assert (most.code, most.stderr) == (0, "")
    more = warm("generate", "gpt", *options, "--max-tokens", "65", cwd=models)
    assert (more.code, more.stdout) == (0, most.stdout)
    assert more.stderr == "note: texts are shorter than --max-tokens 65: model.max_seq_len is 64\n"


def test_an_encoder_fills_masks(models, warm):
    result = warm("generate", "bert", "--prompt", "the [MASK] sat", "--top-k", "3", "--json", cwd=models)
    (found,) = [json.loads(line) for line in result.stdout.splitlines()]
    (candidates,) = found["masks"]
    assert len(candidates) == 3
    assert found["text"] == f"the {candidates[0]['token']} sat"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt", "--beams", "4", "--temperature", "0.5"], "--beams searches, --temperature draws: only one can be"),
        (["gpt", "--prompt", "a", "--file", "b"], "--prompt and --file were both given"),
        (["gpt", "--file", "nope"], "nope: cannot read it: No such file or directory"),
        (["gpt", "--prompt", "cat " * 99], "tokens, model.max_seq_len is 64; shorten the prompt"),
        (["marian"], "there is no prompt; give --prompt, --file, or pipe a text in"),
        (["bert", "--prompt", "no gap"], "the text has no mask; put [MASK] where a word is to be filled in"),
    ],
)
def test_what_makes_no_sense_is_one_line(models, warm, arguments, message):
    result = warm("generate", *arguments, cwd=models)
    assert (result.code, result.stdout) == (64, "")
    assert len(result.errors) == result.stderr.count("\n") == 1
    assert message in result.errors[0]


@pytest.mark.long
def test_a_reader_that_has_seen_enough_ends_it_quietly(models, tmp_path):
    options = ["--max-tokens", "4", "--batch-size", "2"]
    (tmp_path / "prompts").write_text("the cat\n" * 50_000)  # their texts are more than a pipe takes
    with (tmp_path / "prompts").open() as prompts:
        streams = {"stdin": prompts, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = start("gpt", *options, cwd=models, **streams)
    assert process.stdout.readline().startswith("the cat")
    process.stdout.close()
    assert process.stderr.read() == NOTE
    assert process.wait(timeout=LIMIT_S) == 128 + signal.SIGPIPE


@pytest.mark.long
def test_lines_come_before_the_last_prompt_is_there_and_ctrl_c_ends_it_without_a_traceback(models):
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # In a session of its own, so that it has the signal handlers of a foreground process.
    process = start("gpt", "--max-tokens", "4", "--batch-size", "2", cwd=models, start_new_session=True, **streams)
    process.stdin.write("the cat\nthe dog\n")
    process.stdin.flush()
    lines = [process.stdout.readline() for _ in range(2)]
    assert [line[:7] for line in lines] == ["the cat", "the dog"]
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=LIMIT_S) == 130
    assert process.stderr.read() == f"{NOTE}interrupted\n"


def test_a_model_that_is_not_there_is_refused_before_a_prompt_is_read(tmp_path):
    result = run_warm("generate", "nope", "--prompt", "a", cwd=tmp_path)
    assert result.code == 66
    assert "nope" in result.errors[0]


def test_turns_are_typed_in_a_terminal(models, tmp_path):
    folder = shutil.copytree(models / "gpt", tmp_path / "gpt")
    template = {"user": "U:{content}\n", "assistant": "A:{content}\n"}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": to_jinja(template)}))
    ours, theirs = os.openpty()
    options = ["--max-tokens", "3", "--temperature", "0"]
    os.write(ours, b"The cat\n\nThe dog\n\x04")
    typed = run_warm("chat", str(folder), *options, cwd=tmp_path, stdin=os.ttyname(theirs), TERM="dumb")
    os.close(ours)
    os.close(theirs)
    assert typed.code == 0, typed.stderr
    output, errors = typed.stdout, typed.stderr
    assert "a line is a turn; /reset begins anew, Ctrl-D ends" in errors
    assert output.count("> ") == 4  # three lines and the end
    answers = [line for line in output.replace("> ", "").splitlines() if line]
    # The same lines from a pipe are the same conversation, of `generate --chat` too, here until a Ctrl-C.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    command = ["generate", str(folder), "--chat", *options]
    piped = start_warm(*command, cwd=tmp_path, output=tmp_path / "said", stdin=pipe)
    said, complaints = piped.files[0]
    for number, line in enumerate(("The cat", "The dog"), 1):
        os.write(writer, f"{line}\n".encode())
        wanted = "".join(f"{answer}\n" for answer in answers[:number])
        wait_until(lambda wanted=wanted: said.read_text() == wanted, "its answer", piped.is_running, say=piped.output)
    piped.send(signal.SIGINT)
    assert piped.end() == 130
    os.close(writer)
    errors = complaints.read_text()
    assert errors.startswith("note: standard input is one conversation, a turn a line; --prompt gives a text instead")
    assert errors.endswith("interrupted\n") and "Traceback" not in errors
    refused = run_warm("generate", str(folder), "--chat", "--json", cwd=tmp_path)
    assert refused.code == 64 and "a conversation needs a terminal" in refused.stderr
