# ruff: noqa: E402, F401
"""What the server of `tests.support.ranks` holds when it forks, so that no process of a test pays for it again."""

import gc

gc.disable()  # imports leave no garbage

import torch.utils.tensorboard
from imageio_ffmpeg import get_ffmpeg_exe
from transformers import CLIPModel, Qwen2VLForConditionalGeneration

import hyvideo.algorithms.grpo
import hyvideo.algorithms.nft
import hyvideo.evaluation.generate
import hyvideo.planning.preflight
import hyvideo.training.failure
import post_train
from hyvideo.models.reward_models import clip, text_rendering, videoalign, vlm_checks
from scripts.reports import report
from scripts.reports.page import _environment
from tests.support import ranks, tiny_model, training

for template in _environment().list_templates():
    _environment().get_template(template)  # compiled once
get_ffmpeg_exe()  # which tries it
gc.freeze()  # or every collection in a forked process would walk through all of this, and copy it
gc.unfreeze = lambda: None  # a run would thaw it at its end
gc.enable()
