"""FeatCal for the Hugging Face workflow: repair a merged model's features, block by block, in closed form."""

from featcal_hf.card import CardReport, write_card
from featcal_hf.errors import (
    CardError,
    CheckpointError,
    DataError,
    FeatCalError,
    HubError,
    RanksError,
    RecipeError,
    SolveError,
)
from featcal_hf.eval_report import EvalReport
from featcal_hf.evaluation import evaluate
from featcal_hf.hub import PushReport, push
from featcal_hf.in_memory import CalibrationReport, calibrate_model
from featcal_hf.merge import MergeReport, merge
from featcal_hf.ranks import Ranks, joined_ranks
from featcal_hf.recipe import Settings
from featcal_hf.record import RunReport
from featcal_hf.report import report
from featcal_hf.run import calibrate

__version__ = "0.1.0"

__all__ = [
    "CalibrationReport",
    "CardError",
    "CardReport",
    "CheckpointError",
    "DataError",
    "EvalReport",
    "FeatCalError",
    "HubError",
    "MergeReport",
    "PushReport",
    "Ranks",
    "RanksError",
    "RecipeError",
    "RunReport",
    "Settings",
    "SolveError",
    "__version__",
    "calibrate",
    "calibrate_model",
    "evaluate",
    "joined_ranks",
    "merge",
    "push",
    "report",
    "write_card",
]
