"""The command `python -m modicum.recipes`."""

import argparse
import sys
from pathlib import Path

from modicum.errors import Error
from modicum.recipes.recipe import build_recipe, meta_model


def main(arguments: list[str] | None = None) -> int:
    """Writes recipe.json: how each tensor of a directory's model is made of stored tensors."""
    parser = argparse.ArgumentParser(prog="python -m modicum.recipes", description=main.__doc__)
    parser.add_argument("directory", help="a Hugging Face directory: config.json and safetensors")
    parser.add_argument("-o", "--output", help="the file to write; default: stdout")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; default: the config's")
    parser.add_argument(
        "--untie",
        action="store_true",
        help="if both tensors of a tie are stored, load both instead of comparing them",
    )
    parser.add_argument(
        "--ignore-missing",
        action="store_true",
        help="leave out tensors that are not stored; the default is an error",
    )
    parser.add_argument(
        "--ignore-unexpected",
        action="store_true",
        help="drop stored tensors that are not in the model; the default is an error",
    )
    options = parser.parse_args(arguments)
    try:
        model = meta_model(options.directory, options.dtype)
        recipe = build_recipe(
            model,
            options.directory,
            dtype=options.dtype or model.dtype,
            missing="ignore" if options.ignore_missing else "error",
            unexpected="ignore" if options.ignore_unexpected else "error",
            untie=options.untie,
        )
    except Error as error:
        print(f"modicum: {error}", file=sys.stderr)
        return error.code
    if options.output:
        Path(options.output).write_text(recipe.text(), "utf-8")
    else:
        print(recipe.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
