from __future__ import annotations

import importlib.util
from pathlib import Path

import click

import trainmedic
from trainmedic_server.demo.training_text import FaultFile


@click.command()
@click.argument("job")
@click.option("--directory", type=click.Path(path_type=Path), required=True)
@click.option("--metrics-port", type=int, required=True)
@click.option("--plain", is_flag=True, help="Train without PyTorch.")
def main(job: str, directory: Path, metrics_port: int, plain: bool) -> None:
    """Train until a signal ends it."""
    faults = FaultFile(directory, job)
    with trainmedic.connect(job=job, metrics_port=metrics_port) as medic:
        if plain or importlib.util.find_spec("torch") is None:
            from trainmedic_server.demo.plain_training import PlainTraining

            PlainTraining(medic, faults).train()
        else:
            from trainmedic_server.demo import torch_training

            torch_training.train(medic, directory / job, faults)


if __name__ == "__main__":
    main()
