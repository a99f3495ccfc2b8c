"""``retrofit demo``: the main job from end to end in about two minutes, on a model and a text made on the spot.

Train a teacher that recalls, patch it, distil its memory, compare with what it had to beat, save adapter and export,
load the export where this package does not exist, and let it complete a prompt.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PrinterCallback

import retrofit
from distill import demo_reload
from distill.arguments import DistillArguments
from distill.data import PackedRows
from distill.demo_teacher import LENGTH, train_teacher
from distill.demo_text import documents, generator, recall_distance, tokenizer
from distill.progress import ProgressCallback, progress_bar
from distill.trainer import DistillTrainer
from patches.errors import RetrofitError
from retrofit.evaluate import evaluate, gap_closed
from retrofit.files import check_output, write_folder
from retrofit.table import print_table, write_rows

WINDOW, SINKS = 32, 4
STEPS, BATCH, LEARNING_RATE = 250, 8, 3e-2
HELD_OUT = 64  # documents
THREADS = 2  # more do not help at this size

COLUMNS = {
    "name": ("", ""),
    "far_recall": ("far recall", ".3f"),
    "kl": ("KL to teacher", ".4f"),
    "kl_gap_closed": ("KL gap closed", ".1%"),
    "nll": ("NLL", ".3f"),
    "state_bytes": ("state bytes per layer", ",d"),
    "seconds": ("seconds", ".0f"),
}
