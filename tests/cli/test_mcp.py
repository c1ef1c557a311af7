"""The MCP server, driven by the SDK's own client over standard input and output."""

import asyncio
import json
import os
import sys

import pytest

from klgrad.cli import EXAMPLES

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
        server = mcp.StdioServerParameters(
            command=sys.executable, args=["-m", "klgrad", "mcp"], cwd=folder, env=dict(os.environ)
        )
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
    from klgrad.cli import mcp
    from klgrad.errors import MissingExtraError

    monkeypatch.setitem(sys.modules, "mcp.server", None)
    with pytest.raises(MissingExtraError, match="klgrad\\[mcp\\]"):
        mcp()
