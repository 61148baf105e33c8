import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.preparation.prepare import prepare
from tests.helpers.corpus import digests, write_corpus
from tests.helpers.prepare_config import prepare_config
from tests.helpers.processes import is_running
from tests.helpers.waiting import finish, wait_until

CHILD = """
import sys
from pathlib import Path
from pretrain.preparation.prepare import prepare
from tests.helpers.prepare_config import prepare_config
from tests.helpers.waiting import poll_pause

if __name__ == "__main__":
    hold = Path(__file__).with_name("hold")
    def show(phase, *counts):
        print(phase, *counts, flush=True)
        while Path(sys.argv[2], "parts").is_dir() and any(Path(sys.argv[2], "parts").glob("*.json")) and hold.exists():
            poll_pause()
    try:
        config = prepare_config(Path(sys.argv[2]), [sys.argv[1]], vocab_size=300, part_bytes=25_000)
        prepare(config, show, processes=2)
    except KeyboardInterrupt:
        sys.exit(99)
    except Exception as error:
        print(type(error).__name__, error)
        sys.exit(1)
"""


def workers_of(pid):
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            is_child = int(path.read_text().rpartition(")")[2].split()[1]) == pid
            if is_child and "spawn_main" in (path.parent / "cmdline").read_text():
                found.append(int(path.parent.name))
    return sorted(found)


def options(folder, corpus):
    return prepare_config(folder, [corpus], vocab_size=300, part_bytes=25_000)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "in"
    write_corpus(folder, 60, 2000)
    return folder


@pytest.fixture(scope="module")
def expected(corpus):
    prepare(options(corpus.parent / "whole", corpus), processes=1)
    return digests(corpus.parent / "whole")


@pytest.fixture
def running_pool(tmp_path, corpus):
    """A `prepare` with two workers that has finished its first part, and does not end while there is `hold`."""
    script = tmp_path / "child.py"
    (tmp_path / "hold").touch()
    script.write_text(CHILD)
    process = subprocess.Popen(
        [sys.executable, str(script), str(corpus), str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )

    def has_workers_and_a_part():
        return list((tmp_path / "out/parts").glob("*.json")) and len(workers_of(process.pid)) == 2

    wait_until(has_workers_and_a_part, "a finished part and two workers", while_running=process)
    yield process
    process.kill()
    process.communicate()


def resume(folder, corpus):
    assert not (folder / "index.json").exists()
    prepare(options(folder, corpus), processes=1)
    return digests(folder)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_die_with_their_killed_parent_and_a_restart_completes(tmp_path, running_pool, corpus, expected):
    workers = workers_of(running_pool.pid)
    assert len(workers) == 2
    running_pool.kill()
    running_pool.wait()
    assert resume(tmp_path / "out", corpus) == expected
    wait_until(lambda: not any(is_running(pid) for pid in workers), "the workers' end")


STANDING_STILL = """
import multiprocessing, os, signal, sys
from pretrain.preparation.pool import _die_with_parent

def work():
    _die_with_parent()
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=work)
    worker.start()
    worker.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has to run")
def test_a_worker_whose_threads_do_not_run_dies_with_its_parent_too(tmp_path):
    script = tmp_path / "standing.py"
    script.write_text(STANDING_STILL)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        worker = int(parent.stdout.readline())
        parent.kill()
        wait_until(lambda: not is_running(worker), "the worker's end")


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_worker_ends_the_run_with_advice_and_keeps_finished_parts(tmp_path, running_pool, corpus, expected):
    os.kill(workers_of(running_pool.pid)[0], signal.SIGKILL)
    (tmp_path / "hold").unlink()
    output, errors = finish(running_pool)
    assert running_pool.returncode == 1
    assert "DataError" in output and "a worker process died, most likely killed for want of memory" in output
    assert "Traceback" not in errors
    assert list((tmp_path / "out/parts").glob("*.json"))
    assert resume(tmp_path / "out", corpus) == expected


def test_ctrl_c_ends_all_workers_quietly(tmp_path, running_pool, corpus, expected):
    os.kill(running_pool.pid, signal.SIGINT)
    _, errors = finish(running_pool)
    assert running_pool.returncode == 99
    assert errors == ""
    assert not list((tmp_path / "out").rglob("*.tmp-*"))
    assert resume(tmp_path / "out", corpus) == expected


def test_a_worker_imports_no_sections_of_models():
    listed = "import sys, pretrain.preparation.part; print([name for name in sys.modules if 'config.model' in name])"
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
