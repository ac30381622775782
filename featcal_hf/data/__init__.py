"""Datasets to model inputs: which rows a task is calibrated on, and what the models are given for each."""

from featcal_hf.data.batches import Batch
from featcal_hf.data.heldout import HeldOut, HeldOutBatch, held_out, open_other, used_digests
from featcal_hf.data.task import OpenedTask, TaskData, load_task, open_task

__all__ = [
    "Batch",
    "HeldOut",
    "HeldOutBatch",
    "OpenedTask",
    "TaskData",
    "held_out",
    "load_task",
    "open_other",
    "open_task",
    "used_digests",
]
