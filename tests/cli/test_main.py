"""The command as a whole: exit status, encodings of terminals, completion, help without torch, and the MCP server."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from logs.synthetic import sampled, write
from rich.console import Console

from klgrad.cli import EXAMPLES, app, main, mcp as serve
from klgrad.cli.train import SECTIONS, train_or_distill
from klgrad.errors import MissingExtraError

LOSSES = """
import sys

def raises(logp, ref_logp):
    raise ValueError("no loss today")

def exits(logp, ref_logp):
    sys.exit(0)

def interrupts(logp, ref_logp):
    raise KeyboardInterrupt
"""


@pytest.fixture
def losses(tmp_path):
    (tmp_path / "losses.py").write_text(LOSSES)
    (tmp_path / "broken.py").write_text("import nonexistent_thing\n")
    return tmp_path / "losses.py"


@pytest.fixture
def ended(monkeypatch, capfdbinary):
    """The exit status of a command in this process, and what it printed."""

    def run(*arguments, encoding="utf-8"):
        monkeypatch.setattr(sys, "argv", ["klgrad", *map(str, arguments)])
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            stream = os.fdopen(os.dup(descriptor), "w", encoding=encoding)
            monkeypatch.setattr(sys, name, stream)
        with pytest.raises(SystemExit) as stopped:
            main()
        sys.stdout.close()
        sys.stderr.close()
        monkeypatch.undo()
        shown = (text.decode(encoding) for text in capfdbinary.readouterr())
        return stopped.value.code, *shown

    return run


STATUSES = {
    "audit k1-loss": (0, ""),
    "audit k1-loss --expect nothing": (0, ""),
    "audit k1-loss --expect forward-kl-token": (1, "expected forward-kl-token"),
    "audit {folder}/losses.py:raises": (2, "LossCallError: expected"),
    "audit {folder}/broken.py:loss": (2, "LossImportError: expected"),
    "audit {folder}/missing.py:loss": (2, "LossImportError: expected"),
    "audit k3-los": (2, "UnknownNameError: expected"),
    "audit --nope": (2, "No such option"),
    "audit --json={folder} k1-loss": (2, "OutputError: expected"),
    "audit k1-loss --expect reverse": (2, "UnknownNameError: expected"),
    "audit {folder}/losses.py:exits --expect nothing": (2, "SystemExit: expected code that returns"),
    "audit {folder}/losses.py:interrupts": (130, ""),
    "--version": (0, "klgrad "),
    "audit --help": (0, "Usage: klgrad audit"),
    "no-such-command": (2, "No such command"),
}


@pytest.mark.parametrize("arguments", STATUSES)
def test_the_status_is_of_a_verdict_an_error_or_an_interruption(arguments, ended, losses):
    status, out, err = ended(*arguments.format(folder=losses.parent).split())
    assert status == STATUSES[arguments][0]
    assert STATUSES[arguments][1] in (err if status == 2 else out)
    assert "Traceback" not in err


@pytest.mark.parametrize("error", [ZeroDivisionError("division by zero"), RuntimeError("a[/]b"), SystemError()])
def test_a_bug_is_a_traceback_and_status_2(error, ended, monkeypatch):
    def buggy(*_, **__):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("klgrad.audit.audit", buggy)
        status, _, err = ended("audit", "k1-loss")
    assert status == 2
    assert "Traceback" in err
    assert f"{type(error).__name__}" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("klgrad au", {"audit"}),
        ("klgrad audit k3-loss --expect reverse-kl-t", {"reverse-kl-token", "reverse-kl-token-sampler"}),
        ("klgrad audit op", {"openrlhf", "open-instruct"}),
        ("klgrad audit --expect-o", {"--expect-off-policy"}),
        ("klgrad advise t", {"trl", "tunix"}),
    ],
)
def test_the_shell_completes(words, found, ended, monkeypatch):
    monkeypatch.setenv("_KLGRAD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    status, out, err = ended()
    assert (status, set(out.split()), err) == (0, found, "")


def test_completion_is_installed(ended, monkeypatch, tmp_path):
    is_bash = "shellingham.detect_shell", lambda: ("bash", "/bin/bash")  # above a test there may be another
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(*is_bash)
    status, out, err = ended("--install-completion")
    assert (status, err) == (0, "")
    assert "completion installed" in out
    script = (tmp_path / ".bash_completions" / "klgrad.sh").read_text(encoding="utf-8")
    assert "_KLGRAD_COMPLETE=complete_bash" in script
    monkeypatch.setattr(*is_bash)  # `ended` has undone it
    status, out, err = ended("--show-completion")
    assert (status, err) == (0, "")
    assert script.strip() == out.strip()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_a_terminal_of_any_encoding_gets_codes_for_what_it_cannot_show(encoding, ended, tmp_path):
    for name in ("é中.npz", os.fsdecode(b"\xff.npz")):
        log = write(tmp_path / name, sampled("temperature", 0.8, rows=8, tokens=5))
        for arguments in (
            ("logs", log, "--json", tmp_path / f"{name}.json"),
            ("audit", "k1-loss"),
            ("advise", "trl"),
            ("logs", tmp_path / f"missing-{name}"),
            ("audit", "--help"),
        ):
            status, out, err = ended(*arguments, encoding=encoding)
            assert "Traceback" not in err, err
            assert status == (2 if "missing" in str(arguments[1]) else 0)
            if (encoding, name, arguments[0]) == ("ascii", "é中.npz", "logs") and status == 0:
                assert r"KL(\u03c0\u2016ref) by k1" in out
                assert rf"{tmp_path}/\xe9\u4e2d.npz: 8 completions" in out
                assert rf"Wrote {tmp_path}/\xe9\u4e2d" in err
    assert "é中".encode() in (tmp_path / "é中.npz.json").read_bytes()  # files are UTF-8 for every terminal


def status_onto(descriptor, monkeypatch, *arguments):
    """The exit status of a command in this process, whose standard output is this descriptor."""
    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", ["klgrad", *arguments])
        patched.setattr(sys, "stdout", os.fdopen(descriptor, "w", encoding="utf-8"))
        with pytest.raises(SystemExit) as stopped:
            main()
        with suppress(BrokenPipeError):  # of a short text that is still held
            sys.stdout.close()
    return stopped.value.code


@pytest.mark.parametrize("files", [["--json", "r.json"], ["--json", "-", "--markdown", "r.json"]], ids=" ".join)
def test_a_closed_pipe_ends_the_command_without_an_error(files, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    assert status_onto(writer, monkeypatch, "audit", "k1-loss", *files) == 128 + signal.SIGPIPE
    err = capfd.readouterr().err
    assert "-" in files or err == ""
    assert "Error" not in err
    assert (tmp_path / "r.json").exists() == ("-" not in files)


@pytest.mark.slow
def test_ctrl_c_is_130(tmp_path):
    code = "import time\ndef loss(logp):\n    open('begun', 'w').close()\n    time.sleep(60)\n"
    (tmp_path / "slow.py").write_text(code)
    reset = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # background processes of a shell ignore it
    command = [sys.executable, "-m", "klgrad", "audit", "slow.py:loss"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=reset)
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err


# A help text needs no torch: loading it takes seconds.

LOOK = """
import contextlib, io, sys
from klgrad.cli import app
for line in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        app(line.split(), standalone_mode=False)
    print(line, len(shown.getvalue()) > 200, "torch" in sys.modules, sep="\t")
