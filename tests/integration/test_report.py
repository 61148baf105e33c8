"""`pretrain report`: the command, and its page in a real browser."""

import json
import re

import pytest

from pretrain.report.panels import COLORS
from tests.helpers.browser import dump, find_browser, take_picture
from tests.helpers.cli import run_cli, run_light
from tests.unit.report.run_folders import metric_row, write_long_run, write_run

in_browser = [
    pytest.mark.long,
    pytest.mark.skipif(find_browser() is None, reason="no headless browser here: apt install chromium"),
]


def test_the_command_writes_a_page_and_prints_facts(tmp_path):
    for name, rows in (("a", 4), ("b", 6)):
        write_run(tmp_path / "runs" / name, [metric_row(step) for step in range(1, rows)], name=name)
    result = run_cli("report", "runs/a", "runs/b", "--output", "new/page.html", "--json", cwd=tmp_path)
    assert (result.code, result.stderr) == (0, "")
    facts = json.loads(result.stdout)
    assert [(run["name"], run["state"], run["steps"]) for run in facts["runs"]] == [("a", "done", 3), ("b", "done", 5)]
    assert facts["config_differs"] == {}
    assert (tmp_path / facts["path"]).stat().st_size == facts["bytes"]


def test_a_report_imports_nothing_slow(tmp_path):
    write_run(tmp_path / "run", [metric_row(1)])
    slow = ("torch", "numpy", "matplotlib", "transformers", "wandb")
    done = run_light("report", "run", cwd=tmp_path, without=slow)
    assert done.code == 0, done.stderr
    assert "report.html: " in done.stdout and (tmp_path / "report.html").is_file()


def test_what_is_no_run_is_an_error_and_leaves_no_page(tmp_path):
    write_run(tmp_path / "run", [metric_row(1)])
    result = run_light("report", "run", "nowhere", cwd=tmp_path)
    assert result.code == 64 and result.errors == ["nowhere: no run here (no run.json); check the path"]
    assert not (tmp_path / "report.html").exists()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of two runs, one of them long and with a name that wants to be a script."""
    folder = tmp_path_factory.mktemp("report")
    write_long_run(folder / "long", num_rows=2000)
    rows = [metric_row(step) for step in range(10, 9000, 30)]
    write_run(folder / "other", rows, name="</script><script>document.body.innerHTML=''</script>")
    assert run_light("report", "long", "other", cwd=folder).code == 0
    return folder / "report.html"


def curves(html, kind="line"):
    """The points of the curves of each panel, by panel."""
    figures = re.findall(r'<figure data-panel="\d+">(.*?)</figure>', html, re.DOTALL)
    paths = [re.findall(rf'<path class="{kind}"[^>]* d="([^"]+)"', figure) for figure in figures]
    return [[[float(number) for number in re.findall(r"-?[\d.]+", path)] for path in panel] for panel in paths]


def texts(html):
    """What stands at the axes of each panel."""
    figures = re.findall(r'<figure data-panel="\d+">(.*?)</figure>', html, re.DOTALL)
    return [re.findall(r"<text[^>]*>([^<]*)</text>", figure) for figure in figures]


class TestInABrowser:
    """As a user sees it."""

    pytestmark = in_browser

    def test_the_script_draws_what_the_page_holds_without_it(self, page):
        drawn, said = dump(page)
        static = page.read_text()
        assert said == [] and '<html lang="en" class="live"' in drawn and 'class="live"' not in static
        assert texts(drawn) == texts(static)
        for kind in ("line", "band", "restart", "lost", "beyond"):
            both = list(zip(curves(drawn, kind), curves(static, kind), strict=True))
            assert kind == "band" or any(left for left, _ in both)
            for left, right in both:
                assert [len(path) for path in left] == [len(path) for path in right]
                # Numbers in the page have five digits: a pixel is one in four hundred.
                assert all(
                    a == pytest.approx(b, abs=0.25) for one, other in zip(left, right, strict=True)
                    for a, b in zip(one, other, strict=True)
                )  # fmt: skip

    def test_the_address_sets_axis_smoothing_and_runs(self, page):
        plain, _ = dump(page)
        other, said = dump(page, "x=tokens&smooth=0.9&log=1&hide=1")
        assert said == [] and ">tokens</text>" in other and ">0.90</output>" in other
        loss, smooth_loss = curves(plain)[0], curves(other)[0]
        assert (len(loss), len(smooth_loss)) == (2, 1)
        assert smooth_loss[0] != loss[0] and 'class="line raw"' in other
        zoomed, _ = dump(page, "from=5000&to=6000")
        assert len(curves(zoomed)[0][0]) < len(loss[0]) / 3

    @pytest.mark.parametrize(("width", "scripts"), [(1280, True), (400, True), (1280, False)])
    def test_a_picture_shows_the_curves_of_both_runs(self, page, tmp_path, width, scripts):
        from matplotlib import image

        if not scripts:
            # The page's own policy can say so: its script is refused, as any other than its own is.
            text, count = re.subn("script-src 'sha256-[^']*'", "script-src 'none'", page.read_text())
            page = tmp_path / "quiet.html"
            page.write_text(text)
            drawn, said = dump(page)
            assert count == 1 and len(said) == 1 and "Content Security Policy" in said[0]
            assert 'class="live"' not in drawn
        take_picture(page, tmp_path / "page.png", width, 1600)
        pixels = (image.imread(tmp_path / "page.png")[..., :3] * 255).round().astype(int)
        assert pixels.shape == (1600, width, 3)
        for color in COLORS[:2]:
            rgb = [int(color[place : place + 2], 16) for place in (1, 3, 5)]
            near = (abs(pixels - rgb).max(axis=-1) < 40).sum()
            # A swatch has some 50 pixels; a curve across a panel at least as many as the panel is wide.
            assert near > 1000, f"{color}: {near} pixels"
