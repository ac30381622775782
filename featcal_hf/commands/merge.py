"""`featcal-hf merge`."""

from __future__ import annotations

from pathlib import Path

import click

from featcal_hf.commands.options import (
    COMPUTING,
    READING,
    RECIPE,
    TALKING,
    open_console,
    options,
    stages,
    usable_device,
)
from featcal_hf.mapping import read_mapping
from featcal_hf.merge import SHARD_SIZE, merge
from featcal_hf.progress import step_progress


@click.command("merge")
@options(
    [
        RECIPE,
        click.argument("out", type=click.Path(path_type=Path)),
        *READING,
        click.option("--out-shard-size", default=SHARD_SIZE, show_default=True, help="Bytes per output shard."),
        click.option(
            "--copy-tokenizer/--no-copy-tokenizer", default=True, help="Copy the base's tokenizer, processor."
        ),
        click.option(
            "--write-model-card/--no-write-model-card", default=True, help="Output README.md and mergekit_config.yml."
        ),
        click.option("--random-seed", type=int, help="Seed for reproducible use of randomized merge methods."),
        *TALKING,
        *COMPUTING,
    ]
)
def merge_command(
    recipe: Path,
    out: Path,
    mapped: tuple[str, ...],
    cache_dir: str | None,
    trust_remote_code: bool,
    out_shard_size: str,
    copy_tokenizer: bool,
    write_model_card: bool,
    random_seed: int | None,
    verbosity: int,
    quiet: bool,
    device: str | None,
    cuda: bool,
) -> None:
    """Merge the models of RECIPE into the new folder OUT, with mergekit's methods.

    For architectures that mergekit-yaml can't merge, or of which it writes a part: CLIP, ViT, DINOv2, BERT, Whisper.
    """
    console = open_console(verbosity)
    with step_progress(console, quiet) as on_step:
        report = merge(
            recipe,
            out,
            out_shard_size=out_shard_size,
            device=usable_device(device, cuda),
            cache_dir=cache_dir,
            trust_remote_code=trust_remote_code,
            random_seed=random_seed,
            copy_tokenizer=copy_tokenizer,
            write_model_card=write_model_card,
            mapping=read_mapping(mapped),
            on_stage=stages(console, quiet),
            on_step=on_step,
        )
    if not quiet:
        copied = f", {len(report.copied)} copied" if report.copied else ""
        console.print(
            f"{report.merged} tensors merged{copied} in {report.seconds:.0f} s", highlight=False, soft_wrap=True
        )
        console.print(f"Wrote {out}", highlight=False, soft_wrap=True)
