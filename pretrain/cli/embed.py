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
    batch_size: Annotated[int, Option(min=1, help="Texts per batch.")] = 32,
    device: Device = "auto",
) -> None:
    """Write the vectors of texts, of length 1: an array of numpy, fp32, a row a text.

    A record of a .jsonl has the field text.

    Example: pretrain embed runs/embed texts.jsonl --output vectors.npy
    """
    if output.suffix != ".npy":
        raise ConfigError(
            f"--output {output} is no .npy, which holds an array",
            fix="write to a name that ends so",
        )
    import io

    import numpy as np

    from pretrain.artifact.open import open_artifact
    from pretrain.generation.text import find_prompts
    from pretrain.generation.text_vectors import embed_texts
    from pretrain.utils.io import write_file

    read = find_prompts([], texts, "--text")
    assert read is not None, "a file is named"
    artifact = open_artifact(model, device)
    vectors = embed_texts(
        artifact.model,
        artifact.codec,
        artifact.normalized(read),
        prefix=prefix,
        width=width,
        batch_size=batch_size,
    )
    content = io.BytesIO()
    np.save(content, vectors)
    write_file(output, content.getvalue())
    print(f"{output}: {vectors.shape[0]:,} vectors of {vectors.shape[1]} numbers")
