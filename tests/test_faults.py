"""Real runs on two ranks survive what is done to them: see faults.py."""

import sys
from collections.abc import Callable, Iterator

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


@pytest.mark.parametrize("fault", HERE, ids=", ".join)
def test_fault(lab: faults.Lab, fault: tuple[str, str]) -> None:
    """The run ends as documented; some go on, to the very weights of a run that nothing happened to
    (`python benchmarks/faults.py` lets all of them go on)."""
    do: Callable[[faults.Lab, str], int] = faults.FAULTS[fault]
    try:
        lost = do(lab, f"fault-{list(faults.FAULTS).index(fault)}")
    except PermissionError as error:
        pytest.skip(f"no disk to be mounted here: {error}")
    assert lost <= 7  # saved every 3 steps; a damaged one is a checkpoint further back


def test_soak(lab: faults.Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """A dozen kills at random moments (seed 1): nothing is lost but the steps since a save."""
    with capsys.disabled():
        killed = faults.soak(lab, 12, 1, lambda text: print(f"\n  {text}", end="", flush=True))
    assert len(killed) == 12