"""
"""Of each command whether it printed a text, and whether torch was imported by then; all in one process."""


@pytest.mark.slow
def test_a_help_text_and_an_advice_import_no_torch_and_an_audit_does():
    names = sorted(command.name for command in app.registered_commands)
    quick = ["--help", *(f"{name} --help" for name in names), "advise trl", "advise verl --off-policy"]
    command = [sys.executable, "-c", LOOK, *quick, "audit k2-loss"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    shown = [line.split("\t") for line in done.stdout.splitlines()]
    assert shown == [*([line, "True", "False"] for line in quick), ["audit k2-loss", "True", "True"]]


@pytest.mark.parametrize("command", ["train", "distill"])
def test_the_help_of_a_run_needs_no_trl_and_fits_two_screens(command, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("klgrad.cli.train.stdout", lambda: Console(width=80))
    train_or_distill(command, ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 80  # two screens of 40 lines
    assert sum(line.startswith("--") for line in lines) == sum(len(section) for section in SECTIONS.values())
    assert lines[-1] == "TRL is not installed: pip install 'klgrad[train]'"
    assert not any(line.startswith(" ") for line in lines[9:])  # no setting takes two lines
    with pytest.raises(MissingExtraError, match="pip install 'klgrad\\[train\\]'"):
        train_or_distill(command, ["--help-all"])


# The MCP server, driven by the SDK's own client over standard input and output.

LOSS = """
def kl_penalty(logp, ref_logp, mask):
    print("a loss that prints")
    return ((logp - ref_logp) ** 2 / 2 * mask).sum(-1).mean()
"""

RUN = "beta: 0.04\nloss_type: dr_grpo\nuse_bias_correction_kl: false\nnum_generations: 8\n"


def served(folder, *calls):
    """The tools by name, and the results of calls, from a server that is started in a folder."""
    mcp = pytest.importorskip("mcp")

    async def drive():
        of_klgrad = {"command": sys.executable, "args": ["-m", "klgrad", "mcp"]}
        server = mcp.StdioServerParameters(**of_klgrad, cwd=folder, env=dict(os.environ))
        async with mcp.Client(server) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            return tools, [await client.call_tool(name, {"arguments": given}) for name, given in calls]

    return asyncio.run(drive())


def text(result):
    return "".join(block.text for block in result.content)


@pytest.mark.slow
def test_an_agent_audits_a_file_and_reads_advice(tmp_path):
    (tmp_path / "losses.py").write_text(LOSS, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    scalars = [{"step": step, "kl": 0.0, "reward": 0.1 * step} for step in range(1, 21)]
    (tmp_path / "history.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in scalars), encoding="utf-8")
    tools, (audited, failed, differs, advice, converted, diagnosed) = served(
        tmp_path,
        ("audit", ["losses.py:kl_penalty", "--json", "-"]),
        ("audit", ["losses.py:nothing"]),
        ("audit", ["losses.py:kl_penalty", "--expect", "forward-kl-token"]),
        ("advise", ["trl", "--config", "run.yaml"]),
        ("convert", ["k3-loss beta=0.1", "k2-loss"]),
        ("diagnose", ["history.jsonl"]),
    )
    assert set(tools) == set(EXAMPLES) == {"audit", "advise", "convert", "diagnose"}
    assert all(f"klgrad {name}" in tool.description for name, tool in tools.items())
    assert not audited.is_error
    assert "a loss that prints" in text(audited)
    found = text(audited)[text(audited).index("{\n") :]
    assert json.JSONDecoder().raw_decode(found)[0]["results"][0]["verdict"] == "reverse-kl-token"
    assert failed.is_error
    assert "remedy" in text(failed)
    assert not differs.is_error  # the command ran; what it found is its answer
    assert "expected forward-kl-token" in text(differs)
    assert "forward KL" in text(advice)
    assert "0.1" in text(converted)
    assert "The KL is exactly 0" in text(diagnosed)


def test_without_the_sdk_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    with pytest.raises(MissingExtraError, match="klgrad\\[mcp\\]"):
        serve()
