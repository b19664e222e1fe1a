"""Evaluation videos depend on prompt and seed, not on how many are made together or in which order."""

from collections.abc import Sequence

import torch
from accelerate.hooks import CpuOffload
from torch import Tensor, nn

from hyvideo.data.prompts import Prompt
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance, HunyuanVideoGRPOPipeline
from hyvideo.pipelines.sampling import sample_prompts
from tests.support.pipelines import NUM_STEPS, PROMPTS, VIDEO


def prompts(*seeds: int | None) -> list[Prompt]:
    return [Prompt(PROMPTS[i % 3], index=i, seed=seed, ref_image_path=None) for i, seed in enumerate(seeds)]


def videos_of(
    pipeline: HunyuanVideoGRPOPipeline, chosen: Sequence[Prompt], seed: int = 1, batch_size: int = 8
) -> Tensor:
    return sample_prompts(pipeline, chosen, Guidance(), **VIDEO, seed=seed, batch_size=batch_size)


def differ(first: Tensor, second: Tensor) -> bool:
    return bool((first.int() - second.int()).abs().max() > 1)


def test_batch_size_and_order_change_at_most_rounding(pipeline):
    chosen = prompts(None, None, 5)
    expected = videos_of(pipeline, chosen)
    for batch_size in (1, 2, 3):
        assert not differ(videos_of(pipeline, chosen, batch_size=batch_size), expected)
    assert not differ(videos_of(pipeline, [chosen[2], chosen[0]]), expected[[2, 0]])


def test_a_prompts_own_seed_counts_wherever_it_stands_and_others_do_not_share_noise(pipeline):
    chosen = prompts(None, 5)
    first, second = videos_of(pipeline, chosen, seed=1), videos_of(pipeline, chosen, seed=2)
    assert differ(first[0], second[0])
    assert torch.equal(first[1], second[1])
    seeded, unseeded = (
        [Prompt(PROMPTS[0], index=i, seed=seed, ref_image_path=None) for i in (0, 9)] for seed in (5, None)
    )
    assert torch.equal(videos_of(pipeline, seeded[:1]), videos_of(pipeline, seeded[1:]))
    assert differ(*videos_of(pipeline, unseeded))


def test_offloaded_encoders_leave_the_gpu_before_the_transformer_comes(pipeline, monkeypatch):
    """On a CPU with a record of who would be on the GPU. A prompt without quotes leaves the second encoder out."""
    names = {module: name for name, module in pipeline.components.items() if isinstance(module, nn.Module)}
    there, seen = set(), {}

    class Recorded(CpuOffload):
        """Notes where a module would be."""

        def init_hook(self, module: nn.Module) -> nn.Module:
            there.discard(names[module])
            return module

        def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple:
            if self.prev_module_hook is not None:
                self.prev_module_hook.offload()
            there.add(names[module])
            seen[names[module]] = set(there)
            return args, kwargs

    monkeypatch.setattr("accelerate.big_modeling.CpuOffload", Recorded)
    pipeline.enable_model_cpu_offload(device="cpu")
    videos_of(pipeline, [Prompt("a red circle moves left", index=0, seed=None, ref_image_path=None)])
    assert seen == {name: {name} for name in ("text_encoder", "transformer", "vae")}


def test_every_finished_step_of_every_batch_is_reported(pipeline):
    steps = []
    sample_prompts(pipeline, prompts(None, None, None), Guidance(), **VIDEO, seed=1, batch_size=2, on_step=steps.append)
    assert steps == [*range(NUM_STEPS)] * 2
