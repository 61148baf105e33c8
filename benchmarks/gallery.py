"""Makes the pictures of docs/gallery.md, each by the commands that its page shows, from runs that it trains first.

python -m benchmarks.gallery --pairs multi30k-en-de --browser chromium      in a clone, an hour of one CPU core

A run that is complete is not trained again. Pages are photographed by a Chromium, any whose command is given.
"""

import argparse
import shlex
import subprocess
from pathlib import Path

DOCS = Path("docs")
PREPARE = {
    "data/digits": [
        "python -m benchmarks.digits data/digits-images",
        "pretrain prepare --input data/digits-images --kind images --output data/digits --split hash:0.2",
    ],
    "data/multi30k": [
        "pretrain prepare multi30k inputs.0.path={pairs}/train.en.gz inputs.0.paired_path={pairs}/train.de.gz"
        " inputs.1.path={pairs}/val.en.gz inputs.1.paired_path={pairs}/val.de.gz",
    ],
    "runs/quickstart/report.html": ["pretrain quickstart"],
    "runs/reproduce-ladder.done": ["pretrain reproduce ladder"],
}
"""Commands by the file or folder that says that they ran."""
TRAIN = "pretrain train multi30k_recurrent run.name=gallery-alignment train.steps=800 tracking.wandb=off"
DRAW = [
    "pretrain data show vit_digits data.path=data/digits --output {docs}/gallery_sheet.png --rows 48",
    "pretrain attention runs/quickstart --text 'def main(argv):' --layer 2,3 --output {docs}/gallery_attention.png",
    "pretrain attention runs/gallery-alignment --text 'a man in a red jacket is sitting on a bench .'"
    " --output {docs}/gallery_alignment.png",
    "pretrain report runs/quickstart --output runs/gallery-report.html",
]
PAGES = {"gallery_report.png": "runs/gallery-report.html", "gallery_law.png": "runs/reproduce-ladder/scale.html"}
"""Page of each photograph."""
PHOTOGRAPH = "{browser} --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1280,1100"


def main() -> None:
    """Prepares, trains and draws; prints each command. Raises: CalledProcessError: of the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pairs", required=True, metavar="FOLDER", help="with Multi30k: train.en.gz, train.de.gz, val..."
    )
    parser.add_argument("--browser", default="chromium", help="command of a Chromium")
    options = parser.parse_args()
    names = {"pairs": options.pairs, "browser": options.browser, "docs": DOCS}
    for product, commands in PREPARE.items():
        if not Path(product).exists():
            _run(commands, names)
    _run([TRAIN, *DRAW], names)
    for picture, page in PAGES.items():
        address = Path(page).resolve().as_uri()
        _run([f"{PHOTOGRAPH} --screenshot={DOCS / picture} {address}"], names)


def _run(commands: list[str], names: dict[str, object]) -> None:
    for command in commands:
        command = command.format(**names)
        print(f"$ {command}", flush=True)
        subprocess.run(shlex.split(command), check=True)


if __name__ == "__main__":
    main()
