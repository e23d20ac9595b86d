"""The Python of the README runs as it stands, one block after the other."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 3
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert "The answer is" in capsys.readouterr().out


def test_shell_commands_are_those_of_the_package():
    assert "smcgen sample" in README
    assert len(re.findall(r"```sh\n", README)) == 3
