"""Arguments of the wrong kind are refused when the function is called, not when they first act.

Catches: a text such as "no" that counts as True; a function that would be missing only at SIGTERM;
a save in the background that a second thread waits for, while the first one writes to its tensors.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402  (after torch is known to be there)

import modicum.torch as front  # noqa: E402
from modicum.errors import UsageError  # noqa: E402
from modicum.torch.dcp import ModicumWriter  # noqa: E402


def preempted(save: Any) -> None:
    with front.save_on_sigterm(save):
        pass


def rebound(model: Any, resuming: Any) -> None:
    with front.rebind_parameters(model, torch.optim.SGD(model.parameters()), resuming=resuming):
        pass


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m, run: preempted(None), "save .*a function without arguments"),
        (lambda m, run: rebound(m, "x"), "resuming .*True or False"),
        (
            lambda m, run: front.save(m, run, step=1, options=front.SaveOptions(adapters="no")),
            "adapters .*True or False",
        ),
        (lambda m, run: ModicumWriter(run, step="1"), "step .*an integer from 0"),
        (lambda m, run: ModicumWriter(run, step=1, keep="all"), "keep .*an integer from 1"),
        (lambda m, run: front.load_full_state_dict(m, {}, strict="x"), "strict .*True or False"),
        (lambda m, run: front.load_full_state_dict(m, {}, consume=1), "consume .*True or False"),
    ],
)
def test_they_are_refused(tmp_path: Path, call: Callable[[Any, Path], Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call(torch.nn.Linear(2, 2), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_only_the_thread_of_a_save_waits_for_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    front.load(model, tmp_path / "model.safetensors", progress=False)
    saving = front.async_save(model, tmp_path / "run", step=1)
    refused: list[UsageError] = []

    def wait() -> None:
        for method in (saving.result, saving.exception):
            with pytest.raises(UsageError, match="not the thread that called async_save") as error:
                method()
            refused.append(error.value)
        saving.done()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    with pytest.raises(UsageError, match="callback .*a function"):
        saving.add_done_callback("x")
    assert len(refused) == 2 and saving.result().step == 1
    assert saving.exception() is None and saving.done()
