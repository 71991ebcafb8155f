"""Real runs on two ranks survive faults: see faults.py."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import faults
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[faults.Lab]:
    lab = faults.Lab(tmp_path_factory.mktemp("faults"), thorough=False)
    yield lab
    lab.forked.close()


HERE = [fault for fault in faults.FAULTS if fault[0] not in faults.ALSO_ELSEWHERE]
WAITING = [f for f in HERE if f[0] == "SIGSTOP of a rank" or f[1] == "in an evaluation"]


def check(lab: faults.Lab, fault: tuple[str, str]) -> None:
    lost_steps = faults.FAULTS[fault](lab, f"fault-{list(faults.FAULTS).index(fault)}")
    assert lost_steps <= 7  # saved every 3 steps; a damaged one is a checkpoint further back


@pytest.mark.parametrize("fault", [fault for fault in HERE if fault not in WAITING], ids=", ".join)
def test_fault(lab: faults.Lab, fault: tuple[str, str]) -> None:
    """The run ends as documented; some resume, and end with the weights of an uninterrupted run
    (`python benchmarks/faults.py` resumes all of them)."""
    try:
        check(lab, fault)
    except PermissionError as error:
        pytest.skip(f"no disk can be mounted here: {error}")


def test_faults_that_wait(lab: faults.Lab) -> None:
    """A rank that is frozen in a step and in start-up, a stop in an evaluation: at the same time,
    since they mostly wait."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda fault: check(lab, fault), WAITING))


@pytest.mark.long
def test_soak(lab: faults.Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """A dozen kills at random moments (seed 1): nothing is lost but the steps since a save."""
    with capsys.disabled():
        killed = faults.soak(lab, 12, 1, lambda text: print(f"\n  {text}", end="", flush=True))
    assert len(killed) == 12
