"""The command as a user meets it: a process with arguments, two streams and an exit code."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import smcgen as sg
from smcgen.arguments import read_prompts
from smcgen.cli import main
from smcgen.cli import sample as command
from tests.test_paged_engine import tiny, tokenizer
from tests.tiny_models import byte_level, reward_model

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny(seed=1).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, capsys):
    """The command in this process (importing torch for each call would take minutes)."""

    def call(*arguments: str, stdin: str = "", cwd: Path | None = None) -> Done:
        monkeypatch.setattr(sys, "argv", ["smcgen", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
        monkeypatch.chdir(cwd or ROOT)
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        return Done(code, *capsys.readouterr())

    return call


def test_as_a_process(model):
    """A fresh interpreter: the exit codes and streams of the real thing, no traceback, no torch for --version."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for arguments, code, text in (
        (["sample", "ab", "-m", model, "--seed", "1", "--max-tokens", "4", "--regex", "[a-f]{2}"], 0, ""),
        (["sample", "ab", "-m", model, "-n", "0"], 2, "particles=0"),
        (["--version"], 0, ""),
    ):
        command = [sys.executable, "-m", "smcgen", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == code, done.stderr
        assert text in done.stderr
        assert "Traceback" not in done.stderr
        assert bool(done.stdout.strip()) == (code == 0)


def test_help_does_not_import_torch():
    script = "import sys, smcgen.cli as c\ntry: c.app(['sample', '--help'])\nexcept SystemExit: pass\n"
    script += "assert not {'torch', 'transformers', 'numpy', 'llguidance'} & set(sys.modules), sorted(sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "--on-budget" in done.stdout


def test_text_on_stdout_and_the_rest_on_stderr(run, model):
    done = run("sample", "ab", "-m", model, "--seed", "7", "--max-tokens", "6")
    assert done.returncode == 0, done.stderr
    expected = sg.sample(sg.LM(model), ["ab"], seed=7, max_tokens=6)[0].text
    assert done.stdout == expected + "\n"
    assert "log evidence" in done.stderr
    quiet = run("sample", "ab", "-m", model, "--seed", "7", "--max-tokens", "6", "-q")
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")


def test_prompts_from_stdin_and_files(run, model, tmp_path):
    options = ("-m", model, "--seed", "7", "--max-tokens", "6", "-q")
    want = run("sample", "ab", *options).stdout
    assert run("sample", *options, stdin="ab\n").stdout == want
    assert run("sample", "-", *options, stdin="ab").stdout == want
    (tmp_path / "p.txt").write_text("ab\nc\n\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "c"}\n')
    lines = run("sample", "--prompt-file", str(tmp_path / "p.txt"), *options).stdout
    assert lines.startswith(want + "---\n")
    assert run("sample", "--prompt-file", str(tmp_path / "p.jsonl"), *options).stdout == lines


def test_files_of_prompts(run, model, tmp_path):
    """A byte order mark, CRLF, blank lines and line separators inside a string are no part of the prompts."""
    (tmp_path / "p.JSONL").write_bytes('\ufeff{"prompt": "ab"}\r\n\r\n{"prompt": "a\u2028b"}\r\n'.encode())
    assert read_prompts(None, tmp_path / "p.JSONL") == ["ab", "a\u2028b"]
    (tmp_path / "p.txt").write_bytes("\ufeffab\r\nc\n".encode())
    assert read_prompts(None, tmp_path / "p.txt") == ["ab", "c"]
    (tmp_path / "empty.jsonl").write_text('{"prompt": ""}\n')
    assert read_prompts(None, tmp_path / "empty.jsonl") == [""]  # refused by the run, which says what to write instead
    messages = [{"role": "user", "content": "a"}]
    (tmp_path / "m.jsonl").write_text(json.dumps({"messages": messages}))
    assert read_prompts(None, tmp_path / "m.jsonl") == [messages]
    for line in ('{"prompt": true}', "[5]", '{"messages": "abc"}', '{"messages": [1]}', '{"prompt": "\\ud800"}', "[" * 9999):
        (tmp_path / "bad.jsonl").write_text(line)
        with pytest.raises(sg.UsageError, match="line 1"):
            read_prompts(None, tmp_path / "bad.jsonl")


def test_every_option_reaches_the_run(run, model, tmp_path):
    (tmp_path / "mine.py").write_text("def short(text):\n    return -0.1 * len(text)\n")
    done = run(
        "sample", "ab", "-m", model, "-d", "int8", "-k", "2", "-n", "5", "--alpha", "2", "--temperature", "0.9",
        "--regex", "[a-f]*", "--potential", "mine:short", "--max-tokens", "7", "--stop", "fe", "--on-budget", "condition",
        "--runs", "2", "--seed", "3", "--resampling", "ssp", "--threshold", "0.5", "--draft-temperature", "0.8",
        "--groups", "2", "--deterministic", "--no-chat", "--device", "cpu", "--dtype", "float32", "--json", "-q",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    settings = data["settings"]
    assert settings["target"] == f"LM({model!r}).at(temperature=0.9)**2 * regex('[a-f]*') * short"
    expected = {
        "draft": f"{model}:int8", "block": 2, "particles": 5, "max_tokens": 7, "stop": ["fe"], "on_budget": "condition",
        "runs": 2, "seed": 3, "resampling": "ssp", "threshold": 0.5, "draft_temperature": 0.8, "groups": 2,
        "deterministic": True, "chat": False, "device": "cpu", "dtype": ["float32", "float32"],
    }  # fmt: skip
    assert {key: settings[key] for key in expected} == expected
    assert len(data["runs"]) == 2
    assert set(data["text"]) <= set("abcdef")


def test_lossless_decoding(run, model):
    done = run(
        "sample", "ab", "-m", model, "-d", "int4", "--mode", "exact", "--chains", "3", "--max-tokens", "8", "--seed", "1"
    )
    assert done.returncode == 0, done.stderr
    assert "acceptance" in done.stderr
    assert "tokens per round" in done.stderr
    greedy = [
        run("sample", "ab", "-m", model, *draft, "--mode", "exact", "--temperature", "0", "--max-tokens", "8").stdout
        for draft in ((), ("-d", "int4"))
    ]
    assert greedy[0] == greedy[1]
    done = run("sample", "ab", "-m", model, "-d", "int4", "--leniency", "1.5", "--max-tokens", "8")
    assert "bound on the divergence" in done.stderr
    refused = run("sample", "ab", "-m", model, "-d", "int4", "--mode", "exact", "--alpha", "2")
    assert refused.returncode == 2
    assert "mode='smc'" in refused.stderr


def test_a_policy_that_cannot_be_kept_is_refused_before_the_run(run, model, tmp_path, monkeypatch):
    monkeypatch.setattr("smcgen.sample", None)
    options = ("sample", "ab", "-m", model, "-d", "int4", "--max-tokens", "8", "--policy-state")
    for more, message in (
        ((str(tmp_path / "state.json"),), "--policy-state has no effect"),
        ((str(tmp_path / "state.json"), "-k", "1", "-k", "2", "--mode", "auto"), "--policy-state has no place"),
        ((str(tmp_path / "no" / "state.json"), "-k", "1", "-k", "2"), "--policy-state .* cannot be written"),
    ):
        refused = run(*options, *more)
        assert refused.returncode == 2
        assert re.search(message, refused.stderr), refused.stderr
    assert not list(tmp_path.iterdir())


def test_several_drafts(run, model, tmp_path):
    state = tmp_path / "state.json"
    options = ("sample", "ab", "-m", model, "-d", "int4", "-d", "ngram", "-k", "1", "-k", "3", "--mode", "exact", "--seed", "1")
    options = (*options, "--policy", "thompson", "--policy-state", str(state), "--max-tokens", "12")
    for _ in range(2):
        done = run(*options, "--draft-cost", "0.5", "--draft-cost", "0")
        assert done.returncode == 0, done.stderr
        assert "rounds of each draft" in done.stderr
        assert "K=3 in" in done.stderr
    assert json.loads(state.read_text())["arms"] == 4
    done = run("sample", "ab", "-m", model, "-d", "int4", "--mode", "auto", "--max-tokens", "8", "--baseline")
    assert done.returncode == 0, done.stderr
    assert "is accepted at" in done.stderr
    assert "Traceback" not in done.stderr
    done = run("sample", "ab", "-m", model, "-d", "int4", "--mode", "exact", "--max-tokens", "8", "--baseline")
    assert "without a draft" in done.stderr
    refused = run("sample", "ab", "-m", model, "-d", "int4", "-d", "none")
    assert refused.returncode == 2


def test_json_lines_are_reproducible_and_whole(run, model, tmp_path):
    options = ("sample", "ab", "-m", model, "--max-tokens", "6", "--samples", "3", "--json", "-q")
    one, two, other = (run(*options, "--seed", seed).stdout for seed in ("7", "7", "8"))
    assert one == two
    assert one != other
    assert len(one.splitlines()) == 3
    drafted = [run(*options, "--seed", "7", "-d", "int8").stdout for _ in range(2)]
    assert drafted[0] == drafted[1]
    out = tmp_path / "out.jsonl"
    done = run(*options[:-2], "--seed", "7", "-q", "-o", str(out))
    assert done.stdout == ""
    assert out.read_text() == one
    for line in one.splitlines():
        post = sg.Posterior.from_json(line)
        assert post.text == json.loads(line)["text"]


def test_rewards(run, model, tmp_path):
    judge = reward_model()
    judge.save_pretrained(tmp_path / "judge")
    byte_level().save_pretrained(tmp_path / "judge")
    options = ("-m", model, "--max-tokens", "6", "--seed", "1", "--json")
    done = run("sample", "ab", *options, "--reward", "judge:0.5", "--reward", "judge", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["settings"]["potentials"] == ["reward(judge, beta=0.5)", "reward(judge)"]


def test_conditions(run, model, tmp_path):
    (tmp_path / "g.lark").write_text('start: "a" item+\nitem: "b" | "cd"\n')
    (tmp_path / "s.json").write_text('{"enum": [1, 2]}')
    options = ("-m", model, "--max-tokens", "12", "--seed", "1", "--json")
    done = run("sample", "ab", *options, "--grammar", "g.lark", "--contains", "cd", "--avoid", "bb", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert re.fullmatch("a(b|cd)+", data["text"])
    assert "cd" in data["text"]
    assert "bb" not in data["text"]
    assert len(data["settings"]["potentials"]) == 3
    done = run("sample", "ab", *options, "--choice", "abc", "--choice", "ade", cwd=tmp_path)
    assert json.loads(done.stdout)["text"] in ("abc", "ade")
    done = run("sample", "ab", *options, "--json-schema", "s.json", cwd=tmp_path)  # this model has no digits
    assert done.returncode == 3


def test_blanks_of_a_schema(run, model, tmp_path):
    (tmp_path / "s.json").write_text('{"enum": [[1, 2]]}')
    options = ("-m", "tiny", "--max-tokens", "12", "--seed", "1", "--json", "-d", "none", "--json-schema", "s.json")
    done = run("sample", "Once.", *options, "--blanks", "0", cwd=tmp_path)
    assert json.loads(done.stdout)["text"] == "[1,2]", done.stderr
    done = run("sample", "Once.", *options, "--blanks", "-1", cwd=tmp_path)
    assert (done.returncode, "blanks=-1: give a number" in done.stderr) == (2, True)
    done = run("sample", "ab", "-m", model, "--blanks", "2")
    assert (done.returncode, "without --json-schema" in done.stderr) == (2, True)


def test_every_option_of_a_call_is_there():
    """What `sample` in Python has, the command has too."""
    renamed = {"draft_costs": "draft_cost", "reward": "policy_reward"}
    elsewhere = {"target", "keys", "progress"}  # made of -m, --alpha, ...; prompts in a file have their order; -q
    known = set(inspect.signature(command).parameters)
    assert {renamed.get(name, name) for name in inspect.signature(sg.sample).parameters} - elsewhere <= known
    assert set(inspect.signature(sg.LM.at).parameters) - {"self"} <= known


def test_options_reach_the_run(run, model, tmp_path):
    options = ["-m", model, "--no-chat", "--seed", "1", "--max-tokens", "8", "--json"]

    def settings(*more: str) -> dict:
        done = run("sample", "ab", *options, *more)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["settings"]

    drafted = ["-d", "int4"]
    assert settings(*drafted)["verification"] == "block"
    assert settings(*drafted, "--verification", "token")["verification"] == "token"
    assert settings(*drafted, "--collapse", "-n", "3")["collapse"]
    assert settings(*drafted, "--collapse")["mode"] == "smc"
    assert settings(*drafted, "--anneal", "0.5:3")["anneal"] == [0.5, 3, "models"]
    cut = settings(*drafted, "--top-k", "3", "--top-p", "0.9", "--min-p", "0.01")
    assert (cut["mode"], cut["target"].count("top_k=3"), cut["target"].count("min_p=0.01")) == ("exact", 1, 1)
    assert settings(*drafted, "--block", "1", "--block", "2", "--policy-reward", "acceptance")["reward"] == "acceptance"
    (tmp_path / "judge.py").write_text("def short(text): return len(text) < 4\n")
    assert settings("--potential", f"{tmp_path}/judge.py:short", "--candidates", "3")["candidates"] == 3
    collapsed = run("sample", "ab", *options[:-1], *drafted, "--collapse")
    assert "collapsed after" in collapsed.stderr


def test_check(run, model, tmp_path):
    (tmp_path / "g.lark").write_text('start: "a" item+\nitem: "b" | "cd"\n')
    (tmp_path / "s.json").write_text('{"type": "array", "items": {"type": "integer"}, "uniqueItems": true}')
    (tmp_path / "empty.lark").write_text('start: "a" start\n')
    done = run("check", "g.lark", "-m", model, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "exact" in done.stdout
    assert "us mean" in done.stdout
    examples = re.findall("example: '(.*)'", done.stdout)
    assert examples
    assert all(re.fullmatch("a(b|cd)+", example) for example in examples)
    done = run("check", "s.json", cwd=tmp_path)
    assert "checked at the end" in done.stdout
    assert "uniqueItems" in done.stdout
    found = json.loads(run("check", "s.json", "--json", "--examples", "2", cwd=tmp_path).stdout)
    assert found["verdict"] == "checked at the end"
    assert all(isinstance(json.loads(example), list) for example in found["examples"])
    timed = json.loads(run("check", "g.lark", "-m", model, "--json", cwd=tmp_path).stdout)
    assert timed["mask_us"][0] > 0
    assert run("check", "empty.lark", "--json", cwd=tmp_path).returncode == 3
    assert run("check", "empty.lark", cwd=tmp_path).returncode == 3
    assert run("check", "none.lark", cwd=tmp_path).returncode == 2
    assert run("check", "s.json", "--start", "x", cwd=tmp_path).returncode == 2
    (tmp_path / "schema.txt").write_text(' {"type": "integer"}')
    assert "give it a name that ends in .json" in run("check", "schema.txt", cwd=tmp_path).stderr
    wrong = run("check", "s.json", "--seed", "-1", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "--seed -1: give 0 or more" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-m", "./nowhere.gguf"], 2, "nowhere.gguf"),
        (["-m", "./nowhere"], 2, "nowhere"),
        (["-n", "0"], 2, "particles=0"),
        (["-d", "int8", "-k", "0"], 2, "block=0"),
        (["-k", "3"], 2, "without a draft"),
        (["--alpha", "0"], 2, "exponent 0"),
        (["--temperature", "0"], 2, "positive number"),
        (["--regex", "("], 2, "("),
        (["--regex", "[^\\s\\S]"], 3, "no text"),
        (["--regex", "a{40}", "--max-tokens", "3"], 3, "at least 40 tokens"),
        (["--regex", "[ab]*a[ab]{40}", "--max-tokens", "3"], 3, "no particle survived"),
        (["--potential", "nothing"], 2, "module:name"),
        (["--potential", "nothing:here"], 2, "nothing"),
        (["--potential", "nothing.py:here"], 2, "--potential nothing.py: there is no such file"),
        (["--potential", "bad.py:nan"], 2, "nan"),
        (["--potential", "bad.py:broken"], 2, "broken"),
        (["--reward", "no/judge"], 2, "reward model no/judge cannot be read"),
        (["--reward", "judge:much"], 2, "give MODEL or MODEL:beta"),
        (["--reward", "judge:0"], 2, "beta=0"),
        (["--prompt-file", "none.txt"], 2, "none.txt"),
        (["-o", "no/folder/out.jsonl"], 2, "cannot be written"),
        (["-o", "."], 2, "cannot be written"),
        (["--plot", "run.jpeg"], 2, ".png, .pdf, .svg"),
        (["--plot", "no/folder/run.png"], 2, "no folder"),
        (["--plot", "run.png", "--samples", "2"], 2, "one result"),
        (["-d", "int9"], 2, "int8, int6"),
        (["--potential", "exits.py:f"], 2, "SystemExit"),
        (["--prompt-file", "types.jsonl"], 2, "line 2"),
        (["--prompt-file", "empty.jsonl"], 2, "empty prompt"),
        (["--prompt-file", "binary.txt"], 2, "cannot be read"),
        (["--resampling", "best"], 2, "multinomial"),
        (["--resampling", "best", "--mode", "exact"], 2, "multinomial"),
        (["--anneal", "half"], 2, "give FIRST:ROUNDS"),
        (["--anneal", "0.5:2:all:more"], 2, "give FIRST:ROUNDS"),
        (["--verification", "both", "-d", "int8"], 2, "give 'block' or 'token'"),
        (["--collapse", "--alpha", "2"], 2, "plain text"),
        (["--policy", "ucb1", "-d", "int8"], 2, "policy has no effect"),
        (["-m", "mistyped"], 2, "there is no folder mistyped"),
        (["--nonsense"], 2, "nonsense"),
        (["--max-tokens", "1", "--strict", "--regex", "[a-f]*"], 4, ""),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(run, model, tmp_path, arguments, code, message):
    (tmp_path / "bad.py").write_text("def nan(text): return float('nan')\ndef broken(text): return text.nothing\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(7)\n")
    (tmp_path / "empty.jsonl").write_text('{"prompt": ""}\n')
    (tmp_path / "types.jsonl").write_text('{"prompt": "ab"}\n{"prompt": 5}\n')
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xfa")
    own = [] if "-m" in arguments else ["-m", model]
    prompt = [] if "--prompt-file" in arguments else ["ab"]
    budget = [] if "--max-tokens" in arguments else ["--max-tokens", "8"]
    done = run("sample", *prompt, *own, "--seed", "1", *budget, *arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    if code != 4 and arguments != ["--nonsense"]:
        assert done.stdout == ""
        assert len([line for line in done.stderr.splitlines() if line.startswith("smcgen: ")]) <= 2
    assert not list(tmp_path.glob("**/*.part"))


def test_a_draft_with_another_tokenizer(run, model, tmp_path):
    tiny(seed=2).save_pretrained(tmp_path / "other")
    tokenizer(list("fedcba")).save_pretrained(tmp_path / "other")
    done = run("sample", "ab", "-m", model, "-d", str(tmp_path / "other"))
    assert done.returncode == 2
    assert "different tokenizers" in done.stderr


def test_stdin_that_is_no_utf8(run, model):
    stray = b"a\xff".decode("utf-8", "surrogateescape")  # what a POSIX locale makes of it
    done = run("sample", "-m", model, stdin=stray)
    assert (done.returncode, done.stdout) == (2, "")
    assert "stdin is no UTF-8 text" in done.stderr


def test_an_interrupted_run_says_so(run, model, tmp_path, monkeypatch):
    monkeypatch.setattr(sg, "sample", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    done = run("sample", "ab", "-m", model, "-o", str(tmp_path / "out.jsonl"))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "smcgen: interrupted\n")
    assert not list(tmp_path.iterdir())


def test_empty_prompt(run, model):
    done = run("sample", "", "-m", model, "--max-tokens", "3", "-q")
    assert done.returncode == 2
    assert "empty prompt" in done.stderr.lower()


def test_plot(run, model, tmp_path):
    done = run("sample", "ab", "-m", model, "--max-tokens", "6", "--seed", "1", "-q", "--plot", "run.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
