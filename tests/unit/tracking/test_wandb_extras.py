"""What wandb gets besides rows, by the real library offline; and servers that hang, err or talk nonsense."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image

from tests.unit.tracking.test_wandb_tracker import KEY, python
from tests.unit.tracking.wandb_file import read_history, read_records

__all__ = ["python"]
pytestmark = pytest.mark.long


def test_alerts_texts_pictures_and_checkpoints_arrive_in_the_offline_file(python, tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "drawn.png")
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000004" / "weights").write_bytes(b"bytes")
    done = python(
        """
        m = mirror(artifacts="files")
        m.log(4, {"loss": 1.0})
        m.samples(4, [("Once", " upon a time")])
        m.picture(4, "attention", Path("drawn.png"))
        m.checkpoint(4, Path("step-00000004"))
        m.alert("A loss spike", "step 4, with " + os.environ["STORE_SECRET"])
        m.close()
        """,
        STORE_SECRET="hunter2hunter2",
    )
    assert (done.returncode, done.stderr) == (0, "")
    (alert,) = read_records(tmp_path / "run", "alert")
    assert (alert.alert.title, alert.alert.text, alert.alert.level) == ("A loss spike", "step 4, with ***", "ERROR")
    row, table, image = read_history(tmp_path / "run")
    assert row == {"step": 4, "train/loss": 1.0}
    sizes = {key: image[f"attention.{key}"] for key in ("_type", "width", "height")}
    assert (image["step"], sizes) == (4, {"_type": "image-file", "width": 30, "height": 20})
    (copy,) = (tmp_path / "run" / "wandb").glob("offline-run-*/files/" + image["attention.path"])
    assert copy.read_bytes() == (tmp_path / "drawn.png").read_bytes()
    assert (table["step"], table["samples.nrows"]) == (4, 1)
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/files/" + table["samples.path"])
    assert json.loads(path.read_text())["data"] == [[4, "Once", " upon a time"]]
    logged = [record.request.log_artifact.artifact for record in read_records(tmp_path / "run", "request")]
    logged += [record.artifact for record in read_records(tmp_path / "run", "artifact")]
    (artifact,) = [artifact for artifact in logged if artifact.type == "checkpoint"]
    assert (artifact.name, sorted(artifact.aliases)) == ("checkpoint-abc123", ["latest", "step-4"])
    assert [entry.path for entry in artifact.manifest.contents] == ["weights"]


def test_what_cannot_be_sent_is_one_warning_and_rows_go_on(python, tmp_path):
    done = python("""
        m = mirror(artifacts="files", find_facts=lambda: 1 / 0)
        m.checkpoint(4, Path("nowhere"))
        m.picture(4, "attention", Path("nowhere.png"))
        m.log(5, {"loss": 1.0})
        m.close()
    """)
    assert done.returncode == 0
    assert done.stderr.count("\n") == 3
    assert "wandb: cannot log the picture nowhere.png: FileNotFoundError" in done.stderr
    assert "wandb: cannot describe the run: ZeroDivisionError" in done.stderr
    assert "wandb: cannot log the checkpoint nowhere: " in done.stderr
    assert read_history(tmp_path / "run") == [{"step": 5, "train/loss": 1.0}]


def test_facts_stand_beside_the_config(python, tmp_path):
    done = python("""
        m = mirror(run_config={"seed": 1}, find_facts=lambda: {"code": {"dirty": False}})
        m.log(1, {"loss": 1.0})
        m.close()
    """)
    assert (done.returncode, done.stderr) == (0, "")
    (record,) = read_records(tmp_path / "run", "run")
    config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
    assert (config["seed"], config["code"]) == (1, {"dirty": False})


def test_a_run_that_sends_no_rows_is_told_once(python, tmp_path):
    done = python("""
        import queue, threading
        from types import SimpleNamespace

        waits, logged, waits_for_ever = [], threading.Event(), threading.Event()

        class Rows(queue.Queue):  # where nothing is to be had, the time that somebody waits passes at once
            def get(self, timeout):
                logged.wait(LIMIT_S)  # else there may be no row yet
                waits.append(timeout)
                if timeout is None or len(waits) > 9:
                    waits_for_ever.set()
                elif self.empty():
                    raise queue.Empty
                return super().get()

        tracker.queue = SimpleNamespace(Queue=Rows, Empty=queue.Empty, Full=queue.Full)
        m = mirror(stall_alert_s=1800)
        m.log(3, {"loss": 1.0})
        logged.set()
        assert waits_for_ever.wait(LIMIT_S)
        m.close()
        print(waits)
    """)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "[1800.0, 1800.0, None]\n")
    (alert,) = read_records(tmp_path / "run", "alert")
    assert alert.alert.title == "The run stands still"
    assert alert.alert.text.endswith("the last of step 3")


def test_without_alerts_none_are_sent(python, tmp_path):
    done = python("m = mirror(alerts=False); m.alert('A', 'B'); m.log(1, {'loss': 1.0}); m.close()")
    assert (done.returncode, done.stderr) == (0, "")
    assert read_records(tmp_path / "run", "alert") == []


@pytest.fixture(params=["errs", "garbage", "hangs"])
def bad_server(request) -> Iterator[str]:
    """The address of a server that answers every request with 500, with garbage, or not at all."""
    if request.param == "hangs":
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        return

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(500 if request.param == "errs" else 200)
            self.end_headers()
            self.wfile.write(b"<html>no JSON" * 10)

        do_GET = do_POST

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_bad_server_means_offline_and_no_row_is_lost(python, tmp_path, bad_server):
    done = python(
        """
        give_up_online_soon()
        m = mirror("online")
        for step in range(1, 1001):
            m.log(step, {"loss": 1.0})
        m.close()
        print("trained on")
        """,
        WANDB_API_KEY=KEY,
        WANDB_BASE_URL=bad_server,
    )
    assert (done.returncode, done.stdout) == (0, "trained on\n")
    assert done.stderr.count("WARNING wandb: cannot start online: ") == 1
    assert "; tracked offline, see run/wandb/SYNC.txt\n" in done.stderr
    assert "cannot log" not in done.stderr and "Traceback" not in done.stderr
    assert KEY not in done.stderr
    assert len(read_history(tmp_path / "run")) == 1000
