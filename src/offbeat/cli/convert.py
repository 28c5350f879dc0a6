"""``offbeat convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from offbeat.cli.output import JsonFlag, reporting, show_table
from offbeat.cli.waiting import telling_progress


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="A GGUF file of the llama family.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")],
    dtype: Annotated[
        Literal["bf16", "fp32"], typer.Option(help="Of the weights; fp32 keeps all that is in the file.")
    ] = "bf16",
    as_json: JsonFlag = False,
) -> None:
    """Convert a GGUF file to a folder in the layout of Hugging Face."""
    with reporting(as_json) as report:
        with telling_progress(f"converting {file.name}"):
            from offbeat.llm import gguf
            from offbeat.llm.loading import dtype_of

            shape = gguf.convert(file, folder, dtype_of(dtype))
        rows = {
            "architecture": shape.architecture,
            "parameters": f"{shape.num_parameters:,}, {dtype}",
            "positions": f"{shape.max_positions:,}",
            "next": f'offbeat generate {folder} "Once upon a time"; --chat for a model that answers',
        }
        show_table(f"{file} is now {folder}", rows)
        report.values.update(
            folder=str(folder),
            architecture=shape.architecture,
            num_parameters=shape.num_parameters,
            max_positions=shape.max_positions,
            dtype=dtype,
        )
