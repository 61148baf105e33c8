"""`pretrain embed`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pretrain.cli.options import Device, ModelPath
from pretrain.errors import ConfigError


def embed_command(
    model: ModelPath,
    texts: Annotated[str, Argument(metavar="TEXTS", help="One per line or .jsonl; - for stdin.")],
    output: Annotated[Path, Option(help="File to write, a .npy.")],
    prefix: Annotated[str, Option(help="Put before each text, such as 'query: '.")] = "",
    width: Annotated[int | None, Option(min=1, help="First dimensions to keep.")] = None,
    mine: Annotated[int | None, Option(min=1, help="Hard negatives of records of triples.")] = None,
    batch_size: Annotated[int, Option(min=1, help="Texts per batch.")] = 32,
    device: Device = "auto",
) -> None:
    """Write the vectors of texts, of length 1: an array of numpy, fp32, a row a text.

    A record of a .jsonl has the field text. With --mine, TEXTS are records of triples, which are
    written to a .jsonl with the nearest texts of other records as their negatives.

    Example: pretrain embed runs/embed texts.jsonl --output vectors.npy
    """
    suffix = ".npy" if mine is None else ".jsonl"
    if output.suffix != suffix:
        raise ConfigError(f"--output {output} is no {suffix}", fix="write to a name that ends so")
    import io
    import json
    from functools import partial

    import numpy as np

    from pretrain.artifact.open import open_artifact
    from pretrain.evaluation.mining import mine_negatives, read_records
    from pretrain.generation.text import find_prompts
    from pretrain.generation.text_vectors import embed_texts
    from pretrain.utils.io import write_file

    records = [] if mine is None else read_records(Path(texts))
    read = find_prompts([], texts, "--text") if mine is None else None
    artifact = open_artifact(model, device)
    embed = partial(embed_texts, artifact.model, artifact.codec, width=width, batch_size=batch_size)
    if read is None:
        named = mine_negatives(records, lambda some: embed(artifact.normalized(some)), mine or 0)
        write_file(output, "".join(json.dumps(one) + "\n" for one in named).encode())
        print(f"{output}: {len(records):,} records")
        return
    vectors = embed(artifact.normalized(read), prefix=prefix)
    content = io.BytesIO()
    np.save(content, vectors)
    write_file(output, content.getvalue())
    print(f"{output}: {vectors.shape[0]:,} vectors of {vectors.shape[1]} numbers")
