"""`pretrain attention`: a picture of what the heads of a model attend to, over a text or an image."""

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from pretrain.cli.options import Device, Json, ModelPath, print_json
from pretrain.errors import ConfigError


def attention_command(
    model: ModelPath,
    text: Annotated[str | None, Option(help="Input of the model; with two stacks, the source.")] = None,
    target: Annotated[str | None, Option(help="For the decoder. Default: the answer.")] = None,
    image: Annotated[Path | None, Option(help="Input of a model of images, a file.")] = None,
    out: Annotated[Path | None, Option("--output", help="Picture to write: .png, .svg or .pdf.")] = None,
    layer: Annotated[str, Option(help="Indices from 0, such as 0,3; or all.")] = "all",
    head: Annotated[str, Option(help="Indices from 0, such as 0,3; or all.")] = "all",
    kind: Annotated[str | None, Option(help="self, cross (default), encoder, decoder.")] = None,
    rollout: Annotated[bool, Option("--rollout", help="Of an image: one map of all layers.")] = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Draw what the heads of a model attend to, tokens on both axes, or patches of an image.

    Example: pretrain attention runs/quickstart --text "def main():" --output heads.png
    """
    from dataclasses import replace

    from pretrain.artifact.model_path import open_source
    from pretrain.artifact.open import load_artifact
    from pretrain.attention_maps.terminal import AttentionRequest, see_attention
    from pretrain.preparation.normalize import build_normalizers
    from pretrain.utils.units import plural

    if out is None and not as_json:
        raise ConfigError("nothing to show", fix="give --output x.png, or --json")
    if (text is None) == (image is None):
        raise ConfigError(
            "the model needs one input" if text is None else "--text and --image are two inputs",
            fix="give --text, or to a model of images --image",
        )
    if image is not None:
        options = {"--target": target, "--kind": kind}
        for name in (name for name, value in options.items() if value is not None):
            raise ConfigError(f"{name} is of text", fix="leave it out, or give --text")
        facts = _see_image(model, image, layer, head, rollout, out, device)
    elif rollout:
        raise ConfigError("--rollout is of an image", fix="leave it out, or give --image")
    else:
        request = AttentionRequest(text or "", target, kind, layer, head, out)
        source = open_source(model)
        if source.config.input is not None:
            raise ConfigError("the model reads images, not text", where="--text", fix="give --image")
        artifact = load_artifact(source, device)
        if artifact.normalize is not None:
            to_source, to_target = build_normalizers(artifact.normalize)
            target = None if target is None else to_target(target)
            request = replace(request, text=to_source(request.text), target=target)
        facts = see_attention(artifact, request)
    if as_json:
        print_json(facts)
    else:
        print(f"{out}: {plural(len(facts.get('heads', ['rollout'])), 'map')}")


def _see_image(
    model: Path, image: Path, layer: str, head: str, rollout: bool, out: Path | None, device: str
) -> dict[str, Any]:
    """Draws the attention of a model over an image, by the sizes of its run."""
    from pretrain.artifact.model_path import open_source
    from pretrain.artifact.open import find_device, load_model
    from pretrain.attention_maps.image_maps import ImageRequest, see_image
    from pretrain.config.data import ImagesConfig
    from pretrain.config.load import load_config
    from pretrain.config.model import ModelConfig

    request = ImageRequest(image, layer, head, rollout, out)
    source = open_source(model)
    if not isinstance(source.config, ModelConfig) or source.config.input is None:
        raise ConfigError("the model reads text, not images", where="--image", fix="give --text")
    images = ImagesConfig()
    if source.run is not None:
        images = load_config(source.run.config, extensions="require").data.images
    return see_image(load_model(source, find_device(device)), source.config, images, request)
