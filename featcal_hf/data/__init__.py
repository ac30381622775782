"""Datasets to model inputs: which rows a task is calibrated on, and what the models are given for each."""

from featcal_hf.data.batches import Batch
from featcal_hf.data.task import TaskData, load_task

__all__ = ["Batch", "TaskData", "load_task"]
