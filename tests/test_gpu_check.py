"""tools/gpu_check.py on a machine without a GPU: what can be checked is, the rest is listed."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "gpu_check.py"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("gpu_check", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "write_inputs", lambda folder, is_large: None)
    return module


def run(tool: Any, monkeypatch: pytest.MonkeyPatch, gpus: int, *arguments: str) -> int:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(tool, "machine", lambda: "a machine")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
    return tool.main()


@pytest.mark.slow
def test_on_a_cpu(tmp_path: Path) -> None:
    """The real thing: exit code 0, a figure for what ran, and "not run" for the rest."""
    page = tmp_path / "gpu.md"
    command = [
        sys.executable,
        str(TOOL),
        "--only",
        "waits",
        "fsdp",
        "memory",
        "profile",
        "two_gpus",
    ]
    done = subprocess.run([*command, "--write", str(page)], capture_output=True, text=True,
                          env={"PATH": "", "CUDA_VISIBLE_DEVICES": ""}, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text(encoding="utf-8")
    assert text.count("not run: it needs a GPU") == 3
    assert "| graphs kept after an injected error | 0 | 0 | yes |" in text
    assert text.partition("\n\n")[2] in done.stdout


def test_what_is_not_as_expected_fails(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """All checks are begun where there are GPUs, in order; one figure that is off: exit code 1."""
    begun = []

    def measure(name: str, work: Path, seconds: float) -> list[Any]:
        begun.append(name)
        return [tool.at_most(name, 2.0 if name == "speed" else 1.0, 1.0)]

    monkeypatch.setattr(tool, "measure", measure)
    assert run(tool, monkeypatch, 2) == 1
    assert begun == list(tool.CHECKS)
    assert "| speed | 2 | at most 1 | **no** |" in capsys.readouterr().out
    assert run(tool, monkeypatch, 2, "--only", "fp16") == 0


def test_time_is_kept(tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """No check begins that would not end in time; all of them fit into the usual ten minutes."""
    monkeypatch.setattr(tool, "measure", lambda *_: pytest.fail("begun"))
    assert run(tool, monkeypatch, 2, "--minutes", "0.1") == 0
    assert capsys.readouterr().out.count("not run: no time left |") == len(tool.CHECKS)
    assert sum(check.seconds for check in tool.CHECKS.values()) < tool.MINUTES * 60


def test_a_check_that_fails_is_a_row(tool: Any, tmp_path: Path) -> None:
    """Its last line is shown, and what it had found before is kept."""
    (tmp_path / "profile.json").write_text('[{"what": "a", "figure": "1"}]', encoding="utf-8")
    rows = tool.measure("profile", tmp_path, 60.0)  # there is no model in this folder
    assert [row.what for row in rows] == ["a", tool.CHECKS["profile"].what]
    assert rows[1].met is False
    assert rows[1].figure.startswith("FAILED: exit code 1 ")
